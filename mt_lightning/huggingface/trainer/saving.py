"""Folders `checkpoint-N`: a model for `from_pretrained`, and what training goes on from."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer as LightningTrainer
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, TrainerState, TrainingArguments

from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.export.shards import save_weights, size_bytes
from mt_lightning.export.weights import TensorWeights
from mt_lightning.huggingface.adapters import is_adapted, save_adapters
from mt_lightning.huggingface.pretrained import save_model
from mt_lightning.huggingface.streamed import streaming
from mt_lightning.huggingface.trainer.flow import Flow

log = logging.getLogger(__name__)

STATE_NAME = "trainer_state.json"
RUN_NAME = "trainer.ckpt"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def save_weights_of(model: nn.Module, processing_class: Any, directory: Path) -> None:
    """Write a model, and its tokenizer if there is one, for `from_pretrained`.

    Of a model of PEFT the adapters are written, for `PeftModel.from_pretrained`.

    Raises:
        StorageError: Something cannot be written.
    """
    if is_adapted(model):
        save_adapters(model, directory)
    elif isinstance(model, PreTrainedModel):
        save_model(model, directory)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        weights = TensorWeights(model.state_dict())
        save_weights(directory, weights, shard_bytes=size_bytes("1TB"), metadata={"format": "pt"})
    if processing_class is not None:
        processing_class.save_pretrained(str(directory))


def save_checkpoint(
    trainer: LightningTrainer, flow: Flow, model: nn.Module, processing_class: Any
) -> None:
    """Write `checkpoint-N`, and delete those that `save_total_limit` has no place for.

    `trainer_state.json` is written last: a folder without it is not complete.
    """
    args, state = flow.args, flow.state
    directory = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
    (directory / STATE_NAME).unlink(missing_ok=True)
    save_weights_of(model, processing_class, directory)
    if state.best_global_step:
        best = directory.parent / f"checkpoint-{state.best_global_step}"
        if best.exists():
            state.best_model_checkpoint = str(best)
    flow.keep_states()
    if not args.save_only_model:
        trainer.save_checkpoint(directory / RUN_NAME)
    try:
        state.save_to_json(str(directory / STATE_NAME))
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot write the state: {error.strerror}", str(directory)
        ) from error
    rotate(trainer, args, state)


def rotate(
    trainer: LightningTrainer,
    args: TrainingArguments,
    state: TrainerState,
    *,
    at_end: bool = False,
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`; the newest and the best stay.

    At the end of training a limit of 1 leaves the best alone, where there is one.
    """
    limit = args.save_total_limit
    if not limit or limit <= 0:
        return
    folders = checkpoints_in(Path(str(args.output_dir)))
    kept = {str(folders[-1])} if folders else set()
    if state.best_model_checkpoint is not None:
        kept = set() if at_end and limit == 1 else kept
        kept.add(str(Path(state.best_model_checkpoint)))
    surplus = len(folders) - max(limit, len(kept))
    for folder in [each for each in folders if str(each) not in kept][: max(0, surplus)]:
        delete_checkpoint(trainer, folder)


def delete_checkpoint(trainer: LightningTrainer, folder: Path) -> None:
    """Delete a folder and what its checkpoint has elsewhere."""
    log.info("%s is deleted: save_total_limit.", folder)
    if (folder / RUN_NAME).exists():
        trainer.strategy.remove_checkpoint(folder / RUN_NAME)
    shutil.rmtree(folder, ignore_errors=True)


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the folders `checkpoint-N` of a directory, by their number."""
    found = [
        (int(match[1]), path)
        for path in (directory.iterdir() if directory.is_dir() else ())
        if path.is_dir() and (match := _FOLDER.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def checkpoint_to_resume(args: TrainingArguments, asked: str | bool | Path) -> Path:
    """Return the folder to go on from.

    Args:
        args: Say where checkpoints are.
        asked: True: the last complete one in `output_dir`; else the folder.

    Raises:
        ConfigError: There is none, or one that training cannot go on from.
    """
    if asked is True:
        output = Path(str(args.output_dir))
        complete = [each for each in checkpoints_in(output) if (each / RUN_NAME).exists()]
        complete = [each for each in complete if (each / STATE_NAME).exists()]
        if not complete:
            raise ConfigError(
                f"resume_from_checkpoint=True, and {output} holds no complete checkpoint-N. Give "
                "the folder of one, or leave it out."
            )
        return complete[-1]
    folder = Path(str(asked))
    if not folder.is_dir():
        raise ConfigError(f"resume_from_checkpoint={str(folder)!r} is no folder.")
    if not (folder / RUN_NAME).exists():
        there = ", ".join(sorted(each.name for each in folder.iterdir())[:8])
        raise ConfigError(
            f"{folder} has no {RUN_NAME} (it has {there}): it was written with "
            "save_only_model=True, or by another Trainer, whose optimizer state is in pickles. "
            "Load its weights with from_pretrained and train from there."
        )
    return folder


def load_weights(model: nn.Module, folder: Path) -> None:
    """Let parameters show the weights of a checkpoint; they are mapped, not copied."""
    if is_adapted(model):
        adapted: Any = model
        adapted.load_adapter(str(folder), adapted.active_adapter, is_trainable=True)
        return
    if isinstance(model, PreTrainedModel):
        with streaming([str(folder.parent)]):
            loaded = type(model).from_pretrained(folder, dtype=model.dtype)
        tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
        for name, param in (*model.named_parameters(), *model.named_buffers()):
            param.data = tensors[name].data.to(param.dtype)
        return
    with safe_open(folder / "model.safetensors", "pt") as file:  # pyright: ignore
        names = set(file.keys())
        for name, param in model.named_parameters(remove_duplicate=False):
            if name in names:
                param.data = file.get_tensor(name)
