"""The folders of linked checkpoints: `<offload_dir>/checkpoints/<id>`, made, kept and removed.

[Note: what a crash leaves]
A folder holds a marker, `unfinished`, from its first moment until the manifest that names it is in
place, and again from the moment that its removal begins. The marker says where the manifest is or
would be. Whoever opens the directory next looks there: a folder whose manifest names it is whole,
and the marker becomes `manifest`, which tells people whose it is; any other goes altogether. So a
kill at any moment leaves no manifest without its data, and no data for longer than until the next
run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mt_lightning.errors import StorageError
from mt_lightning.tiers.filesystem import free_bytes, sync_directory
from mt_lightning.tiers.pagefile import storage_error

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
MARKER = "unfinished"
NAMED_BY = "manifest"
"""File of a whole folder that says where its manifest was written."""
_COPY_BYTES = 4 << 20
_NO_LINKS = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
)
"""What a system says that cannot, or will not, make a hard link."""

NamedBy = Callable[[Path], str | None]
"""Returns the id of the checkpoint that a file is the manifest of; None where it is none."""


def folders_in(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of the checkpoints that live in an offload directory."""
    try:
        names = os.listdir(Path(directory) / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    entries = [Path(directory) / FOLDER / name for name in sorted(names)]
    return [path for path in entries if path.is_dir() and not path.is_symlink()]


def make_folder(directory: Path, checkpoint_id: str, manifest: Path) -> Path:
    """Make the folder of a checkpoint that is being written.

    Raises:
        StorageError: It cannot be made.
    """
    folder = directory / FOLDER / checkpoint_id
    try:
        folder.mkdir(parents=True)
        _mark(folder, manifest)
        sync_directory(folder.parent)
        sync_directory(directory)
    except OSError as error:
        raise storage_error(error, "cannot make the folder of a checkpoint", str(folder)) from error
    return folder


def link_files(files: Mapping[Path, Path]) -> int:
    """Give files further names; where the file system has no hard links, copy them.

    Args:
        files: From each file that is there to the name it gets.

    Returns:
        How many files had to be copied.

    Raises:
        StorageError: A file can be neither linked nor copied.
    """
    copied = 0
    for source, target in files.items():
        try:
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _tell(source, target, error)
                _copy(source, target)
                copied += 1
        except OSError as error:
            raise storage_error(
                error, f"cannot link or copy {source} for a checkpoint", str(target)
            ) from error
    return copied


_told: set[Path] = set()


def _tell(source: Path, target: Path, error: OSError) -> None:
    directory = target.parents[1]
    if directory not in _told:
        _told.add(directory)
        log.info(
            "%s cannot be hard-linked into %s (%s): files of linked checkpoints are copied there, "
            "which takes time and space.",
            source,
            directory,
            error.strerror,
        )


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, _COPY_BYTES)
        new.flush()
        os.fsync(new.fileno())
        for file in (old, new):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file, whole and durable, in place of what had its name.

    Raises:
        StorageError: It cannot be written; what had the name stays.
    """
    fresh = path.with_name(f"{path.name}.part")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        what = f"cannot write {len(data)} bytes. Free some space"
        raise storage_error(error, what, str(path)) from error


def finish(folders: Iterable[Path]) -> None:
    """Take the markers away: the manifest is in place."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            (folder / MARKER).replace(folder / NAMED_BY)


def doom(folders: Iterable[Path], manifest: Path) -> None:
    """Mark folders whose manifest is about to go."""
    for folder in folders:
        if folder.is_dir():
            _mark(folder, manifest)


def remove_folder(folder: Path) -> None:
    """Delete a marked folder, the marker last.

    Raises:
        StorageError: A file cannot be deleted.
    """
    try:
        for name in os.listdir(folder):
            if name != MARKER:
                (folder / name).unlink()
        (folder / MARKER).unlink(missing_ok=True)
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, "cannot delete a checkpoint", str(folder)) from error


def clean(directory: str | os.PathLike[str], named_by: NamedBy) -> None:
    """Delete what checkpoints that were interrupted left; the directory is locked.

    Args:
        directory: The offload directory.
        named_by: Reads a manifest.
    """
    for folder in folders_in(directory):
        places = marked_for(folder)
        if places is None:
            continue
        if any(named_by(place) == folder.name for place in places):
            finish([folder])
            continue
        log.info("%s is what an interrupted checkpoint left; it is deleted.", folder)
        remove_folder(folder)


def _mark(folder: Path, manifest: Path) -> None:
    places = [os.path.relpath(manifest, folder), str(manifest)]
    write_file(folder / MARKER, json.dumps(places).encode())


def marked_for(folder: Path) -> list[Path] | None:
    """Return where the manifest of a marked folder may lie; None for a whole folder."""
    places = _places(folder / MARKER, folder)
    # Killed before the marker was written: a folder that is empty says as much.
    return [] if places is None and not os.listdir(folder) else places


def written_for(folder: Path) -> list[Path] | None:
    """Return where the manifest of a whole folder was written; None where that is not known."""
    return _places(folder / NAMED_BY, folder)


def _places(path: Path, folder: Path) -> list[Path] | None:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return [folder / str(place) for place in json.loads(text)]
    except (ValueError, TypeError):
        return []


def kept_bytes(directories: Iterable[str | os.PathLike[str]]) -> int:
    """Return the bytes of all files of the checkpoints in these directories, each once."""
    return sum(size for size, _ in _inodes(directories))


def shared_bytes(directories: Iterable[str | os.PathLike[str]]) -> int:
    """Return the bytes of those that have further names: a page of the run, or a checkpoint."""
    return sum(size for size, num_links in _inodes(directories) if num_links > 1)


def _inodes(directories: Iterable[str | os.PathLike[str]]) -> list[tuple[int, int]]:
    """Return the length and the number of names of each file of the checkpoints, each once."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for directory in directories:
        for folder in folders_in(directory):
            for name in os.listdir(folder):
                facts = (folder / name).lstat()
                found[facts.st_dev, facts.st_ino] = (facts.st_size, facts.st_nlink)
    return list(found.values())


def check_room(sources: Iterable[Path]) -> None:
    """Raise StorageError when a drive has no room for what replaces these files once linked.

    Training goes on in fresh files, as many bytes again.
    """
    needed: dict[int, int] = {}
    where: dict[int, Path] = {}
    for source in sources:
        stat = source.stat()
        if stat.st_nlink == 1:
            needed[stat.st_dev] = needed.get(stat.st_dev, 0) + stat.st_size
            where[stat.st_dev] = source.parent
    for device, nbytes in needed.items():
        free = free_bytes(where[device])
        if nbytes > free:
            raise StorageError(
                errno.ENOSPC,
                f"a linked checkpoint keeps {nbytes} bytes that training then needs anew, and "
                f"only {free} are free; free some space, or keep fewer checkpoints (save_top_k)",
                str(where[device]),
            )
