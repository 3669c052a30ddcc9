from __future__ import annotations

import psutil
import pytest
import torch

from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.tiers.address import HUGE_PAGE_BYTES
from mt_lightning.tiers.arena import Arena, Frame

MIB = 1 << 20


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 2 * MIB, 3 * MIB + 1])
def test_frame_is_rounded_and_aligned(nbytes: int) -> None:
    frame = Frame(nbytes)
    assert frame.nbytes == -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    assert frame.tensor.shape == (frame.nbytes,)
    assert frame.memory.nbytes == frame.nbytes
    alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else ALIGN_BYTES
    assert frame.tensor.data_ptr() % alignment == 0


def test_tensor_and_memory_are_the_same_bytes() -> None:
    frame = Frame(4096)
    frame.tensor.fill_(7)
    assert set(frame.memory) == {7}
    frame.memory[5] = 9
    assert frame.tensor[5] == 9


def test_trim_returns_memory_to_the_kernel() -> None:
    arena = Arena()
    before = anonymous_bytes()
    frames = [arena.alloc(32 * MIB) for _ in range(2)]
    for frame in frames:
        frame.tensor.fill_(1)
    assert anonymous_bytes() - before > 60 * MIB
    for frame in frames:
        arena.free(frame)
    assert arena.held_bytes == 64 * MIB
    del frame, frames
    assert arena.trim(1) == 32 * MIB
    assert arena.held_bytes == 32 * MIB
    assert arena.trim() == 32 * MIB
    assert arena.held_bytes == 0
    assert anonymous_bytes() - before < 4 * MIB


def test_memory_does_not_exceed_the_frame() -> None:
    before = anonymous_bytes()
    frame = Frame(3 * MIB)
    frame.tensor.fill_(1)
    assert anonymous_bytes() - before < 3.5 * MIB


def test_frames_of_equal_rounded_size_are_reused() -> None:
    arena = Arena()
    frame = arena.alloc(5000)
    arena.free(frame)
    assert arena.alloc(8192) is frame
    assert arena.alloc(4096) is not frame
    assert arena.held_bytes == 3 * 4096


def test_frame_of_another_arena_is_refused() -> None:
    with pytest.raises(AssertionError, match="not from this arena"):
        Arena().free(Arena().alloc(1))


def test_close_forgets_frames_that_are_still_out() -> None:
    arena = Arena()
    out = arena.alloc(4096)
    arena.free(arena.alloc(8192))
    arena.close()
    assert arena.held_bytes == 0
    out.tensor.fill_(1)


def test_in_use_sees_every_kind_of_view() -> None:
    frame = Frame(4096)
    assert not frame.in_use()
    view = frame.tensor[:64].view(torch.float32)
    assert frame.in_use()
    del view
    assert not frame.in_use()
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.data = frame.tensor[:64].view(torch.float32)
    assert frame.in_use()
    parameter.data = torch.empty(0)
    assert not frame.in_use()
    array = frame.tensor[:64].numpy()
    assert frame.in_use()
    del array
    assert not frame.in_use()


def test_in_use_sees_what_autograd_saved() -> None:
    frame = Frame(4096)
    frame.tensor.zero_()
    weight = frame.tensor.view(torch.float32).view(32, 32)
    x = torch.ones(1, 32, requires_grad=True)
    loss = torch.nn.functional.linear(x, weight).sum()
    del weight
    assert frame.in_use()
    with pytest.raises(AssertionError, match="while a view lives"):
        arena_with(frame).free(frame)
    loss.backward()
    del loss
    assert not frame.in_use()


def arena_with(frame: Frame) -> Arena:
    arena = Arena()
    arena._live[id(frame)] = frame
    return arena


def test_reading_the_use_count_does_not_change_it() -> None:
    frame = Frame(4096)
    for _ in range(10):
        frame.tensor.untyped_storage()
        assert not frame.in_use()


def test_trim_leaves_memory_to_a_holder_that_the_use_count_cannot_see() -> None:
    arena = Arena()
    frame = arena.alloc(4096)
    hidden = frame.memory[:10]
    arena.free(frame)
    del frame
    assert arena.trim() == 4096
    assert arena.held_bytes == 0
    hidden[0] = 1  # alive: the memory is not pulled away under it


def test_frames_are_not_copied_to_forked_children() -> None:
    frame = Frame(4 * MIB)
    start = f"{frame.tensor.data_ptr():x}-"
    maps = psutil.Process().memory_maps(grouped=False)
    assert any(entry.addr.startswith(start) for entry in maps)
    with open("/proc/self/smaps") as smaps:
        lines = smaps.read().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    flags = next(line for line in lines[first:] if line.startswith("VmFlags"))
    assert "dc" in flags.split()
