"""The linked checkpoints that live with a run: whose they are, and what crashes left of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mt_lightning.commands.verify.report import Leftover, Report, count, size
from mt_lightning.tiers.checkpoint_files import folders_in, marked_for, written_for
from mt_lightning.tiers.manifest_reader import id_of


@dataclass
class _Found:
    """A checkpoint of a run: one folder in each of its directories that holds a part of it."""

    folders: list[Path] = field(default_factory=list)
    nbytes: int = 0
    alone_bytes: int = 0
    num_files: int = 0
    manifest: Path | None = None
    known: list[Path] | None = None

    def add(self, folder: Path) -> None:
        """Add a folder that is whole."""
        self.folders.append(folder)
        for path in _files(folder):
            facts = path.lstat()
            self.nbytes += facts.st_size
            self.alone_bytes += facts.st_size if facts.st_nlink == 1 else 0
            self.num_files += 1


def tell_checkpoints(
    report: Report, directories: Sequence[Path], *, in_use: bool
) -> list[Leftover]:
    """Say which linked checkpoints live in the directories of a run; none of them is read.

    Args:
        report: Told what is found.
        directories: Those of the run.
        in_use: Whether somebody may be making or removing one now.

    Returns:
        Folders that the next run in these directories would delete.
    """
    found: dict[str, _Found] = {}
    leftovers: list[Leftover] = []
    for folder in (folder for directory in directories for folder in folders_in(directory)):
        try:
            marked = marked_for(folder)
            places = written_for(folder) if marked is None else marked
            named = [place for place in places or [] if id_of(place) == folder.name]
            if marked is not None and not named:
                if not in_use:
                    nbytes = sum(path.lstat().st_size for path in _files(folder))
                    why = "a linked checkpoint that was not finished, or not removed to the end"
                    leftovers.append(Leftover(folder, nbytes, why))
                continue
            each = found.setdefault(folder.name, _Found())
            each.add(folder)
        except FileNotFoundError:  # a run that is in use has removed it meanwhile
            continue
        if named:
            each.manifest = Path(os.path.realpath(named[0]))
        each.known = places
    _tell(report, found)
    return leftovers


def _tell(report: Report, found: dict[str, _Found]) -> None:
    nbytes = sum(each.nbytes for each in found.values())
    report.facts |= {"checkpoints": len(found), "checkpoint_bytes": nbytes}
    report.facts["linked_checkpoints"] = [
        {
            "id": name,
            "bytes": each.nbytes,
            "bytes_of_its_own": each.alone_bytes,
            "manifest": str(each.manifest) if each.manifest is not None else None,
        }
        for name, each in found.items()
    ]
    for name, each in found.items():
        held = (
            f"{name}: {count(each.num_files, 'file')}, {size(each.nbytes)}, "
            f"{size(each.alone_bytes)} of them its own"
        )
        if each.manifest is not None:
            report.say("linked checkpoint", f"{held}; of {each.manifest}, not verified")
        elif each.known is None:
            report.say("linked checkpoint", f"{held}; where its manifest is is not known")
        else:
            folders = ", ".join(map(str, each.folders))
            report.warn(
                "linked checkpoint",
                f"{held}; the manifest is no longer at {each.known[-1]}",
                f"Nothing removes it by itself: the manifest may have been moved. If it is gone "
                f"for good, delete {folders}.",
            )


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.is_dir()]
