"""Every field of TrainingArguments: what it does here, or why it is refused.

A field that is not in these tables is refused too, as soon as it differs from its default, so that
a newer transformers cannot bring one that nobody follows.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.trainer.sft import MAPPED as SFT_MAPPED
from mt_lightning.huggingface.trainer.sft import is_sft

MAPPED: dict[str, str] = {
    "output_dir": "where checkpoints go",
    "per_device_train_batch_size": "samples of a training batch",
    "num_train_epochs": "length of the run, in epochs",
    "max_steps": "length of the run, in optimizer steps",
    "learning_rate": "of the optimizer",
    "lr_scheduler_type": "transformers' own scheduler; all but the two that wait for a metric",
    "lr_scheduler_kwargs": "of the scheduler",
    "warmup_steps": "of the scheduler",
    "optim": "adamw_torch, adamw_torch_fused, adafactor, adagrad, rmsprop or sgd",
    "optim_args": "of the optimizer",
    "weight_decay": "for the parameters that transformers lets decay",
    "adam_beta1": "of the optimizer",
    "adam_beta2": "of the optimizer",
    "adam_epsilon": "of the optimizer",
    "gradient_accumulation_steps": "batches of an optimizer step",
    "average_tokens_across_devices": "there is one device: True and False are the same",
    "max_grad_norm": "gradients are scaled to this norm; 0 leaves them alone",
    "label_smoothing_factor": "transformers' LabelSmoother",
    "bf16": "precision='bf16-mixed'",
    "activation_checkpointing": "True: recompute=True; False: what mt.init says",
    "activation_checkpointing_kwargs": "use_reentrant, preserve_rng_state and determinism_check: "
    "units are recomputed exactly whatever they say; others are refused",
    "gradient_checkpointing": "another name of activation_checkpointing",
    "gradient_checkpointing_kwargs": "another name of activation_checkpointing_kwargs",
    "use_cache": "put into the config of the model",
    "torch_empty_cache_steps": "there is no cache of a GPU to empty",
    "logging_strategy": "when losses are logged",
    "logging_steps": "when losses are logged",
    "logging_first_step": "when losses are logged",
    "log_on_each_node": "there is one node",
    "logging_nan_inf_filter": "what a NaN loss adds to the logged mean",
    "include_num_input_tokens_seen": "counted in the state and in the log",
    "log_level": "verbosity of transformers' log",
    "log_level_replica": "there is one process, the main one",
    "disable_tqdm": "no progress bar; logs are printed instead",
    "report_to": "transformers' own callbacks",
    "run_name": "read by the callbacks of report_to",
    "project": "read by the callbacks of report_to",
    "trackio_space_id": "read by the callbacks of report_to",
    "trackio_bucket_id": "read by the callbacks of report_to",
    "trackio_static_space_id": "read by the callbacks of report_to",
    "eval_strategy": "when the model is evaluated",
    "eval_steps": "when the model is evaluated",
    "eval_delay": "when the model is evaluated",
    "eval_on_start": "evaluates before the first step",
    "per_device_eval_batch_size": "samples of an evaluation batch",
    "prediction_loss_only": "no predictions are kept",
    "eval_do_concat_batches": "False: predictions are lists of batches",
    "eval_use_gather_object": "there is one process: nothing is gathered",
    "eval_accumulation_steps": "predictions are in RAM in any case",
    "include_for_metrics": "inputs and losses for compute_metrics",
    "batch_eval_metrics": "compute_metrics sees one batch at a time",
    "save_strategy": "when checkpoint-N is written",
    "save_steps": "when checkpoint-N is written",
    "save_total_limit": "how many of them stay",
    "save_only_model": "weights alone: a checkpoint that training cannot go on from",
    "save_on_each_node": "there is one node",
    "load_best_model_at_end": "loads the weights of the best checkpoint",
    "metric_for_best_model": "which checkpoint is the best",
    "greater_is_better": "which checkpoint is the best",
    "restore_callback_states_from_checkpoint": "states of callbacks on resume",
    "full_determinism": "torch.use_deterministic_algorithms",
    "seed": "of the generators, and of the order of the data",
    "data_seed": "of the order of the data",
    "use_cpu": "whether the CPU computes where there is a GPU; one device in any case",
    "accelerator_config": "its defaults, and even_batches, split_batches, dispatch_batches and "
    "non_blocking, which say nothing for one process",
    "dataloader_drop_last": "of the DataLoader",
    "dataloader_num_workers": "of the DataLoader",
    "dataloader_pin_memory": "not needed: batches are small beside the weights",
    "dataloader_persistent_workers": "of the DataLoader",
    "dataloader_prefetch_factor": "of the DataLoader",
    "dataloader_multiprocessing_context": "of the DataLoader",
    "dataloader_in_order": "of the DataLoader",
    "remove_unused_columns": "columns that the model's forward does not take are left out",
    "label_names": "which inputs are labels",
    "train_sampling_strategy": "random, sequential or group_by_length",
    "length_column_name": "of train_sampling_strategy='group_by_length'",
    "ddp_timeout": "there is one process: nothing is waited for",
    "skip_memory_metrics": "True: the closing table of PagingMonitor measures memory",
    "do_train": "for scripts; transformers' Trainer does not read it either",
    "do_eval": "for scripts; transformers' Trainer does not read it either",
    "do_predict": "for scripts; transformers' Trainer does not read it either",
    "resume_from_checkpoint": "for scripts; transformers' Trainer does not read it either",
    "local_rank": "there is one process",
}
"""Fields that are followed, and how."""

REFUSED: dict[str, str] = {
    "optim_target_modules": "GaLore and APOLLO couple parameters; leave it None",
    "fp16": "use bf16=True, or float32",
    "bf16_full_eval": "pages hold the trained weights; use bf16=True",
    "fp16_full_eval": "pages hold the trained weights; use bf16=True",
    "tf32": "set torch.set_float32_matmul_precision yourself; leave it None",
    "torch_compile": "compile the layers yourself (layer.compile()) and leave it False",
    "torch_compile_backend": "see torch_compile; leave it None",
    "torch_compile_mode": "see torch_compile; leave it None",
    "use_liger_kernel": "losses are taken in chunks anyway; leave it False",
    "liger_kernel_config": "see use_liger_kernel; leave it None",
    "neftune_noise_alpha": "not in this version; leave it None",
    "auto_find_batch_size": "memory is planned before training starts; set "
    "per_device_train_batch_size",
    "enable_jit_checkpoint": "every commit can be resumed anyway; leave it False",
    "push_to_hub": "save, and upload the folder yourself; leave it False",
    "hub_token": "see push_to_hub; leave it None",
    "hub_private_repo": "see push_to_hub; leave it None",
    "hub_model_id": "see push_to_hub; leave it None",
    "hub_strategy": "see push_to_hub; leave it 'every_save'",
    "hub_always_push": "see push_to_hub; leave it False",
    "hub_revision": "see push_to_hub; leave it None",
    "ignore_data_skip": "a resumed run goes on with the data where it was; leave it False",
    "parallelism_config": "there is one process; leave it None",
    "ddp_find_unused_parameters": "there is one process; leave it None",
    "ddp_bucket_cap_mb": "there is one process; leave it None",
    "ddp_broadcast_buffers": "there is one process; leave it None",
    "ddp_static_graph": "there is one process; leave it None",
    "ddp_backend": "there is one process; leave it None",
    "fsdp": "there is one process; leave it None",
    "fsdp_config": "there is one process; leave it None",
    "deepspeed": "pages take its place; leave it None",
    "debug": "see the limits of Concepts for what is checked instead; leave it empty",
}
"""Fields that are refused when they differ from their default, and what to do."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd")
_SAMPLING = ("random", "sequential", "group_by_length")
_WAITING_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")
_CHECKPOINTING = {"use_reentrant", "preserve_rng_state", "determinism_check"}
_ACCELERATOR = {"even_batches", "split_batches", "dispatch_batches", "non_blocking"}


