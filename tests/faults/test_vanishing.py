"""Files, folders, rights and descriptors that go away while training: a named error, or no harm."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

import mt_lightning as mt
from mt_lightning.tiers.commit import CommitLog
from mt_lightning.tiers.doubles import Fault

from .nets import (
    Net,
    after,
    assert_same,
    assert_usable,
    committed_step,
    fit,
    parameters_of,
    smallest_gb,
)
from .test_directory import mount, pretend_space, small_drive  # noqa: F401
from .test_disk_full import assert_goes_on
from .test_drive import LASTING, _Switched

STEP, NUM_STEPS = 3, 6
SETTINGS: dict[str, dict[str, Any]] = {"eager": {}, "clipped": {"gradient_clip_val": 0.1}}


class _At(Callback):
    """Does something between two steps, when all is committed."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self.done = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEP:
            trainer.strategy.engine.live.drain()
            self._act()
            self.done = True


def other_slot(directory: Path, plane: str) -> Path:
    """Return the file that the next step writes, of the first page."""
    record = CommitLog([directory]).latest()
    assert record is not None
    assert record.step == STEP
    return directory / "pages" / f"p00001.{plane}.{1 - record.slots[f'p00001.{plane}']}"


def cut(path: Path) -> None:
    os.truncate(path, 8192)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def swap(path: Path) -> None:
    """Let a copy take the place of a file, as a synchronising program does."""
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def run_into(
    root: Path, act: Callable[[], object], setting: str, error: type[Exception]
) -> tuple[str, mt.MegaTrainStrategy]:
    """Train into the fault; the last commit counts, also in memory."""
    module, settings = Net(), SETTINGS[setting]
    strategy = mt.MegaTrainStrategy(
        root / "pages", max_ram_gb=smallest_gb(Net(), root, **settings), disk_full_timeout_s=0
    )
    with pytest.raises(error) as caught:
        fit(module, root, strategy, max_steps=NUM_STEPS, callbacks=[_At(act)], **settings)
    assert_usable(module, after(STEP, root, **settings))
    return str(caught.value), strategy


MEDDLED = list(itertools.product([cut, empty, Path.unlink, swap], ["weight", "state"], SETTINGS))
LASTED = list(
    itertools.product(
        [errno.EROFS, errno.EACCES, errno.ENODEV, errno.ESTALE, errno.EDQUOT, errno.ETIMEDOUT],
        ["read", "write", "sync"],
        SETTINGS,
    )
)


def few(cases: list[Any], every: int) -> list[Any]:
    """Mark all but every n-th case as slow."""
    return [
        pytest.param(
            *case,
            marks=pytest.mark.slow if index % every else (),
            id="-".join(
                getattr(part, "__name__", None) or errno.errorcode.get(part) or str(part)
                for part in case
            ),
        )
        for index, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("act", "plane", "setting"), few(MEDDLED, 3))
def test_page_file_that_is_meddled_with(
    tmp_path: Path, act: Callable[[Path], object], plane: str, setting: str
) -> None:
    """Nothing is written into a file that no resume could read."""
    pages = tmp_path / "pages"
    message, strategy = run_into(
        tmp_path, lambda: act(other_slot(pages, plane)), setting, mt.StorageError
    )
    assert f"p00001.{plane}." in message
    assert "offload_dir" in message or "bring it back" in message
    assert committed_step(pages) == STEP
    strategy._close()
    for left in pages.glob("pages/*.copy"):
        left.unlink()
    assert_goes_on(pages, tmp_path, **SETTINGS[setting])


@pytest.mark.parametrize("setting", SETTINGS)
def test_directory_that_is_moved_away(tmp_path: Path, setting: str) -> None:
    pages, away = tmp_path / "pages", tmp_path / "away"
    message, strategy = run_into(tmp_path, lambda: pages.rename(away), setting, mt.StorageError)
    assert str(pages) in message
    assert "No such file or directory; the directory or its drive was removed" in message
    assert committed_step(away) == STEP
    strategy._close()
    assert_goes_on(away, tmp_path, **SETTINGS[setting])


@pytest.mark.parametrize(
    "act",
    [
        lambda pages: [path.unlink() for path in pages.glob("commit.*")],
        lambda pages: [os.truncate(path, 0) for path in pages.glob("commit.*")],
        lambda pages: [path.write_bytes(b"nonsense") for path in pages.glob("commit.*")],
        lambda pages: (pages / "lock").unlink(),
    ],
    ids=["records removed", "records emptied", "records overwritten", "lock removed"],
)
def test_small_files_that_are_lost_are_made_anew(
    tmp_path: Path, act: Callable[[Path], object]
) -> None:
    pages, module = tmp_path / "pages", Net()
    callback = _At(lambda: act(pages))
    strategy = mt.MegaTrainStrategy(pages)
    fit(module, tmp_path, strategy, max_steps=NUM_STEPS - 1, callbacks=[callback])
    assert callback.done
    strategy._close()
    assert_goes_on(pages, tmp_path)


