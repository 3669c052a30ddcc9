"""Groups move the fewest bytes, as counted by playing the step."""

from __future__ import annotations

import itertools

from mt_lightning.engine.window.grouping import best_group

MIB = 1 << 20


def moved(sizes: list[int], facts: dict[str, int]) -> int | None:
    """Count the bytes of a step in groups of these sizes, None where one has no room."""
    total = 0
    for size in sizes:
        room = facts["near_bytes"] - (2 * size * facts["widest_bytes"] if size > 1 else 0)
        away = max(0, size * facts["input_bytes"] - room)
        if size > 1 and (room < 0 or away > facts["away_bytes"]):
            return None
        total += facts["sweep_bytes"] + 2 * away
    return total


def test_no_other_size_moves_fewer_bytes() -> None:
    seen = set()
    for num_micros, inputs, ram, disk, sweep in itertools.product(
        (2, 4, 12), (1, 3, 8), (0, 2, 8, 30, 200), (0, 10, 1000), (0, 5, 40, 300)
    ):
        facts = {
            "input_bytes": inputs * 8 * MIB,
            "widest_bytes": inputs * MIB,
            "near_bytes": ram * MIB,
            "away_bytes": disk * MIB,
            "sweep_bytes": sweep * MIB,
        }
        size = best_group(num_micros, **facts)
        seen.add(size)
        # Sizes that divide the step; for others the last group is smaller than it is taken for.
        counts = {
            n: moved([n] * (num_micros // n), facts)
            for n in range(1, num_micros + 1)
            if not num_micros % n
        }
        least = min(count for count in counts.values() if count is not None)
        if size in counts:
            assert counts[size] == least, (facts, size, counts)
        else:
            assert moved([size] * (num_micros // size) + [num_micros % size], facts) is not None
    assert {1, 2, 4, 12} <= seen


def test_what_fits_is_one_group() -> None:
    facts = {"widest_bytes": MIB, "near_bytes": 100 * MIB, "away_bytes": 0, "sweep_bytes": 0}
    assert best_group(8, input_bytes=10 * MIB, **facts) == 8
    # Without room on disk, two groups; with weights that cost nothing, never the disk.
    assert best_group(12, input_bytes=10 * MIB, **facts) == 8
    facts["away_bytes"] = 1000 * MIB
    assert best_group(12, input_bytes=10 * MIB, **facts) == 8
    assert best_group(12, input_bytes=10 * MIB, **{**facts, "sweep_bytes": 1000 * MIB}) == 12
