"""Lossless coding restores every bit of any bytes, in bounded space, the same way every time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_lightning.optim.lossless import CHUNK_BYTES, decode, encode, max_encoded
from mt_lightning.optim.lossless import stream as stream_module

CANARY = 0xA5
GUARD_BYTES = 64


def tensor(data: bytes | np.ndarray, shift: int = 0) -> torch.Tensor:
    """Copy `data` to an address that is `shift` above a multiple of 64."""
    flat = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.view(np.uint8)
    memory = torch.empty(flat.size + shift, dtype=torch.uint8)
    memory[shift:] = torch.from_numpy(flat.reshape(-1).copy())
    return memory[shift:]


def stream_of(raw: torch.Tensor, shift: int = 0, filler: int = CANARY) -> torch.Tensor:
    """Code `raw`; check that nothing beside the room given is written."""
    room = max_encoded(raw.numel())
    memory = torch.full((shift + room + GUARD_BYTES,), filler, dtype=torch.uint8)
    used = encode(raw, memory[shift : shift + room])
    assert used <= room
    assert (memory[:shift] == filler).all()
    assert (memory[shift + room :] == filler).all()
    return memory[shift : shift + used]


def restored(stream: torch.Tensor, nbytes: int, shift: int = 0) -> torch.Tensor:
    """Decode `stream`; check that nothing beside the room given is written."""
    memory = torch.full((shift + nbytes + GUARD_BYTES,), CANARY, dtype=torch.uint8)
    decode(stream, memory[shift : shift + nbytes])
    assert (memory[:shift] == CANARY).all()
    assert (memory[shift + nbytes :] == CANARY).all()
    return memory[shift : shift + nbytes]


def check(raw: torch.Tensor, shift: int = 0) -> int:
    """Check that coding restores `raw`; return the bytes it took."""
    stream = stream_of(raw, shift)
    assert torch.equal(restored(stream, raw.numel(), shift), raw)
    return stream.numel()


SPECIAL = np.array(
    [0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
    + [0x7F800001, 0x7FC00000, 0xFFC12345, 0xFFFFFFFF],
    np.uint32,
)
"""Zeros, smallest and largest denormals and normals, infinities, NaNs with payloads."""


@st.composite
def blocks(draw: st.DrawFn) -> np.ndarray:
    """Draw 128 bit patterns: near each other, spread to any degree, spiked, thinned out."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base, spread = draw(st.integers(0, 255)), draw(st.sampled_from([1, 2, 7, 8, 20, 40, 256]))
    exponents = (base + rng.integers(0, spread, 128)).clip(0, 255)
    words = exponents << 23 | rng.integers(0, 1 << 23, 128)
    words |= rng.integers(0, draw(st.integers(1, 2)), 128) << 31
    words = words.astype(np.uint32)
    for share, values in draw(
        st.lists(
            st.tuples(st.sampled_from([0.02, 0.2, 0.5, 0.9, 1.0]), st.sampled_from("z*")),
            max_size=2,
        )
    ):
        chosen = rng.random(128) < share
        words[chosen] = 0 if values == "z" else rng.choice(SPECIAL, chosen.sum())
    return words


