"""Lets transformers' `from_pretrained` keep weights on disk: one tensor in RAM at a time.

[Note: where the weights are]
A tensor whose dtype the checkpoint has already is a private mapping of its file: safetensors gives
it so. Everything else (another dtype, experts that are fused, dequantised weights) is made in RAM
by transformers, tensor by tensor. Here each is written to a file without a name as soon as it is
made, and the parameter becomes a private mapping of that. What is fused is fused in that file. So a
model that was loaded is an ordinary one: reading a weight reads true values from disk, writing to
it copies the touched memory pages, and nothing is left on the drive when the last tensor is gone.
A Trainer moves the weights to pages.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from mt_lightning.huggingface.mapped_files import is_file_backed
from mt_lightning.huggingface.weight_file import WeightFile
from mt_lightning.tiers.filesystem import free_bytes
from mt_lightning.tiers.heap import give_back_heap, returning_freed_memory

log = logging.getLogger(__name__)

_SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay in RAM: a mapping costs as much."""

_MXFP4_ROWS = 1 << 15
"""Rows of 32 weights that are expanded at once."""


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
    unknown = _why_unknown(_HOOKS)
    if unknown is not None:
        warnings.warn(
            f"transformers {transformers.__version__} loads weights in a way that mt_lightning "
            f"does not know ({unknown}): from_pretrained keeps in RAM what is not mapped from its "
            "file. Training is not affected.",
            stacklevel=3,
        )
        return
    for_some = {key: hook for key, hook in _FOR_SOME.items() if _why_unknown({key: hook}) is None}
    for (module, name), (replacement, _) in {**_HOOKS, **for_some}.items():
        target = importlib.import_module(module)
        _now.originals[name] = getattr(target, name)
        setattr(target, name, replacement)


def disable() -> None:
    """Load as transformers does."""
    for module, name in (*_HOOKS, *_FOR_SOME):
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


def _why_unknown(hooks: Mapping[tuple[str, str], tuple[Any, tuple[str, ...]]]) -> str | None:
    """Return what differs from the transformers that is known, None where nothing does."""
    for (module, name), (_, expected) in hooks.items():
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
    with _own_file() as file, _InFile(file, (torch.stack, torch.cat, torch.Tensor.contiguous)):
        return _original("convert_and_load_state_dict_in_model")(*args, **kwargs)


def _load_gguf(*args: Any, **kwargs: Any) -> Any:
    """Expand the weights of a GGUF file, which come as one dict, into a file of its own."""
    with _own_file() as file, _InFile(file, (torch.Tensor.to,)):
        return _original("load_gguf_checkpoint")(*args, **kwargs)


def _convert_mxfp4(*args: Any, **kwargs: Any) -> Any:
    """Expand MXFP4 in pieces; transformers' own pieces are larger than any weight."""
    kwargs["rows_per_chunk"] = min(_MXFP4_ROWS, kwargs.get("rows_per_chunk", _MXFP4_ROWS))
    return _original("convert_moe_packed_tensors")(*args, **kwargs)


@contextlib.contextmanager
def _own_file() -> Iterator[WeightFile]:
    outer, _now.file = _now.file, WeightFile(_now.directory or os.getcwd())
    try:
        with returning_freed_memory():  # else as much as the weights stays in the heap
            yield _now.file
    finally:
        _now.file.close()
        _now.file = outer


class _InFile(TorchFunctionMode):
    """Lets functions of torch write large results into a file.

    Args:
        file: The file.
        functions: Those functions.
    """

    def __init__(self, file: WeightFile, functions: tuple[Any, ...]) -> None:
        super().__init__()
        self._file = file
        self._functions = functions

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function."""
        kwargs = kwargs or {}
        if func not in self._functions or "out" in kwargs:
            return func(*args, **kwargs)
        if func is torch.Tensor.to:
            result = func(*args, **kwargs)
            wanted = _is_plain(result) and not is_file_backed(result)
            return self._file.hold(result) if wanted else result
        if func is torch.Tensor.contiguous:
            (tensor,) = args
            if kwargs or not _is_plain(tensor) or tensor.is_contiguous():
                return func(*args, **kwargs)
            return self._file.room(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        shape = _result_shape(func, *args, **kwargs)
        if shape is None:
            return func(*args, **kwargs)
        out = self._file.room(shape, args[0][0].dtype)
        return func(*args, **kwargs, out=out)


def _result_shape(func: Any, tensors: Any, *args: Any, **kwargs: Any) -> tuple[int, ...] | None:
    """Return the shape of large tensors of one kind joined, None for anything else."""
    given = list(tensors)
    if not given or not all(_is_plain(each, 0) and each.dtype == given[0].dtype for each in given):
        return None
    metas = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in given]
    made = func(metas, *args, **kwargs)
    return tuple(made.shape) if made.numel() * made.element_size() >= _SMALLEST_BYTES else None


def _spawn(thread_pool: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Read when it is needed: threads would read ahead, into RAM, without a bound."""
    return _original("spawn_materialize")(None, tensor, *args, **kwargs)


def _set_param(
    model: nn.Module, target_name: str, param_value: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """Give a module its parameter, on disk."""
    file = _now.file
    if file is not None and _is_plain(param_value):
        held = file.kept(param_value)
        if held is None and not is_file_backed(param_value):
            held = file.hold(param_value)
        if held is not None:
            # In place: transformers still refers to it while the next tensor is made.
            param_value.data = held
    _original("set_param_for_module")(model, target_name, param_value, *args, **kwargs)
    give_back_heap()  # what the tensors before were made of


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

_FOR_SOME: dict[tuple[str, str], tuple[Any, tuple[str, ...]]] = {
    ("transformers.modeling_gguf_pytorch_utils", "load_gguf_checkpoint"): (
        _load_gguf,
        ("gguf_checkpoint_path", "return_tensors"),
    ),
    ("transformers.integrations.mxfp4", "convert_moe_packed_tensors"): (
        _convert_mxfp4,
        ("blocks", "scales", "dtype", "rows_per_chunk"),
    ),
}
"""The same for what some checkpoints need; where one is missing, those take more memory."""


def _is_plain(tensor: Any, smallest_bytes: int = _SMALLEST_BYTES) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() * tensor.element_size() >= smallest_bytes
    )


def _roomiest(directories: Sequence[str] | None) -> str | None:
    paths = [str(Path(each).expanduser().absolute()) for each in directories or ()]
    return max(paths, key=free_bytes, default=None)
