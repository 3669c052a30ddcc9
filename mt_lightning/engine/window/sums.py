"""The gradients of a window: each micro-batch's is added as it comes, in the usual order.

[Note: one accumulator for each execution]
Autograd would add up the gradients of all executions of a parameter before it hands over the sum.
That is another order of additions than that of the usual order as soon as an execution uses a
parameter twice, or something is held from before. So each execution gets an accumulator of its own
(see `Binder.renew`), and its gradient comes here alone.

[Note: when a page has all its gradients]
Autograd runs younger nodes first. Once it runs a unit whose nodes are older than all those of the
executions that read a page, no gradient of that page is left to come.

[Note: sums on a device]
Gradients that leave a device are added up there first, where the host holds none yet: the order of
additions is the same, and a sum leaves once. What the host holds from before is the beginning of
the sum, so it is added to there, one by one.

[Note: resident parameters]
They are used between units, and before the first one, where the first micro-batch runs first: their
gradients come in any order. They are small, so each micro-batch's is kept and added in the end.
"""

from __future__ import annotations

import torch

from mt_lightning.engine.gradients import Gradients, own_gradient, rounded
from mt_lightning.engine.runtime import Runtime
from mt_lightning.engine.units import Unit
from mt_lightning.pages.table import Page, PageTable

SMALL_BYTES = 1 << 20
"""A resident page with smaller gradients keeps those of each micro-batch apart."""


class WindowSums:
    """Collects the gradients of one group of micro-batches.

    Args:
        run: The parts of the engine.
        gradients: Where sums are held, None for those that the coming step will use.
    """

    def __init__(self, run: Runtime, gradients: Gradients | None = None) -> None:
        self._run = run
        self._gradients = gradients or run.gradients
        self._first: dict[int, int] = {}
        """Number of the oldest node of all executions that read a page."""
        self._open: dict[int, Page] = {}
        self._there: dict[int, dict[int, torch.Tensor]] = {}
        """Sums on the device, by page and position."""
        self._resident = set(run.build.resident)
        self._own: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """Gradients of small resident parameters, by page and position, then by micro-batch."""
        self.owner = 0
        """The micro-batch whose gradient comes next, for resident parameters."""

    def executed(self, unit: Unit, start: int) -> None:
        """Take note that a unit was executed; its nodes have numbers from `start` on."""
        for index in unit.pages:
            self._first[index] = min(start, self._first.get(index, start))

    def expect(self, page: Page) -> None:
        """Make room for the gradient of `page`, and bring what is held on disk back."""
        new, run = page.index not in self._open, self._run
        self._open[page.index] = page
        if new and page.index not in self._resident and self._gradients.begin_sum(page):
            self._there[page.index] = {}
        if self._gradients.is_open(page):
            return
        run.worker.retire_page(page.index)
        held = self._gradients.open(page)
        if held.spill.present:
            # Added up on disk, it would be added to the sum of this group, not to its first part.
            run.worker.submit(lambda: run.spiller.fetch(page, held), page.index, lambda: None)
            run.worker.retire_page(page.index)

    def add(self, page: Page, param: int, grad: torch.Tensor) -> None:
        """Add the gradient of one execution."""
        self.expect(page)
        if page.index in self._resident and page.layout.grad_bytes <= SMALL_BYTES:
            own = self._own.setdefault((page.index, param), {})
            if self.owner in own:
                own[self.owner].add_(grad)
            else:
                own[self.owner] = grad.clone()
            return
        sums = self._there.get(page.index)
        if sums is None:
            self._gradients.add(page, param, grad)
        elif param in sums:
            sums[param].add_(rounded(page, grad))
        else:
            sums[param] = own_gradient(rounded(page, grad), page.layout.params[param])

    def passed(self, start: int) -> None:
        """Complete pages that only younger nodes read."""
        for index, page in list(self._open.items()):
            if self._first.get(index, -1) > start:
                self._complete(page)

    def finish(self) -> None:
        """Complete everything; backward has ended."""
        for (index, param), own in self._own.items():
            for number in sorted(own):
                self._gradients.add(self._run.build.table[index], param, own[number])
        self._own.clear()
        for page in list(self._open.values()):
            self._complete(page)
        self._first.clear()

    def _complete(self, page: Page) -> None:
        del self._open[page.index]
        sums = self._there.pop(page.index, None)
        if sums is not None:
            self._gradients.end_sum(page, sums)
        self.on_complete(page)

    def on_complete(self, page: Page) -> None:
        """Hand on a page that has all its gradients."""
        self._run.steps.on_complete(page)


def largest_param_bytes(table: PageTable) -> int:
    """Return what the gradient of one execution takes at most beside a sum."""
    return max(
        (
            spec.nbytes
            for page in table
            if page.layout.optimizer is not None
            for spec in page.layout.params
        ),
        default=0,
    )
