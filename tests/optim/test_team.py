"""The update worker has no team of OpenMP threads, where it steps what may run on one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_lightning.optim import team
from mt_lightning.optim.loop_step import stepper_for
from mt_lightning.optim.shadow import snapshot
from mt_lightning.optim.team import alone

LARGE = 1 << 20
"""Elements that torch divides among threads."""


@pytest.fixture(autouse=True)
def _two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _num_threads_made_by(work: Callable[[], object]) -> int:
    """Return how many threads a fresh thread needs to do `work`, beside itself."""
    made: list[set[str]] = []

    def watched() -> None:
        torch.get_num_threads()
        before = _threads()
        work()
        made.append(_threads() - before)

    thread = threading.Thread(target=watched)
    thread.start()
    thread.join()
    return len(made[0])


def _threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be counted")
@pytest.mark.skipif(team._set_num_threads() is None, reason="torch without OpenMP")
def test_a_loop_alone_makes_no_thread() -> None:
    values = torch.ones(LARGE)

    def by_itself() -> None:
        with alone():
            values.mul_(2)

    assert _num_threads_made_by(by_itself) == 0
    assert _num_threads_made_by(lambda: values.mul_(2)) == 1
    assert values.eq(4).all()


def test_other_threads_and_those_that_begin_later_keep_their_number() -> None:
    seen = []
    with alone():
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert seen == [2]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("settings", "free"), [({}, True), ({"foreach": True}, True), ({"fused": True}, False)]
)
def test_only_what_is_known_not_to_depend_on_threads_is_free(
    settings: dict[str, bool], free: bool
) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], **settings)  # type: ignore[arg-type]
    assert stepper_for(optimizer).is_free(snapshot(optimizer)) is free


def test_a_class_of_the_users_own_is_not_free() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    assert not stepper_for(optimizer).is_free(snapshot(optimizer))


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"amsgrad": True, "maximize": True}])
def test_torch_steps_to_the_same_bits_alone(settings: dict[str, bool]) -> None:
    def stepped(numel: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.randn(numel, generator=generator))
        optimizer = torch.optim.AdamW([param], lr=1e-3, **settings)  # type: ignore[arg-type]
        for _ in range(2):
            param.grad = torch.randn(numel, generator=generator)
            optimizer.step()
        return param.detach(), *(optimizer.state[param].values())

    for numel in (100_001, 262_147):  # divided at places that no vector ends at
        together = stepped(numel)
        with alone():
            by_itself = stepped(numel)
        assert all(torch.equal(a, b) for a, b in zip(together, by_itself, strict=True))
