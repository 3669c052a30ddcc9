"""What an evaluation takes from the outputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import nested_detach
from transformers.utils.generic import can_return_loss, find_labels

from mt_lightning.huggingface.adapters import base_of
from mt_lightning.huggingface.trainer.loss import BatchLoss

Preprocess = Callable[[Any, Any], Any]


class Reader:
    """Reads loss, predictions and labels.

    Args:
        model: Gives the outputs.
        label_names: Which inputs are labels; None: what the model's forward says.
        preprocess: Makes predictions smaller, given them and the labels.
        takes_inputs: Whether compute_metrics wants the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        label_names: list[str] | None,
        preprocess: Preprocess | None,
        *,
        takes_inputs: bool,
    ) -> None:
        model = base_of(model)
        self.label_names = find_labels(type(model)) if label_names is None else label_names
        self._returns_loss = can_return_loss(type(model))
        self._preprocess = preprocess
        config = getattr(model, "config", None)
        self._ignored = ["loss", *getattr(config, "keys_to_ignore_at_inference", ["cache"])]
        self.input_name = str(getattr(model, "main_input_name", "input_ids"))
        self._takes_inputs = takes_inputs

    def read(
        self, loss: BatchLoss, batch: Mapping[str, Any], *, keeps_predictions: bool
    ) -> dict[str, Any]:
        """Run the model.

        Returns:
            `num_samples`, and what there is of `loss`, `predictions`, `labels`, `inputs`.
        """
        read: dict[str, Any] = {"num_samples": _num_samples(batch)}
        names = self.label_names
        labelled = bool(names) and all(batch.get(name) is not None for name in names)
        returns = batch.get("return_loss")
        alone = not names and (self._returns_loss if returns is None else bool(returns))
        with torch.no_grad():
            if not (labelled or alone):
                outputs = loss.outputs(batch) if keeps_predictions else None
            elif keeps_predictions:
                read["loss"], outputs = loss.loss_and_outputs(batch, loss.count([batch]))
            else:
                read["loss"], outputs = loss.loss(batch, loss.count([batch])), None
        if "loss" in read:
            read["loss"] = read["loss"].detach().mean()
        if not keeps_predictions:
            return read
        labels: Any = None
        if labelled or alone:
            labels = nested_detach(tuple(batch.get(name) for name in names))
            labels = labels[0] if len(labels) == 1 else labels
        predictions = nested_detach(self._predictions(outputs, with_loss=labelled or alone))
        predictions = predictions[0] if len(predictions) == 1 else predictions
        if self._preprocess is not None:
            predictions = self._preprocess(predictions, labels)
        read |= {"predictions": predictions, "labels": labels}
        if self._takes_inputs:
            read["inputs"] = batch[self.input_name]
        return read

    def _predictions(self, outputs: Any, *, with_loss: bool) -> tuple[Any, ...]:
        if isinstance(outputs, Mapping):
            return tuple(value for key, value in outputs.items() if key not in self._ignored)
        return tuple(outputs[1:] if with_loss else outputs)


def _num_samples(batch: Mapping[str, Any]) -> int:
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    return 1
