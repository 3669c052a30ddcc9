"""Lets transformers' `from_pretrained` keep weights on disk: one tensor in RAM at a time.

[Note: where the weights are]
A tensor whose dtype the checkpoint has already is a private mapping of its file: safetensors gives
it so. Everything else (another dtype, experts that are fused, dequantised weights) is made in RAM
by transformers, tensor by tensor. Here each is written to a file without a name as soon as it is
made, and the parameter becomes a private mapping of that. So a model that was loaded is an ordinary
one: reading a weight reads true values from disk, writing to it copies the touched memory pages,
and nothing is left on the drive when the last tensor is gone. A Trainer moves the weights to pages.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from mt_lightning.errors import StorageError
from mt_lightning.export.weights import bytes_of
from mt_lightning.huggingface.mapped_files import is_file_backed
from mt_lightning.pages.sizes import ALIGN_BYTES, align_up
from mt_lightning.tiers.mapping import PrivateMapping

log = logging.getLogger(__name__)

_SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay in RAM: a mapping costs as much."""


class WeightFile:
    """A file without a name that tensors are written to and mapped from.

    Args:
        directory: Where it lies.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._fd: int | None = None
        self._end = 0
        self._lock = threading.Lock()

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a private mapping of a copy of a tensor on disk.

        Raises:
            StorageError: The drive is full or cannot be written to.
        """
        flat = tensor.detach().contiguous()
        data = bytes_of(flat)
        try:
            with self._lock:
                fd = self._open()
                offset, self._end = self._end, align_up(self._end + data.nbytes, ALIGN_BYTES)
            os.posix_fallocate(fd, offset, data.nbytes)
            done = 0
            while done < data.nbytes:
                done += os.pwrite(fd, data[done : done + (1 << 26)], offset + done)
            mapping = PrivateMapping.of_file(fd, offset, data.nbytes)
        except OSError as error:
            raise StorageError(
                error.errno,
                f"cannot write {data.nbytes} bytes of a weight that is loaded: {error.strerror}. "
                "Free some space, or give mt.init another offload_dir",
                self._directory,
            ) from error
        return mapping.tensor(0, data.nbytes).view(flat.dtype).view(flat.shape)

    def _open(self) -> int:
        if self._fd is None:
            os.makedirs(self._directory, exist_ok=True)
            self._fd, name = tempfile.mkstemp(prefix=".loading-", dir=self._directory)
            os.unlink(name)
        return self._fd

    def close(self) -> None:
        """Give the descriptor back; tensors keep their mappings."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _Streaming:
    """What is in force now, and what it took the place of."""

    def __init__(self) -> None:
        self.directory: str | None = None
        self.file: WeightFile | None = None
        self.originals: dict[str, Any] = {}
        """Functions of transformers by name."""


_now = _Streaming()


def enable(directories: Sequence[str] | None) -> None:
    """Stream every `from_pretrained` from here on.

    Args:
        directories: Where weights go that are not in their file as they are wanted; the one with
            the most free space. None: the current directory.
    """
    _now.directory = _roomiest(directories)
    if _now.originals:
        return
    unknown = _why_unknown()
    if unknown is not None:
        warnings.warn(
            f"transformers {transformers.__version__} loads weights in a way that mt_lightning "
            f"does not know ({unknown}): from_pretrained keeps in RAM what is not mapped from its "
            "file. Training is not affected.",
            stacklevel=3,
        )
        return
    for (module, name), (replacement, _) in _HOOKS.items():
        target = importlib.import_module(module)
        _now.originals[name] = getattr(target, name)
        setattr(target, name, replacement)


def disable() -> None:
    """Load as transformers does."""
    for module, name in _HOOKS:
        if name in _now.originals:
            setattr(importlib.import_module(module), name, _now.originals.pop(name))


@contextlib.contextmanager
def streaming(directories: Sequence[str] | None = None) -> Iterator[None]:
    """Stream for a while, whatever `enable` said."""
    was_enabled, directory = bool(_now.originals), _now.directory
    if not was_enabled or directories is not None:
        enable(directories)
    try:
        yield
    finally:
        _now.directory = directory
        if not was_enabled:
            disable()


def _why_unknown() -> str | None:
    """Return what differs from the transformers that is known, None where nothing does."""
    for (module, name), (_, expected) in _HOOKS.items():
        try:
            function = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            return str(error)
        if not callable(function):
            return f"there is no {name}"
        found = tuple(inspect.signature(function).parameters)
        if found[: len(expected)] != expected:
            return f"{name} takes {', '.join(found)}"
    return None


def _original(name: str) -> Any:
    return _now.originals[name]


def _convert(*args: Any, **kwargs: Any) -> Any:
    """Load the weights of a model into a file of its own."""
    outer, _now.file = _now.file, WeightFile(_now.directory or os.getcwd())
    try:
        return _original("convert_and_load_state_dict_in_model")(*args, **kwargs)
    finally:
        _now.file.close()
        _now.file = outer


def _spawn(thread_pool: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Read when it is needed: threads would read ahead, into RAM, without a bound."""
    return _original("spawn_materialize")(None, tensor, *args, **kwargs)


def _set_param(
    model: nn.Module, target_name: str, param_value: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """Give a module its parameter, on disk."""
    if _now.file is not None and _is_plain(param_value) and not is_file_backed(param_value):
        held = _now.file.hold(param_value)
        if isinstance(param_value, nn.Parameter):
            held = nn.Parameter(held, requires_grad=param_value.requires_grad)
        param_value = held
    _original("set_param_for_module")(model, target_name, param_value, *args, **kwargs)


_HOOKS: dict[tuple[str, str], tuple[Any, tuple[str, ...]]] = {
    ("transformers.core_model_loading", "set_param_for_module"): (
        _set_param,
        ("model", "target_name", "param_value", "loading_info", "hf_quantizer"),
    ),
    ("transformers.core_model_loading", "spawn_materialize"): (_spawn, ("thread_pool", "tensor")),
    ("transformers.modeling_utils", "convert_and_load_state_dict_in_model"): (
        _convert,
        ("model", "state_dict"),
    ),
}
"""Functions of transformers that ours take the place of, and the parameters that theirs have."""


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() * tensor.element_size() >= _SMALLEST_BYTES
    )


def _roomiest(directories: Sequence[str] | None) -> str | None:
    if not directories:
        return None
    found: list[tuple[int, str]] = []
    for directory in directories:
        path = Path(directory).expanduser().absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        status = os.statvfs(there)
        found.append((status.f_bavail * status.f_frsize, str(path)))
    return max(found)[1]
