"""Where the model of a Trainer computes: on a GPU where torch finds one, as in transformers."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from transformers import TrainingArguments

log = logging.getLogger(__name__)


def accelerator_of(args: TrainingArguments) -> Literal["cpu", "gpu"]:
    """Return Lightning's name of what computes; `use_cpu` asks for the CPU.

    Where there are several GPUs, one of them does: then a batch has the samples of one device.
    """
    if args.use_cpu or not torch.cuda.is_available():
        return "cpu"
    if args.n_gpu > 1:
        log.warning(
            "mt.Trainer computes on one of %d GPUs, and a batch has the %d samples of one. Set "
            "CUDA_VISIBLE_DEVICES to choose it.",
            args.n_gpu,
            args.per_device_train_batch_size,
        )
        args._n_gpu = 1
    return "gpu"
