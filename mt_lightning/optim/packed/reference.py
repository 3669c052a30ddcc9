"""The slow reference: the same steps, codes and records in plain torch operations.

For `fp32` it is torch's own fused kernel. Kernels must agree with it bit for bit; where they do not
(a processor or a build of torch that contracts elsewhere), `fp32` is stepped here.
"""

from __future__ import annotations

from typing import Any

import torch

from mt_lightning.optim.packed import panel_reference
from mt_lightning.optim.packed.panels import PanelFormat
from mt_lightning.optim.packed.place import BLOCK_NUMEL, Place
from mt_lightning.optim.packed.records import M4V4, R0, R1, R2, Format
from mt_lightning.optim.packed.scalars import AdamScalars

_TINY = 2.0**-126
_MASK = 0xFFFFFFFF


def fused_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: AdamScalars,
) -> None:
    """Take torch's fused step on a stretch: whole blocks of a tensor, or its end."""
    # torch steps the last elements of a tensor in double; a stretch that ends where the tensor does
    # has the same last elements, since its start is a multiple of every vector's length.
    ops: Any = torch
    fused = ops._fused_adamw_ if scalars.decoupled else ops._fused_adam_
    fused(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(scalars.step))],
        lr=scalars.lr,
        beta1=scalars.beta1,
        beta2=scalars.beta2,
        weight_decay=scalars.weight_decay,
        eps=scalars.eps,
        amsgrad=False,
        maximize=scalars.maximize,
    )


def step(
    format: Format,
    param: torch.Tensor,
    grad: torch.Tensor,
    records: torch.Tensor,
    scalars: AdamScalars,
    *,
    key: int,
    first: int = 0,
    width: int = 0,
) -> None:
    """Take one step; see `update.adamw_step`."""
    if isinstance(format, PanelFormat):
        panel_reference.step(format, param, grad, records, scalars, first=first, width=width)
        return
    numel = param.numel()
    exp_avg, exp_avg_sq = decode(format, records, numel)
    if format.exact:
        fused_step(param, grad, exp_avg, exp_avg_sq, scalars)
        encode(format, exp_avg, exp_avg_sq, records)
        return
    decay, w1, b2, w2, rate, _, inverse_root_scale, eps, l2, sign = torch.tensor(scalars.constants)
    g = grad * sign
    if l2 != 0:
        g = g + param * l2
    old = _levels(format, records, numel, b2)
    exp_avg = exp_avg + w1 * (g - exp_avg)
    exp_avg_sq = old + (w2 * g) * g
    kappa = torch.tensor(format.kappa**2 - 1)
    # torch's own float32 root is not rounded correctly for every value.
    root = torch.sqrt((exp_avg_sq + kappa * old).double()).float() * inverse_root_scale
    param.copy_(param * decay + (rate * exp_avg) / (root + eps))
    _write(format, _blocks(exp_avg), _blocks(exp_avg_sq), records, key, first)


