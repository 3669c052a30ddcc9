"""Gradients between autograd and the update: collected per page, summed, measured, handed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from mt_lightning.engine.leaving import Leaving
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
        dtypes: What each sum was in RAM; a wider one on disk holds the same values.
        finite: Whether every value seen in the last sums was finite.
    """

    present: set[int] = field(default_factory=set)
    sums: dict[int, list[int]] = field(default_factory=dict)
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    finite: bool = True


class PageGrads:
    """The gradient of one page.

    Args:
        ram: For each parameter its gradient in RAM, in the parameter's memory order; None where
            absent.
        spill: What lies on disk.
        reservations: The bytes set aside for `ram`.
    """

    def __init__(
        self,
        ram: list[torch.Tensor | None],
        spill: Spill | None = None,
        reservations: list[Reservation] | None = None,
    ) -> None:
        self._ram: list[torch.Tensor | None] = ram
        self.spill = Spill() if spill is None else spill
        self.reservations = [] if reservations is None else reservations
        self._landing: list[Callable[[], object]] = []

    @property
    def ram(self) -> list[torch.Tensor | None]:
        """Gradients in RAM; what is still on its way from the device is waited for."""
        for land in self._landing:
            land()
        self._landing.clear()
        return self._ram

    @ram.setter
    def ram(self, ram: list[torch.Tensor | None]) -> None:
        self._ram = ram

    def receive(self, param: int, host: torch.Tensor, land: Callable[[], object]) -> None:
        """Take a gradient whose bytes are complete once `land` has returned.

        Args:
            param: The parameter.
            host: Where it will lie, in the parameter's memory order and in storage of its own; what
                the page holds already where the gradient is added to that.
            land: Waits for the bytes.
        """
        assert self._ram[param] is None or self._ram[param] is host
        self._ram[param] = host
        self._landing.append(land)

    @property
    def is_in_ram(self) -> bool:
        """Whether a gradient is in RAM, or on its way there."""
        return any(grad is not None for grad in self._ram)

    @property
    def empty(self) -> bool:
        """Whether no parameter got a gradient."""
        return not self.spill.present and not self.is_in_ram

    def has(self, param: int) -> bool:
        """Return whether the parameter got a gradient."""
        return self._ram[param] is not None or param in self.spill.present

    def must_be_whole(self, page: Page) -> bool:
        """Return whether the update has to bring gradients back from disk before it begins."""
        absent = any(self._ram[i] is None for i in self.spill.present)
        return absent and not page.state_layout.sliced and not self.reservations

    def part(self) -> PageGrads:
        """Hand over what is in RAM or on its way there; what is on disk stays known to both."""
        part = PageGrads(self._ram, self.spill, self.reservations)
        part._landing = self._landing
        self._ram = [None for _ in self._ram]
        self.reservations, self._landing = [], []
        return part

    def free(self) -> None:
        """Drop what is in RAM."""
        self._ram = [None for _ in self._ram]
        self._landing.clear()
        for reservation in self.reservations:
            reservation.free()
        self.reservations.clear()


class Memory(Protocol):
    """Where gradients lie: that of the host, or of a device."""

    def reserve(self, nbytes: int, purpose: str, what: str) -> Reservation:
        """Make room and reserve."""
        ...