def check_arguments(args: TrainingArguments) -> None:
    """Refuse what is set and would not be followed.

    Raises:
        ConfigError: Lists every such field, its value and what to do.
    """
    problems = [*_unsupported_fields(args), *_unsupported_values(args)]
    if problems:
        raise ConfigError(
            f"{len(problems)} of the TrainingArguments cannot be followed by mt.Trainer:\n"
            + "\n".join(f"- {problem}" for problem in problems)
        )


def unknown_fields(kind: type[TrainingArguments] = TrainingArguments) -> list[str]:
    """Return the fields of a class that no table knows."""
    names = [field.name for field in dataclasses.fields(kind)]
    return [name for name in names if name not in MAPPED and name not in REFUSED]


def _unsupported_fields(args: TrainingArguments) -> list[str]:
    problems = []
    defaults = _defaults(type(args))
    for name, value in _values(args).items():
        followed = name in MAPPED or (is_sft(args) and name in SFT_MAPPED)
        if followed or _plain(value) == _plain(defaults.get(name)):
            continue
        why = REFUSED.get(name, f"this version does not know it; leave it {defaults.get(name)!r}")
        problems.append(f"{name}={_plain(value)!r}: {why}.")
    return problems


def _unsupported_values(args: TrainingArguments) -> list[str]:
    problems = []
    optim, scheduler = str(_plain(args.optim)), str(_plain(args.lr_scheduler_type))
    if optim not in OPTIMIZERS:
        problems.append(f"optim={optim!r}: use one of {', '.join(OPTIMIZERS)}.")
    if scheduler in _WAITING_SCHEDULERS:
        problems.append(
            f"lr_scheduler_type={scheduler!r}: it waits for a metric; use another scheduler."
        )
    sampling = getattr(args, "train_sampling_strategy", "random")
    if sampling not in _SAMPLING:
        problems.append(f"train_sampling_strategy={sampling!r}: use one of {', '.join(_SAMPLING)}.")
    kwargs = getattr(args, "activation_checkpointing_kwargs", None)
    kwargs = kwargs if kwargs is not None else args.gradient_checkpointing_kwargs
    others = sorted(set(kwargs or {}) - _CHECKPOINTING)
    if others:
        problems.append(
            f"activation_checkpointing_kwargs has {', '.join(others)}: recompute= of mt.init "
            "decides what is recomputed; leave them out."
        )
    problems += _accelerator_problems(args)
    if args.skip_memory_metrics is False:
        problems.append("skip_memory_metrics=False: use mt.PagingMonitor; leave it True.")
    return problems


def _accelerator_problems(args: TrainingArguments) -> list[str]:
    config: Any = args.accelerator_config
    if config is None or isinstance(config, (str, Mapping)):
        return []
    default = type(config)()
    changed = {
        name: value
        for name, value in vars(config).items()
        if name not in _ACCELERATOR and value != getattr(default, name, None)
    }
    # One epoch's order comes from the seed alone, which is what True says.
    return [
        f"accelerator_config.{name}={value!r}: leave it {getattr(default, name, None)!r}."
        for name, value in changed.items()
    ]


def _values(args: TrainingArguments) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


def _defaults(kind: type[TrainingArguments]) -> dict[str, Any]:
    """Return the default of each field, as its class leaves it after normalisation."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def _plain(value: Any) -> Any:
    """Return a value as a user writes it: enums by name, nothing for what is empty."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple, dict, str)) and not value:
        return None
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
