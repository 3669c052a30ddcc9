"""What code outside of an attached engine sees of its pages, and how it may write to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from mt_lightning.engine.masters.edits import MasterEdits
from mt_lightning.engine.parking import Parking
from mt_lightning.engine.runtime import Runtime
from mt_lightning.pages.table import Page


class Outside:
    """Shows weights to hooks of modules, and takes in what they write.

    Args:
        run: The parts of the engine.
        parking: Shows pages as mapped files.
        masters: Shows pages as fp32 masters.
        drain: Applies, writes and commits everything.
        undo: Takes back a step that was interrupted.
        on_grad: Takes a gradient.
    """

    def __init__(
        self,
        run: Runtime,
        parking: Parking,
        masters: MasterEdits,
        drain: Callable[[], None],
        undo: Callable[[], None],
        on_grad: Callable[[Page, int, nn.Parameter], None],
    ) -> None:
        self._run = run
        self._parking = parking
        self._masters = masters
        self._drain = drain
        self._undo = undo
        self._on_grad = on_grad
        self._editing: Counter[int] = Counter()

    @property
    def computes_on_host(self) -> bool:
        """Whether parameters show frames of the host while the model runs."""
        return self._run.plan.on_device is None

    def on_grad(self, page: Page, param: int, parameter: nn.Parameter) -> None:
        """Hand a gradient on."""
        self._on_grad(page, param, parameter)

    def show_pages(self, pages: list[Page], *, whole: bool) -> None:
        """Let the parameters of a module show mapped files; `whole` where `state_dict()` begins."""
        self._undo()
        self._masters.settle()
        if whole or any(self._is_behind(page) for page in pages):
            self._drain()
        for page in pages:
            if not self._run.binder.is_bound(page) and not self._editing[page.index]:
                with torch.inference_mode(False), torch.no_grad():
                    self._parking.show_again(page)

    def _is_behind(self, page: Page) -> bool:
        """Return whether the file of a page is not what its weights are."""
        run, entry = self._run, self._run.pool.entry(page)
        pending = run.steps.is_due(page) or run.worker.is_pending(page.index)
        dirty = entry is not None and entry.dirty
        return pending or dirty or run.planes.is_ahead(page)

    def hide_pages(self, pages: list[Page]) -> None:
        """Let them show placeholders again; views that were taken live on."""
        for page in pages:
            if not self._run.binder.is_bound(page) and not self._editing[page.index]:
                self._run.binder.blank(page)

    def begin_edit(self, pages: list[Page]) -> None:
        """Let parameters show what may be written to, as `load_state_dict()` needs it."""
        # Rests of masters are read from disk and written back to it.
        masters = any(page.state_layout.has_masters for page in pages)
        self._run.steps.drain(write=masters)
        for page in pages:
            if page.state_layout.has_masters:
                self._masters.begin(page)
            self._editing[page.index] += 1
            if self._editing[page.index] == 1 and not page.state_layout.has_masters:
                self._run.binder.show(page, self._run.writer.open(page).frame.tensor)

    def end_edit(self, pages: list[Page]) -> None:
        """Keep what was written to them."""
        for page in pages:
            self._editing[page.index] -= 1
            if page.state_layout.has_masters:
                self._masters.end(page)
            elif not self._editing[page.index]:
                self._run.binder.blank(page)
                self._run.writer.close(page)

    def take_replaced(self) -> None:
        """Keep what user code has put in place of the values of what stays in memory."""
        for entry in self._run.resident:
            if not self._editing[entry.page.index]:
                self._run.binder.take_replaced(entry.page)
