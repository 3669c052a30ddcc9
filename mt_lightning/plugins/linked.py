"""Checkpoints whose page files are hard-linked: a manifest, links, and a small file with the rest.

[Note: what a linked checkpoint is]
The tensors of a paged run's checkpoint are views of committed page files. Those files get a further
name each, in `<offload_dir>/checkpoints/<id>/`; the run never writes to a file that has two. All
else in the checkpoint, whatever it is, goes to `run.pt` beside them, in which each linked tensor is
represented by an empty one that carries its number. The manifest at the path of the checkpoint
says which files there are, what must be in them, and where in them each numbered tensor lies.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from mt_lightning.errors import ConfigError, CorruptPageError, StorageError
from mt_lightning.optim.expand import map_file
from mt_lightning.pages.sizes import align_up
from mt_lightning.tiers.checkpoint_files import (
    check_room,
    doom,
    finish,
    link_files,
    make_folder,
    remove_folder,
    write_file,
)
from mt_lightning.tiers.filesystem import sync_directory
from mt_lightning.tiers.lock import held_directories
from mt_lightning.tiers.manifest import DTYPES, Manifest, PageFile, TensorPlace
from mt_lightning.tiers.manifest_reader import (
    find_folders,
    id_of,
    is_manifest,
    parse_manifest,
    read_manifest,
)
from mt_lightning.tiers.mapping import PrivateMapping
from mt_lightning.tiers.origins import Origins, Place
from mt_lightning.tiers.pagefile import storage_error
from mt_lightning.tiers.store import FileStore
from mt_lightning.tiers.verify import (
    open_regular,
    read_file,
    sum_of_file,
    verify,
)

log = logging.getLogger(__name__)

REST_NAME = "run.pt"
RUN_STATE = "megatrain_run"
"""Key of a loaded checkpoint under which the state of its run is, where it has one."""
_STATE_NAME = "run_state"
_BUFFERS_NAME = "buffers"
_STATE_MAGIC = b"MTRUN\r\n\1"
_STAND_IN = 0x4D54
"""An empty tensor of shape (0, this, number) stands for a linked tensor."""
_DTYPES = frozenset(DTYPES.values())
_NUM_THREADS = 4


class _Parts:
    """A checkpoint taken apart: what lies in page files, and the rest."""

    def __init__(self) -> None:
        self.places: list[tuple[Place, torch.Tensor]] = []
        self.store: FileStore | None = None
        self._origins = Origins()
        self._blank = torch.empty(0, dtype=torch.bool)
        self._seen: dict[int, Any] = {}

    def rest_of(self, value: Any) -> Any:
        """Return `value` with stand-ins for tensors that lie in page files."""
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        kind = type(value)
        if kind not in (dict, OrderedDict, list, tuple):
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = value  # inside itself it is left as it is
        result = value
        if kind is tuple:
            result = tuple(self.rest_of(item) for item in value)
        elif kind is list:
            result = [self.rest_of(item) for item in value]
        else:
            result = copy.copy(value)  # with its attributes: a state dict has versions there
            for key, item in value.items():
                result[key] = self.rest_of(item)
        self._seen[id(value)] = result
        return result

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        place = self._origins.locate(tensor) if tensor.dtype in _DTYPES else None
        foreign = place is not None and self.store not in (None, place.store)
        if place is None or foreign:
            # A tensor without data would be one for ever.
            if tensor.device.type == "meta" and tensor.numel():
                raise ConfigError(
                    "the checkpoint holds a tensor without data (on meta). Optimizer state that is "
                    "coded on disk has none while a linked checkpoint is saved: leave it as it is "
                    "in on_save_checkpoint, or use PagedCheckpointIO(format='lightning')."
                )
            return tensor
        self.store = place.store
        self.places.append((place, tensor))
        return self._blank.as_strided((0, _STAND_IN, len(self.places) - 1), (1, 1, 1))


def save_linked(
    checkpoint: dict[str, Any],
    target: Path,
    check: Callable[[Iterable[Path]], None] = check_room,
) -> Manifest | None:
    """Write a checkpoint by linking the page files that its tensors show.

    Args:
        checkpoint: What Lightning saves.
        target: Where the manifest goes.
        check: Raises when there is no room to go on once these files are linked.

    Returns:
        The manifest; None, and nothing is done, where no tensor lies in a page file.

    Raises:
        StorageError: It cannot be written; what was at `target` stays, and is whole.
    """
    begin = time.perf_counter()
    parts = _Parts()
    rest = parts.rest_of(checkpoint)
    store = parts.store
    if store is None:
        return None
    names = sorted({place.name for place, _ in parts.places})
    sources = {name: store.path_of(name) for name in names}
    check(sources.values())
    synced = time.perf_counter()
    unsynced = store.unsynced(names)  # none, where a commit has done it
    with ThreadPoolExecutor(_NUM_THREADS, "megatrain-sync") as pool:
        list(pool.map(store.sync, unsynced))
    linked = time.perf_counter()
    checkpoint_id = f"step-{int(checkpoint.get('global_step') or 0)}-{secrets.token_hex(6)}"
    # The rest is always in the first directory.
    homes = {path.parents[1] for path in sources.values()} - {store.directories[0]}
    directories = [store.directories[0], *sorted(homes)]
    target = Path(os.path.realpath(target.parent)) / target.name
    folders: list[Path] = []
    old = folders_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for directory in directories:
            folders.append(make_folder(directory, checkpoint_id, target))
        where = {name: directories.index(path.parents[1]) for name, path in sources.items()}
        num_copied = link_files({path: folders[where[n]] / n for n, path in sources.items()})
        known = {place.name: place for place, _ in parts.places}
        manifest = Manifest(
            checkpoint_id=checkpoint_id,
            home=str(target),
            directories=tuple((os.path.relpath(d, target.parent), str(d)) for d in directories),
            files={n: _page_file(where[n], store.size(n), known[n]) for n in names},
            tensors=tuple(
                TensorPlace(p.name, p.offset, t.dtype, tuple(t.shape), tuple(t.stride()))
                for p, t in parts.places
            ),
            rest=_write_rest(rest, folders[0] / REST_NAME),
            folders=tuple(folders),
        )
        for folder in folders:
            sync_directory(folder)
        doom(old, target)
        write_file(target, manifest.to_bytes())
    except BaseException as error:
        if id_of(target) != checkpoint_id:
            for folder in folders:
                remove_folder(folder)
            finish(old)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise storage_error(error, "cannot write the checkpoint", str(target)) from error
        raise
    finish(folders)
    for folder in old:
        remove_folder(folder)
    end = time.perf_counter()
    log.info(
        "linked checkpoint %s: %.1f MiB in %d file(s), %d of them copied; looked up in %.0f ms, "
        "%d file(s) synced in %.0f ms, linked in %.0f ms.",
        target,
        sum(file.nbytes for file in manifest.files.values()) / 2**20,
        len(names),
        num_copied,
        (synced - begin) * 1e3,
        len(unsynced),
        (linked - synced) * 1e3,
        (end - linked) * 1e3,
    )
    return manifest


def _page_file(directory: int, nbytes: int, place: Place) -> PageFile:
    file = PageFile(directory, nbytes, place.seal.pieces, place.seal.sums, place.coding)
    assert file.num_blocks == len(file.sums), (file.num_blocks, len(file.sums))
    return file


def _write_rest(rest: Any, path: Path) -> tuple[str, int, int]:
    """Write everything that is not linked; return name, bytes and checksum of the file."""
    try:
        with path.open("xb") as file:
            torch.save(rest, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        raise StorageError(
            number, f"cannot write the checkpoint: {error}. Free some space", str(path)
        ) from error
    fd = open_regular(path)
    try:
        return path.name, os.fstat(fd).st_size, sum_of_file(fd, path)
    finally:
        os.close(fd)


def load_linked(path: Path, places: Iterable[Path], weights_only: bool) -> dict[str, Any]:
    """Return a linked checkpoint; its tensors are private views of its page files.

    Every byte is read once and compared with its checksum before.

    Args:
        path: The manifest.
        places: Further offload directories in which its files may be.
        weights_only: Whether to refuse what is no tensor or plain value.

    Raises:
        ConfigError: The manifest is damaged, or the rest holds more than plain values.
        StorageError: A file is missing.
        CorruptPageError: A file is damaged.
    """
    manifest = read_manifest(path, places)
    verify(manifest)
    return open_linked(path, manifest, weights_only)


def open_linked(path: Path, manifest: Manifest, weights_only: bool) -> dict[str, Any]:
    """Return a checkpoint that has been verified; see `load_linked`."""
    mappings = {name: map_file(manifest, name) for name in manifest.files}
    try:
        rest = torch.load(
            manifest.rest_path, map_location="cpu", mmap=True, weights_only=weights_only
        )
    except Exception as error:
        raise ConfigError(
            f"{manifest.rest_path} cannot be loaded: {error}. If you trust the checkpoint {path} "
            "and it holds objects other than tensors and plain values, pass weights_only=False."
        ) from error
    tensors = [_view(place, mappings[place.file]) for place in manifest.tensors]
    checkpoint = _whole(rest, tensors, path)
    if not isinstance(checkpoint, dict):
        raise ConfigError(f"{path} is no checkpoint: it holds a {type(checkpoint).__name__}.")
    state = _run_state(manifest.folders[0])
    if state is not None:
        checkpoint[RUN_STATE] = state
    return checkpoint


def add_run_state(manifest: Manifest, state: bytes, buffers: Path) -> None:
    """Put the state of a run beside a checkpoint, so that it is resumed exactly.

    Args:
        manifest: The checkpoint.
        state: The state.
        buffers: The file with what the buffers of the module were when the run began.
    """
    folder = manifest.folders[0]
    if not (folder / _BUFFERS_NAME).exists():
        link_files({buffers: folder / _BUFFERS_NAME})
    value = xxhash.xxh3_64_intdigest(state).to_bytes(8, "little")
    write_file(folder / _STATE_NAME, _STATE_MAGIC + value + state)


def _run_state(folder: Path) -> dict[str, bytes] | None:
    """Return what `add_run_state` put into a folder, None where it did not.

    Raises:
        CorruptPageError: It is damaged.
    """
    path = folder / _STATE_NAME
    if not os.path.lexists(path):
        return None
    data = read_file(path)
    start = len(_STATE_MAGIC) + 8
    value = xxhash.xxh3_64_intdigest(data[start:]).to_bytes(8, "little")
    if data[:start] != _STATE_MAGIC + value:
        raise CorruptPageError(
            errno.EBADMSG,
            "the state of the run is damaged at offset 0; without this file the checkpoint is "
            "resumed as a standard one",
            str(path),
        )
    return {"state": data[start:], "buffers": read_file(folder / _BUFFERS_NAME)}


def _view(place: TensorPlace, mapping: PrivateMapping) -> torch.Tensor:
    size = place.dtype.itemsize
    flat = mapping.tensor(place.offset, align_up(place.nbytes, size)).view(place.dtype)
    return flat.as_strided(place.shape, place.stride)


def _whole(value: Any, tensors: list[torch.Tensor], path: Path) -> Any:
    """Put tensors in place of their stand-ins."""
    if isinstance(value, torch.Tensor):
        if tuple(value.shape[:2]) != (0, _STAND_IN) or value.dim() != 3:
            return value
        number = value.shape[2]
        if number >= len(tensors):
            raise ConfigError(f"{path} does not belong to its data: it has no tensor {number}.")
        return tensors[number]
    kind = type(value)
    if kind is tuple:
        return tuple(_whole(item, tensors, path) for item in value)
    if kind is list:
        value[:] = [_whole(item, tensors, path) for item in value]
    elif kind in (dict, OrderedDict):
        for key, item in value.items():
            value[key] = _whole(item, tensors, path)
    return value


def folders_of(target: Path) -> list[Path]:
    """Return the folders that go when the checkpoint at a path goes or is written over.

    A link to a manifest, or a copy of one, has none: the files belong to the one written first.
    """
    if os.path.islink(target) or not is_manifest(target):
        return []
    try:
        manifest = parse_manifest(target)
    except (ConfigError, StorageError) as error:
        log.warning("%s The files that it names, if any, are not deleted.", error)
        return []
    is_copy = os.path.exists(manifest.home) and not os.path.samefile(manifest.home, target)
    if is_copy and id_of(manifest.home) == manifest.checkpoint_id:
        return []
    found = [f for f in find_folders(target, manifest, held_directories()) if f is not None]
    # A manifest may come from anywhere: what does not look like its data is left alone.
    names = {*manifest.files, manifest.rest[0]}
    return [f for f in found if any(os.path.isfile(f / name) for name in names)]


def remove_linked(path: Path) -> None:
    """Delete a manifest and the files it names; of a link or a copy only itself.

    Raises:
        StorageError: A file cannot be deleted.
    """
    folders = folders_of(path)
    try:
        doom(folders, path.absolute())
        path.unlink()
        sync_directory(path.absolute().parent)
    except OSError as error:
        raise storage_error(error, "cannot delete the checkpoint", str(path)) from error
    for folder in folders:
        remove_folder(folder)
