"""What goes to the device is what an independent count of the policy says, to the byte."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from ..graphs.nets import NUM_LAYERS, NUM_STEPS, Net
from .runs import GIB, Scaled, check, link_of, smallest_vram_gb

PAGE_BYTES = 33 * 4096
"""Two matrices of 64 x 256, and 448 other values, in fp32; rounded up to blocks of 4096 bytes."""
GRAD_BYTES = 4 * (2 * 64 * 256 + 448)
INPUT_BYTES = 4 * 8 * 64


def count_uploads(limit_bytes: int, num_steps: int, input_bytes: int = INPUT_BYTES) -> int:
    """Count the copies of pages to the device, of a chain that is updated behind its backward.

    Written from the description of the policy: a page that is there is not brought again until it
    was updated; the page that is needed last goes first, which in a chain that is run to and fro is
    the lowest one. Gradients of two units may be on their way while those of a third are made. What
    each unit received is there until its backward has been, counted as far as it fits beside the
    unit that runs.
    """
    there: set[int] = set()
    leaving: deque[int] = deque()
    num_uploads = in_use = num_inputs = 0
    most_inputs = (limit_bytes - PAGE_BYTES - GRAD_BYTES) // input_bytes

    def make_room(nbytes: int, bound: int | None = None) -> None:
        inputs = min(num_inputs, most_inputs) * input_bytes
        while limit_bytes - len(there) * PAGE_BYTES - inputs - in_use - sum(leaving) < nbytes:
            idle = there - {bound}
            if idle:
                there.remove(min(idle))
            else:
                leaving.popleft()

    def bring(page: int) -> None:
        nonlocal num_uploads
        if page not in there:
            make_room(PAGE_BYTES)
            there.add(page)
            num_uploads += 1

    for _ in range(num_steps):
        for page in range(NUM_LAYERS):
            num_inputs += 1
            bring(page)
        for page in reversed(range(NUM_LAYERS)):
            while len(leaving) > 1:
                leaving.popleft()
            make_room(GRAD_BYTES, page)
            in_use = GRAD_BYTES
            bring(page)
            there.remove(page)  # updated behind backward
            num_inputs -= 1
            in_use = 0
            leaving.append(GRAD_BYTES)
    return num_uploads


@pytest.mark.parametrize("factor", [1.0, 1.25, 1.6, 2.0, 3.0])
def test_bytes_to_the_device_are_those_of_the_policy(factor: float, tmp_path: Path) -> None:
    max_vram_gb = factor * smallest_vram_gb(Net)
    stats = check(
        Net, "eager", link_of("accelerator", 5), tmp_path, max_vram_gb=max_vram_gb, _depth=0
    )
    expected = count_uploads(int(max_vram_gb * GIB), NUM_STEPS)
    assert stats.bytes_uploaded == expected * PAGE_BYTES
    assert stats.bytes_downloaded == NUM_STEPS * NUM_LAYERS * GRAD_BYTES


def test_the_count_falls_as_the_budget_grows() -> None:
    one, all_of_them = PAGE_BYTES + GRAD_BYTES, (NUM_LAYERS + 3) * PAGE_BYTES
    counts = [count_uploads(limit, 1) for limit in range(one, all_of_them, 4096)]
    assert counts[0] == 2 * NUM_LAYERS - 1
    assert counts[-1] == NUM_LAYERS
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("depth", [None, 0])
def test_with_room_for_all_each_page_is_brought_once_per_update(
    depth: int | None, tmp_path: Path
) -> None:
    link = link_of("accelerator", 2)
    stats = check(Net, "eager", link, tmp_path, max_vram_gb=0.1, _depth=depth)
    # With the order known, the last backward brings a page for a forward that never comes.
    beyond_end = 1 if depth is None else 0
    assert stats.bytes_uploaded == (NUM_STEPS * NUM_LAYERS + beyond_end) * PAGE_BYTES


def test_weights_that_stay_the_same_are_brought_once(tmp_path: Path) -> None:
    link = link_of("accelerator", 2)
    stats = check(Net, "accumulated", link, tmp_path, max_vram_gb=0.1, _depth=0)
    assert stats.bytes_uploaded == 2 * NUM_LAYERS * PAGE_BYTES, "four batches, two updates"


def test_parameters_outside_units_are_brought_at_start_and_after_each_update(
    tmp_path: Path,
) -> None:
    link = link_of("accelerator", 2)
    stats = check(Scaled, "eager", link, tmp_path, max_vram_gb=0.1, _depth=0)
    own = (1 + NUM_STEPS) * 4096
    assert stats.bytes_uploaded == own + NUM_STEPS * NUM_LAYERS * PAGE_BYTES
