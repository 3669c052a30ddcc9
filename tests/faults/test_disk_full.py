"""A disk that fills: the run pauses until there is space, or ends with its last commit whole."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

import mt_lightning as mt
from mt_lightning.tiers.doubles import Fault, FaultyStore

from .nets import (
    Net,
    after,
    assert_same,
    assert_usable,
    committed_step,
    fit,
    loader,
    make_trainer,
    parameters_of,
)
from .test_directory import fill, mount, pretend_space, small_drive  # noqa: F401

FULL_FROM = 3
NUM_STEPS = 6


def assert_goes_on(directory: Path, root: Path, **settings: Any) -> None:
    """Resume with new objects, to the bits of plain training."""
    gc.collect()
    module = Net()
    strategy = mt.MegaTrainStrategy(directory, on_existing="resume")
    fit(module, root, strategy, max_steps=NUM_STEPS, **settings)
    assert_same(parameters_of(module), after(NUM_STEPS, root, **settings))


class Full:
    """A fault that lasts until somebody makes room; tells when the first operation met it."""

    def __init__(self, op: str) -> None:
        self.on = False
        self.met = threading.Event()
        self._op = op

    def wrap(self, store: Any) -> Any:
        full = self

        class Store(FaultyStore):
            def _meet(self, op: str, name: str) -> set[str]:
                if not full.on or op != full._op:
                    return set()
                full.met.set()
                return super()._meet(op, name)

        return Store(store, [Fault(op=self._op, kind="enospc", nth=0)])


class _Fills(Callback):
    def __init__(self, full: Full) -> None:
        self._full = full

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FULL_FROM:
            self._full.on = True


@contextlib.contextmanager
def when_full(full: Full, act: Callable[[], None], delay_s: float = 0.3) -> Iterator[None]:
    """Do something a moment after the disk was found full."""

    def wait() -> None:
        if full.met.wait(60):
            time.sleep(delay_s)
            act()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        full.met.set()
        thread.join()


SETTINGS: dict[str, dict[str, Any]] = {"eager": {}, "clipped": {"gradient_clip_val": 0.1}}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_run_goes_on_when_there_is_space(
    tmp_path: Path, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    full, settings = Full("write"), SETTINGS[setting]
    strategy = mt.MegaTrainStrategy(tmp_path / "pages", durability="step", _wrap_store=full.wrap)

    def make_room() -> None:
        full.on = False

    module = Net()
    settings = {"callbacks": [_Fills(full)], **settings}
    with when_full(full, make_room), caplog.at_level(logging.WARNING):
        fit(module, tmp_path, strategy, max_steps=NUM_STEPS, **settings)
    assert caplog.text.count("the disk is full") == 1
    assert "there is space again" in caplog.text
    assert_usable(module, after(NUM_STEPS, tmp_path, **SETTINGS[setting]))


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_deadline_ends_the_run_with_its_commit_whole(tmp_path: Path, setting: str) -> None:
    full, settings = Full("write"), SETTINGS[setting]
    strategy = mt.MegaTrainStrategy(
        tmp_path / "pages",
        durability="step",
        disk_full_timeout_s=0.3,
        _wrap_store=full.wrap,
    )
    module = Net()
    with pytest.raises(mt.StorageError, match=r"disk_full_timeout_s=0\.3"):
        fit(module, tmp_path, strategy, max_steps=NUM_STEPS, callbacks=[_Fills(full)], **settings)
    step = committed_step(tmp_path / "pages")
    assert step in (FULL_FROM - 1, FULL_FROM)
    assert_usable(module, after(step, tmp_path, **settings))
    strategy._close()
    assert_goes_on(tmp_path / "pages", tmp_path, **settings)


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_the_pause(
    tmp_path: Path, setting: str, number: signal.Signals, durability: Any
) -> None:
    full = Full("write")
    strategy = mt.MegaTrainStrategy(
        tmp_path / "pages", durability=durability, _wrap_store=full.wrap
    )
    module, start = Net(), time.monotonic()
    handler = signal.getsignal(signal.SIGINT)
    settings = {"max_steps": NUM_STEPS, "callbacks": [_Fills(full)], **SETTINGS[setting]}
    ended = (KeyboardInterrupt, SystemExit, mt.StorageError)
    try:
        with when_full(full, lambda: os.kill(os.getpid(), number)), pytest.raises(ended) as caught:
            fit(module, tmp_path, strategy, **settings)
    finally:
        signal.signal(signal.SIGINT, handler)
    settings = SETTINGS[setting]
    assert time.monotonic() - start < 100  # it did not wait for the deadline
    if number == signal.SIGTERM:
        assert "asked to end" in str(caught.value)
    step = committed_step(tmp_path / "pages")
    # What is committed at the end only found no room at all.
    assert step in ((FULL_FROM - 1, FULL_FROM) if durability == "step" else (0,))
    assert_usable(module, after(step, tmp_path, **settings))
    strategy._close()
    assert_goes_on(tmp_path / "pages", tmp_path, **settings)


class _Views(Callback):
    """Holds views of page files, so that new files take their place; then the drive fills."""

    def __init__(self, drive: Path, room: threading.Event) -> None:
        self._drive = drive
        self._room = room
        self.held: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.held.append(module.state_dict())
        if trainer.global_step == FULL_FROM:
            fill(self._drive)
            self._room.set()


def test_a_real_drive_that_fills(
    tmp_path: Path,
    mount: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drive = small_drive(mount, tmp_path, 5)
    pretend_space(monkeypatch, 1 << 40)
    filled = threading.Event()

    def make_room() -> None:
        assert filled.wait(60)
        deadline = time.monotonic() + 60
        while "the disk is full" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
        (drive / "other").unlink()

    thread = threading.Thread(target=make_room)
    thread.start()
    module = Net()
    callbacks = [_Views(drive, filled)]
    strategy = mt.MegaTrainStrategy(drive / "pages", durability="step")
    with caplog.at_level(logging.WARNING):
        fit(module, tmp_path, strategy, max_steps=NUM_STEPS, callbacks=callbacks)
    thread.join()
    assert "replace needs" in caplog.text
    assert "are free. Make room there" in caplog.text
    assert "there is space again" in caplog.text
    assert_usable(module, after(NUM_STEPS, tmp_path))


class _Limits(Callback):
    """Forbids large files from a step on, as `ulimit -f` does."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == FULL_FROM:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))


