"""A run that fits the device stays there: updated there, and copied for commits alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

import mt_lightning as mt
from mt_lightning.pager.device_pool import DevicePool

from ..graphs.nets import (
    NUM_LAYERS,
    Detached,
    Dropped,
    Frozen,
    Interleaved,
    Lengths,
    Net,
    Shared,
    Twice,
    Unused,
    assert_same,
    fit,
)
from .runs import MODES, Scaled, check, link_of, paged, reference, smallest_vram_gb
from .test_bytes import GRAD_BYTES, PAGE_BYTES

ROOMY: dict[str, Any] = {"max_vram_gb": 0.1, "durability": "auto"}
MANY = [Net, Scaled, Shared, Frozen, Dropped, Interleaved, Detached, Unused, Lengths]


def plan_of(strategy: mt.MegaTrainStrategy) -> Any:
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert strategy.engine.plan.on_device is not None
    return strategy.engine.plan.on_device


@pytest.mark.parametrize(
    ("make", "mode"),
    [*((make, list(MODES)[i % len(MODES)]) for i, make in enumerate(MANY)), (Scaled, "eager")],
)
def test_the_weights_are_those_of_plain_training(
    make: type[Net], mode: str, tmp_path: Path
) -> None:
    stats = check(make, mode, link_of("accelerator", 3), tmp_path, **ROOMY)
    assert stats.bytes_downloaded == 0, "gradients stay"
    assert stats.bytes_returned > 0


@pytest.mark.parametrize("kind", ["accelerator", "delayed"])
def test_two_backwards_through_one_graph_train_the_same_weights(kind: str, tmp_path: Path) -> None:
    check(Twice, "eager", link_of(kind, 3), tmp_path, **ROOMY)


def test_everything_crosses_once(tmp_path: Path) -> None:
    stats = check(Net, "eager", link_of("accelerator", 2), tmp_path, **ROOMY)
    assert stats.bytes_uploaded == 3 * NUM_LAYERS * PAGE_BYTES, "weights, and two moments"
    assert stats.bytes_returned == stats.bytes_uploaded, "for the commit at the end"


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_commits_at_each_step_are_made_by_the_host(durability: Any, tmp_path: Path) -> None:
    link = link_of("accelerator", 2)
    options = {**ROOMY, "durability": durability}
    module, strategy = paged(Net, "eager", link, tmp_path, **options)
    assert plan_of(strategy).updates == (durability == "checkpoint")
    assert_same(module, reference(Net, "eager"))


def test_the_smallest_budget_that_holds_all_is_used(tmp_path: Path) -> None:
    need = (smallest_vram_gb(Net) * 2**30 + NUM_LAYERS * (PAGE_BYTES + GRAD_BYTES)) / 2**30
    more = need + NUM_LAYERS * 3 * PAGE_BYTES / 2**30
    for number, (gb, there) in enumerate([(need, False), (more, True)]):
        options = {"max_vram_gb": gb, "durability": "auto"}
        link = link_of("accelerator", 2)
        module, strategy = paged(Net, "eager", link, tmp_path / str(number), **options)
        assert plan_of(strategy).updates == there
        assert_same(module, reference(Net, "eager"))
        assert strategy.engine is not None
        assert strategy.engine.stats.vram_peak_bytes <= gb * 2**30


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor])
def test_any_optimizer_steps_there(make: Any, tmp_path: Path) -> None:
    class Own(Net):
        def configure_optimizers(self) -> Any:
            return make(self.parameters(), lr=1e-2)

    module, expected = Own(), Own()
    fit(expected, tmp_path / "plain")
    strategy = mt.MegaTrainStrategy(_link=link_of("accelerator", 4), max_ram_gb=0.5, **ROOMY)
    fit(module, tmp_path / "paged", strategy)
    assert plan_of(strategy).updates
    assert_same(module, expected)


def test_a_run_that_was_killed_goes_on_from_its_commit(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 2:
                raise RuntimeError("stop")

    def run(on_existing: Any, callbacks: list[Callback]) -> Net:
        module = Net()
        strategy = mt.MegaTrainStrategy(
            tmp_path / "pages",
            on_existing=on_existing,
            _link=link_of("accelerator", 4),
            max_ram_gb=0.5,
            **ROOMY,
        )
        fit(module, tmp_path, strategy, callbacks=callbacks)
        return module

    with pytest.raises(RuntimeError, match="stop"):
        run("error", [Stop()])
    assert_same(run("resume", []), reference(Net, "eager"))


def test_checkpoints_in_mid_training_hold_what_the_device_has(tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / f"{type(trainer.strategy).__name__}.ckpt")

    plain, module = Net(), Net()
    fit(plain, tmp_path / "plain", callbacks=[Save()])
    strategy = mt.MegaTrainStrategy(_link=link_of("accelerator", 4), max_ram_gb=0.5, **ROOMY)
    fit(module, tmp_path / "paged", strategy, callbacks=[Save()])
    assert_same(module, plain)
    ours = torch.load(tmp_path / "MegaTrainStrategy.ckpt", weights_only=True)
    theirs = torch.load(tmp_path / "SingleDeviceStrategy.ckpt", weights_only=True)
    for name, tensor in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], tensor), name
    mine, its = ours["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"]
    for index, state in its.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(mine[index][key]), torch.as_tensor(value)), key


def test_weights_that_are_loaded_in_mid_training_are_taken(tmp_path: Path) -> None:
    class Load(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step == 2:
                module: nn.Module = trainer.lightning_module
                module.load_state_dict({k: v * 0.5 for k, v in module.state_dict().items()})

    plain, module = Net(), Net()
    fit(plain, tmp_path / "plain", callbacks=[Load()])
    strategy = mt.MegaTrainStrategy(_link=link_of("accelerator", 4), max_ram_gb=0.5, **ROOMY)
    fit(module, tmp_path / "paged", strategy, callbacks=[Load()])
    assert_same(module, plain)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_loop_of_ones_own_trains_the_same_weights(max_norm: float | None, tmp_path: Path) -> None:
    def train(link: Any = None) -> tuple[Net, Any]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = None
        if link is not None:
            pages = tmp_path / "pages"
            handle = mt.page(model, optimizer, offload_dir=pages, max_vram_gb=0.1, _link=link)
        torch.manual_seed(3)
        for _ in range(4):
            optimizer.zero_grad()
            model.loss(torch.randn(8, 64)).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        if handle is None:
            return model, None
        stats = handle.stats
        handle.close()
        return model, stats

    model, stats = train(link_of("accelerator", 4))
    assert_same(model, train()[0])
    assert stats.bytes_downloaded == 0, "gradients stay"


@pytest.mark.parametrize("forgets", ["come_home", "end_update", "begin_update"])
def test_planted_bugs_are_noticed(
    forgets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: DevicePool, page: Any) -> torch.Tensor:
        return self._entries[page.index].frame.tensor.clone()

    bug = wrong if forgets == "begin_update" else lambda self, *args: None
    monkeypatch.setattr(DevicePool, forgets, bug)
    with pytest.raises(AssertionError):
        check(Net, "eager", link_of("accelerator", 0), tmp_path, **ROOMY)
