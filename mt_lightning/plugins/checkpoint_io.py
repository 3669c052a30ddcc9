"""Checkpoints in the standard format or linked, written and read without a copy in RAM."""

from __future__ import annotations

import logging
import os
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
from mt_lightning.plugins.linked import folders_of, load_linked, remove_linked, save_linked
from mt_lightning.tiers.checkpoint_files import check_room, doom, remove_folder
from mt_lightning.tiers.coding import drop_unused_planes
from mt_lightning.tiers.lock import held_directories
from mt_lightning.tiers.manifest import Manifest
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


class LinkedRun(Protocol):
    """What a linked checkpoint asks of the run that it is saved from."""

    def check(self, sources: Iterable[Path]) -> None:
        """Raise when there is no room to go on once these files are linked."""

    def saved(self, manifest: Manifest) -> None:
        """Take note of a checkpoint."""


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
        self.run: LinkedRun | None = None
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
        if "://" in str(path):
            if self.format == "linked":
                raise ConfigError(
                    f"{path}: a linked checkpoint is on a drive of this machine. Give a local "
                    "path, or use PagedCheckpointIO(format='lightning')."
                )
            super().save_checkpoint(checkpoint, path)
            return
        target = Path(path)
        if self.format == "linked" and self._save_linked(checkpoint, target):
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

    def _save_linked(self, checkpoint: dict[str, Any], target: Path) -> bool:
        manifest = save_linked(checkpoint, target, self.run.check if self.run else check_room)
        if manifest is None:
            log.info("%s holds nothing that is on disk: it is a standard file.", target)
            return False
        if self.run is not None:
            self.run.saved(manifest)
        return True

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint: of a linked one, its page files as well.

        Raises:
            StorageError: A file cannot be deleted.
        """
        if "://" in str(path) or not is_manifest(path):
            super().remove_checkpoint(path)
        else:
            remove_linked(Path(path))

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
            return super().load_checkpoint(path, weights_only=weights_only)
        if not Path(path).is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        only = True if weights_only is None else weights_only
        if is_manifest(path):
            return load_linked(Path(path), held_directories(), only)
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=only)
        except Exception as error:
            raise ConfigError(
                f"{path} cannot be loaded as a checkpoint: {error}. If you trust the file and "
                f"it holds "
                "objects other than tensors and plain values, pass weights_only=False."
            ) from error