def test_a_limit_on_file_sizes_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    module = Net()
    strategy = mt.MegaTrainStrategy(tmp_path / "pages", durability="step")
    try:
        with pytest.raises(mt.StorageError, match="File too large; .*ulimit -f"):
            fit(module, tmp_path, strategy, max_steps=NUM_STEPS, callbacks=[_Limits()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert committed_step(tmp_path / "pages") in (FULL_FROM, FULL_FROM - 1)
    strategy._close()
    assert_goes_on(tmp_path / "pages", tmp_path)


@pytest.mark.parametrize("value", [-1, float("nan"), True, "600", None])
def test_a_wrong_timeout_is_refused(value: Any) -> None:
    with pytest.raises(mt.ConfigError, match="disk_full_timeout_s="):
        mt.MegaTrainStrategy(disk_full_timeout_s=value)


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_nothing_is_left_waiting_when_the_run_ends(tmp_path: Path, durability: Any) -> None:
    """Threads of the run end with it, although the disk is still full."""
    full, before = Full("write"), set(threading.enumerate())
    strategy = mt.MegaTrainStrategy(
        tmp_path / "pages",
        durability=durability,
        disk_full_timeout_s=0.2,
        _wrap_store=full.wrap,
    )
    trainer = make_trainer(tmp_path, strategy, callbacks=[_Fills(full)])
    with pytest.raises(mt.StorageError):
        trainer.fit(Net(), loader())
    strategy._close()
    after = set(threading.enumerate()) - before
    assert [t.name for t in after if t.name.startswith("megatrain")] == []
