"""Step, encode and decode packed state: the one entry for optimizers and for the engine.

[Note: pieces]
All three work on any stretch of a tensor that begins at a multiple of 128 elements (format C5: of
`grain_numel`) and ends at one or at the tensor's end. Stretches may come in any order and from any
thread, and are cut further for the threads here; the bytes are the same.
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import torch

from mt_lightning.errors import ConfigError
from mt_lightning.optim.packed import byte_kernels, kernels, reference
from mt_lightning.optim.packed.panel_update import encode_panels, on_panels
from mt_lightning.optim.packed.panels import PanelFormat
from mt_lightning.optim.packed.place import BLOCK_NUMEL, Place
from mt_lightning.optim.packed.records import FP32, Format
from mt_lightning.optim.packed.scalars import AdamScalars
from mt_lightning.optim.packed.threads import in_pieces

_logger = logging.getLogger(__name__)

_PIECE_NUMEL = 1 << 18
"""Elements that one thread takes at a time; less than two pieces run in the caller's thread."""


def adamw_step(
    format: Format,
    param: torch.Tensor,
    grad: torch.Tensor,
    records: torch.Tensor,
    scalars: AdamScalars,
    *,
    key: int,
    first: int = 0,
    width: int = 0,
    threads: int | None = None,
) -> None:
    """Take one step of AdamW or Adam on a stretch of a tensor.

    Args:
        format: How the state is kept.
        param: float32 [n], contiguous, on the CPU; updated.
        grad: float32 [n], contiguous, on the CPU.
        records: uint8, the `format.state_bytes` of its state first; updated. A block whose new
            state is not finite keeps its record.
        scalars: Constants of this step.
        key: `random.key` of seed, step and tensor.
        first: Index in the tensor of `param[0]`, a multiple of 128 (C5: of the grain).
        width: Columns of the tensor, `Place.width`; only C5 needs it.
        threads: How many threads to use, `torch.get_num_threads()` by default.
    """
    numel, size = param.numel(), format.record_bytes
    data = _data(format, records, Place(numel, width))
    p, g, constants = _values(param, numel), _values(grad, numel), scalars.constants
    assert first % BLOCK_NUMEL == 0, first
    if format.exact:
        if not fuses_like_torch():
            reference.step(format, param.detach(), grad.detach(), records, scalars, key=key)
            return
        moments = data.view(np.float32)
        in_pieces(
            _split(numel)[0],
            _PIECE_NUMEL,
            threads,
            lambda a, b: kernels.step_fp32(p[a:b], g[a:b], moments[2 * a : 2 * b], constants),
        )
        _finish_fp32(param, grad, moments, scalars)
        return
    if isinstance(format, PanelFormat):
        on_panels(
            format,
            data,
            Place(numel, width),
            first,
            threads,
            lambda panel, a, b: panel.step(p[a:b], g[a:b], scalars),
        )
        return
    numbers, kappa = _numbers(format)
    signed = _signed(key)

    def run(p: np.ndarray, g: np.ndarray, begin: int, num_valid: int) -> None:
        stored = _stretch(data, size, begin, begin + len(p))
        at = first + begin
        if format.is_byte_wide:
            byte_kernels.step_bytes(p, g, stored, constants, kappa, signed, at, num_valid)
            return
        kernels.step_packed(p, g, stored, size, constants, numbers, kappa, signed, at, num_valid)

    in_pieces(_split(numel)[0], _PIECE_NUMEL, threads, lambda a, b: run(p[a:b], g[a:b], a, b - a))
    whole, rest = _split(numel)
    if rest:
        block = _padded(p[whole:])
        run(block, _padded(g[whole:]), whole, rest)
        p[whole:] = block[:rest]


