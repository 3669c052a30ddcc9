"""Directories that cannot be used, are in use, or hold something already."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mt_lightning as mt

from .nets import (
    Net,
    after,
    assert_fresh_run_works,
    assert_usable,
    committed_step,
    fit,
    loader,
    make_trainer,
    parameters_of,
)


def refused(
    directory: Any, root: Path, error: type[Exception] = mt.ConfigError, **options: Any
) -> str:
    module = Net()
    start = parameters_of(module)
    with pytest.raises(error) as caught:
        fit(module, root, mt.MegaTrainStrategy(directory, **options))
    assert_usable(module, start)
    assert_fresh_run_works(module, root)
    return str(caught.value)


# --- unusable ---------------------------------------------------------------------------------


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    message = refused(tmp_path / "file", tmp_path)
    assert "offload_dir=" in message
    assert "cannot be written to" in message
    assert (tmp_path / "file").read_text() == "mine"


def test_file_among_the_parents(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "offload_dir=" in refused(tmp_path / "file" / "pages", tmp_path)


@pytest.mark.parametrize("directory", ["/proc/megatrain", "/proc/self", "bad\0name", "~nobody9/a"])
def test_nonsense(tmp_path: Path, directory: str) -> None:
    assert "offload_dir=" in refused(directory, tmp_path)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Any]:
    """Give a function that mounts something; skip where that is not allowed."""
    mounted: list[Path] = []

    def make(name: str, *arguments: str) -> Path:
        place = tmp_path / name
        place.mkdir()
        done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def small_drive(mount: Any, tmp_path: Path, mib: int = 4) -> Path:
    image = tmp_path / "drive.img"
    image.write_bytes(bytes(mib << 20))
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m0", str(image)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mkfs.ext4")
    return mount("drive", "-o", "loop", str(image))


def test_read_only_file_system(tmp_path: Path, mount: Any) -> None:
    place = mount("readonly", "-t", "tmpfs", "-o", "ro,size=1m", "none")
    message = refused(place / "pages", tmp_path)
    assert "Read-only file system" in message


def test_full_drive_is_refused_at_start(tmp_path: Path, mount: Any) -> None:
    drive = small_drive(mount, tmp_path)
    message = refused(drive / "pages", tmp_path, mt.BudgetError)
    assert "Free some space" in message
    assert not list(drive.glob("pages/pages/*"))


def pretend_space(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("mt_lightning.engine.machine.free_bytes", lambda path: nbytes)


def test_full_by_statvfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_space(monkeypatch, (1 << 30) + 4096)
    module = Net()
    start = parameters_of(module)
    with pytest.raises(mt.BudgetError, match=r"0\.00 GiB are free in offload_dir="):
        fit(module, tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    assert_usable(module, start)
    monkeypatch.undo()
    fit(module, tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    assert_usable(module, after(4, tmp_path))


def test_drive_that_fills_while_files_are_made(
    tmp_path: Path, mount: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = small_drive(mount, tmp_path)
    (drive / "other").write_bytes(bytes(5 << 19))
    pretend_space(monkeypatch, 1 << 40)
    message = refused(drive / "pages", tmp_path, mt.StorageError, disk_full_timeout_s=0)
    assert "cannot reserve" in message
    assert "add a directory to offload_dir" in message


def fill(drive: Path) -> None:
    """Take all space, as another program might."""
    with open(drive / "other", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
            os.fsync(file.fileno())


class _Fills(Net):
    """Sees its drive fill after the second step."""

    drive: Path

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            fill(self.drive)


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}], ids=["eager", "deferred"])
def test_training_goes_on_when_the_drive_fills(
    tmp_path: Path, mount: Any, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Every byte that training writes was set aside before; a checkpoint was not."""
    drive = small_drive(mount, tmp_path, 5)
    pretend_space(monkeypatch, 1 << 40)
    module = _Fills()
    module.drive = drive
    trainer = fit(module, tmp_path, mt.MegaTrainStrategy(drive / "pages"), max_steps=8, **settings)
    assert (drive / "other").stat().st_size > 0
    assert_usable(module, after(8, tmp_path, **settings))
    with pytest.raises(mt.StorageError, match=r"cannot write the checkpoint.*Free some space"):
        trainer.save_checkpoint(drive / "some.ckpt")
    assert [path.name for path in drive.glob("some*")] == []
    (drive / "other").unlink()
    trainer.save_checkpoint(drive / "some.ckpt")


# --- in use -----------------------------------------------------------------------------------