def test_drive_that_becomes_read_only(
    tmp_path: Path,
    mount: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = small_drive(mount, tmp_path, 6)
    pretend_space(monkeypatch, 1 << 40)
    module, strategy = Net(), mt.MegaTrainStrategy(drive / "pages")

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(drive)], check=True)

    def protect() -> None:
        assert strategy.engine is not None
        strategy.engine.machine.store.trim()
        lock = strategy.engine.machine.locks[0]
        os.close(lock._fd)  # type: ignore[arg-type]
        lock._fd = os.open("/dev/null", os.O_RDONLY)  # a drive that fails does not ask who writes
        remount("ro")

    with pytest.raises(mt.StorageError, match=r"Read-only.*see dmesg") as caught:
        fit(module, tmp_path, strategy, max_steps=NUM_STEPS, callbacks=[_At(protect)])
    assert str(drive) in str(caught.value)
    assert_usable(module, after(STEP, tmp_path))
    strategy._close()
    remount("rw")
    assert committed_step(drive / "pages") == STEP
    assert_goes_on(drive / "pages", tmp_path)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Take every file descriptor that is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 1, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_goes_on_without_descriptors(tmp_path: Path, setting: str) -> None:
    """Files of our own that are not in use are closed for those that are needed."""
    module, settings = Net(), SETTINGS[setting]
    strategy = mt.MegaTrainStrategy(
        tmp_path / "pages", max_ram_gb=smallest_gb(Net(), tmp_path, **settings)
    )
    with contextlib.ExitStack() as stack:
        callback = _At(lambda: stack.enter_context(no_descriptors()))
        fit(module, tmp_path, strategy, max_steps=NUM_STEPS, callbacks=[callback], **settings)
    assert callback.done
    assert_usable(module, after(NUM_STEPS, tmp_path, **settings))


def test_rights_that_are_taken_away(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may do everything")
    pages = tmp_path / "pages"
    message, strategy = run_into(tmp_path, lambda: pages.chmod(0), "eager", mt.StorageError)
    assert "Permission denied; give this user the right" in message
    pages.chmod(0o755)
    strategy._close()
    assert_goes_on(pages, tmp_path)


@pytest.mark.parametrize(("number", "op", "setting"), few(LASTED, 7))
def test_errors_that_last_leave_the_commit_whole(
    tmp_path: Path, op: str, number: int, setting: str
) -> None:
    module, settings, armed = Net(), SETTINGS[setting], []
    fault = Fault(op=op, kind="error", number=number, times=LASTING)
    strategy = mt.MegaTrainStrategy(
        tmp_path / "pages",
        max_ram_gb=smallest_gb(Net(), tmp_path, **settings),
        disk_full_timeout_s=0,
        _wrap_store=lambda store: _Switched(store, [fault], lambda: bool(armed)),
    )
    callbacks = [_At(lambda: armed.append(True))]
    with pytest.raises(mt.StorageError) as caught:
        fit(module, tmp_path, strategy, max_steps=NUM_STEPS, callbacks=callbacks, **settings)
    assert caught.value.errno == number
    assert re.search(r"p\d+\.(weight|state|grad)\.\d", str(caught.value))
    assert committed_step(tmp_path / "pages") == STEP
    armed.clear()
    assert_usable(module, after(STEP, tmp_path, **settings))
    strategy._close()
    assert_goes_on(tmp_path / "pages", tmp_path, **settings)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["short", pytest.param("error", marks=pytest.mark.slow)])
def test_a_drive_that_often_blinks_changes_no_bit(
    tmp_path: Path, kind: Any, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every seventh read, every fifth write and every create fails once."""
    settings = SETTINGS[setting]
    faults = [
        *[Fault(op="read", kind=kind, nth=nth) for nth in range(7, 300, 7)],
        *[Fault(op="write", kind=kind, nth=nth) for nth in range(5, 300, 5)],
        *[Fault(op="create", kind="eio", nth=nth) for nth in range(1, 30, 2)],
    ]
    strategy = mt.MegaTrainStrategy(
        tmp_path / "pages",
        max_ram_gb=smallest_gb(Net(), tmp_path, **settings),
        _wrap_store=lambda store: _Switched(store, faults, lambda: True),
    )
    module = Net()
    fit(module, tmp_path, strategy, max_steps=NUM_STEPS, **settings)
    assert caplog.text.count("failed and is tried again") > 10
    assert_same(parameters_of(module), after(NUM_STEPS, tmp_path, **settings))
