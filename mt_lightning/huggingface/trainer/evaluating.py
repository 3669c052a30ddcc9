"""Evaluation and prediction: Lightning runs the batches, this collects what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor
from transformers import EvalPrediction, TrainingArguments
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import denumpify_detensorize, speed_metrics

from mt_lightning.engine.memory import ram_limit_bytes
from mt_lightning.errors import BudgetError
from mt_lightning.huggingface.trainer.flow import Flow
from mt_lightning.huggingface.trainer.module import TrainerModule

GIB = 1 << 30

Metrics = dict[str, float]
ComputeMetrics = Callable[..., dict[str, Any]]


class Evaluation(Callback):
    """Collects one evaluation after the other.

    Args:
        flow: Its callbacks are called, and its log is written.
        module: Makes the outputs.
        compute: Makes metrics of predictions, None for the loss alone.
        max_ram_gb: What predictions may take, in GiB; None: 80 % of what is free.
    """

    def __init__(
        self,
        flow: Flow,
        module: TrainerModule,
        compute: ComputeMetrics | None,
        max_ram_gb: float | None,
    ) -> None:
        self._flow = flow
        self._module = module
        self._compute = compute
        self._max_ram_gb = max_ram_gb
        self.prefixes: list[str] = ["eval"]
        """What metrics of each dataset begin with."""
        self.logs = True
        """Whether metrics are logged and `on_evaluate` called; False for predictions."""
        self.after: Callable[[LightningTrainer, Metrics], None] | None = None
        """Called with the metrics of an evaluation in a fit."""
        self.metrics: Metrics = {}
        self.results: list[Collected] = []
        self._num_finished = 0

    @property
    def keeps_predictions(self) -> bool:
        """Whether an evaluation needs more than losses."""
        wanted = self._compute is not None and not self._flow.args.prediction_loss_only
        return wanted or not self.logs

    def on_validation_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Begin anew."""
        args, loaders = self._flow.args, _as_list(trainer.val_dataloaders)
        self._module.keeps_predictions = self.keeps_predictions and not (
            not self.logs and args.prediction_loss_only
        )
        self.metrics = {}
        self._num_finished = 0
        self.results = [
            Collected(args, self._compute, self._room_bytes, batched=self._is_batched, loader=each)
            for each in loaders
        ]
        self._flow.handler.eval_dataloader = loaders[0] if loaders else None

    def on_validation_batch_end(
        self,
        trainer: LightningTrainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take what a batch gave; the first of a dataset ends those before it."""
        self._finish(dataloader_idx)
        self.results[dataloader_idx].add(outputs, batch)
        self._flow.handler.eval_dataloader = _as_list(trainer.val_dataloaders)[dataloader_idx]
        self._flow.call("on_prediction_step")

    def on_validation_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Compute metrics, log them and tell the callbacks."""
        self._finish(len(self.results))
        fits = trainer.state.fn == "fit"
        if fits and self.after is not None:
            self.after(trainer, self.metrics)

    def _finish(self, num_datasets: int) -> None:
        for index in range(self._num_finished, num_datasets):
            metrics = self.results[index].finish(self.prefixes[index])
            if self.logs:
                self._flow.log(dict(metrics))
                self._flow.call("on_evaluate", metrics=metrics)
            self.metrics |= metrics
        self._num_finished = max(self._num_finished, num_datasets)

    @property
    def _is_batched(self) -> bool:
        return self._flow.args.batch_eval_metrics and self.logs

    @property
    def _room_bytes(self) -> int:
        return ram_limit_bytes(self._max_ram_gb)


class Collected:
    """What the batches of one dataset gave.

    Args:
        args: Settings.
        compute: Makes metrics of predictions.
        room_bytes: What they may take in RAM.
        batched: Whether `compute` is given one batch at a time.
        loader: The batches; its length says how much is to come.
    """

    def __init__(
        self,
        args: TrainingArguments,
        compute: ComputeMetrics | None,
        room_bytes: int,
        *,
        batched: bool,
        loader: Any,
    ) -> None:
        self._args = args
        self._compute = compute
        self._room_bytes = room_bytes
        self._batched = batched and compute is not None
        self._loader = loader
        self._started_s = time.time()
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        whole = getattr(args, "eval_do_concat_batches", True)
        self._kept = {
            name: EvalLoopContainer(whole, padding_index=-100)
            for name in ("predictions", "labels", "inputs")
        }
        self.predictions: Any = None
        """Those of all samples, once it is finished."""
        self.labels: Any = None
        """Those of all samples, once it is finished."""
        self._held: EvalPrediction | None = None

    @property
    def num_samples(self) -> int:
        """Samples that were seen."""
        return sum(self._sizes)

    def add(self, outputs: dict[str, Any], batch: Any) -> None:
        """Take a batch.

        Raises:
            BudgetError: The predictions of all batches do not fit in RAM.
        """
        self._sizes.append(outputs["num_samples"])
        if "loss" in outputs:
            self._losses.append(outputs["loss"].cpu())
        if outputs.get("predictions") is None:
            return
        if self._batched:
            self._run_held(last=False)
            losses = outputs["loss"].repeat(self._sizes[-1]) if "loss" in outputs else None
            self._held = EvalPrediction(
                predictions=outputs["predictions"],
                label_ids=outputs["labels"],
                inputs=batch if "inputs" in self._args.include_for_metrics else None,
                losses=losses if "loss" in self._args.include_for_metrics else None,
            )
            return
        if len(self._sizes) == 1:
            self._check_room(outputs)
        for name, kept in self._kept.items():
            if outputs.get(name) is not None:
                kept.add(move_data_to_device(outputs[name], "cpu"))

    def finish(self, prefix: str) -> Metrics:
        """Return the metrics of all batches, under names that begin with `prefix_`."""
        arrays: dict[str, Any] = {name: kept.get_arrays() for name, kept in self._kept.items()}
        self.predictions, self.labels = arrays["predictions"], arrays["labels"]
        metrics: Any = {}
        if self._batched:
            metrics = self._run_held(last=True)
        elif self._compute is not None and self.predictions is not None and self.labels is not None:
            wanted = self._args.include_for_metrics
            losses = np.repeat([float(each) for each in self._losses], self._sizes)
            metrics = self._compute(
                EvalPrediction(
                    predictions=self.predictions,
                    label_ids=self.labels,
                    inputs=arrays["inputs"] if "inputs" in wanted else None,
                    losses=losses if "loss" in wanted else None,
                )
            )
        metrics = denumpify_detensorize(metrics)
        loss = self._mean_loss()
        if loss is not None:
            metrics[f"{prefix}_loss"] = loss
        named = {k if k.startswith(f"{prefix}_") else f"{prefix}_{k}": metrics[k] for k in metrics}
        speed = speed_metrics(
            prefix, self._started_s, num_samples=self.num_samples, num_steps=len(self._sizes)
        )
        return {**named, **speed}

    def _mean_loss(self) -> float | None:
        if not self._losses:
            return None
        losses = torch.stack(self._losses).float()
        weights = torch.tensor(self._sizes, dtype=torch.float64)
        finite = losses.isfinite()
        if self._args.logging_nan_inf_filter and bool(finite.any()):
            losses, weights = losses[finite], weights[finite]
        return float((losses.double() * weights).sum() / weights.sum())

    def _run_held(self, *, last: bool) -> dict[str, Any]:
        held, self._held = self._held, None
        if held is None or held.label_ids is None:
            return {}
        assert self._compute is not None
        return self._compute(held, compute_result=last) or {}

    def _check_room(self, outputs: dict[str, Any]) -> None:
        try:
            num_batches = len(self._loader)
        except TypeError:
            return
        needed = num_batches * _nbytes((outputs.get("predictions"), outputs.get("labels")))
        if needed <= self._room_bytes:
            return
        error = BudgetError(
            f"predictions of {num_batches} batches need {needed / GIB:.2f} GiB of RAM, and "
            f"{self._room_bytes / GIB:.2f} GiB are there (max_ram_gb, or 80 % of what is free). "
            "Set batch_eval_metrics=True and let compute_metrics(prediction, compute_result=...) "
            "add up batch by batch, or make them smaller with preprocess_logits_for_metrics."
        )
        error.smallest_gb = needed / GIB
        raise error


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(map(_nbytes, value))
    return 0


def _as_list(loaders: Any) -> list[Any]:
    if loaders is None:
        return []
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
