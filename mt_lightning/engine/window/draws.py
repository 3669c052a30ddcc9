"""How far a step moves the generators of random numbers, so that the next can start before it ends.

[Note: dropout masks as in the usual order]
In the usual order a micro-batch draws where the one before it has left off. Unit by unit they draw
in turns, so each has a stream of its own. It begins where the micro-batch before will have ended,
if that draws as many numbers as one did when last seen. Whether it did is known at the end.

[Note: generators of a device]
They make numbers from a seed and a count (Philox), which are all of their state. So the count of a
later one is a sum, and to get there costs nothing.
"""

from __future__ import annotations

import torch

from mt_lightning.engine.on_device import give_rng, take_rng

Generators = tuple[torch.Tensor, torch.Tensor | None]
"""The states of the host's generator and of the device's, None where the host computes."""
Draws = tuple[int, int]
"""How many numbers were drawn on the host and on the device."""
NOTHING: Draws = (0, 0)

_BLOCK = 624
"""The Mersenne Twister makes its numbers in blocks of this length."""
_MOST_BLOCKS = 1 << 18
_PIECE = 1 << 20
_PHILOX_BYTES = 16
_WORD = 1 << 64


def take_generators(device: torch.device) -> Generators:
    """Return the states that a step on `device` draws from."""
    return torch.get_rng_state(), take_rng(device)


def give_generators(device: torch.device, state: Generators) -> None:
    """Set the generators to what `take_generators` returned."""
    torch.set_rng_state(state[0])
    give_rng(device, state[1])


def same_generators(a: Generators, b: Generators) -> bool:
    """Return whether two states would give the same numbers."""
    return torch.equal(a[0], b[0]) and _same(a[1], b[1])


def count_draws(before: Generators, after: Generators) -> Draws | None:
    """Return how many numbers lie between two states, None where nobody can say."""
    on_host = _count_on_host(before[0], after[0])
    on_device = _count_on_device(before[1], after[1])
    return None if on_host is None or on_device is None else (on_host, on_device)


def advance(state: Generators, draws: Draws | None) -> Generators:
    """Return the state that many numbers later; with None, one that has nothing to do with it."""
    if draws == NOTHING:
        return state
    on_host, on_device = (None, None) if draws is None else draws
    host = _advance_on_host(state[0], on_host)
    return host, None if state[1] is None else _advance_on_device(state[1], on_device)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _count_on_host(before: torch.Tensor, after: torch.Tensor) -> int | None:
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


def _advance_on_host(state: torch.Tensor, count: int | None) -> torch.Tensor:
    if count == 0:
        return state
    generator = torch.Generator()
    generator.set_state(state)
    if count is None:
        return generator.manual_seed(_other_seed(generator)).get_state()
    _draw(generator, count)
    return generator.get_state()


def _count_on_device(before: torch.Tensor | None, after: torch.Tensor | None) -> int | None:
    if _same(before, after):
        return 0
    if before is None or after is None or {before.numel(), after.numel()} != {_PHILOX_BYTES}:
        return None
    (seed, start), (seed_after, end) = before.view(torch.int64), after.view(torch.int64)
    return int(end - start) % _WORD if seed == seed_after else None


def _advance_on_device(state: torch.Tensor, count: int | None) -> torch.Tensor:
    if count == 0:
        return state
    assert state.numel() == _PHILOX_BYTES, "draws are counted for such generators alone"
    seed, offset = state.view(torch.int64).tolist()
    if count is None:
        generator = torch.Generator().manual_seed((seed ^ offset * 0x9E3779B9) % (_WORD >> 1))
        seed, offset = _other_seed(generator), 0
    else:
        offset += count
    return torch.tensor([seed, offset], dtype=torch.int64).view(torch.uint8)


def _other_seed(generator: torch.Generator) -> int:
    return int(torch.randint(1 << 62, (), generator=generator))


def _left(state: torch.Tensor) -> int:
    return int(state[8:12].view(torch.int32))


def _draw(generator: torch.Generator, count: int) -> None:
    while count:
        piece = min(count, _PIECE)
        torch.randint(2, (piece,), dtype=torch.uint8, generator=generator)
        count -= piece
