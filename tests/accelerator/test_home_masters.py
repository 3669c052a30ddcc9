"""fp32 masters of a run that fits the device are joined, stepped and split there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mt_lightning as mt
from mt_lightning.engine.masters.seen import Seen

from ..masters.reference import Net, Reference, assert_same, fit, make_net, masters_of, paged
from ..masters.test_parity import OPTIMIZERS, RUNS
from .runs import link_of
from .test_home import plan_of


def there(**settings: Any) -> mt.MegaTrainStrategy:
    return paged(**{"_link": link_of("accelerator", 3), "max_vram_gb": 0.1, **settings})


def sgd(net: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-2)


def init(net: Net) -> Net:
    net.load_state_dict(make_net(net.make_optimizer).state_dict())
    return net


@pytest.mark.parametrize(
    ("kind", "run", "tied"),
    [
        ("adamw", "eager", False),
        ("fused", "norm", True),
        ("adafactor", "value", False),
        ("momentum", "accumulated, norm", True),
    ],
)
def test_the_bits_are_those_of_explicit_masters(kind: str, run: str, tied: bool) -> None:
    make = OPTIMIZERS[kind]
    expected = Reference(make_net(make, tied=tied)).fit(**RUNS[run])
    net, strategy = make_net(make, tied=tied), there()
    assert_same(expected, net, fit(net, strategy, **RUNS[run]).optimizers[0])
    plan = plan_of(strategy)
    assert plan.updates
    assert strategy.engine is not None
    stats = strategy.engine.stats
    assert stats.bytes_downloaded == 0, "gradients stay"
    assert 0 < stats.bytes_uploaded <= plan.weight_bytes + plan.home_bytes, "brought once"


def test_the_smallest_budget_that_holds_all_holds_masters_too() -> None:
    make = OPTIMIZERS["adamw"]
    roomy = there()
    fit(make_net(make), roomy)
    plan = plan_of(roomy)
    enough = plan.min_bytes + plan.weight_bytes + plan.home_bytes
    expected = Reference(make_net(make)).fit()
    for nbytes in (enough - 1, enough):
        net, strategy = make_net(make), there(max_vram_gb=nbytes / 2**30)
        assert_same(expected, net, fit(net, strategy).optimizers[0])
        assert plan_of(strategy).updates == (nbytes == enough)
        assert strategy.engine is not None
        assert strategy.engine.stats.vram_peak_bytes <= nbytes


@pytest.mark.parametrize("notices", [True, False])
def test_a_hook_that_writes_there_drops_the_lower_half(
    notices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writing(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if self.global_step == 2:
                with torch.no_grad():
                    self.shift.mul_(1.5)

    if not notices:
        monkeypatch.setattr(Seen, "unwritten", lambda self, page, plane: {})
    net = init(Writing(sgd))
    optimizer = fit(net, there()).optimizers[0]
    reference = Reference(make_net(sgd))
    steps, show = iter(range(100)), reference.show

    def shown() -> None:
        show()
        if next(steps) == 1:
            with torch.no_grad():
                reference.net.shift.mul_(1.5)
                reference.masters.shift.copy_(reference.net.shift)

    reference.show = shown  # type: ignore[method-assign]
    reference.fit()
    same = torch.equal(masters_of(net, optimizer)["shift"], reference.masters.shift.detach())
    assert same == notices


def test_loading_in_mid_training_sets_both_halves() -> None:
    values = Net(sgd).state_dict()

    class Loading(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if self.global_step == 2:
                self.load_state_dict(values)

    net = init(Loading(sgd))
    optimizer = fit(net, there()).optimizers[0]
    reference = Reference(make_net(sgd))
    steps, show = iter(range(100)), reference.show

    def shown() -> None:
        if next(steps) == 1:
            reference.masters.load_state_dict(values)
        show()

    reference.show = shown  # type: ignore[method-assign]
    reference.fit()
    assert_same(reference, net, optimizer)


def test_a_killed_run_goes_on_with_its_masters_on_a_device_or_without(tmp_path: Path) -> None:
    class Stop(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if self.global_step == 3:
                raise RuntimeError("stop")

    make = OPTIMIZERS["adamw"]
    expected = Reference(make_net(make)).fit()
    for number, options in enumerate(({}, {"_link": None, "max_vram_gb": None})):
        directory = tmp_path / str(number)
        with pytest.raises(RuntimeError, match="stop"):
            fit(init(Stop(make)), there(offload_dir=directory))
        net = Net(make)
        strategy = there(offload_dir=directory, on_existing="resume", **options)
        assert_same(expected, net, fit(net, strategy).optimizers[0])


def test_a_second_fit_and_a_checkpoint_have_the_masters(tmp_path: Path) -> None:
    make = OPTIMIZERS["adamw"]
    expected = Reference(make_net(make)).fit()
    net, strategy = make_net(make), there()
    made = fit(net, strategy, max_steps=3)
    made.save_checkpoint(tmp_path / "last.ckpt")
    assert plan_of(strategy).updates
    again, other = Net(make), there()
    made = fit(again, other, ckpt_path=tmp_path / "last.ckpt")
    assert_same(expected, again, made.optimizers[0])
