"""Whole runs whose inputs go to disk give, bit for bit, what plain Lightning gives."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mt_lightning import MegaTrainStrategy
from mt_lightning.errors import BudgetError, CorruptPageError, MegaTrainError
from mt_lightning.layer_major import loop
from mt_lightning.tiers.doubles import Fault, FaultyStore

from ..layer_major import networks as nets
from ..layer_major.run import Batch, assert_same, fit

BATCHES = nets.tokens(8, [24, 32, 28, 32])
EVEN = nets.tokens(8, [32])
DEEP = functools.partial(nets.Tiny, num_layers=6)


def checkpointing() -> nn.Module:
    """A model that checkpoints its layers itself, as users set it."""
    model = nets.zoo_model("llama")()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], list[Batch], dict[str, Any]]] = {
    "deep": (DEEP, BATCHES, {}),
    "clipped": (DEEP, BATCHES, {"gradient_clip_val": 0.1}),
    "bf16": (DEEP, BATCHES, {"precision": "bf16-mixed"}),
    "validated": (DEEP, BATCHES, {"val_batches": BATCHES[:2], "val_check_interval": 3}),
    "stashing": (nets.Stashing, BATCHES, {}),
    "dropout": (nets.zoo_model("gpt", dropout=0.1), EVEN, {}),
    "mixtral": (nets.zoo_model("mixtral"), BATCHES, {}),
    "gradient_checkpointing": (checkpointing, BATCHES, {}),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.WARNING, "lightning.pytorch")
    torch.set_num_threads(1)
    # All batches of a step in one group, whatever that moves.
    monkeypatch.setattr(loop, "best_group", lambda num_micros, **_: num_micros)


def smallest_gb(directory: Path, make: Callable[[], nn.Module], **settings: Any) -> float:
    layer_major = settings.pop("layer_major")
    strategy = MegaTrainStrategy(layer_major=layer_major, max_ram_gb=1e-6)
    with pytest.raises(BudgetError) as refusal:
        fit(directory, make, BATCHES, strategy, **settings)
    assert refusal.value.smallest_gb is not None
    return refusal.value.smallest_gb


def cases_and_orders() -> Iterator[Any]:
    """Yield every case in both orders; each runs in one of them always, the rest by --slow."""
    for i, case in enumerate(CASES):
        for layer_major in (False, True):
            marks = [] if layer_major == i % 2 or case == "deep" else [pytest.mark.slow]
            name = f"{case}-{'layer_major' if layer_major else 'usual'}"
            yield pytest.param(case, layer_major, id=name, marks=marks)


@pytest.mark.parametrize(("case", "layer_major"), list(cases_and_orders()))
def test_bits(case: str, layer_major: bool, tmp_path: Path) -> None:
    make, batches, settings = CASES[case]
    settings = {"accumulate_grad_batches": 3 if layer_major else 1, "max_steps": 4, **settings}
    expected = fit(tmp_path, make, batches, None, **settings)
    smallest = smallest_gb(tmp_path, make, layer_major=layer_major, **settings)
    strategy = MegaTrainStrategy(
        layer_major=layer_major, max_ram_gb=smallest + 2e-5, durability="step"
    )
    assert_same(expected, fit(tmp_path, make, batches, strategy, **settings))
    assert strategy.engine is not None
    stats = strategy.engine.stats
    assert stats.ram_peak_bytes <= strategy.engine.plan.ram_limit_bytes
    if case != "gradient_checkpointing":
        assert 0 < stats.inputs_read_bytes <= stats.inputs_spilled_bytes
    assert not list(tmp_path.glob("**/*.input.0"))


@pytest.mark.parametrize("layer_major", [False, True], ids=["usual", "layer_major"])
def test_a_run_that_breaks_off_goes_on(layer_major: bool, tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 2, "max_epochs": 1}
    expected = fit(tmp_path, DEEP, BATCHES, None, **settings)
    paging = {
        "offload_dir": tmp_path / "pages",
        "layer_major": layer_major,
        "max_ram_gb": smallest_gb(tmp_path, DEEP, layer_major=layer_major, **settings) + 2e-5,
        "durability": "step",
    }
    fault = Fault(op="read", kind="flip", name_pattern="*.input.0", nth=20, times=1000)
    failing = MegaTrainStrategy(**paging, _wrap_store=lambda inner: FaultyStore(inner, [fault]))
    with pytest.raises(MegaTrainError, match="checksum") as caught:
        fit(tmp_path, DEEP, BATCHES, failing, **settings)
    assert isinstance(caught.value, CorruptPageError)
    assert not list((tmp_path / "pages").glob("**/*.input.0"))
    assert failing.engine is not None
    failing.engine.machine.close()
    # As if it had been killed.
    (tmp_path / "pages" / "pages" / "i00007.input.0").write_bytes(b"left behind")
    strategy = MegaTrainStrategy(**paging, on_existing="resume")
    found = fit(tmp_path, DEEP, BATCHES, strategy, **settings)
    for name in ("weights", "moments", "global_step", "rng"):
        assert_same(expected[name], found[name], name)
    assert not list((tmp_path / "pages").glob("**/*.input.0"))