@given(st.binary(max_size=3000), st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_any_bytes_of_any_length_at_any_address_are_restored(data, shift):
    check(tensor(data, shift), shift)


@given(st.lists(blocks(), max_size=12), st.integers(0, 513), st.integers(0, 3))
@settings(max_examples=120, deadline=None)
def test_any_float_patterns_are_restored(words, cut, shift):
    data = np.concatenate([*words, np.zeros(0, np.uint32)]).view(np.uint8)
    check(tensor(data[: max(data.size - cut, 0)], shift), shift)


@pytest.mark.parametrize("spare", [-513, -512, -3, 0, 1, 511, 512, 515])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_lengths_around_a_chunk_are_restored(num_chunks, spare):
    size = num_chunks * CHUNK_BYTES + spare
    values = torch.randn(size // 4 + 1, generator=torch.Generator().manual_seed(0))
    assert check(values.view(torch.uint8)[:size]) < 0.9 * size


def test_every_exponent_is_restored_in_every_place_of_a_block():
    exponents = (np.arange(256)[:, None] + 7 * np.arange(128)) % 256
    signs = np.arange(128) % 2
    for words in (exponents << 23, exponents << 23 | signs << 31 | 0x2AAAAA):
        check(tensor(words.astype(np.uint32)))
    for spike in range(256):
        words = np.full(128, 100 << 23 | 0x123456, np.uint32)
        words[spike % 128] = spike << 23 | 0x654321
        assert check(tensor(words)) < 512


def test_what_cannot_shrink_takes_the_bytes_promised_and_no_more():
    for nbytes in (0, 1, 511, 512, 513, 4096, CHUNK_BYTES, 2 * CHUNK_BYTES + 5):
        noise = np.random.default_rng(nbytes).integers(0, 256, nbytes).astype(np.uint8)
        assert check(tensor(noise)) <= max_encoded(nbytes)
    assert check(tensor(noise)) == max_encoded(noise.size)


def test_zeros_take_nothing_but_the_index():
    for nbytes in (1, 512, 1000, CHUNK_BYTES, 8 * CHUNK_BYTES + 4):
        assert check(tensor(np.zeros(nbytes, np.uint8))) == max_encoded(nbytes) - nbytes


def test_untouched_rows_are_nearly_free():
    rows = torch.zeros(1000, 256)
    touched = torch.arange(0, 1000, 20)
    rows[touched] = torch.randn(50, 256, generator=torch.Generator().manual_seed(0)).abs()
    assert check(rows.flatten().view(torch.uint8)) < 0.055 * rows.nbytes


def test_scattered_zeros_are_not_stored():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1 << 16, generator=generator)
    values[torch.rand(1 << 16, generator=generator) < 0.75] = 0
    assert check(values.view(torch.uint8)) < 0.29 * values.nbytes


def adam_state(num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Adam's moments on gradients whose scale differs by row, column and step."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(256, 1, generator=generator) + torch.randn(1, 512, generator=generator)
    exp_avg, exp_avg_sq = torch.zeros(256, 512), torch.zeros(256, 512)
    for _ in range(num_steps):
        grad = torch.randn(256, 512, generator=generator) * scale.mul(0.5).exp() * 1e-3
        exp_avg.lerp_(grad, 0.1)
        exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
    return exp_avg, exp_avg_sq


def test_adam_state_shrinks_to_the_bits_documented():
    exp_avg, exp_avg_sq = adam_state(50)
    first = check(exp_avg.flatten().view(torch.uint8)) * 32 / exp_avg.nbytes
    second = check(exp_avg_sq.flatten().view(torch.uint8)) * 32 / exp_avg_sq.nbytes
    assert first < 27.5
    assert second < 26.3


def test_the_stream_depends_on_the_bytes_alone():
    raw = torch.cat([moment.flatten() for moment in adam_state(3)]).repeat(3).view(torch.uint8)
    raw = torch.cat([torch.zeros(700, dtype=torch.uint8), raw, raw[:1003]])
    expected = stream_of(raw)
    for shift, filler in ((1, 0), (2, 255), (3, 7)):
        assert torch.equal(stream_of(tensor(raw.numpy(), shift), shift, filler), expected)
    with ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda _: stream_of(raw), range(12)))
        assert all(torch.equal(stream, expected) for stream in streams)
        copies = pool.map(lambda _: restored(expected, raw.numel()), range(12))
        assert all(torch.equal(copy, raw) for copy in copies)


def test_coding_again_what_was_restored_changes_nothing():
    raw = adam_state(3)[0].flatten().view(torch.uint8)
    stream = stream_of(raw)
    assert torch.equal(stream_of(restored(stream, raw.numel())), stream)


def test_bytes_behind_a_stream_do_not_matter():
    raw = adam_state(1)[1].flatten().view(torch.uint8)
    padded = torch.cat([stream_of(raw), torch.full((4096,), 255, dtype=torch.uint8)])
    assert torch.equal(restored(padded, raw.numel()), raw)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(64),
        torch.zeros(8, 8, dtype=torch.uint8),
        torch.zeros(64, dtype=torch.uint8)[::2],
        torch.zeros(64, dtype=torch.uint8, device="meta"),
    ],
    ids=["float32", "2-D", "strided", "meta"],
)
def test_other_tensors_are_refused_by_name(wrong):
    right = torch.zeros(1024, dtype=torch.uint8)
    for call in (encode, decode):
        with pytest.raises(ValueError, match="contiguous 1-D tensors of uint8 in RAM"):
            call(wrong, right)
        with pytest.raises(ValueError, match="contiguous 1-D tensors of uint8 in RAM"):
            call(right, wrong)


def test_too_little_room_is_refused_with_the_bytes_needed():
    raw = torch.zeros(1024, dtype=torch.uint8)
    needed = max_encoded(1024)
    with pytest.raises(ValueError, match=f"may take {needed} and has {needed - 1}"):
        encode(raw, torch.empty(needed - 1, dtype=torch.uint8))


def test_kernels_are_given_aligned_memory_only(monkeypatch):
    """They are compiled for it, and nothing would tell on a processor that does not care."""
    calls = []

    def watched(kernel):
        def call(*arrays):
            calls.append(all(array.flags.aligned for array in arrays))
            return kernel(*arrays)

        return call

    for name in ("encode_blocks", "decode_blocks"):
        monkeypatch.setattr(stream_module, name, watched(getattr(stream_module, name)))
    values = torch.randn(256, generator=torch.Generator().manual_seed(0))
    for shift in range(4):
        check(tensor(values.numpy(), shift), shift)
    assert len(calls) == 8
    assert all(calls)
