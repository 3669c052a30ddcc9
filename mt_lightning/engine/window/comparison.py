"""Compares the gradients of a window with those that the usual order has left for the coming step.

[Note: what counts as rounding]
Both orders add the same gradients, one for each execution of a unit, but in some cases in another
order. Sums of n numbers in two orders differ by at most about n * eps times the sum of their
absolute values. So where the order of additions is known to differ, every element may differ by
`SLACK * n * eps` times the sum of the largest absolute values of the n gradients, eps being that of
the parameter's dtype. The slack is for a unit that uses a parameter several times: those parts are
added in another order too. Everywhere else every bit must be the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from mt_lightning.engine.gradients import Gradients, PageGrads, flat
from mt_lightning.engine.leaving import Leaving
from mt_lightning.engine.runtime import Runtime
from mt_lightning.engine.units import Unit
from mt_lightning.engine.window.learned import Learned
from mt_lightning.engine.window.sums import SMALL_BYTES, WindowSums
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.table import Page
from mt_lightning.tiers.link import Link

SLACK = 8
_PIECE = 1 << 18
"""Elements compared at once: what they need beside them is never large."""


@dataclass
class Findings:
    """What a comparison has shown.

    Attributes:
        num_compared: Parameters whose gradients were compared.
        wrong: What differs and must not, as a sentence; empty where nothing does.
        rounding: For each known case, the largest difference as text.
        silent: Names of pages whose gradients are all zero, which proves nothing.
    """

    num_compared: int = 0
    wrong: str = ""
    rounding: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)


class Comparison(WindowSums):
    """Collects the gradients of micro-batches that run again, and drops them page by page.

    Args:
        run: The parts of the engine; its gradients are left as they are.
        link: Brings gradients to the host.
        learned: Knows the units that change buffers.
        num_micros: How many micro-batches run again.

    Attributes:
        findings: What was found so far.
    """

    def __init__(self, run: Runtime, link: Link, learned: Learned, num_micros: int) -> None:
        self._leaving = leaving = Leaving(link, run.planes, Stats())
        mine = Gradients(
            run.build.table,
            run.pool,
            link,
            leaving,
            set(run.build.resident),
            run.gradients.there,
        )
        super().__init__(run, mine)
        self.findings = Findings()
        self._learned = learned
        self._num_micros = num_micros
        self._num_executions: dict[int, int] = {}
        self._addends: dict[tuple[int, int], tuple[int, float]] = {}
        """For each parameter the number of gradients and the sum of their largest values."""
        self._compared: set[int] = set()
        self._largest: dict[str, float] = {}

    def executed(self, unit: Unit, start: int) -> None:
        """Count how often each unit is executed."""
        super().executed(unit, start)
        self._num_executions[unit.index] = self._num_executions.get(unit.index, 0) + 1

    def add(self, page: Page, param: int, grad: torch.Tensor) -> None:
        """Add the gradient of one execution, and take note of its size."""
        count, size = self._addends.get((page.index, param), (0, 0.0))
        if grad.numel():
            size += float(torch.linalg.vector_norm(grad, math.inf))
        self._addends[page.index, param] = count + 1, size
        super().add(page, param, grad)

    def on_complete(self, page: Page) -> None:
        """Compare a page that has all its gradients, and drop them."""
        run = self._run
        run.worker.retire_page(page.index)
        mine, theirs = self._gradients.take(page), run.gradients.held(page)
        self._compared.add(page.index)
        try:
            self._compare(page, mine, theirs)
        finally:
            if mine is not None:
                mine.free()
            while self._leaving.settle_oldest():
                pass  # they have left: nobody else knows of what they were counted for

    def close(self) -> Findings:
        """Look at pages that got gradients in the usual order alone; return what was found."""
        for page in self._run.gradients.holding():
            if page.index not in self._compared:
                self.on_complete(page)
        return self.findings

    def drop(self) -> None:
        """Give back what is held, however the window ended."""
        self._gradients.reset()

    def _compare(self, page: Page, mine: PageGrads | None, theirs: PageGrads | None) -> None:
        names = [spec.name for spec in page.layout.params]
        both = []
        for i, name in enumerate(names):
            usual, again = (grads is not None and grads.has(i) for grads in (theirs, mine))
            if usual and again:
                both.append(i)
            elif usual or again:
                where = "in the usual order" if usual else "unit by unit"
                self._differs(f"{name} gets a gradient only {where}")
        if mine is None or theirs is None:
            return
        gaps = {i: _Gap() for i in both}
        stored = [i for i in both if theirs.ram[i] is None]
        for i in both:
            kept, grad = theirs.ram[i], mine.ram[i]
            assert grad is not None
            if kept is not None:
                # A sum lies either in RAM or on disk: no update behind backward was begun.
                assert i not in theirs.spill.present
                gaps[i].see(flat(kept), flat(grad))
        if stored:
            again = PageGrads(mine.ram, theirs.spill)

            def read() -> None:
                for i, kept, part in self._run.spiller.pairs(page, again, stored):
                    gaps[i].see(kept, part)

            self._run.worker.submit(read, page.index, lambda: None)
            self._run.worker.retire_page(page.index)
        for i, gap in gaps.items():
            self._judge(page, i, gap)
        if both and not any(gap.nonzero for gap in gaps.values()):
            self.findings.silent.add(page.layout.key)

    def _judge(self, page: Page, param: int, gap: _Gap) -> None:
        findings, spec = self.findings, page.layout.params[param]
        findings.num_compared += 1
        if not gap.largest:
            return
        case, (count, size) = self._known_case(page), self._addends[page.index, param]
        bound = SLACK * count * torch.finfo(spec.dtype).eps * size
        if case is None:
            self._differs(f"the gradient of {spec.name} differs by up to {gap.largest:.3g}")
        elif not (math.isfinite(bound) and gap.largest <= bound):
            self._differs(
                f"the gradient of {spec.name} differs by up to {gap.largest:.3g}, and rounding "
                f"({case}) explains {bound:.3g}"
            )
        elif gap.largest / bound > self._largest.get(case, 0.0):
            self._largest[case] = gap.largest / bound
            findings.rounding[case] = f"{spec.name} by up to {gap.largest:.2g} (bound {bound:.2g})"

    def _differs(self, what: str) -> None:
        self.findings.wrong = self.findings.wrong or what

    def _known_case(self, page: Page) -> str | None:
        """Return why gradients of a page are added in another order, None where they are not."""
        units = [unit.index for unit in self._run.build.units if page.index in unit.pages]
        if len(units) > 1:
            return "parameters that several units use"
        if any(unit in self._learned.counted for unit in units):
            return "units that change a buffer"
        if any(self._num_executions.get(unit, 0) > self._num_micros for unit in units):
            return "units that run twice in a step"
        if page.index in self._resident and page.layout.grad_bytes > SMALL_BYTES:
            return "large parameters outside all units"
        return None


class _Gap:
    """The largest difference between two tensors that are seen in pieces."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.nonzero = False

    def see(self, a: torch.Tensor, b: torch.Tensor) -> None:
        for one, other in zip(a.split(_PIECE), b.split(_PIECE), strict=True):
            self.nonzero = self.nonzero or bool(one.any())
            if torch.equal(one, other):
                continue
            same = (one == other) | (one.isnan() & other.isnan())
            gap = (one.double() - other.double()).abs().masked_fill(same, 0.0)
            self.largest = max(self.largest, float(gap.nan_to_num(nan=math.inf).max()))
