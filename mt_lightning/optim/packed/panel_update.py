"""Step, encode and decode format C5, panel by panel; the entry is update."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mt_lightning.optim.packed import panel_columns
from mt_lightning.optim.packed import panel_kernels as kernels
from mt_lightning.optim.packed.panels import FIT_ROUNDS, PanelFormat
from mt_lightning.optim.packed.place import BLOCK_NUMEL, Place
from mt_lightning.optim.packed.scalars import AdamScalars
from mt_lightning.optim.packed.threads import in_pieces


class Panel:
    """One panel: the bytes of its state, and a work space for its columns.

    Args:
        format: How the state is kept.
        data: uint8, its bytes.
        numel: Its elements.
        first: Index in the tensor of the first of them.
        width: Columns of the tensor.
    """

    def __init__(
        self, format: PanelFormat, data: np.ndarray, numel: int, first: int, width: int
    ) -> None:
        start = format.vectors_at(numel)
        self._vectors = slice(start, start + 8 * width)
        self._data, self._size = data, format.record_bytes
        self._numel, self._width, self._column = numel, width, first % width
        self._num_blocks = -(-numel // BLOCK_NUMEL)
        self._work = np.empty(4 * (width + BLOCK_NUMEL), np.float32)
        self._prepare()

    def step(self, param: np.ndarray, grad: np.ndarray, scalars: AdamScalars) -> None:
        """Take one step; see `update.adamw_step`."""
        constants, extra = scalars.constants, scalars.extra

        def run(records: np.ndarray, column: int, count: int, p: np.ndarray, g: np.ndarray) -> None:
            kernels.step_blocks(
                p, g, records, self._work, self._width, column, constants, extra, count
            )

        self._on_blocks(run, param, grad)
        self._fold(scalars.column_weight)

    def decode(self, exp_avg: np.ndarray, exp_avg_sq: np.ndarray) -> None:
        """Write what the state holds."""

        def run(records: np.ndarray, column: int, count: int, m: np.ndarray, v: np.ndarray) -> None:
            kernels.decode_blocks(records, self._work, self._width, column, m, v, count)

        self._on_blocks(run, exp_avg, exp_avg_sq)

    def fit(self, exp_avg_sq: np.ndarray) -> None:
        """Set both vectors to the columns of `exp_avg_sq`."""

        def run(records: np.ndarray, column: int, count: int, v: np.ndarray) -> None:
            kernels.fit_blocks(v, self._work, self._width, column, count)

        self._data[self._vectors] = 0
        for _ in range(FIT_ROUNDS):
            self._prepare()
            self._on_blocks(run, exp_avg_sq)
            self._fold(1.0)
        old, new = self._data[self._vectors].reshape(2, -1)
        old[:] = new
        self._prepare()

    def take(self, data: np.ndarray) -> None:
        """Set both vectors to those of another state of this panel."""
        self._data[self._vectors] = data[self._vectors]
        self._prepare()

    def encode(self, exp_avg: np.ndarray, exp_avg_sq: np.ndarray) -> int:
        """Write records with the vectors that are there; return how many blocks were unfit."""
        unfit = 0

        def run(records: np.ndarray, column: int, count: int, m: np.ndarray, v: np.ndarray) -> None:
            nonlocal unfit
            unfit += kernels.encode_blocks(m, v, records, self._work, self._width, column, count)

        self._on_blocks(run, exp_avg, exp_avg_sq)
        self._data[self._num_blocks * self._size : self._vectors.start] = 0
        self._data[self._vectors.stop :] = 0
        return unfit

    def _prepare(self) -> None:
        panel_columns.prepare(self._data[self._vectors], self._work, self._width)

    def _fold(self, rho: float) -> None:
        panel_columns.fold(
            self._data[self._vectors], self._work, self._width, self._column, self._numel, rho
        )

    def _on_blocks(self, run: Callable[..., None], *values: np.ndarray) -> None:
        """Call `run` on whole blocks, then on the last one, for which `values` are copied."""
        rest = self._numel % BLOCK_NUMEL
        whole = self._numel - rest
        at = whole // BLOCK_NUMEL * self._size
        if whole:
            run(self._data[:at], self._column, whole, *(value[:whole] for value in values))
        if rest:
            padded = np.zeros((len(values), BLOCK_NUMEL), np.float32)
            for row, value in zip(padded, values, strict=True):
                row[:rest] = value[whole:]
            column = (self._column + whole) % self._width
            run(self._data[at : at + self._size], column, rest, *padded)
            for row, value in zip(padded, values, strict=True):
                value[whole:] = row[:rest]


def on_panels(
    format: PanelFormat,
    data: np.ndarray,
    place: Place,
    first: int,
    threads: int | None,
    run: Callable[[Panel, int, int], object],
) -> None:
    """Call `run(panel, begin, end)` on every panel of a stretch, from several threads.

    Args:
        format: How the state is kept.
        data: uint8, the state of the stretch.
        place: The stretch.
        first: Index in the tensor of its first element.
        threads: How many threads to use, `torch.get_num_threads()` by default.
        run: Works on elements `begin` to `end` of the stretch.
    """
    grain, size = format.grain_numel(place), format.grain_bytes(place)
    assert place.width > 0, "format C5 must know the width of the tensor"
    assert first % grain == 0, (first, grain)

    def piece(begin: int, end: int) -> None:
        stored = data[begin // grain * size :][:size]
        run(Panel(format, stored, end - begin, first + begin, place.width), begin, end)

    in_pieces(place.numel, grain, threads, piece)


def encode_panels(
    format: PanelFormat,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    data: np.ndarray,
    place: Place,
    first: int,
    given: np.ndarray | None,
    threads: int | None,
) -> list[int]:
    """Encode a stretch; see `update.encode`.

    Args:
        format: How the state is kept.
        exp_avg: float32, m of the stretch.
        exp_avg_sq: float32, v of it.
        data: uint8, its state; written.
        place: The stretch.
        first: Index in the tensor of its first element.
        given: uint8, state whose vectors are taken; None to fit them.
        threads: How many threads to use.

    Returns:
        For each panel, how many blocks were unfit.
    """
    unfit = []
    grain, size = format.grain_numel(place), format.grain_bytes(place)

    def run(panel: Panel, begin: int, end: int) -> None:
        if given is None:
            panel.fit(exp_avg_sq[begin:end])
        else:
            panel.take(given[begin // grain * size :][:size])
        unfit.append(panel.encode(exp_avg[begin:end], exp_avg_sq[begin:end]))

    on_panels(format, data, place, first, threads, run)
    return unfit
