"""What the last commit of a directory says, read without a model and without changing anything."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mt_lightning.engine.commit import RUN_KEY
from mt_lightning.engine.kept import is_kept
from mt_lightning.errors import ConfigError, CorruptPageError
from mt_lightning.pages.layout import PageLayout, ParamSpec, strided_span
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.commit import CommitLog, CommitRecord
from mt_lightning.tiers.run_files import RunFiles

_LAYOUT_NAME = re.compile(r"layout-([0-9a-f]{16})\.json")


@dataclass(frozen=True)
class Committed:
    """A run as its last commit left it.

    Attributes:
        files: Its files.
        record: The commit.
        layouts: The pages.
    """

    files: RunFiles
    record: CommitRecord
    layouts: list[PageLayout]

    @property
    def run_state(self) -> bytes | None:
        """The state of the loop that trained, None where there is none."""
        state = self.record.tensors.get(RUN_KEY)
        return state.numpy().tobytes() if state is not None else None

    def weight_file(self, layout: PageLayout) -> tuple[str, list[int]]:
        """Return the file that holds a page's weights, and its checksums.

        Raises:
            CorruptPageError: The commit does not fit the pages.
        """
        key = f"{layout.key}.weight"
        slot, sums = self.record.slots.get(key), self.record.sums.get(key)
        if slot is None or sums is None or len(sums) != -(-layout.nbytes // BLOCK_BYTES):
            raise CorruptPageError(
                None, "the commit does not fit the description of the pages", f"{key}.{slot}"
            )
        return f"{key}.{slot}", [int(each) for each in sums]

    def kept(self, name: str) -> bytes:
        """Return a small file of the run.

        Raises:
            CorruptPageError: It is not there, or not what it was.
        """
        data = self.files.small(name)
        if data is None or not is_kept(name, data):
            raise CorruptPageError(None, "a commit names this file; it is gone or damaged", name)
        return data


def open_committed(directories: Sequence[Path]) -> Committed:
    """Read the last commit of the directories of one run.

    Raises:
        ConfigError: They are not the directories of one run with a commit.
        CorruptPageError: The commit or what it names is damaged.
        StorageError: Something cannot be read.
    """
    files = RunFiles(directories)
    found = [record for path in directories if (record := CommitLog([path]).latest()) is not None]
    where = ", ".join(map(str, directories))
    if len(found) > 1:
        raise ConfigError(
            f"{where}: several of them hold commits; give the directories of one run."
        )
    if not found:
        what = "holds pages, but no readable commit" if files.pages else "holds no committed run"
        raise ConfigError(f"{where} {what}. Give all directories of a run (its offload_dir).")
    return Committed(files, found[0], read_layouts(files, found[0]))


def read_layouts(files: RunFiles, record: CommitRecord) -> list[PageLayout]:
    """Return the pages that a commit is of.

    Raises:
        CorruptPageError: Their description is gone or damaged.
    """
    name = str(record.meta.get("layout"))
    text = files.small(name) if _LAYOUT_NAME.fullmatch(name) else None
    if text is None:
        raise CorruptPageError(None, "the last commit names this file, and it is not there", name)
    match = _LAYOUT_NAME.fullmatch(name)
    assert match is not None
    if hashlib.sha256(text).hexdigest()[:16] != match[1]:
        raise CorruptPageError(None, "the description of the pages is damaged", name)
    try:
        return [_layout(index, page) for index, page in enumerate(json.loads(text))]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CorruptPageError(
            None, f"the description of the pages cannot be read: {error!r}", name
        ) from error


def _layout(index: int, page: dict[str, Any]) -> PageLayout:
    rank, world_size = page["rank"]
    params = tuple(_spec(*fields) for fields in page["params"])
    return PageLayout(index, tuple(page["units"]), page["optimizer"], params, rank, world_size)


def _spec(name: str, shape: list[int], stride: list[int], dtype: str, offset: int) -> ParamSpec:
    found = getattr(torch, dtype.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{dtype} is no dtype")
    span = strided_span(tuple(shape), tuple(stride))
    return ParamSpec(name, tuple(shape), tuple(stride), found, offset, span)
