"""Packed state on pages: the same bits as `CompressedAdamW` by itself, whatever moves where."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mt_lightning import BudgetError, CompressedAdamW, ConfigError, MegaTrainStrategy
from mt_lightning.optim.packed.formats import FORMATS as FORMATS_BY_NAME
from mt_lightning.optim.packed.place import Place
from mt_lightning.optim.packed.update import decode

from .net import Net, assert_same_training, fit, make_net

FORMATS = ["dynamic", "fp32", "m8v8", "m4v4", "R2", "R1", "R0", "C5"]


def smallest_gb(net: Net, **settings: Any) -> float:
    with pytest.raises(BudgetError) as refusal:
        fit(net, MegaTrainStrategy(max_ram_gb=1e-5, **settings))
    assert refusal.value.smallest_gb is not None
    return refusal.value.smallest_gb


@functools.cache
def _smallest_of(make: Any, tied: bool, settings: tuple[tuple[str, Any], ...]) -> float:
    return smallest_gb(make_net(make, tied=tied), **dict(settings))


def paged(make: Any, *, tied: bool = False, smallest: bool = True, **settings: Any) -> Any:
    """Return a strategy with the smallest budget for a net, or with ample memory."""
    # Where the pages lie takes no memory.
    matters = tuple((key, value) for key, value in settings.items() if key != "offload_dir")
    budget = _smallest_of(make, tied, matters) if smallest else 1.0
    return MegaTrainStrategy(max_ram_gb=budget, **settings)


TINY_SLICES = {"_slice_bytes": 4096}
"""Each grain of a parameter is then updated by itself."""


@functools.cache
def trained_alone(name: str) -> Net:
    net = make_net(lambda net: CompressedAdamW(net.parameters(), lr=1e-2, format=name))
    fit(net)
    return net


@pytest.mark.parametrize(
    ("slices", "smallest"),
    [
        pytest.param({}, False, id="usual-ample"),
        pytest.param(TINY_SLICES, True, id="tiny-smallest"),
        pytest.param({}, True, id="usual-smallest", marks=pytest.mark.slow),
        pytest.param(TINY_SLICES, False, id="tiny-ample", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_adamw_is_stepped_as_compressed_adamw_alone(
    name: str, slices: dict[str, Any], smallest: bool
) -> None:
    alone = trained_alone(name)
    trained = make_net(adamw)
    settings = {"optimizer_compression": name, **slices}
    strategy = paged(trained.make_optimizer, smallest=smallest, **settings)
    trainer = fit(trained, strategy)
    assert_same_training(alone, trained)
    assert (strategy.engine.stats.reloads > 0) == smallest
    assert_same_state(alone, trainer.optimizers[0])


def assert_same_state(alone: Net, optimizer: torch.optim.Optimizer) -> None:
    expected = alone.trainer.optimizers[0].state_dict()["state"]
    found = optimizer.state_dict()["state"]
    assert found.keys() == expected.keys()
    for index, entries in expected.items():
        assert found[index].keys() == entries.keys()
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found[index][key], value), key
            else:
                assert found[index][key] == value, key


def no_decay_groups(net: nn.Module, make: Any) -> torch.optim.Optimizer:
    params = list(net.parameters())
    return make(
        [
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
            {"params": [p for p in params if p.dim() >= 2], "betas": (0.8, 0.95)},
        ]
    )


KINDS: dict[str, tuple[Any, Any]] = {
    "adam with L2 decay": (
        lambda net: torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=0.1),
        lambda net: CompressedAdamW(
            net.parameters(), lr=1e-2, weight_decay=0.1, decoupled_weight_decay=False
        ),
    ),
    "maximize": (
        lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4, maximize=True),
        lambda net: CompressedAdamW(net.parameters(), lr=1e-4, maximize=True),
    ),
    "groups": (
        lambda net: no_decay_groups(net, partial(torch.optim.AdamW, lr=1e-2)),
        lambda net: no_decay_groups(net, partial(CompressedAdamW, lr=1e-2)),
    ),
    "fused": (
        lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
        lambda net: CompressedAdamW(net.parameters(), lr=1e-2),
    ),
    "tensor learning rate": (
        lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2), foreach=False),
        lambda net: CompressedAdamW(net.parameters(), lr=torch.tensor(1e-2)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_of_the_optimizer_counts(kind: str) -> None:
    make_plain, make_compressed = KINDS[kind]
    alone, trained = make_net(make_compressed), make_net(make_plain)
    fit(alone)
    fit(trained, paged(make_plain, optimizer_compression=True))
    assert_same_training(alone, trained)


TRAINER_SETTINGS: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate_grad_batches": 4},
    "both": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
}


def settings_and_ties() -> Iterator[Any]:
    """Yield all of them; each setting runs always with weights tied or not, the rest by --slow."""
    for i, name in enumerate(TRAINER_SETTINGS):
        for tied in (False, True):
            marks = [] if tied == i % 2 else [pytest.mark.slow]
            yield pytest.param(name, tied, id=f"{name}-{'tied' if tied else 'untied'}", marks=marks)


@pytest.mark.parametrize(("setting", "tied"), list(settings_and_ties()))
def test_clipping_and_accumulation_change_nothing(setting: str, tied: bool) -> None:
    settings = TRAINER_SETTINGS[setting]
    alone = make_net(lambda net: CompressedAdamW(net.parameters(), lr=1e-2), tied=tied)
    trained = make_net(adamw, tied=tied)
    fit(alone, max_steps=3, **settings)
    strategy = paged(trained.make_optimizer, tied=tied, optimizer_compression=True, **TINY_SLICES)
    fit(trained, strategy, max_steps=3, **settings)
    assert_same_training(alone, trained)


@pytest.mark.parametrize("name", ["dynamic", "R0"])
def test_an_own_compressed_adamw_is_paged_in_its_own_format(name: str) -> None:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        return CompressedAdamW(net.parameters(), lr=1e-2, format=name, seed=5)

    alone, trained = make_net(make), make_net(make)
    fit(alone)
    trainer = fit(trained, paged(make))
    assert_same_training(alone, trained)
    assert_same_state(alone, trainer.optimizers[0])


# -- checkpoints ----------------------------------------------------------------------------------


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def compressed(net: nn.Module) -> torch.optim.Optimizer:
    return CompressedAdamW(net.parameters(), lr=1e-2)


def run_on(make: Any, strategy: Any, path: Path, *, steps: tuple[int, int]) -> Net:
    """Continue a checkpoint, or train from the start and save one."""
    net = make_net(make)
    trainer = fit(net, strategy, max_steps=steps[1], ckpt_path=path if steps[0] else None)
    if not steps[0]:
        trainer.save_checkpoint(path)
    return net


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("paged", "paged"),
        ("paged", "alone"),
        ("alone", "paged"),
        pytest.param("alone", "alone", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_carry_packed_state_exactly(tmp_path: Path, first: str, second: str) -> None:
    kinds = {
        "alone": lambda: (compressed, "auto"),
        # The same class on both sides: a checkpoint names what the groups hold.
        "paged": lambda: (compressed, paged(compressed)),
    }
    make_first, first_strategy = kinds[first]()
    make_second, second_strategy = kinds[second]()
    path = tmp_path / "half.ckpt"
    run_on(make_first, first_strategy, path, steps=(0, 8))
    resumed = run_on(make_second, second_strategy, path, steps=(8, 10))

    straight_path = tmp_path / "straight.ckpt"
    straight = run_on(compressed, "auto", straight_path, steps=(0, 10))
    if "alone" in (first, second):
        # Plain Lightning neither saves nor restores the generators that dropout draws from.
        run_on(compressed, "auto", straight_path, steps=(0, 8))
        straight = run_on(compressed, "auto", straight_path, steps=(8, 10))
    assert_same_training(straight, resumed)


def test_packed_adamw_resumes_its_own_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    run_on(adamw, paged(adamw, optimizer_compression=True), path, steps=(0, 8))
    resumed = run_on(adamw, paged(adamw, optimizer_compression=True), path, steps=(8, 10))
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    assert {"step", "packed"} <= saved[0].keys()

    assert_same_training(run_on(compressed, "auto", tmp_path / "all.ckpt", steps=(0, 10)), resumed)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [(False, True), (True, False), ("R1", "R0"), ("R0", "dynamic"), (True, "lossless")],
)
def test_state_of_another_format_is_refused_and_nothing_changes(
    tmp_path: Path, wrote: Any, reads: Any
) -> None:
    path = tmp_path / "a.ckpt"
    strategy = paged(adamw, smallest=False, optimizer_compression=wrote)
    run_on(adamw, strategy, path, steps=(0, 2))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="megatrain export IN OUT --optimizer"):
        run_on(
            adamw,
            paged(adamw, smallest=False, optimizer_compression=reads),
            path,
            steps=(2, 4),
        )
    assert path.read_bytes() == before


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), "SGD"),
        (lambda net: torch.optim.Adafactor(net.parameters()), "Adafactor"),
        (lambda net: torch.optim.NAdam(net.parameters()), "NAdam"),
        (lambda net: torch.optim.AdamW(net.parameters(), amsgrad=True), "amsgrad"),
    ],
    ids=["sgd", "adafactor", "nadam", "amsgrad"],
)
def test_what_cannot_be_packed_is_refused_with_a_way_out(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){words}.*lossless"):
        fit(make_net(make), MegaTrainStrategy(optimizer_compression=True))


def test_a_subclass_of_adamw_is_refused_since_its_step_may_differ() -> None:
    class Mine(torch.optim.AdamW):
        pass

    with pytest.raises(ConfigError, match="Mine"):
        fit(
            make_net(lambda net: Mine(net.parameters())),
            MegaTrainStrategy(optimizer_compression=True),
        )


@pytest.mark.parametrize("kind", ["float64", "gaps"])
def test_parameters_that_cannot_be_packed_are_named(kind: str) -> None:
    net = make_net(adamw)
    if kind == "float64":
        net.layers[1].odd = nn.Parameter(net.layers[1].odd.detach().double())
    else:
        net.layers[1].odd = nn.Parameter(torch.randn(67, 90)[:, :71])
    with pytest.raises(ConfigError, match=r"layers\.1\.odd"):
        fit(net, MegaTrainStrategy(optimizer_compression=True))


def test_two_names_for_the_format_must_agree() -> None:
    net = make_net(lambda net: CompressedAdamW(net.parameters(), format="R1"))
    with pytest.raises(ConfigError, match=r"optimizer_compression='R0'.*'R1'"):
        fit(net, MegaTrainStrategy(optimizer_compression="R0"))


def test_the_start_table_says_what_is_lossy() -> None:
    for compression, words in ((True, "lossy"), ("lossless", "every bit"), (False, "streamed")):
        net = make_net(adamw)
        strategy = MegaTrainStrategy(max_ram_gb=1, optimizer_compression=compression)
        fit(net, strategy, max_steps=1)
        rows = {item: place for item, _, place in strategy.engine.plan.rows()}
        assert words in rows["optimizer state"]


# -- a gradient that is not finite ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["R1", "m8v8"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_a_nan_gradient_never_enters_packed_state(nonfinite: str, name: str) -> None:
    class Spoiled(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 2 else loss

    torch.manual_seed(0)
    net = Spoiled(lambda net: CompressedAdamW(net.parameters(), lr=1e-2, format=name))
    strategy = MegaTrainStrategy(max_ram_gb=1, nonfinite=nonfinite)
    trainer = fit(net, strategy, max_steps=3)
    for entries in trainer.optimizers[0].state_dict()["state"].values():
        place = Place.of(entries["shape"], entries["stride"])
        moments = decode(FORMATS_BY_NAME[name], entries["packed"], place.numel, width=place.width)
        assert all(torch.isfinite(moment).all() for moment in moments)
    is_nan = any(not torch.isfinite(p).all() for p in net.state_dict().values())
    assert is_nan == (nonfinite == "propagate")
