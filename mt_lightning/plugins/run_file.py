"""The state of a run with a standard checkpoint: in the file, or beside it in `<path>.run`.

[Note: in the file or beside it]
A checkpoint saved between two batches, in a validation or at the end of an epoch knows the state to
go on from, and holds it under one key more, which plain Lightning ignores. One saved in the middle
of a batch does not: it holds a random id, and when its batch has ended a small file with the same
id is put beside it. An id belongs to one save, so a file that an older checkpoint left at the same
path is never taken for this one's.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.plugins.linked import RUN_STATE
from mt_lightning.tiers.checkpoint_files import write_file
from mt_lightning.tiers.verify import read_file

log = logging.getLogger(__name__)

RUN_ID = "megatrain_run_id"
"""Key of a checkpoint under which the id of the file beside it is, where there is to be one."""
MISSING = "missing"
"""Key, in place of the state of a run, of the reason why there is none."""
NO_ID = "0" * 16

_MAGIC = b"MTCKRUN\1"
_SUM_BYTES, _ID_BYTES, _LENGTH_BYTES = 8, 16, 8
_HEAD_BYTES = len(_MAGIC) + _SUM_BYTES + _ID_BYTES + _LENGTH_BYTES


def seal(run_id: str, state: bytes, buffers: bytes) -> bytes:
    """Return the state of a run as checksummed bytes.

    Args:
        run_id: 16 characters.
        state: The state.
        buffers: What the buffers of the module were when the run began.
    """
    body = run_id.encode() + len(state).to_bytes(_LENGTH_BYTES, "little") + state + buffers
    return _MAGIC + xxhash.xxh3_64_intdigest(body).to_bytes(_SUM_BYTES, "little") + body


def unseal(data: bytes, run_id: str, path: str) -> dict[str, bytes]:
    """Return state and buffers.

    Raises:
        CorruptPageError: The bytes are not what `seal` returned for this id.
    """
    body = data[len(_MAGIC) + _SUM_BYTES :]
    value = xxhash.xxh3_64_intdigest(body).to_bytes(_SUM_BYTES, "little")
    if len(data) < _HEAD_BYTES or data[: len(_MAGIC) + _SUM_BYTES] != _MAGIC + value:
        raise CorruptPageError(errno.EBADMSG, "the state of the run is damaged", path)
    if body[:_ID_BYTES] != run_id.encode():
        raise CorruptPageError(
            errno.EBADMSG, "the state of the run belongs to another checkpoint", path
        )
    start = _ID_BYTES + _LENGTH_BYTES
    end = start + int.from_bytes(body[_ID_BYTES:start], "little")
    return {"state": body[start:end], "buffers": body[end:]}


def seal_inside(state: bytes, buffers: bytes) -> torch.Tensor:
    """Return what a checkpoint holds under `RUN_STATE`: bytes, shape (n,), uint8."""
    return torch.frombuffer(bytearray(seal(NO_ID, state, buffers)), dtype=torch.uint8)


def beside(path: str | os.PathLike[str]) -> Path:
    """Return where the file beside a checkpoint is."""
    return Path(f"{os.fspath(path)}.run")


class RunFile:
    """The file beside a checkpoint that has just been saved.

    Args:
        target: The checkpoint.
        run_id: The id that it holds.
    """

    def __init__(self, target: Path, run_id: str) -> None:
        self._target = target.absolute()
        self._run_id = run_id
        self._saved = self._facts()

    def _facts(self) -> tuple[int, int, int] | None:
        try:
            facts = self._target.stat()
        except OSError:
            return None
        return facts.st_dev, facts.st_ino, facts.st_mtime_ns

    def put(self, state: bytes, buffers: Path) -> None:
        """Write it, unless the checkpoint has been deleted or written over since.

        Args:
            state: The state of the run.
            buffers: The file with what the buffers of the module were when the run began.
        """
        path = beside(self._target)
        if self._facts() != self._saved or self._saved is None:
            return
        if os.path.lexists(path) and not _is_ours(path):
            why = f"{path} is there, and is no state of a run"
        else:
            try:
                write_file(path, seal(self._run_id, state, buffers.read_bytes()))
            except OSError as error:
                why = str(error)
            else:
                return
        log.warning(
            "%s: the checkpoint is whole, but will be resumed with the data of its epoch from "
            "their beginning.",
            why,
        )


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def drop_beside(path: str | os.PathLike[str]) -> None:
    """Delete the file beside a checkpoint; one that is no state of a run stays."""
    file = beside(path)
    if _is_ours(file):
        file.unlink(missing_ok=True)


def is_taken_in(checkpoint: Mapping[str, Any]) -> bool:
    """Tell whether a loaded checkpoint holds the state of a run."""
    found = checkpoint.get(RUN_STATE)
    return isinstance(found, Mapping) and {"state", "buffers"} == found.keys()


def take_in(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Put what lies in or beside a standard file into its checkpoint, as in a linked one.

    What is missing or damaged becomes a reason under `MISSING`: the weights are there all the same.

    Args:
        checkpoint: As it was loaded; changed.
        path: Its file, a symbolic link to it, or its URL.
    """
    run_id, inside = checkpoint.pop(RUN_ID, None), checkpoint.get(RUN_STATE)
    try:
        if isinstance(inside, torch.Tensor):
            data = inside.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            checkpoint[RUN_STATE] = unseal(data, NO_ID, str(path))
        elif inside is None and isinstance(run_id, str):
            file = beside(path if "://" in str(path) else os.path.realpath(path))
            if not os.path.lexists(file):
                checkpoint[RUN_STATE] = {
                    MISSING: f"{file}, which lay beside the checkpoint, is not there (it goes with "
                    "the checkpoint, and is written when the batch ends)"
                }
                return
            checkpoint[RUN_STATE] = unseal(read_file(file), run_id, str(file))
    except (CorruptPageError, StorageError) as error:
        checkpoint[RUN_STATE] = {MISSING: str(error)}
