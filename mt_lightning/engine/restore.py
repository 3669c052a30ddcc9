"""Go on from the last commit of a directory: slots, checksums and small state of every page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from mt_lightning.engine.machine import LAYOUT_NAME, Machine
from mt_lightning.errors import ConfigError, CorruptPageError
from mt_lightning.pages.sizes import BLOCK_BYTES, align_up
from mt_lightning.pages.table import Page, PageTable, ParamState, Plane
from mt_lightning.tiers.commit import CommitRecord
from mt_lightning.tiers.store import Store

_LENGTHS = "{}/lengths"


def keep_layout(store: Store, table: PageTable) -> str:
    """Write down what the pages are, for whoever goes on with them; return the file's name."""
    text = json.dumps(table.describe()).encode()
    name = _layout_name(text)
    if store.read_small(name) is None:
        store.write_small(name, text)
    return name


def _layout_name(text: bytes) -> str:
    return LAYOUT_NAME.format(hashlib.sha256(text).hexdigest()[:16])


def take_over(
    machine: Machine, table: PageTable, record: CommitRecord, *, trains: bool
) -> dict[str, int]:
    """Let new pages stand where a commit left the directory, and delete what it does not name.

    Args:
        machine: The tiers.
        table: The pages, never written.
        record: The commit.
        trains: Whether there are optimizers.

    Returns:
        The files that are there, and their lengths.

    Raises:
        ConfigError: The commit is of another model or optimizer.
        CorruptPageError: A file is missing or damaged.
    """
    if not trains:
        raise ConfigError(
            "on_existing='resume' goes on with Trainer.fit. To validate, test or predict, fit "
            "first, or load a checkpoint."
        )
    store, name = machine.store, str(record.meta["layout"])
    text = store.read_small(name)
    if text is None:
        raise CorruptPageError(None, "the last commit names this file, and it is not there", name)
    if _layout_name(text) != name:
        raise CorruptPageError(None, "the description of the pages is damaged", name)
    check_same(table.describe(), json.loads(text))
    sizes = {}
    named = {f"{plane}.{slot}" for plane, slot in record.slots.items()}
    for found in store.names():
        if found.split(".")[-2] in ("grad", "input") or found.split(".")[-1] not in ("0", "1"):
            store.delete(found)
            continue
        try:
            sizes[found] = store.size(found)
        except CorruptPageError:
            if found in named:
                raise
            store.delete(found)  # made just before the power went; it is made anew
    restore(table, record, store)
    return sizes


def restore(table: PageTable, record: CommitRecord, store: Store) -> None:
    """Let every page of a new table stand where the commit left it.

    Raises:
        CorruptPageError: The record does not fit the pages it is about, or a file is missing.
    """
    names = {spec.name: page for page in table for spec in page.layout.params}
    unknown = set(record.meta["optimizer"]) - set(names)
    if unknown:
        raise _torn(f"it names state of {sorted(unknown)[0]}, which is not in the pages")
    for page in table:
        _restore_plane(page.weight, record, store, [[page.weight.nbytes]])
        if page.state.nbytes:
            lengths = record.tensors.get(_LENGTHS.format(page.state.key))
            page.state.lengths = lengths.tolist() if lengths is not None else []
            _restore_plane(page.state, record, store, _state_pieces(page))
        page.small = [_small(spec.name, record) for spec in page.layout.params]
        page.commit()


def _state_pieces(page: Page) -> list[list[int]]:
    """Return the lengths of what each chunk wrote."""
    if not page.state_layout.slots:
        return [[length for _, length in chunk.pieces] for chunk in page.state_layout.chunks]
    if page.state.lengths and len(page.state.lengths) != len(page.state_layout.chunks):
        raise _torn(f"{page.state.key} has {len(page.state.lengths)} chunks")
    return [[align_up(length)] if length else [] for length in page.state.lengths]


def _restore_plane(
    plane: Plane, record: CommitRecord, store: Store, pieces: list[list[int]]
) -> None:
    slot = record.slots.get(plane.key)
    if slot is None:
        return
    plane.slot = slot
    if not store.exists(plane.file):
        raise CorruptPageError(
            None, "the last commit names this file, and it is not there", plane.file
        )
    sums: Iterator[int] = iter(record.sums[plane.key].tolist())
    counts = [sum(-(-length // BLOCK_BYTES) for length in chunk) for chunk in pieces]
    if sum(counts) != len(record.sums[plane.key]):
        raise _torn(f"{plane.key} has {len(record.sums[plane.key])} checksums, not {sum(counts)}")
    plane.sums = [[next(sums) for _ in range(count)] for count in counts]


def _small(name: str, record: CommitRecord) -> ParamState:
    kept: dict[str, Any] | None = record.meta["optimizer"].get(name)
    if kept is None:
        return ParamState()
    prefix = f"{name}/"
    tensors = {
        key.removeprefix(prefix): value
        for key, value in record.tensors.items()
        if key.startswith(prefix) and key.removeprefix(prefix) in kept["tensors"]
    }
    return ParamState(tuple(kept["present"]), {**kept["values"], **tensors})


def _torn(what: str) -> CorruptPageError:
    return CorruptPageError(None, f"the commit record is not of these pages: {what}")


def check_same(now: list[Any], then: list[Any]) -> None:
    """Raise ConfigError, naming the difference, when pages are of another model or optimizer.

    Args:
        now: What `PageTable.describe` returns for this run.
        then: What it returned for the run that was committed.
    """
    # As JSON has it: tuples are lists there.
    here = json.loads(json.dumps(now))
    if here != then:
        difference = _difference(then, here) or "its parameters are laid out otherwise"
        raise ConfigError(
            f"offload_dir holds a run of another model or optimizer: {difference}. Go on with "
            "what it was committed with, or set on_existing='overwrite' to start anew."
        )


def _difference(before: list[Any], now: list[Any]) -> str:
    then, here = _by_param(before), _by_param(now)
    for name in then:
        if name not in here:
            return f"it has a parameter {name}, which this model does not have"
    for name in here:
        if name not in then:
            return f"this model has a parameter {name}, which it does not have"
    for name, facts in here.items():
        for what, value in facts.items():
            if then[name].get(what) != value:
                return f"{name} has {what} {then[name].get(what)} there and {value} here"
    return ""


def _by_param(described: list[Any]) -> dict[str, dict[str, Any]]:
    result = {}
    for page in described:
        for param, state, form in zip(page["params"], page["state"], page["form"], strict=True):
            name, shape, stride, dtype, _ = param
            result[name] = {
                "shape": shape,
                "strides": stride,
                "dtype": dtype,
                "optimizer": page["optimizer"],
                "form of optimizer state": form,
                "optimizer state": state,
                "units": page["units"],
            }
    return result
