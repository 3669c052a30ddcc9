"""The loss of a batch as Hugging Face's Trainer computes it, and the sum that is logged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from transformers import PreTrainedModel, TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from typing_extensions import override

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.adapters import base_of
from mt_lightning.huggingface.batch_checks import check_length, check_tokens, most_positions
from mt_lightning.huggingface.training_loss import TrainingLoss

LossFunction = Callable[..., Tensor]


class BatchLoss:
    """Computes losses.

    Args:
        model: Takes the inputs of a batch.
        args: Says how labels are smoothed.
        function: Takes outputs, labels and `num_items_in_batch`; None: the model's own loss.
    """

    def __init__(
        self, model: nn.Module, args: TrainingArguments, function: LossFunction | None
    ) -> None:
        self._model = model
        self._base = base = base_of(model)
        self._function = function
        self.takes_num_items = _takes_loss_arguments(base)
        """Whether the model's own loss is one over all items of an optimizer step."""
        kind = LOSS_MAPPING.get(str(getattr(base, "loss_type", None)))
        config = getattr(base, "config", None)
        encoder = getattr(config, "is_encoder_decoder", False)
        self._shifts = kind is ForCausalLMLoss and not encoder
        self._smoother: LabelSmoother | None = None
        problem = getattr(config, "problem_type", None)
        if args.label_smoothing_factor and problem != "multi_label_classification":
            self._smoother = LabelSmoother(epsilon=args.label_smoothing_factor)
        self._most_tokens = most_positions(base)
        chunks = isinstance(base, PreTrainedModel) and function is None and self._smoother is None
        self._chunked = TrainingLoss("auto" if chunks else None)
        self._takes_labels_away = function is not None or self._smoother is not None

    def count(self, batches: list[Mapping[str, Any]]) -> Tensor | None:
        """Return the number of labels of the batches of a step, None where none are counted."""
        if not (self.takes_num_items or self._function is not None):
            return None
        numbers = []
        for batch in batches:
            labels = batch.get("shift_labels", batch.get("labels"))
            if not isinstance(labels, Tensor):
                return None
            if "shift_labels" not in batch and self._shifts:
                labels = labels[..., 1:]
            numbers.append(labels.ne(-100).sum())
        if not numbers:
            return None
        total = torch.stack(numbers).sum()
        if total.device.type == "cpu" and int(total) == 0:
            raise ConfigError(
                f"all labels of the {len(batches)} batch(es) of a step are -100: nothing would be "
                "trained, and the loss be divided by 0. See that samples have answers, and that "
                "they are not cut off."
            )
        return total

    def scaled(self, num_items: Tensor | None) -> bool:
        """Return whether a loss is one over all items of a step, not of its batch."""
        return (self.takes_num_items and num_items is not None) or self._function is not None

    def loss(self, inputs: Mapping[str, Any], num_items: Tensor | None) -> Tensor:
        """Return the loss alone; logits need not exist all at once.

        Raises:
            ConfigError: The model returns no loss, or the sequence is too long for it.
        """
        if self._takes_labels_away or not isinstance(self._base, PreTrainedModel):
            return self.loss_and_outputs(inputs, num_items)[0]
        arguments = self._arguments(inputs, num_items)
        loss: Tensor | None = self._chunked(self._model, lambda: self._run(arguments))
        return _needed(loss, self._model, arguments)

    def loss_and_outputs(
        self, inputs: Mapping[str, Any], num_items: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Return the loss and all that the model gives."""
        arguments = self._arguments(inputs, num_items)
        labels = arguments.pop("labels", None) if self._takes_labels_away else None
        outputs = self._run(arguments)
        if self._function is not None:
            return self._function(outputs, labels, num_items_in_batch=num_items), outputs
        if labels is not None:
            assert self._smoother is not None
            extra: dict[str, Any] = {}
            if "num_items_in_batch" in inspect.signature(self._smoother.__call__).parameters:
                extra["num_items_in_batch"] = num_items
            causal = type(self._base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            loss: Any = self._smoother(outputs, labels, shift_labels=causal, **extra)
            return loss, outputs
        found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        return _needed(found, self._model, arguments), outputs

    def outputs(self, inputs: Mapping[str, Any]) -> Any:
        """Return what the model gives without a loss."""
        return self._run(self._arguments(inputs, None))

    def _arguments(self, inputs: Mapping[str, Any], num_items: Tensor | None) -> dict[str, Any]:
        tokens = inputs.get("input_ids")
        if isinstance(tokens, Tensor) and tokens.dim() > 1:
            most = self._most_tokens
            check_length(tokens.shape[-1], most, f"Truncate the samples to {most} tokens.")
            check_tokens(inputs, self._base)
        extra = {"num_items_in_batch": num_items}
        return {**inputs, **(extra if self.takes_num_items and num_items is not None else {})}

    def _run(self, arguments: Mapping[str, Any]) -> Any:
        return self._model(**arguments)


class LossSum(Metric):
    """Adds the losses of batches up until they are logged.

    Args:
        filters: Let the mean of the steps so far stand for a loss that is not finite.
    """

    total: Tensor

    def __init__(self, *, filters: bool) -> None:
        super().__init__()
        self._filters = filters
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    @override
    def update(self, loss: Tensor, num_steps: int) -> None:
        """Add a loss.

        Args:
            loss: Scalar.
            num_steps: Steps since the sum began.
        """
        if self._filters and not bool(torch.isfinite(loss)):
            loss = self.total / (1 + num_steps)
        self.total = self.total + loss.to(self.total.dtype)

    @override
    def compute(self) -> Tensor:
        """Return the sum."""
        return self.total


def _takes_loss_arguments(model: nn.Module) -> bool:
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters)


def _needed(loss: Tensor | None, model: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    if loss is None:
        raise ConfigError(
            f"{type(model).__name__} returned no loss for a batch with {', '.join(arguments)}. "
            "Give the samples labels, or a data_collator that makes them, such as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)."
        )
    return loss
