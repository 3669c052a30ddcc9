"""Bring a model's parameters into pages: from the module, from a parked file, or from birth."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mt_lightning.engine import birth
from mt_lightning.engine.build import Build
from mt_lightning.engine.masters.carried import Rests, sources
from mt_lightning.engine.masters.edits import MasterEdits
from mt_lightning.engine.masters.halves import write_weight
from mt_lightning.engine.needs import spill_bytes
from mt_lightning.engine.parking import Parking
from mt_lightning.engine.plan import Plan
from mt_lightning.engine.runtime import Runtime
from mt_lightning.errors import StorageError
from mt_lightning.pages.table import Page, PageTable
from mt_lightning.tiers.heap import give_back_heap
from mt_lightning.tiers.store import Store

log = logging.getLogger(__name__)


def file_sizes(table: PageTable, plan: Plan) -> dict[str, int]:
    """Return every file of a run and its length, in the order in which they are made.

    Several drives are filled in turn. What one step reads, or writes, comes one after the other, so
    that it is spread over all of them: slots of one page side by side would give all of the slots
    that a step writes to the same drives.
    """
    sizes: dict[str, int] = {}
    for slot in (0, 1):
        for page in table:
            if slot == 0 or page.layout.optimizer is not None:
                sizes[f"{page.weight.key}.{slot}"] = page.weight.nbytes
        for page in table:
            if page.state.nbytes:
                sizes[f"{page.state.key}.{slot}"] = page.state.nbytes
    for page in table:
        if page.index in plan.spilled:
            sizes[f"{page.layout.key}.grad.0"] = spill_bytes(page)
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
    masters: MasterEdits,
    rests: Rests,
) -> None:
    """Write to pages what parameters hold, page by page, and leave placeholders behind.

    Args:
        run: The parts of the engine.
        build: The pages.
        parking: Where the pages already hold the parameters: only what user code changed is
            written.
        unborn: `id` of parameters that hold nothing yet.
        imported: Pages are appended once their parameters hold placeholders.
        masters: Writes the rests of fp32 masters.
        rests: Those that parked parameters have.
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
                    write_weight(page.layout.params[i], entry.frame.tensor, params[i].data)
            run.writer.close(page)
        which = None if page.state.slot is None else set(living)
        if found := sources(page, params, rests, which):
            known = {i: None if id(params[i]) in unborn else s for i, s in found.items()}
            masters.rewrite(page, known)
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


def give_back(
    run: Runtime, build: Build, parking: Parking, imported: list[Page], masters: MasterEdits
) -> None:
    """Give imported parameters their values back, after a start that failed.

    They come from a frame where it is still in RAM, else from the slot that was written.
    """
    for page in imported:
        entry = run.pool.entry(page)
        if entry is not None and entry.read is None:
            params = build.members[page.index].params
            try:
                values = masters.values(page, entry)
            except StorageError as error:  # the drive may be why the start failed
                log.warning("the lower halves of masters cannot be given back: %s", error)
                values = [spec.view(entry.frame.tensor).clone() for spec in page.layout.params]
            for param, value in zip(params, values, strict=True):
                param.data = value
        elif page.weight.slot is not None:
            parking.show(page)


def give_birth(
    root: nn.Module,
    run: Runtime,
    build: Build,
    masters: MasterEdits,
    unborn: dict[int, torch.dtype],
) -> None:
    """Initialise what was built on meta, one unit in RAM at a time.

    Args:
        root: The model.
        run: The parts of the engine.
        build: The pages.
        masters: Shows fp32 masters, so that they are what is initialised.
        unborn: By `id` of the parameters that hold nothing yet, the dtype they were built with.
    """
    paths = {id(module): path for path, module in root.named_modules()}
    inside: set[int] = set()
    for unit in build.units:
        modules = [(paths[id(module)], module) for module in unit.module.modules()]
        inside.update(id(module) for _, module in modules)
        pages = [build.table[index] for index in unit.pages]
        if any(id(p) in unborn for page in pages for p in build.members[page.index].params):
            with _writing(run, build, pages, masters, unborn):
                birth.give_birth(root, modules, unborn)
            give_back_heap()
    rest = [(path, module) for path, module in root.named_modules() if id(module) not in inside]
    with _writing(run, build, [build.table[i] for i in build.resident], masters, unborn):
        birth.give_birth(root, rest, unborn)


@contextmanager
def _writing(
    run: Runtime,
    build: Build,
    pages: list[Page],
    masters: MasterEdits,
    dtypes: dict[int, torch.dtype],
) -> Iterator[None]:
    own = [page for page in pages if page.state_layout.has_masters]
    with run.writer.writing([page for page in pages if not page.state_layout.has_masters]):
        for page in own:
            shown = masters.dtypes(page)
            params = build.members[page.index].params
            masters.begin(
                page, [dtypes.get(id(p), dtype) for p, dtype in zip(params, shown, strict=True)]
            )
        try:
            yield
        finally:
            for page in own:
                masters.end(page)
    masters.settle()