_HOLD = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX)
os.pwrite(fd, f"{os.getpid()} elsewhere".encode(), 0)
print("held", flush=True)
sys.stdin.read()
"""


def test_in_use_by_another_process(tmp_path: Path) -> None:
    directory = tmp_path / "pages"
    directory.mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(directory / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        message = refused(directory, tmp_path, on_existing="overwrite")
        assert f"pid {other.pid}" in message
        assert "offload_dir" in message
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdin.close()
        other.stdout.close()
    fit(Net(), tmp_path, mt.MegaTrainStrategy(directory))


def test_in_use_by_another_strategy_of_this_process(tmp_path: Path) -> None:
    first = Net()
    trainer = fit(first, tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    message = refused(tmp_path / "pages", tmp_path, on_existing="overwrite")
    assert f"pid {os.getpid()}" in message
    assert_usable(first, after(4, tmp_path))
    assert committed_step(tmp_path / "pages") == 4
    del trainer


# --- holds something --------------------------------------------------------------------------


def earlier_run(tmp_path: Path) -> Path:
    directory = tmp_path / "pages"
    trainer = fit(Net(), tmp_path, mt.MegaTrainStrategy(directory))
    trainer.strategy._close()  # type: ignore[attr-defined]
    return directory


def test_another_run_is_refused_and_kept(tmp_path: Path) -> None:
    directory = earlier_run(tmp_path)
    message = refused(directory, tmp_path)
    assert "a run committed at step 4" in message
    assert "on_existing='overwrite'" in message
    assert committed_step(directory) == 4


def test_another_run_is_overwritten_on_request(tmp_path: Path) -> None:
    directory = earlier_run(tmp_path)
    module = Net()
    fit(module, tmp_path, mt.MegaTrainStrategy(directory, on_existing="overwrite"), max_steps=2)
    assert_usable(module, after(2, tmp_path))
    assert committed_step(directory) == 2


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_another_run_with_damaged_records(tmp_path: Path, damage: bytes | None) -> None:
    directory = earlier_run(tmp_path)
    for name in ("commit.0", "commit.1"):
        record = (directory / name).read_bytes()
        (directory / name).write_bytes(record[:-9] if damage is None else damage)
    assert "on_existing='overwrite'" in refused(directory, tmp_path)
    module = Net()
    fit(module, tmp_path, mt.MegaTrainStrategy(directory, on_existing="overwrite"))
    assert_usable(module, after(4, tmp_path))


@pytest.mark.parametrize("on_existing", ["error", "overwrite"])
def test_files_of_the_user_are_never_deleted(tmp_path: Path, on_existing: Any) -> None:
    """A folder named `pages` is common; "overwrite" is about runs."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "thesis.tex").write_text("mine")
    message = refused(tmp_path, tmp_path / "root", on_existing=on_existing)
    assert "thesis.tex" in message
    assert (tmp_path / "pages" / "thesis.tex").read_text() == "mine"


def test_refused_second_start_leaves_the_first_run_whole(tmp_path: Path) -> None:
    """The same trainer, another optimizer that cannot be paged: the parked weights stay."""
    module = Net()
    trainer = make_trainer(tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    trainer.fit(module, loader())
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    with pytest.raises(mt.ConfigError):
        trainer.fit(module, loader())
    assert_usable(module, after(4, tmp_path))
    assert committed_step(tmp_path / "pages") == 4


# --- several ----------------------------------------------------------------------------------


def test_two_directories(tmp_path: Path) -> None:
    module = Net()
    fit(module, tmp_path, mt.MegaTrainStrategy([tmp_path / "a", tmp_path / "b"]))
    assert_usable(module, after(4, tmp_path))
    assert all(list((tmp_path / name / "pages").iterdir()) for name in "ab")


@pytest.mark.parametrize("second", ["a", "a/", "b/../a", "link"])
def test_a_directory_twice(tmp_path: Path, second: str) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    message = refused([str(tmp_path / "a"), f"{tmp_path}/{second}"], tmp_path)
    assert "named twice" in message
    assert not (tmp_path / "a").exists()


def test_one_of_two_directories_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("a file")
    refused([tmp_path / "a", tmp_path / "b"], tmp_path)
    assert not (tmp_path / "a").exists(), "what was made for the refused run is left behind"


def test_one_of_two_directories_holds_a_run(tmp_path: Path) -> None:
    directory = earlier_run(tmp_path)
    assert "step 4" in refused([directory, tmp_path / "other"], tmp_path / "1")
    assert "step 4" in refused([tmp_path / "other", directory], tmp_path / "2")
    assert committed_step(directory) == 4


def test_directory_that_vanished_between_two_fits(tmp_path: Path) -> None:
    module = Net()
    trainer = make_trainer(tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    trainer.fit(module, loader())
    subprocess.run(["rm", "-r", str(tmp_path / "pages")], check=True)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-2)  # type: ignore[method-assign]
    with pytest.raises(mt.MegaTrainError, match="pages"):
        trainer.fit(module, loader())
    assert_usable(module, after(4, tmp_path))
    del module.configure_optimizers
    assert_fresh_run_works(module, tmp_path)
