"""A drive that lies or fails while training: the error names the file, the last commit is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mt_lightning as mt
from mt_lightning.tiers.doubles import Fault, FaultyStore
from mt_lightning.tiers.store import Store

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
    smallest_gb,
)

LASTING = 1 << 30
"""Calls in a row: longer than anybody tries again."""

SETTINGS: dict[str, dict[str, Any]] = {"eager": {}, "deferred": {"gradient_clip_val": 0.1}}


class _Switched(FaultyStore):
    """A store whose faults begin when training has come to a step."""

    def __init__(self, inner: Store, faults: list[Fault], due: Callable[[], bool]) -> None:
        super().__init__(inner, faults)
        self._due = due

    def _meet(self, op: str, name: str) -> set[str]:
        return super()._meet(op, name) if self._due() else set()


class _Counted(Net):
    """Knows whether the faulty step has begun."""

    bad_from = 3

    def __init__(self) -> None:
        super().__init__()
        self.reached = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.reached = batch_idx >= self.bad_from


def make_strategy(root: Path, module: _Counted, fault: Fault, setting: str) -> mt.MegaTrainStrategy:
    """Make a strategy that needs its drive all the time; the fault waits for the bad step."""
    return mt.MegaTrainStrategy(
        root / "pages",
        max_ram_gb=smallest_gb(Net(), root, **SETTINGS[setting]),
        disk_full_timeout_s=0,
        _wrap_store=lambda store: _Switched(store, [fault], lambda: module.reached),
    )


def train_on_faults(root: Path, fault: Fault, error: type[Exception], setting: str) -> str:
    """Train until the fault shows; check the commit, the parameters, and that it is over."""
    module, settings = _Counted(), SETTINGS[setting]
    strategy = make_strategy(root, module, fault, setting)
    with pytest.raises(error) as caught:
        fit(module, root, strategy, max_steps=8, **settings)
    module.reached = False
    step = committed_step(root / "pages")
    assert step is not None
    assert step >= _Counted.bad_from - 1
    assert_usable(module, after(step, root, **settings))
    module.bad_from = 99
    assert_fresh_run_works(module, root, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("plane", "setting"),
    [
        ("weight", "eager"),
        ("weight", "deferred"),
        ("state", "eager"),
        ("state", "deferred"),
        ("grad", "deferred"),
    ],
)
def test_flipped_bit(tmp_path: Path, plane: str, setting: str) -> None:
    fault = Fault(op="read", kind="flip", name_pattern=f"*.{plane}.*", nth=0)
    message = train_on_faults(tmp_path, fault, mt.CorruptPageError, setting)
    assert f".{plane}." in message
    assert "at offset" in message
    assert "check it, or give another offload_dir" in message


@pytest.mark.parametrize("setting", SETTINGS)
def test_bit_that_flips_once_is_read_again(
    tmp_path: Path, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, settings = _Counted(), SETTINGS[setting]
    fault = Fault(op="read", kind="flip")
    fit(module, tmp_path, make_strategy(tmp_path, module, fault, setting), **settings)
    assert "suspect the drive" in caplog.text
    assert_usable(module, after(4, tmp_path, **settings))


@pytest.mark.parametrize(
    ("op", "nth", "setting"),
    [
        pytest.param(op, nth, setting, marks=[pytest.mark.slow] * ((i + j + k) % 2))
        for i, op in enumerate(("read", "write", "sync"))
        for j, nth in enumerate((1, 3))
        for k, setting in enumerate(SETTINGS)
    ],
)
def test_input_output_error(tmp_path: Path, op: str, nth: int, setting: str) -> None:
    fault = Fault(op=op, kind="eio", nth=nth, times=LASTING)
    message = train_on_faults(tmp_path, fault, mt.StorageError, setting)
    assert "Input/output error" in message


@pytest.mark.parametrize("kind", ["short", "enospc"])
def test_write_that_is_not_whole(tmp_path: Path, kind: Any) -> None:
    fault = Fault(op="write", kind=kind, nth=2, times=LASTING)
    train_on_faults(tmp_path, fault, mt.StorageError, "eager")


@pytest.mark.parametrize("setting", SETTINGS)
def test_written_bit_that_flips_is_found_when_it_is_read(tmp_path: Path, setting: str) -> None:
    fault = Fault(op="write", kind="flip", name_pattern="*.state.*")
    module, settings = _Counted(), SETTINGS[setting]
    strategy = make_strategy(tmp_path, module, fault, setting)
    with pytest.raises(mt.CorruptPageError, match=r"\.state\."):
        fit(module, tmp_path, strategy, max_steps=8, **settings)


def faulty(op: str, nth: int, kind: Any = "eio") -> dict[str, Any]:
    fault = Fault(op=op, kind=kind, nth=nth, times=LASTING)
    return {"_wrap_store": lambda store: FaultyStore(store, [fault])}


@pytest.mark.parametrize(
    ("op", "nth"),
    [
        ("create", 1),
        ("create", 4),
        *[(op, nth) for op in ("write", "sync") for nth in (1, 4)],
    ],
)
def test_failure_at_start_keeps_the_weights(tmp_path: Path, op: str, nth: int) -> None:
    """The weights are on their way to the drive; they must not be lost between the two."""
    module = Net()
    start = parameters_of(module)
    strategy = mt.MegaTrainStrategy(tmp_path / "pages", **faulty(op, nth))
    with pytest.raises(mt.StorageError, match="Input/output error"):
        fit(module, tmp_path, strategy)
    assert_usable(module, start)
    fit(module, tmp_path, mt.MegaTrainStrategy(tmp_path / "pages", on_existing="overwrite"))
    assert_usable(module, after(4, tmp_path))


def test_failure_at_the_second_start_keeps_the_weights(tmp_path: Path) -> None:
    module, armed = Net(), []
    faults = [Fault(op="write", kind="eio", times=LASTING)]
    strategy = mt.MegaTrainStrategy(
        tmp_path / "pages", _wrap_store=lambda store: _Switched(store, faults, lambda: bool(armed))
    )
    trainer = make_trainer(tmp_path, strategy)
    trainer.fit(module, loader())
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.5)
    start = parameters_of(module)
    armed.append(True)
    trainer.fit_loop.epoch_loop.max_steps = 8
    with pytest.raises(mt.StorageError, match="Input/output error"):
        trainer.fit(module, loader())
    assert_usable(module, start)


def test_optimizer_state_that_does_not_fit_keeps_the_weights(tmp_path: Path) -> None:
    """Refused while state is taken in, when the parameters are paged already."""
    module = Net()
    start = parameters_of(module)

    def configure() -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        optimizer.state[module.layers[1].out.weight]["exp_avg"] = torch.zeros(3, 5)
        return optimizer

    module.configure_optimizers = configure  # type: ignore[method-assign]
    with pytest.raises(mt.ConfigError, match=r"layers|AdamW"):
        fit(module, tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    assert_usable(module, start)
