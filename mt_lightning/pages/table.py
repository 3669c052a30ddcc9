"""The page table: which slot of each plane is current, and which one the last commit named.

[Note: two slots]
A plane is never overwritten in place. An update writes the slot that the last commit does not name
and makes it current; the commit then names it. Until then a crash, or `rollback`, loses nothing:
the committed slot is still whole. A plane that was not touched keeps its slot.

The table is changed by one thread at a time: by the thread that trains, and by the update worker
for a page whose job it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_lightning.pages.layout import PageLayout
from mt_lightning.pages.state import StateLayout


@dataclass(frozen=True)
class ParamState:
    """What a parameter's optimizer state holds beside the tensors of the state plane.

    Attributes:
        present: Keys whose bytes in the state plane are valid.
        values: Step counts, numbers and flags; replaced as a whole by an update, never changed.
    """

    present: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether the optimizer has not stepped the parameter yet."""
        return not self.present and not self.values


@dataclass
class Plane:
    """Current and committed version of one plane of one page.

    Attributes:
        key: Stem of its file names.
        nbytes: Bytes of payload.
        slot: The current slot, None before the first write.
        sums: Checksums of the current slot, one list per chunk.
        lengths: Of a coded plane, the bytes of each chunk's stream; else empty.
        committed: Slot that the last commit names.
        committed_sums: Its checksums.
        committed_lengths: Its lengths.
    """

    key: str
    nbytes: int
    slot: int | None = None
    sums: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    committed: int | None = None
    committed_sums: list[list[int]] = field(default_factory=list)
    committed_lengths: list[int] = field(default_factory=list)

    @property
    def file(self) -> str:
        """Name of the current file."""
        assert self.slot is not None
        return f"{self.key}.{self.slot}"

    @property
    def next_slot(self) -> int:
        """The slot that an update may write."""
        return 1 - self.committed if self.committed is not None else 0

    def advance(self, slot: int, sums: list[list[int]], lengths: Sequence[int] = ()) -> None:
        """Make a fully written slot the current one."""
        self.slot, self.sums, self.lengths = slot, sums, list(lengths)

    def commit(self) -> None:
        """Take the current slot as the committed one."""
        self.committed, self.committed_sums = self.slot, self.sums
        self.committed_lengths = self.lengths

    def rollback(self) -> None:
        """Return to the committed slot."""
        self.slot, self.sums = self.committed, self.committed_sums
        self.lengths = self.committed_lengths


@dataclass
class Page:
    """One page: its layout, its planes and the small state of its parameters."""

    layout: PageLayout
    state_layout: StateLayout
    weight: Plane
    state: Plane
    small: list[ParamState]
    committed_small: list[ParamState]
    version: int = 0

    @property
    def index(self) -> int:
        """Number of the page."""
        return self.layout.index

    def describe(self) -> dict[str, object]:
        """Return what a run that goes on must have in common, as JSON data."""
        keys: list[list[str]] = [[] for _ in self.layout.params]
        for tensor in self.state_layout.tensors:
            keys[tensor.param].append(f"{tensor.key} {tensor.dtype} {tensor.shape}")
        layout = self.state_layout
        form = list(layout.formats) or ["coded" if layout.slots else "raw"] * len(keys)
        return {**self.layout.describe(), "state": keys, "form": form}

    def commit(self) -> None:
        """Take everything current as committed."""
        self.weight.commit()
        self.state.commit()
        self.committed_small = self.small

    def rollback(self) -> None:
        """Return to the last commit."""
        self.weight.rollback()
        self.state.rollback()
        self.small = self.committed_small


def new_page(layout: PageLayout, state_layout: StateLayout) -> Page:
    """Make a page that has never been written."""
    blank = [ParamState() for _ in layout.params]
    return Page(
        layout,
        state_layout,
        Plane(f"{layout.key}.weight", layout.nbytes),
        Plane(f"{layout.key}.state", state_layout.nbytes),
        blank,
        list(blank),
    )


class PageTable:
    """All pages of one model."""

    def __init__(self, pages: list[Page], fingerprint: str) -> None:
        self.pages = pages
        self.fingerprint = fingerprint

    def __iter__(self) -> Iterator[Page]:
        return iter(self.pages)

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, index: int) -> Page:
        return self.pages[index]

    def describe(self) -> list[dict[str, object]]:
        """Return what a run that goes on must have in common, as JSON data."""
        return [page.describe() for page in self.pages]

    def planes(self) -> Iterator[Plane]:
        """Yield every plane that has bytes."""
        for page in self.pages:
            yield page.weight
            if page.state.nbytes:
                yield page.state

    def commit(self) -> None:
        """Take everything current as committed."""
        for page in self.pages:
            page.commit()

    def rollback(self) -> None:
        """Return every page to the last commit."""
        for page in self.pages:
            page.rollback()
