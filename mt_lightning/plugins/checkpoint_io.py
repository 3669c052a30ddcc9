"""Checkpoint files in Lightning's standard format, written and read without a copy in RAM."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from mt_lightning.errors import ConfigError, StorageError


class PagedCheckpointIO(TorchCheckpointIO):
    """CheckpointIO plugin of `strategy="megatrain"`.

    The tensors of a paged run's checkpoint are mapped page files, so `torch.save` streams them from
    drive to drive. Lightning's own plugin would first build the whole file in RAM, twice.

    Args:
        format: "lightning", the standard file; plain Lightning reads it, and its files are read
            here.

    Raises:
        ConfigError: The format is not available.
    """

    def __init__(self, format: Literal["lightning", "linked"] = "lightning") -> None:
        if format == "linked":
            raise ConfigError("format='linked' is not available in this version; use 'lightning'.")
        if format != "lightning":
            raise ConfigError(f"format={format!r}: choose 'lightning'.")
        self.format = format

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None
    ) -> None:
        """Write `checkpoint` beside `path`, make it durable, then move it into place.

        Raises:
            StorageError: The file cannot be written; what was at `path` stays.
        """
        if storage_options is not None:
            raise TypeError("PagedCheckpointIO takes no storage_options.")
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path)
            return
        target = Path(path)
        part = target.with_name(f"{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            number = error.errno if isinstance(error, OSError) else None
            raise StorageError(
                number, f"cannot write the checkpoint: {error}. Free some space", str(target)
            ) from error

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Map the file; tensors are read from it as they are needed.

        Args:
            path: The file.
            map_location: Not used: tensors stay in the mapping until pages take them.
            weights_only: None means True; False unpickles, so only for files you trust.

        Raises:
            FileNotFoundError: There is no such file.
            ConfigError: The file is no checkpoint, or holds more than weights and plain values.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        if not Path(path).is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        only = True if weights_only is None else weights_only
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=only)
        except Exception as error:
            raise ConfigError(
                f"{path} cannot be loaded as a checkpoint: {error}. If you trust the file and "
                f"it holds "
                "objects other than tensors and plain values, pass weights_only=False."
            ) from error
