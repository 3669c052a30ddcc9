"""Verify the directories of one run: commits, pages, small files and what else lies there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mt_lightning.commands.verify.leftovers import (
    Exclusive,
    find_leftovers,
    remove,
)
from mt_lightning.commands.verify.linked_folders import tell_checkpoints
from mt_lightning.commands.verify.records import (
    FoundRecord,
    age,
    find_records,
    needed_small_files,
)
from mt_lightning.commands.verify.report import Leftover, Report, count, size, told
from mt_lightning.engine.committed import Committed, read_layouts
from mt_lightning.engine.pieces import PIECES_KEY, written_pieces
from mt_lightning.errors import ConfigError, CorruptPageError, StorageError
from mt_lightning.pages.layout import PageLayout
from mt_lightning.tiers.block_check import Block, check_blocks
from mt_lightning.tiers.checkpoint_files import FOLDER
from mt_lightning.tiers.run_files import RunFiles, blocks
from mt_lightning.tiers.shared_lock import holder, shared

Begin = Callable[[str, int], Callable[[int], None]]
"""Told the name of a task and its bytes; returns what is called with the bytes that are done."""

_LOST = (
    "Put this file back from a copy, or start from a checkpoint with on_existing='overwrite'. "
    "Check the drive before it is used again."
)


def verify_run(directories: list[Path], begin: Begin, *, prune: bool) -> Report:
    """Verify one run.

    Args:
        directories: All its directories.
        begin: Shows progress.
        prune: Whether leftovers are removed.

    Raises:
        ConfigError: They are not of one run, or are in use and `prune` was asked for.
        StorageError: A directory cannot be read, or a leftover not be removed.
    """
    report = Report("run", directories)
    users = {str(who) for path in directories if (who := holder(path)) is not None}
    if prune:
        guard: Any = Exclusive(directories)
    else:
        guard = nullcontext() if users else shared(directories)
    with guard:
        _verify(report, directories, begin, in_use=", ".join(users) if not prune else "")
        if prune:
            _prune(report)
    return report


def _verify(report: Report, directories: list[Path], begin: Begin, *, in_use: str) -> None:
    files = RunFiles(directories)
    if in_use:
        report.warn(
            "in use",
            f"by {in_use}",
            "Its files change meanwhile: checksums are verified when the run has ended.",
        )
    found = find_records(directories, report)
    torn = tell_checkpoints(report, directories, in_use=bool(in_use))
    if len({each.path.parent for each in found}) > 1:
        raise ConfigError(
            f"{', '.join(map(str, directories))}: several of them hold commits; name the "
            "directories of one run together, and other runs in a call of their own."
        )
    if not found:
        what = count(len(files.pages), "page file")
        if files.pages and not report.damaged:
            report.blame(
                "commits",
                f"none, and {what} of {size(_bytes_of(files))}",
                "A directory of the run may be missing from the list or not mounted: give all. "
                "Or the run ended before its first commit: on_existing='overwrite' starts anew.",
            )
        elif not report.damaged:
            report.say("commits", "none; the run has not begun")
        report.facts |= {"step": None, "page_files": len(files.pages)}
        _tell_leftovers(report, torn)
        return
    newest = found[0]
    layouts = _tell_run(report, files, newest)
    if layouts is not None:
        run = Committed(files, newest.record, layouts)
        small = _check_small(report, run)
        _check_planes(report, run, small, begin, in_use=bool(in_use))
        _tell_slots(report, run)
    _tell_leftovers(report, [*_find_leftovers(report, files, found, layouts), *torn])


def _tell_run(report: Report, files: RunFiles, newest: FoundRecord) -> list[PageLayout] | None:
    record = newest.record
    report.facts |= {
        "step": record.step,
        "sequence": record.sequence,
        "age_s": round(newest.age_s),
        "page_files": len(files.pages),
        "page_file_bytes": _bytes_of(files),
    }
    try:
        layouts = read_layouts(files, record)
    except StorageError as error:
        report.blame("pages", told(error), _LOST)
        return None
    num_params = sum(len(layout.params) for layout in layouts)
    weight_bytes = sum(layout.nbytes for layout in layouts)
    report.facts |= {"pages": len(layouts), "parameters": num_params, "weight_bytes": weight_bytes}
    report.say(
        "run",
        f"committed at step {record.step}, {age(newest.age_s)} ago: {count(len(layouts), 'page')}, "
        f"{count(num_params, 'parameter')}, {size(weight_bytes)} of weights",
    )
    return layouts


def _check_small(report: Report, run: Committed) -> dict[str, Any]:
    """Check the small files; return how the state planes are cut, nothing where nobody knows."""
    names = needed_small_files(run.record)
    if names is None:
        report.blame("run state", "the state of the loop cannot be read", _LOST)
        names = {n for n in (run.record.meta.get(PIECES_KEY),) if isinstance(n, str)}
    elif run.run_state is None and run.record.step:
        report.warn(
            "run state",
            "the commit has none",
            "The weights can be exported, but on_existing='resume' cannot go on from here.",
        )
    planes: dict[str, Any] = {}
    num_good = 0
    for name in sorted(name for name in names if name.startswith("kept-")):
        try:
            data = run.kept(name)
            if name == run.record.meta.get(PIECES_KEY):
                planes = json.loads(data)
            num_good += 1
        except StorageError as error:
            report.blame("kept files", told(error), _LOST)
    report.say("kept files", f"{num_good + 1} with the description of the pages")
    return planes


def _check_planes(
    report: Report, run: Committed, planes: dict[str, Any], begin: Begin, *, in_use: bool
) -> None:
    jobs: dict[str, list[tuple[str, int, list[Block]]]] = {"weights": [], "optimizer state": []}
    for layout in run.layouts:
        try:
            name, sums = run.weight_file(layout)
        except CorruptPageError as error:
            report.blame("weights", told(error), _LOST)
            continue
        pieces = [(0, layout.nbytes)]
        jobs["weights"].append((name, layout.nbytes, _with_sums(pieces, sums)))
    states = {key: slot for key, slot in run.record.slots.items() if key.endswith(".state")}
    unknown = [key for key in states if key not in planes]
    if unknown:
        report.warn(
            "optimizer state",
            f"{count(len(unknown), 'file')} not verified",
            "The commit does not say where its checksums belong: an earlier release wrote it.",
        )
    for key, slot in states.items():
        if key in planes:
            try:
                job = _state_job(run, key, planes[key])
            except (ValueError, KeyError, TypeError, IndexError) as error:
                report.blame("optimizer state", f"{key}.{slot}: {error}", _LOST)
                continue
            jobs["optimizer state"].append((f"{key}.{slot}", *job))
    for what, todo in jobs.items():
        _check_files(report, run.files, what, todo, begin, in_use=in_use)


def _with_sums(pieces: list[tuple[int, int]], sums: list[int]) -> list[Block]:
    """Match checksums with the blocks they are of."""
    found = [block for offset, nbytes in pieces for block in blocks(offset, nbytes)]
    if len(found) != len(sums):
        raise ValueError(f"{len(sums)} checksums for {len(found)} blocks")
    return [Block(offset, n, expected) for (offset, n), expected in zip(found, sums, strict=True)]


def _state_job(run: Committed, key: str, plane: dict[str, Any]) -> tuple[int, list[Block]]:
    lengths = run.record.tensors.get(f"{key}/lengths")
    sums = [int(each) for each in run.record.sums[key]]
    pieces = list(written_pieces(plane, lengths.tolist() if lengths is not None else None))
    return int(plane["nbytes"]), _with_sums(pieces, sums)


def _check_files(
    report: Report,
    files: RunFiles,
    what: str,
    todo: list[tuple[str, int, list[Block]]],
    begin: Begin,
    *,
    in_use: bool,
) -> None:
    if not todo:
        return
    num_blocks = sum(len(found) for _, _, found in todo)
    nbytes = sum(block.nbytes for _, _, found in todo for block in found)
    held = f"{count(len(todo), 'file')}, {size(nbytes)}"
    if in_use:
        report.say(what, f"{held}; not verified")
        return
    gone = [name for name, _, _ in todo if name not in files.pages]
    if gone:
        names = ", ".join(gone[:4]) + (", ..." if len(gone) > 4 else "")
        report.blame(
            what,
            f"{count(len(gone), 'file')} that the commit names not there: {names}",
            "Give all directories of the run. If they are lost, start from a checkpoint with "
            "on_existing='overwrite'.",
        )
    advance = begin(what, nbytes)
    damaged = len(gone)
    for name, payload_bytes, found in todo:
        if name in gone:
            continue
        errors = check_blocks(files.open(name, payload_bytes), found, advance)
        if errors:
            damaged += 1
            more = f" (and {count(len(errors) - 1, 'more block')})" if len(errors) > 1 else ""
            report.blame(what, f"{told(errors[0])}{more}", _LOST)
    good = f"{held}, {count(num_blocks, 'checksum')} right"
    report.facts[f"{what.replace(' ', '_')}_verified_bytes"] = nbytes
    if not damaged:
        report.say(what, good)


def _tell_slots(report: Report, run: Committed) -> None:
    """Say what lies in the slots that the next step writes."""
    named = {f"{key}.{slot}" for key, slot in run.record.slots.items()}
    keys = set(run.record.slots)
    spare = [
        name
        for name in run.files.pages
        if name not in named and (name[:-2] in keys or name[:-2].endswith((".state", ".weight")))
    ]
    nbytes = sum(_length(run.files.pages[name]) for name in spare)
    report.facts |= {"spare_slots": len(spare), "spare_slot_bytes": nbytes}
    if spare:
        report.say("other slots", f"{count(len(spare), 'file')}, {size(nbytes)}: for the next step")


def _find_leftovers(
    report: Report,
    files: RunFiles,
    found: list[FoundRecord],
    layouts: list[PageLayout] | None,
) -> list[Leftover]:
    pages: set[str] = {layout.key for layout in layouts or []}
    small: set[str] | None = set()
    for each in found:
        pages |= {key.split(".")[0] for key in each.record.slots}
        needed = needed_small_files(each.record)
        small = small | needed if small is not None and needed is not None else None
    leftovers, foreign = find_leftovers(files.directories, pages, small)
    if foreign:
        names = ", ".join(path.name for path in foreign[:4])
        more = ", ..." if len(foreign) > 4 else ""
        report.say("other files", f"{len(foreign)}, not of a run: {names}{more}")
    # Without the pages nobody knows what belongs to them.
    return leftovers if layouts is not None else []


def _tell_leftovers(report: Report, leftovers: list[Leftover]) -> None:
    report.leftovers = leftovers
    if leftovers:
        nbytes = sum(leftover.nbytes for leftover in leftovers)
        report.warn(
            "leftovers",
            f"{len(leftovers)}, {size(nbytes)}",
            "No commit and no checkpoint needs them: --prune removes them.",
        )


def _prune(report: Report) -> None:
    if report.damaged:
        report.findings = [each for each in report.findings if each.name != "leftovers"]
        report.warn("prune", "nothing was removed", "While something is damaged, all is kept.")
        return
    report.pruned = remove(report.leftovers)
    report.leftovers = []
    nbytes = sum(leftover.nbytes for leftover in report.pruned)
    report.findings = [each for each in report.findings if each.name != "leftovers"]
    report.say("prune", f"removed {len(report.pruned)}, {size(nbytes)}")


def _bytes_of(files: RunFiles) -> int:
    return sum(_length(path) for path in files.pages.values())


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a run that is in use has replaced it
        return 0


def is_run(path: Path) -> bool:
    """Tell whether a directory is one of a run."""
    return any((path / name).is_dir() for name in ("pages", FOLDER)) or has_commits(path)


def has_commits(path: Path) -> bool:
    """Tell whether a directory is the one with the commits of its run."""
    return any(path.glob("commit.[01]"))


def group_runs(directories: list[Path]) -> Iterator[list[Path]]:
    """Yield the directories of each run.

    Raises:
        ConfigError: Nobody can tell which belong together.
    """
    with_commits = [path for path in directories if has_commits(path)]
    others = [path for path in directories if path not in with_commits]
    if others and len(with_commits) > 1:
        raise ConfigError(
            f"{', '.join(map(str, others))}: pages without commits, and there are several runs "
            "they may belong to. Name the directories of one run at a time."
        )
    if others:
        yield [*with_commits, *others]
    else:
        yield from ([path] for path in with_commits)
