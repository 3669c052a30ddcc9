"""Gradients between autograd and the update: collected per page, summed, measured, handed on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from mt_lightning.errors import StepError
from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.pool import WeightPool
from mt_lightning.pages.layout import ParamSpec
from mt_lightning.pages.table import Page, PageTable
from mt_lightning.tiers.link import Download, Link


@dataclass
class Spill:
    """The part of a page's gradient that lies on disk. Changed by the update worker alone.

    Attributes:
        present: Parameters whose sum so far is on disk.
        sums: Checksums of each range of the gradient plane.
        norms: Norm of each parameter's sum, taken while it was whole in RAM.
        finite: Whether every value seen in the last sums was finite.
    """

    present: set[int] = field(default_factory=set)
    sums: dict[int, list[int]] = field(default_factory=dict)
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    finite: bool = True


@dataclass
class PageGrads:
    """The gradient of one page.

    Attributes:
        ram: For each parameter its gradient in RAM, in the parameter's memory order; None where
            absent.
        spill: What lies on disk.
        reservations: The bytes set aside for `ram`.
    """

    ram: list[torch.Tensor | None]
    spill: Spill = field(default_factory=Spill)
    reservations: list[Reservation] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether no parameter got a gradient."""
        return not self.spill.present and all(grad is None for grad in self.ram)

    def has(self, param: int) -> bool:
        """Return whether the parameter got a gradient."""
        return self.ram[param] is not None or param in self.spill.present

    def must_be_whole(self, page: Page) -> bool:
        """Return whether the update has to bring gradients back from disk before it begins."""
        absent = any(self.ram[i] is None for i in self.spill.present)
        return absent and not page.state_layout.sliced and not self.reservations

    def free(self) -> None:
        """Drop what is in RAM."""
        self.ram = [None] * len(self.ram)
        for reservation in self.reservations:
            reservation.free()
        self.reservations.clear()


