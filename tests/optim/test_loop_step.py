"""Adam without `fused=True` is stepped in one pass to the bits of torch's own loop."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mt_lightning.optim import loop_step, torch_root
from mt_lightning.optim.loop_step import LoopStepper, agrees, kind_of, stepper_for
from mt_lightning.optim.shadow import Shadow, Target, snapshot
from tests.optim.packed_cases import same, wild

CLASSES = [torch.optim.AdamW, torch.optim.Adam]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "foreach": True, "amsgrad": True, "maximize": True},
    {"betas": (0.3, 0.99), "weight_decay": 0.1},
    {"betas": (0.5, 0.5), "eps": 0.0},
    {"betas": (0.0, 0.0), "weight_decay": 0.1},
    {"lr": 0.0},
    {"lr": torch.tensor(1e-2)},
    {"fused": True},
]


def _compare(
    make: Any, numel: int, cuts: list[int], settings: dict[str, Any], bad_step: int | None = None
) -> None:
    """Train one tensor by torch, and a copy of it in slices by the stepper."""
    param = torch.nn.Parameter(wild(numel, 1))
    optimizer = make([param], **{"lr": 1e-2, **settings})
    stepper, ours = stepper_for(optimizer), param.detach().clone()
    bounds = list(itertools.pairwise([0, *cuts, numel]))
    states: list[dict[str, Any]] = [{} for _ in bounds]
    for step in range(1, 6):
        grad = wild(numel, 100 + step)
        if step == bad_step:
            grad[::5], grad[1::5], grad[2::5] = torch.nan, torch.inf, -torch.inf
            grad[3::5] = 3e38
        param.grad = grad.clone()
        optimizer.step()
        targets = [
            Target(ours[a:b], grad[a:b], 0, state)
            for (a, b), state in zip(bounds, states, strict=True)
        ]
        states = stepper.step(snapshot(optimizer), targets)
        assert same(ours, param.detach())
        for key, value in optimizer.state[param].items():
            if key == "step":
                assert all(torch.equal(state[key], value) for state in states)
            else:
                assert same(torch.cat([state[key] for state in states]), value), key


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_all_settings_are_equal(make: Any, settings: dict[str, Any]) -> None:
    _compare(make, 5003, [1024, 4096], settings)


@pytest.mark.parametrize("make", CLASSES)
def test_every_size_is_equal_to_its_last_element(make: Any) -> None:
    for numel in [*range(1, 140), 255, 256, 257]:
        _compare(make, numel, [], {"weight_decay": 0.1})


def test_odd_cuts_change_no_bit() -> None:
    _compare(torch.optim.AdamW, 3001, [1, 18, 99, 1000, 1001, 2900], {})


@pytest.mark.parametrize("amsgrad", [False, True])
def test_nan_and_infinity_go_where_torch_lets_them(amsgrad: bool) -> None:
    _compare(torch.optim.AdamW, 2000, [], {"amsgrad": amsgrad}, bad_step=3)


def test_threads_change_no_bit() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        _compare(torch.optim.AdamW, 5 * (1 << 18) + 77, [], {})
    finally:
        torch.set_num_threads(before)


def test_other_default_dtypes_change_no_bit() -> None:
    before = torch.get_default_dtype()
    agrees.cache_clear()
    try:
        torch.set_default_dtype(torch.bfloat16)
        _compare(torch.optim.AdamW, 1000, [], {})
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("make", CLASSES)
def test_the_class_itself_steps_where_the_kernel_would_round_otherwise(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(group: dict[str, Any], kind: Any, target: Target) -> dict[str, Any]:
        target.param.mul_(1 + 2**-20)
        return target.state

    agrees.cache_clear()
    monkeypatch.setattr(loop_step, "_step", wrong)
    try:
        _compare(make, 2000, [], {})
    finally:
        agrees.cache_clear()


def test_the_kernel_steps_what_it_can_and_the_class_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [torch.nn.Parameter(wild(300, i)) for i in range(3)]
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "fused": True}])
    kind = kind_of(torch.optim.AdamW, optimizer.param_groups[0])
    assert kind is not None
    assert kind_of(torch.optim.AdamW, optimizer.param_groups[1]) is None
    if not agrees(kind):
        pytest.skip("this build of torch rounds in another way, and steps all by itself")
    by_class: list[int] = []
    step = Shadow.step

    def counted(self: Shadow, hyper: Any, targets: list[Target]) -> list[dict[str, Any]]:
        by_class.append(len(targets))
        return step(self, hyper, targets)

    monkeypatch.setattr(Shadow, "step", counted)
    stepper = stepper_for(optimizer)
    assert isinstance(stepper, LoopStepper)
    states: list[dict[str, Any]] = [{}, {}, {}]
    for _ in range(2):
        targets = [
            Target(param.detach(), torch.ones(300), group, state)
            for param, group, state in zip(params, (0, 0, 1), states, strict=True)
        ]
        states = stepper.step(snapshot(optimizer), targets)
    assert by_class == [3, 1]


def test_a_subclass_steps_by_itself() -> None:
    class Mine(torch.optim.AdamW):
        pass

    param = torch.nn.Parameter(torch.zeros(4))
    assert isinstance(stepper_for(Mine([param])), Shadow)
    assert isinstance(stepper_for(torch.optim.NAdam([param])), Shadow)


def test_a_step_leaves_the_threads_of_torch_alone() -> None:
    library = torch_root._library()
    if library is None:
        pytest.skip("this build of torch is without Intel's library")
    param = torch.nn.Parameter(wild(300, 1))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones(300)
    optimizer.step()
    state = {key: value.clone() for key, value in optimizer.state[param].items()}
    before = library.MKL_Set_Num_Threads_Local(3)
    try:
        target = Target(param.detach(), param.grad, 0, state)
        stepper_for(optimizer).step(snapshot(optimizer), [target])
        assert library.MKL_Set_Num_Threads_Local(3) == 3
    finally:
        library.MKL_Set_Num_Threads_Local(before)
