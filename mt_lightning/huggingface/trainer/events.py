"""Lightning's hooks of a fit, told to transformers' callbacks, and what they decide, done."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor
from transformers import TrainerState

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.trainer.flow import Flow
from mt_lightning.huggingface.trainer.module import TrainerModule
from mt_lightning.plugins.grad_norm import grad_norm


class FitEvents(Callback):
    """Follows one fit.

    Args:
        flow: Its callbacks are called.
        module: Sums losses.
        num_batches: Batches of an epoch, None where nobody knows.
        num_epochs: Epochs of the run.
        save: Writes a checkpoint.
    """

    def __init__(
        self,
        flow: Flow,
        module: TrainerModule,
        num_batches: int | None,
        num_epochs: int,
        save: Callable[[LightningTrainer], None],
    ) -> None:
        self._flow = flow
        self._module = module
        self._num_batches = num_batches
        self._num_epochs = num_epochs
        self._save = save
        self._learning_rate = 0.0
        self._global_step = 0
        self._num_weights: int | None = None
        self.total_loss = 0.0
        """Sum of the losses of all steps that were logged."""
        self.num_before = 0
        """Steps that were taken before this fit began."""
        self.evaluation_due = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of transformers' side of the run."""
        return {"state": json.dumps(dataclasses.asdict(self._flow.state))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        self._flow.state = TrainerState(**json.loads(state_dict["state"]))

    def on_sanity_check_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Begin before the evaluation that `eval_on_start` asks for."""
        self._begin(trainer)

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Call `on_train_begin`."""
        if not self._flow.args.eval_on_start:
            self._begin(trainer)
        self._global_step = self.num_before = trainer.global_step

    def _begin(self, trainer: LightningTrainer) -> None:
        handler: Any = self._flow.handler
        handler.optimizer = trainer.optimizers[0]
        handler.lr_scheduler = trainer.lr_scheduler_configs[0].scheduler
        handler.train_dataloader = trainer.train_dataloader
        self._flow.begin(self._module.max_steps, self._num_epochs)

    def on_train_epoch_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Call `on_epoch_begin`."""
        self._module.stops_epoch = False
        self._flow.call("on_epoch_begin")

    def on_train_epoch_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Refuse an epoch of nothing: Lightning would go from one to the next for ever.

        Raises:
            ConfigError: The data gave no batch; steps of earlier epochs are kept.
        """
        if not trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            raise ConfigError(
                f"train_dataset gave no batch in epoch {trainer.current_epoch + 1}, after "
                f"{trainer.global_step} of {self._module.max_steps} steps. A stream has to begin "
                "anew each time it is iterated; or set max_steps to what it has."
            )

    def on_train_batch_start(
        self, trainer: LightningTrainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Call `on_step_begin` before the first batch of a step."""
        if trainer.global_step != self._global_step:  # a run that goes on
            self._global_step = self.num_before = trainer.global_step
        self._learning_rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._flow.call("on_step_begin")

    def on_train_batch_end(
        self,
        trainer: LightningTrainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Call what comes behind a batch or a step, log, and save where nothing is evaluated."""
        flow = self._flow
        self._count(batch)
        if trainer.global_step == self._global_step:
            flow.call("on_substep_end")
            return
        state = flow.state
        self._global_step = state.global_step = trainer.global_step
        done = self._num_batches or self._module.max_steps * trainer.accumulate_grad_batches
        state.epoch = trainer.current_epoch + (batch_idx + 1) / done
        self._module.num_unlogged_steps += 1
        flow.call("on_step_end")
        if trainer.is_last_batch or flow.control.should_training_stop:
            flow.call("on_epoch_end")
        if flow.control.should_log:
            self._log(trainer)
        self._stop(trainer)
        self.evaluation_due = flow.control.should_evaluate
        flow.control.should_evaluate = False
        if flow.control.should_save and not self.evaluation_due and not self._waits_for_best:
            self._save_now(trainer)

    @property
    def _waits_for_best(self) -> bool:
        return str(getattr(self._flow.args.save_strategy, "value", "")) == "best"

    def evaluated(self, trainer: LightningTrainer, metrics: dict[str, float]) -> None:
        """Save what an evaluation says is the best, or what was to be saved behind it."""
        flow = self._flow
        self.evaluation_due = False
        if trainer.sanity_checking:
            return
        best = flow.is_best(metrics)
        if self._waits_for_best:
            flow.control.should_save = best
        self._stop(trainer)
        if flow.control.should_save:
            self._save_now(trainer)

    def is_evaluation_due(self, data_fetcher: object) -> bool:
        """Return whether a callback wants an evaluation; takes the place of Lightning's rule."""
        return self.evaluation_due

    def take_total(self) -> float:
        """Return the sum of the losses of all steps of this fit."""
        total, self.total_loss = self.total_loss + self._module.unlogged_loss, 0.0
        self._module.forget_losses()
        return total

    def _save_now(self, trainer: LightningTrainer) -> None:
        self._save(trainer)
        self._flow.call("on_save")

    def _stop(self, trainer: LightningTrainer) -> None:
        control = self._flow.control
        self._module.stops_epoch = control.should_epoch_stop
        if control.should_training_stop:
            trainer.should_stop = True

    def _log(self, trainer: LightningTrainer) -> None:
        module, steps = self._module, self._module.num_unlogged_steps
        total = module.unlogged_loss
        logs = {"loss": total / max(steps, 1)}
        norm = grad_norm(trainer) if trainer.gradient_clip_val else None
        if norm is not None:
            logs["grad_norm"] = norm
        logs["learning_rate"] = self._learning_rate
        self.total_loss += total
        module.forget_losses()
        self._flow.log(logs)

    def _count(self, batch: Mapping[str, Any]) -> None:
        state, args, model = self._flow.state, self._flow.args, self._module.model
        tokens: Any = batch.get(str(getattr(model, "main_input_name", "input_ids")))
        if not isinstance(tokens, Tensor):
            return
        if self._num_weights is None:
            count = getattr(model, "num_parameters", None)
            self._num_weights = 0 if count is None else int(count(exclude_embeddings=True))
        state.total_flos += 6.0 * tokens.numel() * self._num_weights
        kind, mask = args.include_num_input_tokens_seen, batch.get("attention_mask")
        if kind == "non_padding" and isinstance(mask, Tensor):
            state.num_input_tokens_seen += int(mask.sum())
        elif kind not in ("no", False):
            state.num_input_tokens_seen += tokens.numel()


def run_length(
    num_batches: int | None, accumulate: int, max_steps: int, num_epochs: float
) -> tuple[int, int]:
    """Return optimizer steps and epochs of a run, as transformers counts them.

    Args:
        num_batches: Batches of an epoch, None where nobody knows.
        accumulate: Batches of a step.
        max_steps: What is asked for; not above 0 for `num_epochs`.
        num_epochs: Possibly not whole.
    """
    if num_batches is None:
        return max_steps, 1
    steps_per_epoch = max(1, math.ceil(num_batches / accumulate))
    if max_steps > 0:
        return max_steps, math.ceil(max_steps / steps_per_epoch)
    return math.ceil(num_epochs * steps_per_epoch), math.ceil(num_epochs)
