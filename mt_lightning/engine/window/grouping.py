"""Of how many micro-batches a window is best made.

[Note: what a group costs]
Each group reads the weights twice, less what stays in RAM between. Inputs of units that do not fit
where they are used go elsewhere once and come back once. A larger group saves passes over the
weights and moves more inputs. Between two units, each micro-batch of a group has one input there,
and later its gradient.
"""

from __future__ import annotations


def best_group(
    num_micros: int,
    *,
    input_bytes: int,
    widest_bytes: int,
    near_bytes: int,
    away_bytes: int,
    sweep_bytes: int,
) -> int:
    """Return the size of groups that moves the fewest bytes; the larger one of equals.

    Args:
        num_micros: How many micro-batches make a step.
        input_bytes: What all units together receive from one of them.
        widest_bytes: What one unit receives at most.
        near_bytes: Room for inputs where units compute.
        away_bytes: Room for inputs elsewhere: on disk, or in RAM where a device computes.
        sweep_bytes: Weights that one group reads.
    """
    best, least = 1, None
    for size in range(num_micros, 0, -1):
        between = 2 * size * widest_bytes if size > 1 else 0
        above = max(0, size * input_bytes + between - near_bytes)
        if size > 1 and (between > near_bytes or above > away_bytes):
            continue
        num_groups = -(-num_micros // size)
        moved = num_groups * (sweep_bytes + 2 * above)
        if least is None or moved < least:
            best, least = size, moved
    return best