class Gradients:
    """The gradients of all pages since the last `zero_grad`."""

    def __init__(self, table: PageTable, pool: WeightPool, link: Link, resident: set[int]) -> None:
        self._table = table
        self._pool = pool
        self._link = link
        self._resident = resident
        self._grads: dict[int, PageGrads] = {}
        self._expected: dict[int, list[Reservation]] = {}
        self._arriving: dict[int, list[tuple[int, Download]]] = {}
        self._early: set[int] = set()
        self._stepped: set[int] = set()

    def expect(self, page: Page) -> None:
        """Reserve what autograd is about to make for `page`.

        On a CPU those are real allocations of the host. A page that several units use is reserved
        once per use: autograd holds one partial sum for each until the last one is added.
        """
        if page.index in self._early:
            # A gradient that needs nothing saved by the unit came before its replay.
            self._early.discard(page.index)
            return
        nbytes = page.layout.grad_bytes
        if nbytes and page.index not in self._resident:
            what = f"the gradients of page {page.layout.key} ({', '.join(page.layout.units)})"
            self._expected.setdefault(page.index, []).append(
                self._pool.reserve(nbytes, "gradients", what)
            )

    def arrive(self, page: Page, param: int, grad: torch.Tensor, needed: int) -> bool:
        """Take a gradient from autograd; True when all `needed` of this backward have arrived."""
        if page.index not in self._expected:
            self.expect(page)
            self._early.add(page.index)
        arriving = self._arriving.setdefault(page.index, [])
        arriving.append((param, self._link.download(grad)))
        return len(arriving) == needed

    def complete(self, page: Page) -> bool:
        """Take in what arrived in one backward, settle its reservations; False if nothing did."""
        expected = self._expected.pop(page.index, [])
        self._early.discard(page.index)
        arriving = self._arriving.pop(page.index, [])
        took_in = bool(arriving)
        if arriving:
            held = self._grads.get(page.index)
            if held is None:
                held = self._grads[page.index] = PageGrads([None] * len(page.layout.params))
            while arriving:
                param, download = arriving.pop(0)
                grad, mine = self._link.done(download), held.ram[param]
                del download
                if mine is None:
                    held.ram[param] = _own(grad, page.layout.params[param])
                else:
                    mine.add_(grad)
                del grad
            if not held.reservations and expected:
                held.reservations.append(expected.pop())
        for reservation in expected:
            reservation.free()
        return took_in

    def is_open(self, page: Page) -> bool:
        """Return whether all that `page` holds is in RAM, with room for its whole gradient."""
        held = self._grads.get(page.index)
        reserved = page.index in self._resident or not page.layout.grad_bytes
        return held is not None and not held.spill.present and (reserved or bool(held.reservations))

    def open(self, page: Page) -> PageGrads:
        """Return what `page` holds, having reserved its whole gradient."""
        nbytes = page.layout.grad_bytes
        held = self._grads.setdefault(page.index, PageGrads([None] * len(page.layout.params)))
        if nbytes and page.index not in self._resident and not held.reservations:
            what = f"the gradients of page {page.layout.key} ({', '.join(page.layout.units)})"
            held.reservations.append(self._pool.reserve(nbytes, "gradients", what))
        return held

    def add(self, page: Page, param: int, grad: torch.Tensor) -> None:
        """Add a gradient to what the open `page` holds."""
        held = self._grads[page.index]
        grad = self._link.done(self._link.download(grad))
        mine = held.ram[param]
        if mine is None:
            held.ram[param] = _own(grad, page.layout.params[param])
        else:
            mine.add_(grad)

    def unfinished(self) -> list[Page]:
        """Return pages whose backward has not been completed, in order of first arrival."""
        return [self._table[index] for index in dict.fromkeys((*self._arriving, *self._expected))]

    def in_ram(self) -> list[Page]:
        """Return pages that hold gradients in RAM."""
        return [
            self._table[index]
            for index, held in self._grads.items()
            if any(grad is not None for grad in held.ram)
        ]

    def holding(self) -> list[Page]:
        """Return pages that hold gradients, wherever they are."""
        return [self._table[index] for index, held in self._grads.items() if not held.empty]

    def take_ram(self, page: Page) -> PageGrads | None:
        """Hand over what the page holds in RAM; the spilled part stays known."""
        held = self._grads.get(page.index)
        if held is None or all(grad is None for grad in held.ram):
            return None
        part = PageGrads(held.ram, held.spill, held.reservations)
        self._grads[page.index] = PageGrads([None] * len(held.ram), held.spill)
        return part

    def take(self, page: Page) -> PageGrads | None:
        """Hand over everything the page holds."""
        held = self._grads.pop(page.index, None)
        if held is not None and held.empty:
            held.free()
        return None if held is None or held.empty else held

    def check_cleared(self, page: Page) -> None:
        """Raise StepError when the gradients of the step before were never cleared."""
        if page.index in self._stepped:
            raise StepError(
                f"{page.layout.params[0].name}: optimizer.step() was called again without "
                "optimizer.zero_grad() since the last step. Plain PyTorch would apply the old "
                "gradient "
                "once more; paging has already freed it. Call optimizer.zero_grad()."
            )

    def expect_clearing(self, pages: Iterable[Page]) -> None:
        """Note that `pages` were stepped: `zero_grad` must come before they are stepped again."""
        self._stepped.update(page.index for page in pages)

    def held(self, page: Page) -> PageGrads | None:
        """Return what the page holds, None where nothing arrived."""
        held = self._grads.get(page.index)
        return None if held is None or held.empty else held

    def clear(self, pages: Iterable[Page]) -> None:
        """Drop the gradients of `pages`, as `zero_grad` does."""
        for page in pages:
            held = self._grads.pop(page.index, None)
            if held is not None:
                held.free()
            self._stepped.discard(page.index)

    def reset(self) -> None:
        """Drop everything, reservations of an interrupted backward included."""
        self.clear(list(self._table))
        for reservations in self._expected.values():
            for reservation in reservations:
                reservation.free()
        self._expected.clear()
        self._early.clear()
        self._stepped.clear()
        self._arriving.clear()


def _own(grad: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """Return `grad` in the parameter's memory order and in storage of its own."""
    storage = grad.untyped_storage()
    # One use by `grad`, one by the handle just made; more means that someone else can write to it.
    alone = (
        storage.nbytes() <= grad.numel() * grad.element_size() + 64
        and torch._C._storage_Use_Count(storage._cdata) <= 2  # type: ignore[attr-defined]
    )
    if alone and (not spec.dense or _same_order(grad, spec)):
        return grad
    stride = spec.stride if spec.dense else tuple(torch.empty(spec.shape, device="meta").stride())
    own = torch.empty_strided(spec.shape, stride, dtype=grad.dtype, device="cpu")
    return own.copy_(grad)


def _same_order(grad: torch.Tensor, spec: ParamSpec) -> bool:
    return all(
        a == b or size <= 1
        for a, b, size in zip(grad.stride(), spec.stride, spec.shape, strict=True)
    )


def flat(grad: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense gradient as a 1-D view, in memory order."""
    return grad.as_strided((grad.numel(),), (1,))