def decode(
    format: Format,
    records: torch.Tensor,
    numel: int,
    *,
    first: int = 0,
    width: int = 0,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what records hold.

    Args:
        format: How the state is kept.
        records: uint8, the `format.state_bytes` of the state first.
        numel: Elements of the stretch.
        first: Index in the tensor of the first element, a multiple of 128 (C5: of the grain).
        width: Columns of the tensor, `Place.width`; only C5 needs it.
        threads: How many threads to use, `torch.get_num_threads()` by default.

    Returns:
        exp_avg and exp_avg_sq, float32 [numel].
    """
    data = _data(format, records, Place(numel, width))
    if format.exact:
        return reference.decode(format, records, numel)
    if isinstance(format, PanelFormat):
        values = torch.empty(2, numel)
        m, v = values.numpy()
        on_panels(
            format,
            data,
            Place(numel, width),
            first,
            threads,
            lambda panel, a, b: panel.decode(m[a:b], v[a:b]),
        )
        return values[0], values[1]
    padded, size = Place(numel, width).num_blocks * BLOCK_NUMEL, format.record_bytes
    exp_avg, exp_avg_sq = torch.empty(padded), torch.empty(padded)
    m, v = exp_avg.numpy(), exp_avg_sq.numpy()
    numbers, _ = _numbers(format)

    def run(a: int, b: int) -> None:
        stored = _stretch(data, size, a, b)
        if format.is_byte_wide:
            byte_kernels.decode_bytes(stored, m[a:b], v[a:b])
        else:
            kernels.decode_packed(stored, size, numbers, m[a:b], v[a:b])

    in_pieces(padded, _PIECE_NUMEL, threads, run)
    return exp_avg[:numel], exp_avg_sq[:numel]


def encode(
    format: Format,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    records: torch.Tensor,
    *,
    key: int = 0,
    first: int = 0,
    width: int = 0,
    vectors: torch.Tensor | None = None,
    threads: int | None = None,
) -> None:
    """Write records; for what `decode` returned, the very bytes that it came from.

    For C5 this holds where `vectors` are given. Else they are fitted to `exp_avg_sq`, and are not
    those that decoded values were made with. Then v decodes to the same values up to 2^-15 of them
    where rows are as long as blocks, or a multiple or half of them and so on, and up to some
    hundredths elsewhere; m is rounded again, by half a code at most.

    Args:
        format: How the state is kept.
        exp_avg: float32 [n], contiguous, on the CPU.
        exp_avg_sq: float32 [n], contiguous, on the CPU.
        records: uint8, `format.state_bytes` at least; the first of them are written.
        key: `random.key` of seed, step and tensor.
        first: Index in the tensor of the first element, a multiple of 128 (C5: of the grain).
        width: Columns of the tensor, `Place.width`; only C5 needs it.
        vectors: Packed state of the same stretch, whose vectors C5 takes.
        threads: How many threads to use, `torch.get_num_threads()` by default.

    Raises:
        ConfigError: A packed format was given NaN, infinity or a negative second moment. The
            records of other blocks have been written.
    """
    numel, size = exp_avg.numel(), format.record_bytes
    place = Place(numel, width)
    data = _data(format, records, place)
    if format.exact:
        reference.encode(format, exp_avg, exp_avg_sq, records)
        return
    m, v = _values(exp_avg, numel), _values(exp_avg_sq, numel)
    unfit: list[int] = []
    if isinstance(format, PanelFormat):
        given = None if vectors is None else _data(format, vectors, place)
        unfit += encode_panels(format, m, v, data, place, first, given, threads)
    else:
        numbers, _ = _numbers(format)
        signed = _signed(key)

        def run(m: np.ndarray, v: np.ndarray, begin: int) -> None:
            stored, at = _stretch(data, size, begin, begin + len(m)), first + begin
            if format.is_byte_wide:
                unfit.append(byte_kernels.encode_bytes(m, v, stored, signed, at))
            else:
                unfit.append(kernels.encode_packed(m, v, stored, size, numbers, signed, at))

        whole, rest = _split(numel)
        in_pieces(whole, _PIECE_NUMEL, threads, lambda a, b: run(m[a:b], v[a:b], a))
        if rest:
            run(_padded(m[whole:]), _padded(v[whole:]), whole)
    if sum(unfit):
        raise ConfigError(
            f"{sum(unfit)} of {place.num_blocks} blocks of Adam state hold NaN, "
            f"infinity or a negative second moment, which format {format.name!r} has no code for. "
            "Take the state from before the loss diverged, or use format='fp32'."
        )


@cache
def fuses_like_torch() -> bool:
    """Return whether the fp32 kernel agrees bit for bit with torch's on this processor."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 4, (4, 1024), generator=generator)
    param, grad, exp_avg, exp_avg_sq = torch.randn(4, 1024, generator=generator) * 2.0**exponents
    records = torch.zeros(FP32.state_bytes(Place(1024, 0)), dtype=torch.uint8)
    reference.encode(FP32, exp_avg, exp_avg_sq.square(), records)
    expected, expected_records = param.clone(), records.clone()
    for decoupled in (True, False):
        scalars = AdamScalars(
            lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=7, decoupled=decoupled
        )
        reference.step(FP32, expected, grad, expected_records, scalars, key=0)
        moments = records.numpy().view(np.float32)
        kernels.step_fp32(param.numpy(), grad.numpy(), moments, scalars.constants)
    same = torch.equal(param, expected) and torch.equal(records, expected_records)
    if not same:
        _logger.info("Format 'fp32' is stepped by torch's own kernel, which rounds differently.")
    return same


def _finish_fp32(
    param: torch.Tensor, grad: torch.Tensor, moments: np.ndarray, scalars: AdamScalars
) -> None:
    whole, rest = _split(param.numel())
    if rest:
        block = torch.from_numpy(moments[2 * whole : 2 * (whole + BLOCK_NUMEL)])
        exp_avg, exp_avg_sq = block[:rest], block[BLOCK_NUMEL : BLOCK_NUMEL + rest]
        reference.fused_step(
            param.detach()[whole:], grad.detach()[whole:], exp_avg, exp_avg_sq, scalars
        )


def _values(tensor: torch.Tensor, numel: int) -> np.ndarray:
    assert tensor.dtype == torch.float32, tensor.dtype
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.shape == (numel,), (tensor.shape, numel)
    return tensor.detach().numpy()


def _data(format: Format, records: torch.Tensor, place: Place) -> np.ndarray:
    flat, nbytes = records.view(-1), format.state_bytes(place)
    assert flat.dtype == torch.uint8, flat.dtype
    assert flat.numel() >= nbytes, (flat.numel(), format, place)
    return flat[:nbytes].numpy()


def _stretch(data: np.ndarray, size: int, a: int, b: int) -> np.ndarray:
    """Return the records of elements a to b."""
    return data[a // BLOCK_NUMEL * size : b // BLOCK_NUMEL * size]


def _split(numel: int) -> tuple[int, int]:
    """Return how many elements are in whole blocks, and how many in the last one if it is not."""
    rest = numel % BLOCK_NUMEL
    return numel - rest, rest


def _padded(values: np.ndarray) -> np.ndarray:
    block = np.zeros(BLOCK_NUMEL, np.float32)
    block[: len(values)] = values
    return block


@cache
def _numbers(format: Format) -> tuple[np.ndarray, np.float32]:
    """Return what kernels must know of a format: int32 numbers, and kappa^2 - 1."""
    numbers = [format.code, format.level_shift, format.lowest_bits, format.num_levels - 1]
    return np.array(numbers, np.int32), np.float32(format.kappa**2 - 1)


def _signed(key: int) -> np.int32:
    return np.uint32(key).view(np.int32)
