"""Formats keep the bytes they promise, and each tensor gets the one that is documented."""

from __future__ import annotations

import pytest
import torch

from mt_lightning.errors import ConfigError
from mt_lightning.optim.packed.formats import FORMATS, choose
from mt_lightning.optim.packed.place import BLOCK_NUMEL, Place
from mt_lightning.optim.packed.records import M8V8, R0, R1, R2
from tests.optim.packed_cases import (
    ALL,
    RECORDS,
    STOCHASTIC,
    WIDTH,
    adamw_step,
    by_name,
    decode,
    encode,
    fresh,
    scalars,
)

RECORD_BYTES = {"fp32": 1024, "m8v8": 262, "C5": 85, "m4v4": 132, "R2": 116, "R1": 111, "R0": 100}
BITS = {
    "fp32": 32,
    "m8v8": 8.188,
    "C5": 2.656,
    "m4v4": 4.125,
    "R2": 3.625,
    "R1": 3.469,
    "R0": 3.125,
}


def whole(shape: tuple[int, ...]) -> Place:
    return Place.of(shape, torch.empty(shape, device="meta").stride())


def test_records_have_the_promised_lengths() -> None:
    assert {name: format.record_bytes for name, format in FORMATS.items()} == RECORD_BYTES
    assert {name: round(format.bits_per_value, 3) for name, format in FORMATS.items()} == BITS


def test_codes_are_distinct() -> None:
    assert len({format.code for format in ALL}) == len(ALL)


@pytest.mark.parametrize("format", RECORDS, ids=by_name)
@pytest.mark.parametrize(("numel", "blocks"), [(0, 0), (1, 1), (128, 1), (129, 2), (4096, 32)])
def test_state_takes_whole_records(format, numel: int, blocks: int) -> None:
    place = Place(numel, WIDTH)
    assert place.num_blocks == blocks
    assert format.state_bytes(place) == blocks * RECORD_BYTES[format.name]


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((), "fp32"),
        ((1_000_000,), "fp32"),
        ((64, 63), "fp32"),
        ((0, 5), "fp32"),
        ((64, 64), "m8v8"),
        ((511, 512), "m8v8"),
        ((4, 65535), "m8v8"),
        ((63, 4096), "m8v8"),
        ((64, 64, 3, 3), "m8v8"),
        ((512, 512), "C5"),
        ((64, 4096), "C5"),
        ((1029, 255), "R1"),
        ((63, 8192), "R1"),
        ((64, 32768), "C5"),
        ((64, 32769), "R1"),
        ((2048, 16, 3, 3), "R1"),
        ((256, 128, 3, 3), "C5"),
        ((8, 128, 256), "C5"),
        ((1024, 256, 1), "C5"),
    ],
)
def test_dynamic_spends_few_bits_on_large_matrices_only(shape: tuple[int, ...], name: str) -> None:
    assert choose("dynamic", whole(shape)).name == name


@pytest.mark.parametrize("name", FORMATS)
def test_a_name_holds_for_every_tensor(name: str) -> None:
    assert choose(name, whole((3,))) is FORMATS[name] is choose(name, whole((512, 512)))


def test_an_unknown_format_is_refused_with_the_list_of_names() -> None:
    with pytest.raises(ConfigError, match="'R9'.*dynamic, fp32, m8v8, C5, m4v4, R2, R1, R0"):
        choose("R9", whole((4,)))


# --- records by hand, written from the documentation and not from the code ------------------------

M_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_m_codes_lie_in_nibbles_a_half_block_apart() -> None:
    record = fresh(R1, 128)
    record[:64] = torch.arange(64, dtype=torch.uint8) * 37
    record[-4:-2] = torch.tensor([2.0]).to(torch.bfloat16).view(torch.uint8)
    values, _ = decode(R1, record, 128)
    for j in range(64):
        byte = j * 37 % 256
        for position, code in ((j, byte & 15), (j + 64, byte >> 4)):
            value = 2.0 * M_VALUES[code & 7] * (-1 if code & 8 else 1)
            assert values[position].item() == value


def test_v_codes_of_r1_are_digits_of_base_six() -> None:
    record = fresh(R1, 128)
    digits = [[(j * 5 + part) % 6 for j in range(43)] for part in range(3)]
    digits[2][42] = 0
    record[64:107] = torch.tensor(
        [digits[0][j] + 6 * digits[1][j] + 36 * digits[2][j] for j in range(43)]
    )
    record[-2:] = torch.tensor([3.0]).to(torch.bfloat16).view(torch.uint8)
    _, values = decode(R1, record, 128)
    expected = [3.0 * 2.0 ** (k - 5) for k in sum(digits, [])[:128]]
    assert values.tolist() == expected