def decode(
    format: Format, records: torch.Tensor, numel: int, *, first: int = 0, width: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return m and v; see `update.decode`."""
    if isinstance(format, PanelFormat):
        return panel_reference.decode(format, records, numel, first=first, width=width)
    if format.exact:
        moments = _rows(format, records, numel).view(torch.float32)
        exp_avg, exp_avg_sq = moments[:, :BLOCK_NUMEL], moments[:, BLOCK_NUMEL:]
        return exp_avg.flatten()[:numel], exp_avg_sq.flatten()[:numel]
    rows = _rows(format, records, numel)
    if format.is_byte_wide:
        codes, values = rows[:, :BLOCK_NUMEL].long(), _byte_values()
    else:
        low, high = rows[:, :64] & 15, rows[:, :64] >> 4
        codes = torch.cat([low, high], 1).long()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    exp_avg = values[codes] * _scale(rows, -format.scale_bytes)
    return exp_avg.flatten()[:numel], _levels(format, records, numel, torch.tensor(1.0))


def encode(
    format: Format,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    records: torch.Tensor,
    *,
    key: int = 0,
    first: int = 0,
    width: int = 0,
) -> int:
    """Write the records of finite values; return how many blocks were not fit to write."""
    if isinstance(format, PanelFormat):
        moments = exp_avg, exp_avg_sq
        return panel_reference.encode(format, *moments, records, first=first, width=width)
    if format.exact:
        moments = torch.cat([_blocks(exp_avg), _blocks(exp_avg_sq)], 1)
        _rows(format, records, exp_avg.numel()).copy_(moments.view(torch.uint8))
        return 0
    return _write(format, _blocks(exp_avg), _blocks(exp_avg_sq + 0.0), records, key, first)


def _rows(format: Format, records: torch.Tensor, numel: int) -> torch.Tensor:
    return records.view(-1)[: format.state_bytes(Place(numel, 0))].view(-1, format.record_bytes)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-values.numel() // BLOCK_NUMEL) * BLOCK_NUMEL)
    padded[: values.numel()] = values
    return padded.view(-1, BLOCK_NUMEL)


def _scale(rows: torch.Tensor, at: int) -> torch.Tensor:
    low, high = rows[:, at].int(), rows[:, at + 1].int()
    return ((low << 16) | (high << 24)).view(torch.float32)[:, None]


def _levels(
    format: Format, records: torch.Tensor, numel: int, factor: torch.Tensor
) -> torch.Tensor:
    """Return the levels of v times the scale, which is multiplied by `factor` before."""
    rows = _rows(format, records, numel)
    x = rows[:, format.m_bytes : format.m_bytes + format.v_bytes].int()
    scale = _scale(rows, -2)
    if format.is_byte_wide:
        codes = x
        scale = rows[:, -4:].flatten().clone().view(torch.float32)[:, None]
    elif format == R1:
        codes = torch.cat([x % 6, x // 6 % 6, x // 36], 1)[:, :BLOCK_NUMEL]
    elif format == M4V4:
        codes = torch.cat([x & 15, x >> 4], 1)
    else:
        codes = torch.cat([x[:, :32] >> 2 * part & 3 for part in range(4)], 1)
        if format == R2:
            codes = codes | torch.cat([(x[:, 32:] >> part & 1) << 2 for part in range(8)], 1)
    bits = (codes << format.level_shift) + format.lowest_bits
    return (bits.view(torch.float32) * (scale * factor)).flatten()[:numel]


def _write(
    format: Format,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    records: torch.Tensor,
    key: int,
    first: int,
) -> int:
    tops = exp_avg.abs().amax(1, True), exp_avg_sq.amax(1, True)
    fit = (tops[0].isfinite() & tops[1].isfinite() & (exp_avg_sq.amin(1, True) >= 0)).squeeze(1)
    rows = _rows(format, records, exp_avg.numel())
    if format.is_byte_wide:
        new = _byte_wide(format, exp_avg, exp_avg_sq, *tops, key, first)
        rows[fit] = new[fit]
        return int((~fit).sum())
    m_scale = _cut(tops[0] / 6)
    v_scale = _cut(tops[1] / 1.5 if format == M4V4 else tops[1])
    m_codes = _m_codes(exp_avg, m_scale)
    v_codes = _v_codes(format, exp_avg_sq, v_scale, key, first)
    parts = [m_codes[:, :64] | m_codes[:, 64:] << 4]
    if format == R1:
        k = torch.nn.functional.pad(v_codes, (0, 1)).view(-1, 3, 43)
        parts.append(k[:, 0] + 6 * k[:, 1] + 36 * k[:, 2])
    elif format == M4V4:
        parts.append(v_codes[:, :64] | v_codes[:, 64:] << 4)
    else:
        k = v_codes.view(-1, 4, 32)
        parts.append(_joined([(k[:, part] & 3) << 2 * part for part in range(4)]))
        if format == R2:
            k = v_codes.view(-1, 8, 16)
            parts.append(_joined([k[:, part] >> 2 << part for part in range(8)]))
    for scale in (m_scale, v_scale):
        bits = scale.view(torch.int32) >> 16
        parts += [bits & 255, bits >> 8]
    new = torch.cat(parts, 1).to(torch.uint8)
    rows[fit] = new[fit]
    return int((~fit).sum())


def _byte_wide(
    format: Format,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    m_top: torch.Tensor,
    v_top: torch.Tensor,
    key: int,
    first: int,
) -> torch.Tensor:
    """Return the records of m8v8."""
    nearest = (m_top.view(torch.int32) + 0x8000 & -65536).clamp(max=0x7F7F0000)
    m_scale = _cut(nearest.view(torch.float32))
    v_scale = torch.where(v_top < 2.0**-110, 0.0, v_top)
    parts = [
        _m_byte_codes(exp_avg, m_scale),
        _v_codes(format, exp_avg_sq, v_scale, key, first),
    ]
    parts += [m_scale.view(torch.int32) >> shift & 255 for shift in (16, 24)]
    parts += [v_scale.view(torch.int32) >> shift & 255 for shift in (0, 8, 16, 24)]
    return torch.cat(parts, 1).to(torch.uint8)


def _byte_values() -> torch.Tensor:
    """Return the magnitudes of the m codes of m8v8."""
    bits = (127 << 23) - (127 - torch.arange(128, dtype=torch.int32) << 20)
    return torch.cat([torch.zeros(1), bits[1:].view(torch.float32)])


def _m_byte_codes(exp_avg: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    y = exp_avg.abs() * _inverse(scale)
    bits = torch.clamp(y, min=1.125 * 2.0**-16).view(torch.int32)
    magnitude = (bits - (127 << 23) + (1 << 19) >> 20) + 127
    sign = (exp_avg.view(torch.int32) < 0).int() << 7
    return torch.where(magnitude == 0, 0, magnitude | sign)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0)


def _cut(x: torch.Tensor) -> torch.Tensor:
    cut = (x.view(torch.int32) & -65536).view(torch.float32)
    return torch.where(cut < _TINY, 0.0, cut)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1 / scale, 0.0)


def _m_codes(exp_avg: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    r = exp_avg.abs() * _inverse(scale)
    y = torch.maximum(r, 0.5 * r + 0.5)  # below 1, moved to where codes are linear too
    magnitude = (y.view(torch.int32) + (1 << 21) >> 22) - 252
    sign = (exp_avg.view(torch.int32) < 0).int() << 3
    return torch.where(magnitude == 0, 0, magnitude | sign)


def _v_codes(
    format: Format, exp_avg_sq: torch.Tensor, scale: torch.Tensor, key: int, first: int
) -> torch.Tensor:
    low, shift = format.lowest_bits, format.level_shift
    y = torch.clamp(exp_avg_sq * _inverse(scale), min=format.lowest_level)
    bits = y.view(torch.int32)
    if format == R0:  # a level spans two octaves: make y linear in its bits between levels
        rest = bits - low & (1 << 24) - 1
        above = (rest + (127 << 23)).view(torch.float32) - 1
        bits = bits - rest + (above * torch.tensor((1 << 24) / 3)).int()
    index = torch.arange(exp_avg_sq.numel(), dtype=torch.int64).view(exp_avg_sq.shape) + first
    salt = key ^ _lowbias32(index >> 32)
    draw = _lowbias32((index & _MASK) * 0x9E3779B9 & _MASK ^ salt) >> 32 - format.draw_bits
    carry = (draw << shift - format.draw_bits) + (1 << shift - format.draw_bits - 1)
    codes = torch.clamp(bits.long() - low + carry >> shift, max=format.num_levels - 1).int()
    return torch.where(scale > 0, codes, 0)


def _lowbias32(x: torch.Tensor) -> torch.Tensor:
    x = _times(x ^ x >> 16, 0x7FEB352D)
    x = _times(x ^ x >> 15, 0x846CA68B)
    return x ^ x >> 16


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Multiply modulo 2^32 without overflow of int64."""
    low, high = factor & 0xFFFF, factor >> 16
    return x * low + ((x * high & 0xFFFF) << 16) & _MASK
