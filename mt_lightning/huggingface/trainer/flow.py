"""State, log and callbacks of transformers: when to log, to evaluate, to save and to stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from mt_lightning.errors import ConfigError

_GRADIENT_EVENTS = ("on_pre_optimizer_step", "on_optimizer_step")


class Flow:
    """Calls transformers' callbacks and keeps what they decide.

    Args:
        args: Settings.
        model: Given to callbacks.
        processing_class: Given to callbacks.
        callbacks: The user's.

    Raises:
        ConfigError: A callback looks at gradients where there are none.
    """

    def __init__(
        self,
        args: TrainingArguments,
        model: nn.Module,
        processing_class: Any,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
    ) -> None:
        self.args = args
        reporting = get_reporting_integration_callbacks(args.report_to)
        made = [each() if isinstance(each, type) else each for each in callbacks]
        for callback in made:
            check_callback(callback)
        shown = PrinterCallback if args.disable_tqdm else ProgressCallback
        everything: list[Any] = [DefaultFlowCallback, *reporting, *made, shown]
        self.handler = CallbackHandler(everything, model, processing_class, None, None)
        self.control = TrainerControl()
        self.state = self.new_state()
        self._started_s = time.time()
        self.num_tokens_before = 0
        self._call("on_init_end")

    def new_state(self) -> TrainerState:
        """Return a state of step 0."""
        stateful: Any = self._stateful()
        return TrainerState(stateful_callbacks=stateful)

    def begin(self, max_steps: int, num_epochs: int) -> None:
        """Call `on_train_begin`; the state is a new one, or that of a run that goes on."""
        state = self.state
        state.compute_steps(self.args, max_steps)
        state.max_steps, state.num_train_epochs = max_steps, num_epochs
        state.train_batch_size = self.args.train_batch_size
        self._started_s = time.time()
        self.num_tokens_before = state.num_input_tokens_seen
        self.call("on_train_begin")

    def call(self, event: str, **arguments: Any) -> None:
        """Call an event of all callbacks."""
        self._call(event, **arguments)

    def log(self, logs: dict[str, float]) -> None:
        """Add an entry to the log and call `on_log`."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen not in ("no", False):
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            seconds = max(time.time() - self._started_s, 1e-9)
            new = self.state.num_input_tokens_seen - self.num_tokens_before
            logs["train_tokens_per_second"] = new / seconds
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Take note of metrics; return whether they are the best so far.

        Raises:
            ConfigError: `metric_for_best_model` is not among them.
        """
        name = self.args.metric_for_best_model
        if name is None:
            return False
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                f"metric_for_best_model={self.args.metric_for_best_model!r} is not among the "
                f"metrics: {', '.join(metrics)}. Choose one of them, or let compute_metrics "
                "return it."
            )
        state, value = self.state, metrics[name]
        better = np.greater if self.args.greater_is_better else np.less
        if state.best_metric is not None and not better(value, state.best_metric):
            return False
        if state.best_metric is None and np.isnan(value):
            return False
        state.best_metric = value
        if self.args.save_strategy != "no":
            state.best_global_step = state.global_step
        return True

    def keep_states(self) -> None:
        """Write down the state of callbacks that have one."""
        for callback in self._stateful():
            name, kept = type(callback).__name__, callback.state()
            known = self.state.stateful_callbacks.get(name)  # pyright: ignore
            if isinstance(known, list):
                known.append(kept)
            else:
                self.state.stateful_callbacks[name] = kept  # pyright: ignore

    def give_states(self) -> None:
        """Give callbacks, and the control, the state that was written down."""
        kept: Any = self.state.stateful_callbacks
        for index, callback in enumerate(self.handler.callbacks):
            found = kept.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and isinstance(found, dict):
                self.handler.callbacks[index] = type(callback).from_state(found)
        control = kept.get(type(self.control).__name__)
        if isinstance(control, dict):
            self.control = TrainerControl.from_state(control)

    def _stateful(self) -> list[Any]:
        everything = [*self.handler.callbacks, self.control]
        return [each for each in everything if isinstance(each, ExportableState)]

    def _call(self, event: str, **arguments: Any) -> None:
        call = getattr(self.handler, event)
        self.control = call(self.args, self.state, self.control, **arguments)


def check_callback(callback: Any) -> None:
    """Raise ConfigError for what is no callback, or what looks at gradients."""
    if not isinstance(callback, TrainerCallback):
        kind = type(callback).__name__
        raise ConfigError(
            f"callbacks holds a {kind}; give callbacks of transformers (TrainerCallback) or of "
            "Lightning (Callback)."
        )
    for event in _GRADIENT_EVENTS:
        if getattr(type(callback), event) is not getattr(TrainerCallback, event):
            raise ConfigError(
                f"{type(callback).__name__} overrides {event}, which is called when gradients are "
                "whole; here they leave for their pages as they arrive. Use on_step_end; the log "
                "has grad_norm."
            )
