"""What is away takes no memory, and what is gone takes neither memory nor disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mt_lightning.commands.verify.leftovers import find_leftovers
from mt_lightning.errors import BudgetError, CorruptPageError, StepError, StorageError
from mt_lightning.tiers.doubles import Fault, FaultyStore, MemoryStore

from .rig import INPUT_BYTES, WIDTH, Rig, assert_equal, data, grads, rig, stack


def forward(layers: nn.ModuleList) -> torch.Tensor:
    x = data()
    for layer in layers:
        x = layer(x)
    return x.square().mean()


def expected(num_layers: int) -> list[torch.Tensor]:
    layers = stack(num_layers)
    forward(layers).backward()
    return grads(layers)


@pytest.mark.parametrize("num_fitting", [0, 2, 5])
def test_the_peak_does_not_grow_with_depth(num_fitting: int) -> None:
    peaks = {}
    for num_layers in (8, 32):
        layers = stack(num_layers)
        with rig(layers, num_fitting * INPUT_BYTES) as made:
            loss = forward(layers)
            # What fits, what the last unit has just received, and the batch, which data() made.
            assert made.live_bytes() <= (num_fitting + 2) * INPUT_BYTES
            loss.backward()
            peaks[num_layers] = made.peak_bytes
            assert_equal(grads(layers), expected(num_layers))
            assert made.budget.peak_bytes <= made.budget.limit_bytes
    assert peaks[32] == peaks[8] <= (num_fitting + 3) * INPUT_BYTES


def test_bytes_are_what_does_not_fit() -> None:
    layers = stack(10)
    with rig(layers, 4 * INPUT_BYTES) as made:
        forward(layers).backward()
        made.tier.count()
        assert made.stats.inputs_bytes == 10 * INPUT_BYTES
        # Four fit; an eighth of that, twice, is what the others are written through.
        through = 2 * (4 * INPUT_BYTES // 8)
        num_away = 10 - (4 * INPUT_BYTES - through) // INPUT_BYTES
        assert made.stats.inputs_spilled_bytes == num_away * INPUT_BYTES
        assert made.stats.inputs_read_bytes == num_away * INPUT_BYTES
        assert made.store.bytes_written == made.store.bytes_read == num_away * INPUT_BYTES


def test_what_comes_next_is_read_while_a_unit_runs() -> None:
    layers = stack(8)
    with rig(layers, 4 * INPUT_BYTES) as made:
        forwarded = forward(layers)
        begun = []

        def look(index: int) -> None:
            items = [hold.item for holds in made.tier._holds.values() for hold in holds]
            begun.append(sum(item.read is not None for item in items))

        made.on_replay = look
        forwarded.backward()
        assert max(begun) >= 1
        assert made.budget.peak_bytes <= made.budget.limit_bytes


def test_a_loss_that_is_dropped_gives_everything_back() -> None:
    layers = stack()
    with rig(layers) as made:
        for _ in range(3):
            forward(layers)
        assert made.files.num_bytes <= len(layers) * (INPUT_BYTES + 4096)
        made.assert_nothing_is_kept()
        forward(layers).backward()
        assert_equal(grads(layers), expected(len(layers)))
        made.assert_nothing_is_kept()


def test_backward_can_be_run_twice() -> None:
    layers = stack()
    with rig(layers) as made:
        loss = forward(layers)
        loss.backward(retain_graph=True)
        assert_equal(grads(layers), expected(len(layers)))
        loss.backward()
        assert_equal(grads(layers), expected(len(layers)))
        made.tier.count()
        # Written once.
        assert made.stats.inputs_spilled_bytes <= len(layers) * INPUT_BYTES
        del loss
        made.assert_nothing_is_kept()


def test_no_gradient_keeps_nothing() -> None:
    layers = stack()
    with rig(layers) as made, torch.no_grad():
        forward(layers)
        assert made.stats.inputs_bytes == 0
        assert not made.tier._holds


def test_an_error_between_forward_and_backward_leaks_nothing() -> None:
    layers = stack()
    with rig(layers) as made:

        def fail(index: int) -> None:
            if index == 2:
                raise RuntimeError("stop here")

        made.on_replay = fail
        with pytest.raises(RuntimeError, match="stop here"):
            forward(layers).backward()
        made.on_replay = lambda index: None
        for param in layers.parameters():
            param.grad = None
        made.assert_nothing_is_kept()
        forward(layers).backward()
        assert_equal(grads(layers), expected(len(layers)))
        made.assert_nothing_is_kept()


def test_what_somebody_else_holds_stays_readable() -> None:
    layers = stack()
    with rig(layers):
        x, held, copies = data(), [], []
        for layer in layers:
            x = layer(x)
            held.append(x)
            copies.append(x.detach().clone())
        for a, b in zip(held, copies, strict=True):
            assert torch.equal(a, b)
        x.sum().backward()


@pytest.mark.parametrize("named", [False, True])
def test_a_change_in_place_is_still_found(named: bool) -> None:
    layers = stack(2, Taker)
    with rig(layers):
        x = layers[0](data())
        y = layers[1](x=x) if named else layers[1](x)
        x.detach().add_(1)
        text = "changed in place" if named else "modified by an inplace operation"
        with pytest.raises(StepError if named else RuntimeError, match=text):
            y.sum().backward()


class Taker(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_backward_after_the_end_says_so() -> None:
    layers = stack()
    with rig(layers) as made:
        loss = forward(layers)
    with pytest.raises(StepError, match="after training had ended"):
        loss.backward()
    assert made.budget.used_bytes == 2 * made.frames[0].nbytes


# -- the disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(op="write", kind="eio", nth=0), StorageError),
        (Fault(op="read", kind="eio", nth=0), StorageError),
        (Fault(op="read", kind="short", nth=0), StorageError),
        (Fault(op="write", kind="flip", nth=3), CorruptPageError),
        (Fault(op="read", kind="flip", nth=0), CorruptPageError),
        (Fault(op="create", kind="enospc", nth=0), StorageError),
    ],
    ids=lambda value: f"{value.op}-{value.kind}" if isinstance(value, Fault) else "",
)
def test_a_failing_disk_is_named(fault: Fault, error: type[Exception]) -> None:
    layers = stack()
    made = Rig(layers, store=FaultyStore(MemoryStore(), [fault]))
    with pytest.raises(error, match=r"i\d+\.input\.0|injected|checksum") as caught:
        forward(layers).backward()
    assert "input" in str(caught.value.filename)
    made.tier.close()
    held = {k: v for k, v in made.budget.by_purpose.items() if k != "state"}
    assert not any(held.values())
    assert made.store.names() == []


def test_half_a_copy_is_not_taken_for_a_whole_one() -> None:
    layers = stack()
    # One part of the second input is not written; whoever goes on does so without it.
    fault = Fault(op="write", kind="eio", nth=6)
    with rig(layers, store=FaultyStore(MemoryStore(), [fault])) as made:
        with pytest.raises(StorageError):
            forward(layers)
        forward(layers).backward()
        assert_equal(grads(layers), expected(len(layers)))
        made.assert_nothing_is_kept()


def test_the_ceiling_on_disk_is_kept() -> None:
    layers = stack()
    with rig(layers, max_disk_bytes=2 * INPUT_BYTES) as made:
        with pytest.raises(BudgetError, match="max_disk_gb") as caught:
            forward(layers)
        assert made.files.num_bytes <= 2 * INPUT_BYTES
        assert caught.value.smallest_gb is not None
        assert caught.value.smallest_gb * 2**30 >= 3 * INPUT_BYTES


def test_files_in_memory_are_not_used() -> None:
    layers = stack()
    with rig(layers, usable=False) as made:
        forward(layers).backward()
        assert_equal(grads(layers), expected(len(layers)))
        assert made.stats.inputs_spilled_bytes == 0


def test_files_of_a_run_that_was_killed_are_leftovers(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    for name in ("i00003.input.0", "i00004.input.0.new"):
        (pages / name).write_bytes(b"of no commit")
    leftovers, foreign = find_leftovers([tmp_path], set(), set())
    assert {each.path.name for each in leftovers} == {"i00003.input.0", "i00004.input.0.new"}
    assert foreign == []
