"""`megatrain export`: its arguments, and a checkpoint whose optimizer state has another form.

[Note: what is in RAM]
The checkpoint is mapped, and each converted tensor is moved to a mapped file without a name as soon
as it is made; so one parameter's state is in RAM at a time, whatever the size of the model.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from mt_lightning.commands.export_model import ModelOptions, as_storage_error, export_model
from mt_lightning.commands.output import progress, progress_of_bytes
from mt_lightning.errors import ConfigError
from mt_lightning.export.shards import DEFAULT_SHARD_SIZE
from mt_lightning.optim.convert import FORMS, convert_group, convert_state, key_of_state
from mt_lightning.plugins.checkpoint_io import PagedCheckpointIO
from mt_lightning.plugins.linked import RUN_STATE
from mt_lightning.plugins.run_file import RUN_ID
from mt_lightning_command import COMMANDS

_DESCRIPTION = """\
Write the weights of a run or a checkpoint as safetensors. OUT is a directory that
AutoModelForCausalLM.from_pretrained reads or, if it ends in .safetensors, one file with the plain
state dict. With --optimizer, OUT is a standard checkpoint. A linked one is read as any other.
"""
_EXAMPLES = """\
examples:
  megatrain export run1 model                      the last commit of the run in offload_dir run1
  megatrain export last.ckpt model --model gpt2    a checkpoint that does not know its config
  megatrain export last.ckpt weights.safetensors   any module
  megatrain export a.ckpt b.ckpt --optimizer R1    optimizer state in another form; b.ckpt is a
                                                   standard file, whether a.ckpt is linked or not
"""


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        target: The new checkpoint.
        num_tensors: Parameters whose state was converted.
        before_bytes: Bytes of their state before.
        after_bytes: Bytes of their state now.
    """

    target: Path
    num_tensors: int
    before_bytes: int
    after_bytes: int


def export_optimizer(source: Path, target: Path, form: str, progress: Progress) -> Exported:
    """Copy a Lightning checkpoint with its optimizer state in another form.

    Args:
        source: A checkpoint that plain Lightning or the strategy wrote.
        target: Where the new one goes; it must not exist.
        form: "adamw" for `torch.optim.AdamW` and `Adam` with raw or lossless state, else a format.
        progress: Where to show how far it is.

    Raises:
        ConfigError: There is no such form, `source` is no checkpoint or holds no state of Adam.
        StorageError: `target` cannot be written.
    """
    if form not in FORMS:
        raise ConfigError(f"--optimizer {form}: use one of {', '.join(FORMS)}.")
    if target.exists():
        raise ConfigError(f"{target} exists; give another name, or delete it first.")
    if not source.is_file():
        raise ConfigError(f"{source} is not a file; give a checkpoint.")
    checkpoint = PagedCheckpointIO().load_checkpoint(source)
    if not isinstance(checkpoint, dict) or not checkpoint.get("optimizer_states"):
        raise ConfigError(
            f"{source} holds no optimizer state: it was saved with save_weights_only=True, or is "
            "not a checkpoint of a training run."
        )
    for key in (RUN_STATE, RUN_ID):  # they belong to the state as it was saved
        checkpoint.pop(key, None)
    try:
        with as_storage_error("checkpoint", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with _spool(target) as directory:
                return _export(checkpoint, target, form, directory, progress)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{source} does not hold the optimizer state of a training run: {error!r}."
        ) from error


