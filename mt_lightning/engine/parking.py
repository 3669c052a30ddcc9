"""What parameters hold between runs: private, writable mappings of the committed pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mt_lightning.engine.build import Build
from mt_lightning.pages.layout import ParamSpec
from mt_lightning.pages.table import Page
from mt_lightning.tiers.mapping import PrivateMapping
from mt_lightning.tiers.origins import Seal
from mt_lightning.tiers.store import Store


@dataclass
class _Shown:
    """A mapping that parameters have shown, and of which version of the page it is."""

    mapping: PrivateMapping
    slot: int | None
    sums: list[list[int]]

    def is_of(self, page: Page) -> bool:
        return self.slot == page.weight.slot and self.sums is page.weight.sums


class Parking:
    """Parks parameters on mapped files and finds out afterwards what user code changed."""

    def __init__(self, build: Build, store: Store) -> None:
        self._table = build.table
        self._members = build.members
        self._store = store
        self._parked: dict[int, tuple[PrivateMapping, list[int]]] = {}
        self._shown: dict[int, _Shown] = {}

    def park(self, page: Page) -> None:
        """Let the parameters of `page` show its current slot; it needs no RAM until written to."""
        mapping = self.show(page)
        params = self._members[page.index].params
        self._parked[page.index] = (mapping, [param.data_ptr() for param in params])

    def show(self, page: Page) -> PrivateMapping:
        """Map the current slot of `page` into its parameters."""
        mapping = self._store.map_private(page.weight.file, 0, page.layout.nbytes)
        mapping.views.seal = Seal.of_chunks([[(0, page.layout.nbytes)]], page.weight.sums)
        self._let_show(page, mapping)
        return mapping

    def show_again(self, page: Page) -> None:
        """Show the current slot as it was shown last, if nobody let go of that or wrote to it.

        A `state_dict()` asks once for every module; tensors that several modules hold must be one
        tensor in it, as they are in the model.
        """
        shown = self._shown.get(page.index)
        if shown is not None and shown.is_of(page) and shown.mapping.is_pristine():
            self._let_show(page, shown.mapping)
        else:
            mapping = self.show(page)
            self._shown[page.index] = _Shown(mapping, page.weight.slot, page.weight.sums)

    def forget_dead(self) -> None:
        """Let go of what was shown and has no tensor left: it would keep a file on the drive."""
        self._shown = {i: shown for i, shown in self._shown.items() if shown.mapping.alive}

    def _let_show(self, page: Page, mapping: PrivateMapping) -> None:
        for param, spec in zip(self._members[page.index].params, page.layout.params, strict=True):
            param.data = _view(mapping, spec)

    def changed(self, page: Page) -> list[int]:
        """Return the parameters of a parked page whose bytes are no longer those of its slot."""
        mapping, addresses = self._parked[page.index]
        written = mapping.written_ranges()
        changed = []
        for i, (param, spec) in enumerate(
            zip(self._members[page.index].params, page.layout.params, strict=True)
        ):
            stop = spec.offset + spec.nbytes
            if (
                param.data_ptr() != addresses[i]
                or tuple(param.stride()) != spec.stride
                or any(a < stop and b > spec.offset for a, b in written)
            ):
                changed.append(i)
        return changed

    def different(self, page: Page) -> set[int]:
        """Return the parameters of a parked page whose values are no longer those of its slot.

        `changed` also names neighbours of what was written to.
        """
        changed = self.changed(page)
        if not changed:
            return set()
        fresh = self._store.map_private(page.weight.file, 0, page.layout.nbytes)
        params, specs = self._members[page.index].params, page.layout.params
        return {i for i in changed if not _same_bytes(params[i].data, _view(fresh, specs[i]))}


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    rows = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
    return torch.equal(*rows)


def _view(mapping: PrivateMapping, spec: ParamSpec) -> torch.Tensor:
    flat = mapping.tensor(spec.offset, spec.nbytes).view(spec.dtype)
    return flat.as_strided(spec.shape, spec.stride)
