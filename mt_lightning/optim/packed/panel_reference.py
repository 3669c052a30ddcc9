"""The slow reference of panels: plain NumPy, operation by operation as panels writes them down."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from mt_lightning.optim.packed.panels import FIT_ROUNDS, KAPPA_SQUARED, PanelFormat
from mt_lightning.optim.packed.place import BLOCK_NUMEL, Place
from mt_lightning.optim.packed.scalars import AdamScalars

f32 = np.float32
_LARGE, _SMALL, _TINY = f32(2.0**100), f32(2.0**-100), f32(2.0**-126)


class _Panel:
    """Views of the bytes of one panel, and what follows from them."""

    def __init__(self, format: PanelFormat, data: np.ndarray, numel: int, column: int, width: int):
        self.num_blocks = -(-numel // BLOCK_NUMEL)
        start = format.vectors_at(numel)
        self.records = data[: self.num_blocks * format.record_bytes]
        self.records = self.records.reshape(self.num_blocks, format.record_bytes)
        self.stored = data[start : start + 8 * width].reshape(2, 4 * width)
        self.padding = (
            data[self.num_blocks * format.record_bytes : start],
            data[start + 8 * width :],
        )
        self.numel, self.column, self.width = numel, column, width
        index = np.arange(self.num_blocks * BLOCK_NUMEL)
        self.columns = ((index + column) % width).reshape(-1, BLOCK_NUMEL)
        self.valid = (index < numel).reshape(-1, BLOCK_NUMEL)
        self.n = self.valid.sum(1).astype(f32)[:, None]
        self.read_vectors()

    def read_vectors(self) -> None:
        old, new = self.stored.copy().view(f32)
        self.fresh = not new[:1].view(np.int32).any()
        self.old, self.new = (np.where(x != 0, x, f32(1)) for x in (old, new))
        self.acc = np.zeros(self.width + BLOCK_NUMEL, f32)

    def columns_sum(self) -> np.ndarray:
        return _lane_sum(np.where(self.valid, self.new[self.columns], f32(0)))

    def blocks(self, values: np.ndarray) -> np.ndarray:
        padded = np.zeros(self.num_blocks * BLOCK_NUMEL, f32)
        padded[: self.numel] = values
        return padded.reshape(-1, BLOCK_NUMEL)

    def codes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return q, a and s."""
        low = np.concatenate([self.records[:, :64] & 15, self.records[:, :64] >> 4], 1)
        signs = np.concatenate([self.records[:, 64:80] >> i & 1 for i in range(8)], 1)
        q = low.astype(np.int32) - 16 * signs
        zero = np.zeros((self.num_blocks, 1), np.uint8)
        a = np.concatenate([zero, zero, self.records[:, 80:82]], 1).view(f32)
        s = np.concatenate([zero, self.records[:, 82:85]], 1).view(f32)
        return q, a, s

    def moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return m, and what v and k are in this panel: k * cols."""
        q, a, s = self.codes()
        cols = self.new[self.columns]
        k = s * (self.n / self.columns_sum())
        return (q.astype(f32) * a) * np.sqrt(self.old)[self.columns], cols, k

    def write(self, y: np.ndarray, s: np.ndarray, fit: np.ndarray) -> None:
        top = np.abs(y).max(1, keepdims=True)
        a = _rounded(top / f32(15), 16)
        a = np.where(a >= _SMALL, a, f32(0))
        q = np.rint(y * _inverse(a, _SMALL)).astype(np.int32).astype(np.uint8)
        signs = (q >> 7).reshape(-1, 8, 16) << np.arange(8, dtype=np.uint8)[:, None]
        parts = [
            (q[:, :64] & 15) | (q[:, 64:] & 15) << 4,
            np.bitwise_or.reduce(signs, 1),
            a.view(np.uint8)[:, 2:],
            s.view(np.uint8)[:, 1:],
        ]
        self.records[fit] = np.concatenate(parts, 1)[fit]

    def add(self, parts: np.ndarray, fit: np.ndarray) -> None:
        for block in np.flatnonzero(fit):
            first = self.columns[block, 0]
            self.acc[first : first + BLOCK_NUMEL] += parts[block]

    def fold(self, rho: float) -> None:
        width = self.width
        for j in range(width, width + BLOCK_NUMEL):
            self.acc[j % width] += self.acc[j]
        least, rest = divmod(self.numel, width)
        behind_first = (np.arange(width) - self.column) % width
        seldom = 1 / least if least else 0.0
        f = self.acc[:width] * np.where(behind_first < rest, 1 / (least + 1), seldom)
        mean = _sum8(f) / width
        if not mean > 0:
            self.stored[0] = self.stored[1]
            return
        f = f * (1 / mean)
        old = self.new.astype(np.float64)
        c = np.maximum(old + (1.0 if self.fresh else rho) * (f - old), 2.0**-16)
        self.stored[0] = self.new.view(np.uint8)
        self.stored[1] = _rounded((c * (1 / (_sum8(c) / width))).astype(f32), 8).view(np.uint8)


def step(
    format: PanelFormat,
    param: torch.Tensor,
    grad: torch.Tensor,
    records: torch.Tensor,
    scalars: AdamScalars,
    *,
    first: int = 0,
    width: int,
) -> None:
    """Take one step; see `update.adamw_step`."""
    decay, w1, b2, w2, rate, _, _, eps, l2, sign = scalars.constants
    unbias, w2_unbiased, limit = scalars.extra
    for panel, at in _panels(format, records, Place(param.numel(), width), first):
        p, g = panel.blocks(param[at].numpy()), panel.blocks(grad[at].numpy()) * sign
        if l2 != 0:
            g = g + p * l2
        m, cols, k = panel.moments()
        m = m + w1 * (g - m)
        square = g * g
        root = np.sqrt((f32(KAPPA_SQUARED) * b2 * unbias) * k * cols + w2_unbiased * square)
        x = np.clip((rate * m) / (root + eps), -limit, limit)
        param[at] = torch.from_numpy((p * decay + x).reshape(-1)[: panel.numel])
        y = m * (f32(1) / np.sqrt(panel.new))[panel.columns]
        mean = b2 * panel.codes()[2] + w2 * (_lane_sum(square) / panel.n)
        fit = np.asarray((np.abs(y).max(1) <= _LARGE) & (mean[:, 0] <= _LARGE))
        s = _scale_of_v(mean)
        panel.write(y, s, fit)
        panel.add(np.minimum(square * _inverse(s * unbias, _SMALL), f32(4096)), fit)
        panel.fold(scalars.column_weight)


def decode(
    format: PanelFormat, records: torch.Tensor, numel: int, *, first: int = 0, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return m and v; see `update.decode`."""
    exp_avg, exp_avg_sq = torch.empty(2, numel)
    for panel, at in _panels(format, records, Place(numel, width), first):
        m, cols, k = panel.moments()
        exp_avg[at] = torch.from_numpy(m.reshape(-1)[: panel.numel])
        exp_avg_sq[at] = torch.from_numpy((k * cols).reshape(-1)[: panel.numel])
    return exp_avg, exp_avg_sq


