"""Hooks on the user's modules: gradients leave, and state dicts see real weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from mt_lightning.engine.adapting import AdapterGuard, guard_adapters
from mt_lightning.engine.build import Build
from mt_lightning.pages.table import Page
from mt_lightning.tiers.ledger import PAGING
from mt_lightning.tiers.spans import Span

Removable = RemovableHandle | AdapterGuard


class Host(Protocol):
    """What the hooks ask of the engine."""

    @property
    def computes_on_host(self) -> bool:
        """Whether parameters show frames of the host while the model runs."""
        ...

    def on_grad(self, page: Page, param: int, parameter: nn.Parameter) -> None:
        """Take a gradient."""

    def show_pages(self, pages: list[Page], *, whole: bool) -> None:
        """Let parameters show mapped files; `whole` where a state dict begins."""

    def hide_pages(self, pages: list[Page]) -> None:
        """Let them show placeholders again."""

    def begin_edit(self, pages: list[Page]) -> None:
        """Let parameters show writable frames."""

    def end_edit(self, pages: list[Page]) -> None:
        """Keep what was written to them."""


def attach_hooks(host: Host, root: nn.Module, build: Build) -> list[Removable]:
    """Install every hook; the handles remove them."""
    handles: list[Removable] = [*guard_adapters(root)]
    place: dict[int, Page] = {}
    for page in build.table:
        for i, param in enumerate(build.members[page.index].params):
            place[id(param)] = page
            if page.layout.params[i].has_gradient:
                # Also on frozen ones, which may be unfrozen later; torch wants to see the flag.
                needs_grad = param.requires_grad
                param.requires_grad_(True)
                handles.append(param.register_post_accumulate_grad_hook(_leave(host, page, i)))
                param.requires_grad_(needs_grad)
    # On a device those show its memory, which is not what a state dict should hold.
    resident = set(build.resident) if host.computes_on_host else set[int]()
    for module in root.modules():
        own = [place[id(p)] for p in module.parameters(recurse=False)]
        pages = list({page.index: page for page in own if page.index not in resident}.values())
        # What stays in RAM shows its weights anyway; of fp32 masters there is more to write.
        loaded = {p.index: p for p in own if p in pages or p.state_layout.has_masters}
        handles.append(_show_hook(host, module, pages))
        if pages:
            handles.append(_hide_hook(host, module, pages))
        if loaded:
            handles.extend(_load_hooks(host, module, list(loaded.values())))
    return handles


def _leave(host: Host, page: Page, index: int) -> Callable[[Any], None]:
    def hook(parameter: nn.Parameter) -> None:
        with Span("take gradient", page.layout.key, PAGING):
            host.on_grad(page, index, parameter)

    return hook


def _show_hook(host: Host, module: nn.Module, pages: list[Page]) -> RemovableHandle:
    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        del module, keep_vars
        # Modules inside another one are asked with a prefix, right after it.
        if pages or not prefix:
            host.show_pages(pages, whole=not prefix)

    return module.register_state_dict_pre_hook(before_save)


def _hide_hook(host: Host, module: nn.Module, pages: list[Page]) -> RemovableHandle:
    def after_save(*_: Any) -> None:
        host.hide_pages(pages)

    return module.register_state_dict_post_hook(after_save)


def _load_hooks(host: Host, module: nn.Module, pages: list[Page]) -> list[RemovableHandle]:
    def before_load(*_: Any) -> None:
        host.begin_edit(pages)

    def after_load(*_: Any) -> None:
        host.end_edit(pages)

    return [
        module.register_load_state_dict_pre_hook(before_load),
        module.register_load_state_dict_post_hook(after_load),
    ]
