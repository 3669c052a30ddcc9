"""Checkpoints in the standard format or linked, written and read without a copy in RAM."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from mt_lightning.engine.plain import AS_STORED
from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.plugins.linked import (
    RUN_STATE,
    add_run_state,
    folders_of,
    load_linked,
    remove_linked,
    save_linked,
)
from mt_lightning.plugins.run_file import (
    MISSING,
    RUN_ID,
    RunFile,
    drop_beside,
    is_taken_in,
    seal_inside,
    take_in,
)
from mt_lightning.tiers.checkpoint_files import check_room, doom, remove_folder
from mt_lightning.tiers.coding import drop_unused_planes
from mt_lightning.tiers.lock import held_directories
from mt_lightning.tiers.manifest_reader import is_manifest

log = logging.getLogger(__name__)


@contextmanager
def as_stored(io: object) -> Iterator[None]:
    """Let an attached engine give coded state as it is on disk, where `io` keeps it so."""
    linked = isinstance(io, PagedCheckpointIO) and io.format == "linked"
    drop_unused_planes()
    token = AS_STORED.set(linked)
    try:
        yield
    finally:
        AS_STORED.reset(token)


RunState = tuple[bytes, Path]
"""The state of a run, and the file with what its buffers were when it began."""


class SavingRun(Protocol):
    """What a checkpoint asks of the run that it is saved from."""

    def check(self, sources: Iterable[Path]) -> None:
        """Raise when there is no room to go on once these files are linked."""

    def state(self) -> RunState | str | None:
        """Return what a checkpoint that is saved now goes on from.

        A string says why there is nothing; None means that it is known when the batch ends.
        """

    def when_known(self, put: Callable[[bytes, Path], None]) -> None:
        """Call `put` with the state when the batch ends, if there is one then."""


class PagedCheckpointIO(TorchCheckpointIO):
    """CheckpointIO plugin of `strategy="megatrain"`.

    Either format is read, whichever is written.

    Args:
        format: "lightning", the standard file, which plain Lightning reads. The tensors of a paged
            run's checkpoint are mapped page files, so they are streamed from drive to drive;
            Lightning's own plugin would first build the whole file in RAM, twice. "linked": the
            page files get a second name beside the run, and a small manifest says what they are.
            The time it takes follows the number of pages, not their bytes.

    Raises:
        ConfigError: There is no such format.
    """

    def __init__(self, format: Literal["lightning", "linked"] = "lightning") -> None:
        if format not in ("lightning", "linked"):
            raise ConfigError(f"format={format!r}: choose 'lightning' or 'linked'.")
        self.format = format
        self.run: SavingRun | None = None
        """The run whose checkpoints these are, while one is trained."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None
    ) -> None:
        """Write `checkpoint` beside `path`, make it durable, then move it into place.

        Raises:
            BudgetError: A linked checkpoint would pass `max_disk_gb`.
            StorageError: The file cannot be written; what was at `path` stays.
        """
        if storage_options is not None:
            raise TypeError("PagedCheckpointIO takes no storage_options.")
        remote = "://" in str(path)
        if remote and self.format == "linked":
            raise ConfigError(
                f"{path}: a linked checkpoint is on a drive of this machine. Give a local "
                "path, or use PagedCheckpointIO(format='lightning')."
            )
        target = Path(path)
        run = self.run if "optimizer_states" in checkpoint else None
        state = run.state() if run is not None else None
        checkpoint = {key: value for key, value in checkpoint.items() if key != RUN_ID}
        if isinstance(state, str):
            checkpoint[RUN_STATE] = {MISSING: state}
        if self.format == "linked" and self._save_linked(checkpoint, target, state):
            drop_beside(target)
            return
        run_id = secrets.token_hex(8)
        if isinstance(state, tuple):
            checkpoint[RUN_STATE] = seal_inside(state[0], state[1].read_bytes())
        elif run is not None and state is None:
            checkpoint[RUN_ID] = run_id
        elif is_taken_in(checkpoint):  # loaded, and saved again
            checkpoint[RUN_STATE] = seal_inside(**checkpoint[RUN_STATE])
        if remote:
            super().save_checkpoint(checkpoint, path)
            return
        old = folders_of(target)
        part = target.with_name(f"{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            doom(old, target)
            part.replace(target)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            number = error.errno if isinstance(error, OSError) else None
            raise StorageError(
                number, f"cannot write the checkpoint: {error}. Free some space", str(target)
            ) from error
        for folder in old:
            remove_folder(folder)
        drop_beside(target)
        if RUN_ID in checkpoint and run is not None:
            run.when_known(RunFile(target, run_id).put)

    def _save_linked(
        self, checkpoint: dict[str, Any], target: Path, state: RunState | str | None
    ) -> bool:
        manifest = save_linked(checkpoint, target, self.run.check if self.run else check_room)
        if manifest is None:
            log.info("%s holds nothing that is on disk: it is a standard file.", target)
            return False

        def put(state: bytes, buffers: Path) -> None:
            # One that was written over since is gone.
            if manifest.folders[0].is_dir():
                add_run_state(manifest, state, buffers)

        if isinstance(state, tuple):
            put(*state)
        elif state is None and self.run is not None and "optimizer_states" in checkpoint:
            self.run.when_known(put)
        return True

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint: of a linked one its page files as well, else the file beside it.

        Raises:
            StorageError: A file cannot be deleted.
        """
        if "://" in str(path):
            super().remove_checkpoint(path)
            return
        drop_beside(path)
        if is_manifest(path):
            remove_linked(Path(path))
        else:
            super().remove_checkpoint(path)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Map the file; tensors are read from it as they are needed.

        Args:
            path: The file, of either format. The data of a linked one are verified at once.
            map_location: Not used: tensors stay in the mapping until pages take them.
            weights_only: None means True; False unpickles, so only for files you trust.

        Raises:
            FileNotFoundError: There is no such file.
            ConfigError: The file is no checkpoint, or holds more than weights and plain values.
            StorageError: A file of a linked checkpoint is missing.
            CorruptPageError: A file of a linked checkpoint is damaged.
        """
        if "://" in str(path):
            remote = super().load_checkpoint(path, weights_only=weights_only)
            take_in(remote, path)
            return remote
        if not Path(path).is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        only = True if weights_only is None else weights_only
        if is_manifest(path):
            return load_linked(Path(path), held_directories(), only)
        try:
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=only)
        except Exception as error:
            raise ConfigError(
                f"{path} cannot be loaded as a checkpoint: {error}. If you trust the file and "
                f"it holds "
                "objects other than tensors and plain values, pass weights_only=False."
            ) from error
        if isinstance(checkpoint, dict):
            take_in(checkpoint, path)
        return checkpoint
