"""How far a step moves the random number generator, so that the next one can start before it ends.

[Note: dropout masks as in the usual order]
In the usual order a micro-batch draws where the one before it has left off. Unit by unit they draw
in turns, so each has a stream of its own. It begins where the micro-batch before will have ended,
if that draws as many numbers as one did when last seen. Whether it did is known at the end.
"""

from __future__ import annotations

import torch

_BLOCK = 624
"""The Mersenne Twister makes its numbers in blocks of this length."""
_MOST_BLOCKS = 1 << 18
_PIECE = 1 << 20


def count_draws(before: torch.Tensor, after: torch.Tensor) -> int | None:
    """Return how many numbers lie between two states, None where nobody can say."""
    if torch.equal(before, after):
        return 0
    generator = torch.Generator()
    count = (_left(before) - _left(after)) % _BLOCK
    generator.set_state(before)
    _draw(generator, count)
    for _ in range(_MOST_BLOCKS):
        if torch.equal(generator.get_state(), after):
            return count
        _draw(generator, _BLOCK)
        count += _BLOCK
    return None


def advance(state: torch.Tensor, count: int | None) -> torch.Tensor:
    """Return the state `count` numbers later; with None, one that has nothing to do with it."""
    if count == 0:
        return state
    generator = torch.Generator()
    generator.set_state(state)
    if count is None:
        seed = torch.randint(1 << 62, (), generator=generator)
        return generator.manual_seed(int(seed)).get_state()
    _draw(generator, count)
    return generator.get_state()


def _left(state: torch.Tensor) -> int:
    return int(state[8:12].view(torch.int32))


def _draw(generator: torch.Generator, count: int) -> None:
    while count:
        piece = min(count, _PIECE)
        torch.randint(2, (piece,), dtype=torch.uint8, generator=generator)
        count -= piece
