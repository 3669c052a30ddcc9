"""Make everything current the committed state: data first, then one record that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mt_lightning.optim.team import alone
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.table import PageTable
from mt_lightning.tiers.commit import CommitLog, CommitRecord
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.ledger import WRITE
from mt_lightning.tiers.spans import Span

RUN_KEY = "run"
"""The tensor of a record that holds the state of the loop that trains, as bytes."""


class Committer:
    """Writes commit records; called from one thread at a time.

    Args:
        table: The pages.
        io: I/O threads.
        log: Where records go.
        stats: Counters to keep.
        names: Files that a record names: what describes the pages, and how state is cut.
    """

    def __init__(
        self,
        table: PageTable,
        io: IOQueue,
        log: CommitLog,
        stats: Stats,
        names: dict[str, str],
    ) -> None:
        self._table = table
        self._names = names
        self._io = io
        self._log = log
        self._stats = stats
        latest = log.latest()
        self._sequence = latest.sequence if latest is not None else 0
        self.step = 0
        self.run_state: bytes | None = None
        self.begun = False
        """Whether the weights are other than those that the module came with."""

    def go_on(self, record: CommitRecord) -> None:
        """Continue after a commit that the pages were restored from."""
        self.step = record.step
        state = record.tensors.get(RUN_KEY)
        self.run_state = state.numpy().tobytes() if state is not None else None

    def commit(
        self, step: int, take_touched: Callable[[], set[str]], run_state: bytes | None
    ) -> None:
        """Make the current slots durable and name them in a record.

        Args:
            step: Optimizer steps applied so far.
            take_touched: Returns, and forgets, the files written since the last commit.
            run_state: State of the loop that trains, which goes on from it when it is resumed.
        """
        self._io.sync(sorted(take_touched())).wait()
        self._sequence += 1
        slots: dict[str, int] = {}
        sums: dict[str, np.ndarray] = {}
        for plane in self._table.planes():
            if plane.slot is not None:
                slots[plane.key] = plane.slot
                flat = [value for chunk in plane.sums for value in chunk]
                sums[plane.key] = np.array(flat, dtype=np.uint64)
        tensors, values = _small_state(self._table)
        for plane in self._table.planes():
            if plane.lengths:
                tensors[f"{plane.key}/lengths"] = torch.tensor(plane.lengths)
        if run_state is not None:
            tensors[RUN_KEY] = torch.frombuffer(bytearray(run_state), dtype=torch.uint8)
        record = CommitRecord(
            sequence=self._sequence,
            step=step,
            fingerprint=self._table.fingerprint,
            slots=slots,
            sums=sums,
            tensors=tensors,
            meta={"optimizer": values, **self._names, "begun": self.begun},
        )
        with alone(), Span("write record", f"step {step}", WRITE):
            self._log.write(record)
        self._table.commit()
        self.step, self.run_state = step, run_state
        self._stats.commits += 1


def _small_state(table: PageTable) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split step counts and the like into tensors and JSON values."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for page in table:
        for spec, state in zip(page.layout.params, page.small, strict=True):
            if state.empty:
                continue
            plain: dict[str, Any] = {}
            small: list[str] = []
            for key, value in state.values.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{spec.name}/{key}"] = value.contiguous()
                    small.append(key)
                else:
                    plain[key] = value
            values[spec.name] = {
                "present": list(state.present),
                "values": plain,
                "tensors": small,
            }
    return tensors, values
