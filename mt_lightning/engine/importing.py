"""Bring a model's parameters into pages: from the module, from a parked file, or from birth."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from mt_lightning.engine import birth
from mt_lightning.engine.build import Build
from mt_lightning.engine.parking import Parking
from mt_lightning.engine.plan import Plan
from mt_lightning.engine.runtime import Runtime
from mt_lightning.pages.table import Page, PageTable
from mt_lightning.tiers.heap import give_back_heap
from mt_lightning.tiers.store import Store


def file_sizes(table: PageTable, plan: Plan) -> dict[str, int]:
    """Return every file of a run and its length."""
    sizes: dict[str, int] = {}
    for page in table:
        trained = page.layout.optimizer is not None
        for slot in (0, 1) if trained else (0,):
            sizes[f"{page.weight.key}.{slot}"] = page.weight.nbytes
        for slot in (0, 1) if page.state.nbytes else ():
            sizes[f"{page.state.key}.{slot}"] = page.state.nbytes
        if page.index in plan.spilled:
            sizes[f"{page.layout.key}.grad.0"] = page.layout.nbytes
    return sizes


def create_files(
    store: Store, old: dict[str, int], new: dict[str, int], *, kept: Container[str]
) -> None:
    """Make the files of a run; what is there already is deleted, but for what stays.

    Mappings of a deleted file stay valid: parameters may be parked on it until they are imported.

    Args:
        store: Where they lie.
        old: Files that are there, and their lengths.
        new: Those of the run.
        kept: Kinds of files that stay: "weight", "state".
    """
    written = {f"{name.rsplit('.', 1)[0]}.{slot}" for name in old for slot in (0, 1)}
    for name in sorted(written):
        nbytes = old.get(name, 0)
        stays = name.split(".")[-2] in kept and new.get(name) == nbytes
        if not stays and store.exists(name):
            store.delete(name)
    for name, nbytes in new.items():
        store.create(name, nbytes)


def take_planes(old: PageTable, new: PageTable) -> None:
    """Let a new table go on with the weight planes of an old one of the same layout."""
    for before, after in zip(old, new, strict=True):
        after.weight = before.weight


def import_weights(
    run: Runtime,
    build: Build,
    parking: Parking | None,
    unborn: Container[int],
    imported: list[Page],
) -> None:
    """Write to pages what parameters hold, page by page, and leave placeholders behind.

    Args:
        run: The parts of the engine.
        build: The pages.
        parking: Where the pages already hold the parameters: only what user code changed is
            written.
        unborn: `id` of parameters that hold nothing yet.
        imported: Pages are appended once their parameters hold placeholders.
    """
    for page in build.table:
        params = build.members[page.index].params
        if parking is None:
            living = [i for i, param in enumerate(params) if id(param) not in unborn]
        else:
            living = parking.changed(page)
        if living:
            entry = run.writer.open(page)
            with torch.no_grad():
                for i in living:
                    page.layout.params[i].view(entry.frame.tensor).copy_(params[i].data)
            run.writer.close(page)
        run.binder.blank(page)
        imported.append(page)
        # What the parameters held would else stay in the heap, beside the budget.
        give_back_heap()


def forget_weights(run: Runtime, build: Build, imported: list[Page]) -> None:
    """Leave placeholders in place of what the parameters hold: the pages have better."""
    for page in build.table:
        run.binder.blank(page)
        imported.append(page)
    give_back_heap()


def give_back(run: Runtime, build: Build, parking: Parking, imported: list[Page]) -> None:
    """Give imported parameters their values back, after a start that failed.

    They come from a frame where it is still in RAM, else from the slot that was written.
    """
    with torch.inference_mode(False), torch.no_grad():
        for page in imported:
            entry = run.pool.entry(page)
            if entry is not None and entry.read is None:
                params = build.members[page.index].params
                for param, spec in zip(params, page.layout.params, strict=True):
                    param.data = spec.view(entry.frame.tensor).clone()
            elif page.weight.slot is not None:
                parking.show(page)


def give_birth(root: nn.Module, run: Runtime, build: Build, unborn: Container[int]) -> None:
    """Initialise what was built on meta, one unit in RAM at a time."""
    paths = {id(module): path for path, module in root.named_modules()}
    inside: set[int] = set()
    for unit in build.units:
        modules = [(paths[id(module)], module) for module in unit.module.modules()]
        inside.update(id(module) for _, module in modules)
        pages = [build.table[index] for index in unit.pages]
        if any(id(p) in unborn for page in pages for p in build.members[page.index].params):
            with run.writer.writing(pages):
                birth.give_birth(root, modules, unborn)
            give_back_heap()
    rest = [(path, module) for path, module in root.named_modules() if id(module) not in inside]
    with run.writer.writing([build.table[index] for index in build.resident]):
        birth.give_birth(root, rest, unborn)
