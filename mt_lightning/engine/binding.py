"""Let parameters show the bytes of a frame, and take them away again."""

from __future__ import annotations

import torch
from torch import nn

from mt_lightning.engine.build import Build
from mt_lightning.engine.placeholder import placeholder
from mt_lightning.errors import StepError
from mt_lightning.pages.table import Page


class Binder:
    """Sets `p.data` of a page's parameters.

    [Note: views keep frames]
    Whatever saved a view of a bound weight (autograd, the user) keeps the frame's storage alive
    after the parameter has let go. A frame is free for reuse only when no such view is left, which
    the storage's use count tells; nothing has to be announced by anyone.

    [Note: stand-ins for frozen parameters]
    Autograd saves a parameter that needs no gradient as the very object, not as a view of it: once
    that object holds a placeholder, so does what was saved. While bound, such a parameter is
    therefore replaced in its modules by a fresh one that shows the frame and is left alone later.
    """

    def __init__(self, root: nn.Module, build: Build, device: torch.device) -> None:
        self._table = build.table
        self._members = build.members
        self._owners = _owners(root)
        self._blanks = [
            [placeholder(s.shape, s.dtype, device) for s in page.layout.params]
            for page in build.table
        ]
        self._others = [
            [placeholder(s.shape, _another(s.dtype), device) for s in p.layout.params]
            for p in build.table
        ]
        self._depth = [0] * len(build.table)
        self._planes: dict[int, torch.Tensor] = {}
        self._settled: dict[int, torch.Tensor] = {}
        self._standing_in: dict[int, list[nn.Parameter]] = {}
        self.used: set[int] = set()

    def bind(self, page: Page, plane: torch.Tensor) -> None:
        """Show `plane` (uint8, the page's weight plane) through the page's parameters."""
        if not self._depth[page.index]:
            self._check_blank(page)
        self._planes.setdefault(page.index, plane)
        self._depth[page.index] += 1
        self.used.add(page.index)
        self.show(page, self._planes[page.index])
        self._stand_in(page)

    def _check_blank(self, page: Page) -> None:
        if not (replaced := self.replaced(page)):
            return
        members = self._members[page.index].params
        index = next(i for i, param in enumerate(members) if param is replaced[0][0])
        raise StepError(
            f"{page.layout.params[index].name} was given new values while its page was not in "
            "memory; they would be lost. Between steps, change weights through load_state_dict(); "
            "before and after fit, as you like."
        )

    def _stand_in(self, page: Page) -> None:
        frozen = [p for p in self._members[page.index].params if not p.requires_grad]
        self._standing_in[page.index] = frozen
        for param in frozen:
            self._install(param, nn.Parameter(param.data, requires_grad=False))

    def _install(self, param: nn.Parameter, shown: nn.Parameter) -> None:
        for module, name in self._owners.get(id(param), ()):
            module._parameters[name] = shown

    def settle(self, page: Page, plane: torch.Tensor) -> None:
        """Bind a page that stays where it is until `reset`."""
        self._settled[page.index] = plane
        self.used.add(page.index)
        self.show(page, plane)

    def take_replaced(self, page: Page) -> None:
        """Write to a page that stays what user code has put in place of its values (`p.data = x`).

        Nothing is shown of it, hence nothing replaced, where a run that broke off let go of it.

        Raises:
            StepError: That has another shape or dtype.
        """
        plane = self._settled.get(page.index)
        if plane is None:
            return
        for param, spec in zip(self._members[page.index].params, page.layout.params, strict=True):
            view = spec.view(plane)
            if param.data_ptr() == view.data_ptr():
                continue
            if param.shape != view.shape or param.dtype != view.dtype:
                raise StepError(
                    f"{spec.name} was given values of shape {tuple(param.shape)} and "
                    f"{param.dtype} while its page holds {tuple(view.shape)} and {view.dtype}: "
                    "neither can change in a run. Change it before or after fit."
                )
            with torch.inference_mode(False), torch.no_grad():
                view.copy_(param.data)
                param.data = view

    def replaced(self, page: Page) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return what user code has put in place of placeholders: no page holds it."""
        params, blanks = self._members[page.index].params, self._blanks[page.index]
        pairs = zip(params, blanks, strict=True)
        return [(p, p.data) for p, blank in pairs if p.data_ptr() != blank.data_ptr()]

    def show(self, page: Page, plane: torch.Tensor) -> None:
        """Point the parameters at `plane` without keeping count."""
        for param, spec in zip(self._members[page.index].params, page.layout.params, strict=True):
            param.data = spec.view(plane)

    def renew(self, page: Page) -> None:
        """Let the next execution have accumulators of its own for the page's gradients.

        Autograd forgets the accumulator of a parameter whose dtype changes; those that it has put
        into graphs live on with them.
        """
        params = self._members[page.index].params
        for param, other in zip(params, self._others[page.index], strict=True):
            if param.requires_grad:
                data = param.data
                param.data = other
                param.data = data

    def unbind(self, page: Page) -> None:
        """Undo one `bind`; the last one puts placeholders back."""
        self._depth[page.index] -= 1
        if self._depth[page.index]:
            return
        # In this order, so that `reset` can end what an interrupt has broken off.
        for param in self._standing_in.get(page.index, []):
            self._install(param, param)
        self.blank(page)
        self._standing_in.pop(page.index, None)
        del self._planes[page.index]

    def blank(self, page: Page) -> None:
        """Put placeholders into the page's parameters, or what a page shows that stays bound."""
        if page.index in self._settled:
            self.show(page, self._settled[page.index])
            return
        with torch.inference_mode(False), torch.no_grad():
            for param, blank in zip(
                self._members[page.index].params, self._blanks[page.index], strict=True
            ):
                param.data = blank

    def plane(self, page: Page) -> torch.Tensor | None:
        """Return the bytes that the parameters show now, None where they are placeholders."""
        return self._planes.get(page.index)

    def is_bound(self, page: Page) -> bool:
        """Return whether the parameters show real bytes now."""
        return self._depth[page.index] > 0

    def reset(self) -> None:
        """Forget every bind after an error and blank what was bound."""
        for page in self._table:
            if self._depth[page.index] or page.index in self._planes:
                self._depth[page.index] = 1
                self.unbind(page)
        settled = [self._table[index] for index in self._settled]
        self._settled.clear()
        for page in settled:
            self.blank(page)
        self.used.clear()


def _another(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype != torch.float64 else torch.float32


def _owners(root: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append((module, name))
    return owners