def encode(
    format: PanelFormat,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    records: torch.Tensor,
    *,
    first: int = 0,
    width: int,
) -> int:
    """Write the state of finite values; return how many blocks were not fit to write."""
    unfit = 0
    for panel, at in _panels(format, records, Place(exp_avg.numel(), width), first):
        m, v = panel.blocks(exp_avg[at].numpy()), panel.blocks(exp_avg_sq[at].numpy())
        fit = np.asarray((np.isfinite(v) & (v >= 0)).all(1))
        v = np.minimum(v, f32(2.0**119))
        mean = _lane_sum(v) / panel.n
        panel.stored[:] = 0
        for _ in range(FIT_ROUNDS):
            panel.read_vectors()
            panel.add(v * (_inverse(mean, _SMALL) * (panel.columns_sum() / panel.n)), fit)
            panel.fold(1.0)
        panel.stored[0] = panel.stored[1]
        panel.read_vectors()
        fit = fit & np.isfinite(m).all(1)
        y = np.clip(m / np.sqrt(panel.old)[panel.columns], -_LARGE, _LARGE)
        panel.write(y, _scale_of_v(np.minimum(mean, _LARGE)), fit)
        for padding in panel.padding:
            padding[:] = 0
        unfit += int((~fit).sum())
    return unfit


def _panels(
    format: PanelFormat, records: torch.Tensor, place: Place, first: int
) -> Iterator[tuple[_Panel, slice]]:
    grain, size = format.grain_numel(place), format.grain_bytes(place)
    data = records[: format.state_bytes(place)].numpy()
    with np.errstate(all="ignore"):
        for begin in range(0, place.numel, grain):
            numel = min(grain, place.numel - begin)
            stored = data[begin // grain * size :][:size]
            column = (first + begin) % place.width
            yield _Panel(format, stored, numel, column, place.width), slice(begin, begin + numel)


def _lane_sum(blocks: np.ndarray) -> np.ndarray:
    lanes = blocks.reshape(-1, 8, 16)
    total = lanes[:, 0]
    for part in range(1, 8):
        total = total + lanes[:, part]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total


def _sum8(values: np.ndarray) -> float:
    padded = np.zeros(-(-len(values) // 8) * 8)
    padded[: len(values)] = values
    total = 0.0
    for lane in padded.reshape(-1, 8).cumsum(0)[-1]:
        total += float(lane)
    return total


def _rounded(x: np.ndarray, num_bits: int) -> np.ndarray:
    """Round floats so that the lowest bits are zero."""
    bits = x.view(np.int32) + np.int32(1 << num_bits - 1)
    return (bits & np.int32(-1 << num_bits)).view(f32)


def _scale_of_v(mean: np.ndarray) -> np.ndarray:
    s = _rounded(mean, 8)
    return np.where(s >= _TINY, s, f32(0))


def _inverse(x: np.ndarray, least: np.float32) -> np.ndarray:
    return np.where(x >= least, f32(1) / x, f32(0))
