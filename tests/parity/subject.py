"""The LightningModules under test: ordinary user code, made from a recipe."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from . import optimizers, structures, zoo
from .recipe import Recipe

_CHANGES = {
    "odd_sizes": structures.with_odd_sizes,
    "non_contiguous": structures.with_non_contiguous,
    "int_buffer": structures.with_int_buffer,
    "called_twice": structures.with_block_called_twice,
    "checkpointed": structures.with_checkpoints,
    "added_last": structures.with_shift,
    "unused_even": structures.with_gate,
    "data_branch": structures.with_gate,
}


class Subject(LightningModule):
    """A module with automatic optimisation.

    ``recipe.structure`` is one of: usual | tied | odd_sizes | non_contiguous | int_buffer |
    called_twice | unused_even (a layer rests on even steps) | data_branch (a layer rests by the
    data) | no_grad_forward | hf_checkpointing | checkpointed (by user code, within and around
    layers) | added_last (each layer adds a parameter last) | resized (token embeddings).
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        dropout = 0.1 if recipe.dropout == "on" else 0.0
        network = zoo.build(recipe.model, dropout=dropout, tied=recipe.structure == "tied")
        if recipe.structure in _CHANGES:
            _CHANGES[recipe.structure](recipe.model, network)
        elif recipe.structure == "hf_checkpointing":
            network.gradient_checkpointing_enable()
        elif recipe.structure == "resized":
            network.resize_token_embeddings(zoo.VOCAB_SIZE + 9, mean_resizing=False)
        self.network = network
        self.val_mean = MeanMetric()
        self.losses: list[Tensor] = []
        if recipe.groups == "frozen_base":
            params = list(network.parameters())
            for parameter in params[: int(len(params) * 0.6)]:
                parameter.requires_grad_(False)
        elif recipe.groups == "frozen_between":
            for parameter in list(network.parameters())[1::2]:
                parameter.requires_grad_(False)

    # --- steps -----------------------------------------------------------------------------------

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        self._set_gates(batch, batch_idx)
        if self.recipe.control == "none_sometimes" and batch_idx % 3 == 1:
            return None
        return self.compute_loss(batch)

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        factor = 1.0
        if self.recipe.structure == "no_grad_forward":
            with torch.no_grad():
                factor = 1.0 + 0.1 * torch.tanh(self.network(**batch).loss)
        loss = self.network(**batch).loss * factor
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(**batch).logits

    def _evaluate(self, name: str, batch: dict[str, Tensor]) -> None:
        for gate in structures.gates_of(self.network):
            gate.open = True
        output = self.network(**batch)
        logits = output.logits.float()
        self.val_mean.update(logits.square().mean())
        self.log(f"{name}_loss", output.loss, batch_size=1)
        self.log(f"{name}_max", logits.amax(), batch_size=1)
        self.log(f"{name}_mean", self.val_mean, batch_size=1)

    def _set_gates(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.recipe.structure == "data_branch":
            is_open = bool(batch["labels"].sum() % 2 == 0)
        else:
            is_open = (batch_idx // self.recipe.num_accumulated) % 2 == 1
        for gate in structures.gates_of(self.network):
            gate.open = is_open

    # --- optimizers ------------------------------------------------------------------------------

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        named = [(name, p) for name, p in self.network.named_parameters() if p.requires_grad]
        if self.recipe.optimizer == "adafactor":  # divides by the number of elements
            return [(name, p) for name, p in named if p.numel() > 0]
        return named

    def make_optimizers(self) -> list[Optimizer]:
        groups = optimizers.parameter_groups(
            self.trainable(), no_decay=self.recipe.groups == "no_decay"
        )
        return [optimizers.make_optimizer(self.recipe.optimizer, groups)]

    def configure_optimizers(self) -> Any:
        made = self.make_optimizers()
        schedules = [optimizers.make_schedule(self.recipe.schedule, each) for each in made]
        return made, [
            {"scheduler": schedule, "interval": "step"} for schedule in schedules if schedule
        ]


class ManualSubject(Subject):
    """Manual optimisation: a window of two batches, clipped by the module itself."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._set_gates(batch, batch_idx)
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch) / 2)
        if batch_idx % 2 == 1 or batch_idx + 1 == self.recipe.num_batches:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.step_schedules()

    def step_schedules(self) -> None:
        schedules = self.lr_schedulers() or []
        for schedule in schedules if isinstance(schedules, list) else [schedules]:
            schedule.step()


class TwoOptimizersSubject(ManualSubject):
    """Muon for the matrices, the recipe's optimizer for the rest; one backward for both."""

    def make_optimizers(self) -> list[Optimizer]:
        named = self.trainable()
        matrices = [p for _, p in named if p.dim() == 2]
        rest = [(name, p) for name, p in named if p.dim() != 2]
        groups = optimizers.parameter_groups(rest, no_decay=False)
        return [
            optimizers.make_muon(matrices),
            optimizers.make_optimizer(self.recipe.optimizer, groups),
        ]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._set_gates(batch, batch_idx)
        self.manual_backward(self.compute_loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.step_schedules()


class GanSubject(ManualSubject):
    """Two players in turn, each with half of the parameters of every layer."""

    def make_optimizers(self) -> list[Optimizer]:
        named = self.trainable()
        no_decay = self.recipe.groups == "no_decay"
        return [
            optimizers.make_optimizer(
                self.recipe.optimizer,
                optimizers.parameter_groups(named[player::2], no_decay=no_decay),
            )
            for player in (0, 1)
        ]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._set_gates(batch, batch_idx)
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.compute_loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.step_schedules()


def make_subject(recipe: Recipe) -> Subject:
    """Make the module of a recipe; equal recipes give equal bits."""
    return {
        "automatic": Subject,
        "none_sometimes": Subject,
        "manual": ManualSubject,
        "two_optimizers": TwoOptimizersSubject,
        "gan": GanSubject,
    }[recipe.control](recipe)
