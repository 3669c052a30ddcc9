"""Arguments of a Trainer in the wrong place, and models that it cannot page."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.pretrained import forget_quantizer, is_quantized


def check_inputs(
    model: Any,
    args: Any,
    data_collator: Any,
    processing_class: Any,
    compute_metrics: Any,
    optimizers: Any,
) -> None:
    """Raise ConfigError for an argument that is no such thing, or a package that is missing."""
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            "mt.Trainer needs accelerate, which transformers asks for in TrainingArguments. Run: "
            "pip install 'mt-lightning[trainer]'."
        )
    if isinstance(model, (str, bytes)) or not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is {_kind(model)}; give the module, such as "
            "AutoModelForCausalLM.from_pretrained(...)."
        )
    if args is not None and not isinstance(args, TrainingArguments):
        raise ConfigError(
            f"args is {_kind(args)}; the arguments are mt.Trainer(model, args, data_collator, "
            "train_dataset, ...), and args is a transformers.TrainingArguments. Name them."
        )
    for name, value in (("data_collator", data_collator), ("compute_metrics", compute_metrics)):
        if value is not None and not callable(value):
            raise ConfigError(
                f"{name} is {_kind(value)}, which cannot be called. Name the arguments: "
                "mt.Trainer(model=..., args=..., train_dataset=...)."
            )
    if isinstance(processing_class, (str, bytes)):
        raise ConfigError(
            f"processing_class is {_kind(processing_class)}; give the tokenizer, such as "
            "AutoTokenizer.from_pretrained(...)."
        )
    if not isinstance(optimizers, tuple) or len(optimizers) != 2:
        raise ConfigError("optimizers is a tuple of an optimizer and a scheduler, or of None.")


def check_model(model: nn.Module) -> None:
    """Raise ConfigError for weights on a device, quantised, or spread by accelerate."""
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"{name} is on {param.device}: mt.Trainer starts from weights on the CPU, and "
                "brings them where they are needed. Load without device_map, and do not call "
                "model.to() or model.cuda()."
            )
        if type(param.data) is not torch.Tensor:
            raise ConfigError(
                f"{name} is a {type(param.data).__name__}, no plain tensor: quantised weights "
                "cannot be trained in pages. Load the model without quantization_config (FP8 and "
                "MXFP4 checkpoints: with one that has dequantize=True)."
            )
        if not param.dtype.is_floating_point and param.requires_grad:
            raise ConfigError(f"{name} is {param.dtype}, which cannot be trained.")
    if is_quantized(model):
        raise ConfigError(
            f"the model is quantised ({type(model.hf_quantizer).__name__}); load it without "  # pyright: ignore
            "quantization_config, or with one that has dequantize=True."
        )
    forget_quantizer(model)
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:  # pyright: ignore
        raise ConfigError(
            "the model was loaded with a device_map that spreads it. Load it without one."
        )


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
