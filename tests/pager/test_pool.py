"""Single moves of the pool, each by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mt_lightning.errors import BudgetError

from .test_pool_model import PoolMachine


@pytest.fixture
def machine() -> Iterator[PoolMachine]:
    """Give a pool of four blocks with five pages of 1, 2, 1, 3 and 2 blocks."""
    machine = PoolMachine()
    machine.open(num_blocks=4)
    yield machine
    machine.teardown()


def test_what_was_committed_is_not_overwritten(machine: PoolMachine) -> None:
    machine.visit(0, 1)
    machine.commit()
    for seed in (2, 3):
        machine.visit(0, seed)
        machine.flush()
    assert {machine.pages[0].weight.slot, machine.pages[0].weight.committed} == {0, 1}
    machine.clear(lose=True)
    machine.visit(0, None)


def test_the_old_copy_goes_with_its_last_view(machine: PoolMachine) -> None:
    entry = machine.pin(1)
    view = machine.look(entry)
    machine.copy_on_write(entry)
    machine.change(entry, 5)
    machine.views_keep_what_they_saw()
    assert machine.budget.available_bytes == 0
    with pytest.raises(BudgetError):
        machine.pool.pin(machine.pages[0])
    machine.look_away(view)
    machine.pool.release(machine.pool.pin(machine.pages[0]))
    assert machine.budget.by_purpose["weights"] == 3 * 4096


def test_a_frame_with_a_view_outlives_clear_and_stays_reserved(machine: PoolMachine) -> None:
    entry = machine.pin(1)
    view = machine.look(entry)
    machine.release(entry)
    machine.clear(lose=False)
    assert machine.budget.by_purpose["weights"] == 2 * 4096
    machine.views_keep_what_they_saw()
    machine.look_away(view)
    machine.clear(lose=False)
    assert machine.budget.used_bytes == 0


def test_a_refusal_says_what_is_in_use_and_what_to_change(machine: PoolMachine) -> None:
    kept = machine.pin(3), machine.reserve(1)
    with pytest.raises(BudgetError) as caught:
        machine.pool.pin(machine.pages[0])
    text = str(caught.value)
    assert "the weights of page p00000 need 4096 bytes, but only 0 of" in text
    assert "weights 0.01 MiB, gradients 0.00 MiB" in text
    assert "Raise max_ram_gb" in text
    del kept


def test_an_old_update_is_waited_for_before_refusing(machine: PoolMachine) -> None:
    machine.pin(3)
    old = [machine.reserve(1)]
    asked = []

    def relieve() -> bool:
        asked.append(len(old))
        if old:
            old.pop().free()
            return True
        return False

    machine.pool.relieve = relieve
    machine.pool.pin(machine.pages[0])
    assert asked == [1]
    with pytest.raises(BudgetError):
        machine.pool.pin(machine.pages[2])
    assert asked == [1, 0]
