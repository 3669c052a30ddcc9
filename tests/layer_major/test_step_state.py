"""Steps that run in turns find on modules what they would find one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mt_lightning.engine.window.attributes import Own
from mt_lightning.engine.window.step_state import StepState
from mt_lightning.engine.window.thread_state import ThreadState
from mt_lightning.engine.window.waiting import held_bytes

OUTSIDE, INSIDE = None, 0


class Run:
    """Two steps that change a module in turns; `places` says what each slice has run."""

    def __init__(self, **values: Any) -> None:
        self.root = nn.Module()
        self.root.unit = nn.Linear(2, 2)
        vars(self.root).update(values)
        self.root.register_buffer("buffer", torch.zeros(2))
        self.state = StepState(self.root, [list(self.root.unit.modules())], [])
        self.own: list[Own] = [{}, {}]

    def go_on(self, step: int, change: Any, unit: int | None = OUTSIDE, ended: bool = False) -> Any:
        before = self.state.show(self.own[step])
        seen = change(self.root)
        self.state.hide(self.own[step], before, unit, ended=ended)
        return seen


def append(value: Any) -> Any:
    return lambda root: root.items.append(value)


def test_lists_come_out_in_the_order_of_batches() -> None:
    run = Run(items=["before"])
    for step in (0, 1):
        run.go_on(step, append((step, "first")))
    for step in (1, 0):
        run.go_on(step, append((step, "second")), INSIDE)
    assert run.root.items == ["before"]
    for step in (0, 1):
        run.go_on(step, append((step, "last")), INSIDE, ended=True)
    parts = ("first", "second", "last")
    assert run.root.items == ["before", *((step, part) for step in (0, 1) for part in parts)]


def test_a_list_that_a_step_empties_is_its_own() -> None:
    run = Run(items=[])

    def collect(root: Any) -> list[Any]:
        found = list(root.items)
        root.items.clear()
        return found

    for part in (1, 2):
        for step in (0, 1):
            run.go_on(step, append((step, part)), INSIDE)
    assert run.go_on(0, collect, INSIDE, ended=True) == [(0, 1), (0, 2)]
    assert run.go_on(1, collect, INSIDE, ended=True) == [(1, 1), (1, 2)]
    assert run.root.items == []


@pytest.mark.parametrize("kind", [dict, set])
def test_what_is_put_in_dictionaries_and_sets(kind: type) -> None:
    run = Run(items=kind())

    def put(key: Any) -> Any:
        return lambda r: r.items.update({key: key} if kind is dict else {key})

    for step in (0, 1):
        run.go_on(step, put(step), INSIDE)
        assert not run.root.items
    assert set(run.go_on(1, lambda r: list(r.items), INSIDE)) == {1}
    for step in (0, 1):
        run.go_on(step, put(2), INSIDE, ended=True)
    assert set(run.root.items) == {0, 1, 2}


def test_flags_that_are_set_and_cleared_stay_cleared() -> None:
    run = Run(flag=False)

    def set_flag(value: bool) -> Any:
        return lambda root: setattr(root, "flag", value)

    run.go_on(0, set_flag(True))
    assert run.go_on(1, lambda root: root.flag) is False
    run.go_on(0, set_flag(False), INSIDE)
    assert run.go_on(0, lambda root: root.flag, INSIDE) is False


def test_a_tensor_that_a_unit_leaves_on_itself_is_of_its_step() -> None:
    run = Run()
    for step in (0, 1):
        run.go_on(step, lambda r, s=step: setattr(r.unit, "aux", torch.tensor(s)), INSIDE)
    for step in (0, 1):
        assert run.go_on(step, lambda root: int(root.unit.aux), INSIDE) == step


def test_a_buffer_that_is_replaced_is_of_its_step_and_one_written_to_is_not() -> None:
    run = Run()
    old = run.root.buffer
    run.go_on(0, lambda root: setattr(root, "buffer", torch.ones(2)), INSIDE)
    assert run.root.buffer is old
    assert run.go_on(0, lambda root: float(root.buffer.sum()), INSIDE) == 2.0
    run.go_on(1, lambda root: root.buffer.add_(3), INSIDE)
    assert float(run.root.buffer.sum()) == 6.0


def test_numbers_that_may_be_carried_from_step_to_step_are_named() -> None:
    def count(root: Any) -> None:
        root.seen += 1
        root.per_unit["unit"] = root.seen

    run = Run(seen=0, per_unit={"unit": 0}, kept=None)
    run.go_on(0, count)
    assert not run.state.carried
    run.go_on(0, lambda root: setattr(root, "kept", 3), INSIDE)
    assert not run.state.carried
    run.go_on(1, count, INSIDE)
    assert run.state.carried == {"seen", "per_unit"}


def test_inference_mode_is_the_steps_own() -> None:
    step = ThreadState.copy()
    with torch.inference_mode():
        main = ThreadState.take()
        step.give()
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        weight = torch.ones(1, requires_grad=True)
        assert (weight * 2).requires_grad
        inner = torch.inference_mode()
        inner.__enter__()
        step = ThreadState.take()
        main.give()
        assert torch.is_inference_mode_enabled()
        assert torch.ones(1).is_inference()
        main = ThreadState.take()
        step.give()
        assert torch.is_inference_mode_enabled()
        inner.__exit__(None, None, None)
        assert not torch.is_inference_mode_enabled()
        assert (weight * 2).requires_grad
        step = ThreadState.take()
        main.give()
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


class Cache:
    def __init__(self) -> None:
        self.layers = [{"keys": torch.zeros(100), "values": torch.zeros(100)}]


def outermost(call: Any) -> int:
    ignored = torch.zeros(1000)
    return call() + 0 * ignored.numel()


def test_what_a_waiting_step_holds_is_counted_once() -> None:
    def step() -> int:
        cache, hidden = Cache(), torch.zeros(10)
        views = [hidden[:5], hidden.view(2, 5)]
        weight = nn.Parameter(torch.zeros(5000))
        let_go = torch.zeros(7000)
        del let_go
        assert views
        assert weight is not None
        return inner(cache, hidden)

    def inner(cache: Cache, hidden: torch.Tensor) -> int:
        mask = torch.zeros(1).expand(1000)
        module = nn.Linear(50, 50)
        num_bytes = held_bytes(outermost.__code__)
        assert module is not None
        assert mask is not None
        return num_bytes

    assert outermost(step) == 4 * (200 + 10 + 1)