class Gradients:
    """The gradients of all pages since the last `zero_grad`."""

    def __init__(
        self,
        table: PageTable,
        pool: WeightPool,
        link: Link,
        leaving: Leaving,
        resident: set[int],
        there: Memory | None = None,
    ) -> None:
        self._table = table
        self.there = there
        """Where gradients stay when they are not needed on the host, None where they are."""
        self._memory: Memory = pool if there is None else there
        self._stays = link.unified or there is not None
        self._link = link
        self._leaving = leaving
        self._resident = resident
        self._grads: dict[int, PageGrads] = {}
        self._expected: dict[int, list[Reservation]] = {}
        self._arriving: dict[int, list[tuple[int, torch.Tensor | Download]]] = {}
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
        # What leaves a device is rounded there.
        nbytes = page.layout.grad_bytes if self._stays else page.layout.waiting_bytes
        if nbytes and page.index not in self._resident:
            what = f"the gradients of page {page.layout.key} ({', '.join(page.layout.units)})"
            self._expected.setdefault(page.index, []).append(
                self._memory.reserve(nbytes, "gradients", what)
            )
            if not self._stays:
                self._leaving.expect(page)

    def arrive(self, page: Page, param: int, grad: torch.Tensor, needed: int) -> bool:
        """Take a gradient from autograd; True when all `needed` of this backward have arrived."""
        if page.index not in self._expected:
            self.expect(page)
            self._early.add(page.index)
        arriving = self._arriving.setdefault(page.index, [])
        if self._stays:
            arriving.append((param, rounded(page, grad)))
        else:
            mine = self._grads[page.index]._ram[param] if page.index in self._grads else None
            for other, before in arriving:
                if other == param and isinstance(before, Download):
                    mine = before.host
            spec = page.layout.params[param]
            arriving.append((param, self._download(rounded(page, grad), spec, mine)))
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
                param, grad = arriving.pop(0)
                if isinstance(grad, Download):
                    held.receive(param, grad.host, partial(self._link.done, grad))
                    self._leaving.left(page, grad)
                else:
                    _add(held, param, grad, page.layout.params[param])
                del grad
            if not held.reservations and expected:
                held.reservations.append(expected.pop())
                held.reservations[-1].shrink(page.layout.waiting_bytes)
        self._leaving.complete(page)
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
        nbytes = page.layout.waiting_bytes
        held = self._grads.setdefault(page.index, PageGrads([None] * len(page.layout.params)))
        if nbytes and page.index not in self._resident and not held.reservations:
            what = f"the gradients of page {page.layout.key} ({', '.join(page.layout.units)})"
            held.reservations.append(self._memory.reserve(nbytes, "gradients", what))
        return held

    def begin_sum(self, page: Page) -> bool:
        """Make room on the device for a sum of gradients; False where it is made elsewhere.

        That is so where they do not leave, and where the host holds what they are added to.
        """
        if self._stays or self.held(page) is not None:
            return False
        self._leaving.expect(page)
        return True

    def end_sum(self, page: Page, sums: Mapping[int, torch.Tensor]) -> None:
        """Let a sum leave for the open `page`, by parameter."""
        held = self._grads[page.index]
        for param, grad in sums.items():
            download = self._download(rounded(page, grad), page.layout.params[param], None)
            held.receive(param, download.host, partial(self._link.done, download))
            self._leaving.left(page, download)
        self._leaving.complete(page)

    def add(self, page: Page, param: int, grad: torch.Tensor) -> None:
        """Add a gradient to what the open `page` holds."""
        held, spec = self._grads[page.index], page.layout.params[param]
        if self._stays:
            _add(held, param, rounded(page, grad), spec)
            return
        download = self._download(rounded(page, grad), spec, held._ram[param])
        held.receive(param, download.host, partial(self._link.done, download))
        _ = held.ram  # nobody has counted what it takes on the device

    def _download(self, grad: torch.Tensor, spec: ParamSpec, mine: torch.Tensor | None) -> Download:
        """Send a gradient to the host, in the parameter's memory order, to be added to `mine`."""
        stride = spec.stride if spec.dense else contiguous_stride(spec.shape)
        if grad.stride() != stride:
            own = torch.empty_strided(spec.shape, stride, dtype=grad.dtype, device=grad.device)
            grad = own.copy_(grad)
        into = mine
        if into is None:
            into = torch.empty_strided(spec.shape, stride, dtype=grad.dtype, device="cpu")
        return self._link.download(grad, into, add=mine is not None)

    def unfinished(self) -> list[Page]:
        """Return pages whose backward has not been completed, in order of first arrival."""
        return [self._table[index] for index in dict.fromkeys((*self._arriving, *self._expected))]

    def in_ram(self) -> list[Page]:
        """Return pages that hold gradients in RAM."""
        return [self._table[index] for index, held in self._grads.items() if held.is_in_ram]

    def holding(self) -> list[Page]:
        """Return pages that hold gradients, wherever they are."""
        return [self._table[index] for index, held in self._grads.items() if not held.empty]

    def take_ram(self, page: Page) -> PageGrads | None:
        """Hand over what the page holds in RAM; the spilled part stays known."""
        held = self._grads.get(page.index)
        return held.part() if held is not None and held.is_in_ram else None

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
        self._leaving.reset()


def is_narrow(page: Page, param: int, grad: torch.Tensor) -> bool:
    """Return whether what the optimizer steps is float32, and the gradient that waits is not."""
    stepped = torch.float32 if page.state_layout.has_masters else page.layout.params[param].dtype
    return stepped == torch.float32 and grad.dtype == torch.bfloat16


def rounded(page: Page, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient as it waits: bfloat16 where fp32 ones are rounded."""
    return grad.bfloat16() if page.layout.rounds and grad.dtype == torch.float32 else grad


def _add(held: PageGrads, param: int, grad: torch.Tensor, spec: ParamSpec) -> None:
    mine = held.ram[param]
    if mine is None:
        held.ram[param] = own_gradient(grad, spec)
    else:
        mine.add_(grad)


def own_gradient(grad: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """Return `grad` in the parameter's memory order and in storage of its own."""
    storage = grad.untyped_storage()
    # One use by `grad`, one by the handle just made; more means that someone else can write to it.
    alone = (
        storage.nbytes() <= grad.numel() * grad.element_size() + 64
        and torch._C._storage_Use_Count(storage._cdata) <= 2  # type: ignore[attr-defined]
    )
    if alone and (not spec.dense or _same_order(grad, spec)):
        return grad
    stride = spec.stride if spec.dense else contiguous_stride(spec.shape)
    own = torch.empty_strided(spec.shape, stride, dtype=grad.dtype, device=grad.device)
    return own.copy_(grad)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(torch.empty(shape, device="meta").stride())


def _same_order(grad: torch.Tensor, spec: ParamSpec) -> bool:
    return all(
        a == b or size <= 1
        for a, b, size in zip(grad.stride(), spec.stride, spec.shape, strict=True)
    )


def flat(grad: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense gradient as a 1-D view, in memory order."""
    return grad.as_strided((grad.numel(),), (1,))
