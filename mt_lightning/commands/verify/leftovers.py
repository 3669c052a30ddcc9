"""Files of a run that no commit needs: which they are, and their removal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mt_lightning.commands.verify.records import RECORD_NAMES
from mt_lightning.commands.verify.report import Leftover
from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.tiers.checkpoint_files import FOLDER, folders_in, remove_folder
from mt_lightning.tiers.lock import DirectoryLock
from mt_lightning.tiers.pagefile import NEW_SUFFIX
from mt_lightning.tiers.run_files import list_directory

_PLANE = re.compile(r"(p\d{5,})\.(weight|state)\.[01]")
_GRAD = re.compile(r"p\d{5,}\.grad\.\d")
_INPUT = re.compile(r"i\d{5,}\.input\.0")
_NEW = re.compile(
    r"(p\d{5,}\.(weight|state|grad)\.\d|i\d{5,}\.input\.0|layout-.*|kept-.*)"
    + re.escape(NEW_SUFFIX)
)
_SMALL = re.compile(r"layout-[0-9a-f]{16}\.json|kept-[0-9a-f]{16}")
_PROBE = re.compile(r"\.write-\d+")
_OWN = {"lock", "pages", FOLDER, *RECORD_NAMES}


def find_leftovers(
    directories: Sequence[Path], pages: set[str], small: set[str] | None
) -> tuple[list[Leftover], list[Path]]:
    """Find what no commit needs.

    Args:
        directories: Those of the run.
        pages: Keys of the pages that a readable commit has ("p00003").
        small: Names of the small files that a commit needs, None where that is not known.

    Returns:
        The leftovers, and files that are not of a run at all.
    """
    leftovers: list[Leftover] = []
    foreign: list[Path] = []
    for directory in directories:
        linked = bool(folders_in(directory))
        for path in list_directory(directory / "pages"):
            plane = _PLANE.fullmatch(path.name)
            if _NEW.fullmatch(path.name):
                _add(leftovers, path, "a file that was not finished")
            elif _GRAD.fullmatch(path.name):
                _add(leftovers, path, "gradients of a step that was not finished")
            elif _INPUT.fullmatch(path.name):
                _add(leftovers, path, "inputs of units in a step that was not finished")
            elif plane is None:
                foreign.append(path)
            elif plane[1] not in pages:
                _add(leftovers, path, "a page of an earlier model")
        for path in list_directory(directory):
            if _NEW.fullmatch(path.name) or _PROBE.fullmatch(path.name):
                _add(leftovers, path, "a file that was not finished")
            elif _SMALL.fullmatch(path.name):
                # A linked checkpoint may name it, and its manifest may lie anywhere.
                if small is not None and path.name not in small and not linked:
                    _add(leftovers, path, "a small file of an earlier fit")
            elif path.name not in _OWN:
                foreign.append(path)
    return leftovers, foreign


def _add(leftovers: list[Leftover], path: Path, why: str) -> None:
    try:
        leftovers.append(Leftover(path, path.lstat().st_size, why))
    except FileNotFoundError:  # a run that is in use has finished it meanwhile
        return


class Exclusive:
    """Directories that nobody else uses while they are changed."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._locks = [DirectoryLock(directory) for directory in directories]

    def __enter__(self) -> None:
        taken: list[DirectoryLock] = []
        try:
            for lock in self._locks:
                lock.acquire()
                taken.append(lock)
        except (ConfigError, StorageError) as error:
            for lock in taken:
                lock.release()
            raise ConfigError(f"--prune removes nothing: {error}") from error

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.release()


def remove(leftovers: Sequence[Leftover]) -> list[Leftover]:
    """Remove files and folders; return those that are gone.

    Raises:
        StorageError: One cannot be removed.
    """
    gone = []
    for leftover in leftovers:
        try:
            if leftover.path.is_dir():
                remove_folder(leftover.path)
            else:
                leftover.path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                error.errno, f"cannot remove: {error.strerror}", str(leftover.path)
            ) from error
        gone.append(leftover)
    return gone