def _spool(target: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-")


def _export(
    checkpoint: dict[str, Any], target: Path, form: str, directory: str, progress: Progress
) -> Exported:
    spool = _Spool(Path(directory))
    converted = [_convert(state, form, spool, progress) for state in checkpoint["optimizer_states"]]
    PagedCheckpointIO().save_checkpoint({**checkpoint, "optimizer_states": converted}, target)
    return Exported(target, spool.num_states, spool.before_bytes, spool.after_bytes)


class _Spool:
    """Moves tensors to files that nobody else sees, and counts them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.num_states = self.before_bytes = self.after_bytes = 0

    def keep(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """Return `after` with its tensors in files."""
        self.num_states += 1
        self.before_bytes += _num_bytes(before)
        self.after_bytes += _num_bytes(after)
        return {name: self._moved(value) for name, value in after.items()}

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel() < 4096:
            return value
        path = self._directory / "tensor"
        flat = torch.from_file(str(path), shared=True, size=value.numel(), dtype=value.dtype)
        path.unlink()
        return flat.as_strided(value.shape, value.stride()).copy_(value)


def _num_bytes(state: dict[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def _convert(
    state_dict: dict[str, Any], form: str, spool: _Spool, progress: Progress
) -> dict[str, Any]:
    states: dict[Any, dict[str, Any]] = {}
    task = progress.add_task("optimizer state", total=len(state_dict["state"]))
    position = 0
    for group in state_dict["param_groups"]:
        for param in group["params"]:
            state = state_dict["state"].get(param)
            if state:
                salt = key_of_state(group, state, position)
                states[param] = spool.keep(state, convert_state(state, form, key=salt))
                progress.advance(task)
            position += 1
    groups = [convert_group(group, form) for group in state_dict["param_groups"]]
    return {**state_dict, "state": states, "param_groups": groups}


def add_export_parser(commands: Any) -> None:
    """Add `export` to the subparsers of the command line."""
    parser = commands.add_parser(
        "export",
        help=COMMANDS["export"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "source",
        type=Path,
        nargs="+",
        metavar="IN",
        help="a checkpoint, or the offload_dir of a run (all of them, if it has several)",
    )
    parser.add_argument("target", type=Path, metavar="OUT", help="what to write; it must not exist")
    parser.add_argument(
        "--model",
        metavar="NAME_OR_DIR",
        help="model whose config and tokenizer are used, where IN does not know",
    )
    parser.add_argument("--tokenizer", metavar="NAME_OR_DIR", help="its tokenizer, if another")
    parser.add_argument(
        "--prefix", metavar="NAME", help="attribute of the module that holds the model"
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help=f"most bytes of weights in one file (default: {DEFAULT_SHARD_SIZE})",
    )
    parser.add_argument(
        "--masters",
        action="store_true",
        help="of a checkpoint with precision bf16-true: write its fp32 masters",
    )
    parser.add_argument(
        "--optimizer",
        metavar="FORM",
        help=f"write a checkpoint with its optimizer state as {', '.join(FORMS)}",
    )


def run_export(options: argparse.Namespace) -> int:
    """Export and say what was written."""
    model = ModelOptions(
        model=options.model,
        tokenizer=options.tokenizer,
        prefix=options.prefix,
        max_shard_size=options.max_shard_size,
        masters=options.masters,
    )
    if options.optimizer is None:
        return _run_model(options.source, options.target, model)
    if model != ModelOptions() or len(options.source) > 1:
        raise ConfigError(
            "--optimizer writes one checkpoint from one: give one IN, and no --model, "
            "--tokenizer, --prefix, --max-shard-size or --masters."
        )
    with progress() as bar:
        done = export_optimizer(options.source[0], options.target, options.optimizer, bar)
    console = Console()
    console.print(
        f"{done.target}: optimizer state of {done.num_tensors} parameters as {options.optimizer}, "
        f"{done.before_bytes / 2**20:.1f} MiB before, {done.after_bytes / 2**20:.1f} MiB now",
        soft_wrap=True,
    )
    return 0


def _run_model(sources: list[Path], target: Path, options: ModelOptions) -> int:
    with progress_of_bytes() as bar:
        task = bar.add_task("weights", total=None)
        done = export_model(
            sources,
            target,
            options,
            lambda nbytes: bar.update(task, total=nbytes),
            lambda nbytes: bar.advance(task, nbytes),
        )
    saved = done.saved
    what = [
        done.architecture or "state dict",
        f"{saved.num_tensors} tensors",
        f"{saved.nbytes / 2**20:.1f} MiB",
        f"{len(saved.files)} file{'s' if len(saved.files) > 1 else ''}",
    ]
    if done.step is not None:
        what.append(f"step {done.step}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{target}: {', '.join(what)}", markup=False)
    if done.left_out:
        some = ", ".join(done.left_out[:4]) + (", ..." if len(done.left_out) > 4 else "")
        console.print(f"left out, no part of the model: {some}", markup=False)
    if done.architecture is not None:
        found = done.tokenizer or "none found; give --tokenizer"
        console.print(f"tokenizer: {found}", markup=False)
    return 0