@pytest.mark.parametrize(("format", "base"), [(R2, 2), (R0, 4)], ids=["R2", "R0"])
def test_v_codes_of_r2_and_r0_are_bits_in_planes(format, base: int) -> None:
    record = fresh(format, 128)
    record[64:-4] = torch.arange(format.v_bytes, dtype=torch.uint8) * 29 + 11
    record[-2:] = torch.tensor([1.0]).to(torch.bfloat16).view(torch.uint8)
    _, values = decode(format, record, 128)
    top = format.num_levels - 1
    for position in range(128):
        code = int(record[64 + position % 32]) >> 2 * (position // 32) & 3
        if format is R2:
            code |= (int(record[96 + position % 16]) >> (position // 16) & 1) << 2
        assert values[position].item() == float(base) ** (code - top)


def test_codes_of_m8v8_are_bytes_eight_and_sixteen_to_an_octave() -> None:
    record = fresh(M8V8, 256)
    codes = torch.arange(256, dtype=torch.uint8)
    rows = record.view(2, 262)
    rows[:, :128] = codes.view(2, 128)
    rows[:, 128:256] = codes.view(2, 128)
    rows[:, 256:258] = torch.tensor([2.0]).to(torch.bfloat16).view(torch.uint8)
    rows[:, 258:] = torch.tensor([0.1]).view(torch.uint8)
    m, v = decode(M8V8, record, 256)
    for code in range(256):
        magnitude, from_top = code & 127, 255 - code
        expected = 0.0
        if magnitude:
            octave, part = divmod(magnitude + 1, 8)
            expected = 2.0 * (1 + part / 8) * 2.0 ** (octave - 16)
        assert m[code].item() == (-expected if code & 128 else expected)
        octave, part = divmod(-from_top, 16)
        level = torch.tensor((1 + part / 16) * 2.0**octave)
        assert v[code].item() == level * torch.tensor(0.1)


def test_m_of_m8v8_is_rounded_to_the_nearest_level_or_to_zero() -> None:
    lowest = 1.25 * 2.0**-16
    values = torch.zeros(128)
    values[:8] = torch.tensor(
        [1.0, 0.97, -0.968, 0.51, 0.54, lowest, -lowest * 0.96, -lowest * 0.94]
    )
    record = fresh(M8V8, 128)
    encode(M8V8, values, torch.zeros(128), record)
    m, _ = decode(M8V8, record, 128)
    assert m[:8].tolist() == [1.0, 1.0, -0.9375, 0.5, 0.5625, lowest, -lowest, 0.0]
    assert not m[7:].signbit().any()


def test_a_lone_large_v_of_m8v8_is_not_worn_down_by_its_scale() -> None:
    param, record = torch.zeros(128), fresh(M8V8, 128)
    grad = torch.full((128,), 0.1)
    grad[0] = 1.0
    for step in range(1, 501):
        adamw_step(M8V8, param, grad, record, scalars(step, beta2=0.999), key=step)
    _, v = decode(M8V8, record, 128)
    expected = torch.tensor([1.0, 1e-2]) * (1 - 0.999**500)
    assert torch.allclose(v[:1], expected[:1], rtol=1e-4)
    assert torch.allclose(v[1:].mean(), expected[1], rtol=0.05)


@pytest.mark.parametrize("format", STOCHASTIC, ids=by_name)
def test_the_largest_values_keep_their_scale_to_eight_bits(format) -> None:
    exp_avg, exp_avg_sq = torch.zeros(BLOCK_NUMEL), torch.zeros(BLOCK_NUMEL)
    exp_avg[5], exp_avg_sq[9] = -0.7, 0.3
    record = fresh(format, 128)
    encode(format, exp_avg, exp_avg_sq, record)
    m, v = decode(format, record, 128)
    assert -0.7 <= m[5].item() <= -0.7 * (1 - 2**-7)
    assert 0.3 * (1 - 2**-7) <= v[9].item() <= 0.3 + 1e-7
    assert m.count_nonzero() == 1


@pytest.mark.parametrize("format", ALL, ids=by_name)
def test_a_record_of_zero_bytes_is_a_fresh_state(format) -> None:
    m, v = decode(format, fresh(format, 300), 300)
    assert m.shape == v.shape == (300,)
    assert not m.any()
    assert not v.any()


@pytest.mark.parametrize(
    ("shape", "stride", "width"),
    [
        ((), (), 1),
        ((7,), (1,), 7),
        ((0, 5), (5, 1), 1),
        ((3, 0), (1, 1), 1),
        ((300, 70), (70, 1), 70),
        ((300, 70), (1, 300), 300),
        ((300, 1), (1, 1), 300),
        ((64, 32, 3, 3), (288, 9, 3, 1), 288),
        ((64, 32, 3, 3), (288, 1, 96, 32), 32),
        ((64, 8, 3, 3), (72, 1, 24, 8), 24),
        ((64, 1, 3, 3), (9, 9, 3, 1), 576),
        ((8, 64, 100), (6400, 100, 1), 100),
        ((8, 64, 1, 100), (6400, 100, 100, 1), 100),
        ((5, 3), (3, 1), 15),
    ],
)
def test_the_width_is_that_of_the_memory(shape, stride, width: int) -> None:
    place = Place.of(shape, stride)
    assert place.width == width
    assert place.numel == torch.Size(shape).numel()
    assert place.dims == len(shape)
    assert place.rows == -(-place.numel // width)


@pytest.mark.parametrize("format", ALL, ids=by_name)
@pytest.mark.parametrize("width", [1, 50, 4096, 20_000])
def test_state_is_cut_at_multiples_of_the_grain(format, width: int) -> None:
    place = Place(1, width)
    grain, size = format.grain_numel(place), format.grain_bytes(place)
    assert size % 4096 == 0
    for numel in (1, 129, grain):
        whole = format.state_bytes(Place(3 * grain + numel, width))
        assert whole == 3 * size + format.state_bytes(Place(numel, width))
