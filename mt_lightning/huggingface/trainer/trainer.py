"""`mt.Trainer`: what transformers' Trainer takes and gives, with weights in pages."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from torch import nn
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    enable_full_determinism,
    set_seed,
)
from transformers.trainer_utils import (
    IntervalStrategy,
    PredictionOutput,
    TrainOutput,
    speed_metrics,
)

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.session import new_strategy, refuse_unknown
from mt_lightning.huggingface.trainer.checks import check_inputs, check_model
from mt_lightning.huggingface.trainer.data import LoaderMaker, WindowLoader, check_dataset
from mt_lightning.huggingface.trainer.device import accelerator_of
from mt_lightning.huggingface.trainer.evaluating import Evaluation
from mt_lightning.huggingface.trainer.events import FitEvents, run_length
from mt_lightning.huggingface.trainer.fields import check_arguments
from mt_lightning.huggingface.trainer.flow import Flow, check_callback
from mt_lightning.huggingface.trainer.loss import BatchLoss, LossFunction
from mt_lightning.huggingface.trainer.module import OptimizerKind, Optimizers, TrainerModule
from mt_lightning.huggingface.trainer.predictions import Preprocess, Reader
from mt_lightning.huggingface.trainer.raw import default_collator
from mt_lightning.huggingface.trainer.saving import (
    RUN_NAME,
    STATE_NAME,
    checkpoint_to_resume,
    load_weights,
    rotate,
    save_checkpoint,
    save_weights_of,
)
from mt_lightning.huggingface.trainer.sft import TextCollator, is_sft

log = logging.getLogger(__name__)

_UNSUPPORTED = {"model_init": "call it, and give the model"}


class Trainer:
    """Train, evaluate and predict as `transformers.Trainer` does, with weights in pages.

    A Lightning Trainer with `MegaTrainStrategy` does the work; it is at `lightning_trainer`. What
    `mt.init` said holds for it.

    Args:
        model: A model of transformers, or a module that takes and returns what they do.
        args: Settings. Each field is followed, or refused by name; see docs/huggingface.md.
        data_collator: Makes a batch of a list of samples; None: transformers' default.
        train_dataset: Samples to train on: a Dataset or IterableDataset of torch or of Hugging
            Face, or a list of dicts.
        eval_dataset: Samples to evaluate on, or a dict of several such.
        processing_class: Tokenizer; pads batches, and is saved beside the model.
        compute_loss_func: Takes outputs, labels and `num_items_in_batch`.
        compute_metrics: Takes an `EvalPrediction`; with `batch_eval_metrics` also
            `compute_result`.
        callbacks: Callbacks of transformers, or of Lightning such as `mt.PagingMonitor`.
        optimizers: Optimizer and scheduler, None for those of `args`.
        optimizer_cls_and_kwargs: Class and settings of the optimizer in place of `optim`.
        preprocess_logits_for_metrics: Makes predictions smaller, given logits and labels.

    Raises:
        ConfigError: An argument is of the wrong kind, misspelt, or cannot be followed.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback] | Callback] | None = None,
        optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: OptimizerKind | None = None,
        preprocess_logits_for_metrics: Preprocess | None = None,
        **unknown: Any,
    ) -> None:
        for name, way_out in _UNSUPPORTED.items():
            if unknown.pop(name, None) is not None:
                raise ConfigError(f"mt.Trainer does not take {name}: {way_out}.")
        known = list(Trainer.__init__.__annotations__)
        refuse_unknown("mt.Trainer", unknown, [each for each in known if each != "unknown"])
        check_inputs(model, args, data_collator, processing_class, compute_metrics, optimizers)
        assert model is not None
        self.args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_arguments(self.args)
        self._accelerator = accelerator_of(self.args)
        for name, dataset in _named(train_dataset, eval_dataset):
            check_dataset(name, dataset)
        if self.args.eval_strategy != "no" and eval_dataset is None:
            strategy = IntervalStrategy(self.args.eval_strategy).value
            raise ConfigError(
                f"eval_strategy={strategy!r}, and there is no eval_dataset. Give one, or set "
                "eval_strategy='no'."
            )
        check_model(model)
        seed = enable_full_determinism if self.args.full_determinism else set_seed
        seed(self.args.seed)
        if getattr(model, "config", None) is not None:
            model.config.use_cache = self.args.use_cache  # pyright: ignore
        self.model = model
        self.processing_class = processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        if data_collator is None and is_sft(self.args):
            data_collator = TextCollator(self.args, processing_class)
        self.data_collator = data_collator or default_collator(processing_class)
        self.compute_metrics = compute_metrics
        self._loss = BatchLoss(model, self.args, compute_loss_func)
        wanted = self.args.include_for_metrics
        self._reader = Reader(
            model,
            self.args.label_names,
            preprocess_logits_for_metrics,
            takes_inputs="inputs" in wanted,
        )
        self._loaders = LoaderMaker(
            self.args, model, self.data_collator, self._reader.label_names, self._reader.input_name
        )
        self._module = TrainerModule(
            model, self.args, self._loss, self._reader, optimizers, optimizer_cls_and_kwargs
        )
        self._callbacks = [each for each in callbacks or () if isinstance(each, Callback)]
        theirs = [each for each in callbacks or () if not isinstance(each, Callback)]
        self._flow = Flow(self.args, model, processing_class, theirs)
        self._lightning: LightningTrainer | None = None
        self._evaluation: Evaluation | None = None

    @property
    def lightning_trainer(self) -> LightningTrainer:
        """The Lightning Trainer of the last `train`, `evaluate` or `predict`."""
        if self._lightning is None:
            self._lightning = self._new_lightning(max_steps=-1, events=[])
        return self._lightning

    @property
    def state(self) -> TrainerState:
        """The state of the run, with its `log_history`."""
        return self._flow.state

    @property
    def control(self) -> TrainerControl:
        """What callbacks have decided."""
        return self._flow.control

    @property
    def optimizer(self) -> Any:
        """The optimizer of the last `train`, None before."""
        return self._flow.handler.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler of the last `train`, None before."""
        return self._flow.handler.lr_scheduler

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback of transformers."""
        made = callback() if isinstance(callback, type) else callback
        check_callback(made)
        self._flow.handler.add_callback(made)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, or the one of a class."""
        self._flow.handler.remove_callback(callback)

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None
    ) -> TrainOutput:
        """Train.

        Args:
            resume_from_checkpoint: The folder of a checkpoint to go on from; True: the last one in
                `output_dir`.

        Returns:
            Steps, mean loss and metrics.

        Raises:
            ConfigError: There are no data, nothing says when to end, or the checkpoint is not one.
        """
        if self.train_dataset is None:
            raise ConfigError("train() needs data: give mt.Trainer(train_dataset=...).")
        folder = None
        if resume_from_checkpoint:
            asked = resume_from_checkpoint
            folder = checkpoint_to_resume(self.args, asked if asked is True else Path(asked))
        loader = self._loaders.training(self.train_dataset)
        num_batches = _length(loader)
        if num_batches is None and self.args.max_steps <= 0:
            raise ConfigError(
                "train_dataset has no length: nothing says when to end. Set max_steps of "
                "TrainingArguments."
            )
        accumulate = self.args.gradient_accumulation_steps
        max_steps, num_epochs = run_length(
            num_batches, accumulate, self.args.max_steps, self.args.num_train_epochs
        )
        self._module.max_steps = max_steps
        self._flow.state = self._flow.new_state()
        if folder is not None:
            self._flow.state = TrainerState.load_from_json(str(folder / STATE_NAME))
            if self.args.restore_callback_states_from_checkpoint:
                self._flow.give_states()
        events = FitEvents(self._flow, self._module, num_batches, num_epochs, self._save_checkpoint)
        self._lightning = trainer = self._new_lightning(
            max_steps, [events], resumes=folder is not None
        )
        assert self._evaluation is not None
        self._evaluation.after = events.evaluated
        # Evaluated when a callback says so, at the place where Lightning would decide.
        trainer.fit_loop.epoch_loop._should_check_val_fx = events.is_evaluation_due
        self.model.train()
        started_s = time.time()
        with warnings.catch_warnings():
            # There need not be any: a Trainer without eval_dataset is an ordinary one.
            warnings.filterwarnings("ignore", ".*`validation_step` but have no `val_dataloader`")
            trainer.fit(
                self._module,
                WindowLoader(loader, accumulate, self._loss.count),
                self._evaluation_loaders(self.eval_dataset, "eval") or None,
                ckpt_path=None if folder is None else str(folder / RUN_NAME),
            )
        return self._finish(events, started_s)

    def _finish(self, events: FitEvents, started_s: float) -> TrainOutput:
        assert self._lightning is not None
        state, args = self.state, self.args
        num_steps = state.global_step - events.num_before
        mean = events.take_total() / max(num_steps, 0.001)
        samples = num_steps * args.train_batch_size * args.gradient_accumulation_steps
        metrics = speed_metrics("train", started_s, num_samples=samples, num_steps=num_steps)
        metrics |= {"total_flos": state.total_flos, "train_loss": mean}
        self._flow.log(dict(metrics))
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load_weights(self.model, Path(state.best_model_checkpoint))
        rotate(self._lightning, args, state, at_end=True)
        self._flow.call("on_train_end")
        return TrainOutput(state.global_step, mean, metrics)

    def evaluate(
        self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate.

        Args:
            eval_dataset: Samples, or a dict of several such; None: those of the Trainer.
            metric_key_prefix: What the names of metrics begin with.

        Returns:
            Metrics.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("evaluate() needs data: give it, or mt.Trainer, an eval_dataset.")
        for name, each in _named(None, dataset):
            check_dataset(name, each)
        return self._run(dataset, metric_key_prefix, logs=True).metrics

    def predict(self, test_dataset: Any, *, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predict.

        Args:
            test_dataset: Samples, with or without labels.
            metric_key_prefix: What the names of metrics begin with.

        Returns:
            Predictions, labels and metrics; arrays are padded with -100.

        Raises:
            BudgetError: The predictions do not fit in RAM.
        """
        check_dataset("test_dataset", test_dataset)
        evaluation = self._run(test_dataset, metric_key_prefix, logs=False)
        (result,) = evaluation.results
        self._flow.call("on_predict", metrics=evaluation.metrics)
        return PredictionOutput(
            predictions=result.predictions,  # pyright: ignore[reportArgumentType]
            label_ids=result.labels,  # pyright: ignore[reportArgumentType]
            metrics=evaluation.metrics,
        )

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Save model and tokenizer for `from_pretrained`, read from pages piece by piece.

        Args:
            output_dir: Where to; None: that of the arguments.
        """
        save_weights_of(self.model, self._tokenizer, Path(output_dir or str(self.args.output_dir)))

    def save_state(self) -> None:
        """Write `trainer_state.json` into `output_dir`."""
        os.makedirs(str(self.args.output_dir), exist_ok=True)
        self.state.save_to_json(os.path.join(str(self.args.output_dir), STATE_NAME))

    @property
    def _tokenizer(self) -> Any:
        if self.processing_class is not None:
            return self.processing_class
        return getattr(self.data_collator, "tokenizer", None)

    def _save_checkpoint(self, trainer: LightningTrainer) -> None:
        save_checkpoint(trainer, self._flow, self.model, self._tokenizer)

    def _run(self, dataset: Any, prefix: str, *, logs: bool) -> Evaluation:
        trainer = self.lightning_trainer
        evaluation = self._evaluation
        assert evaluation is not None
        was = evaluation.prefixes, evaluation.logs
        loaders = self._evaluation_loaders(dataset, prefix)
        evaluation.logs = logs
        try:
            trainer.validate(self._module, loaders, verbose=False)
        finally:
            evaluation.prefixes, evaluation.logs = was
        return evaluation

    def _evaluation_loaders(self, dataset: Any, prefix: str) -> list[Any]:
        assert self._evaluation is not None
        if dataset is None:
            return []
        if isinstance(dataset, Mapping):
            self._evaluation.prefixes = [f"{prefix}_{name}" for name in dataset]
            return [self._loaders.evaluation(each, str(name)) for name, each in dataset.items()]
        self._evaluation.prefixes = [prefix]
        return [self._loaders.evaluation(dataset)]

    def _new_lightning(
        self, max_steps: int, events: list[FitEvents], *, resumes: bool = False
    ) -> LightningTrainer:
        args = self.args
        strategy = new_strategy(
            fits=bool(events), recompute=bool(args.gradient_checkpointing), resumes=resumes
        )
        self._evaluation = Evaluation(
            self._flow, self._module, self.compute_metrics, strategy.options.max_ram_gb
        )
        return LightningTrainer(
            strategy=strategy,
            accelerator=self._accelerator,
            devices=1,
            precision="bf16-mixed" if args.bf16 else "32-true",
            max_steps=max_steps,
            max_epochs=-1,
            accumulate_grad_batches=args.gradient_accumulation_steps,
            gradient_clip_val=args.max_grad_norm or None,
            num_sanity_val_steps=-1 if events and args.eval_on_start else 0,
            callbacks=[*events, self._evaluation, *self._callbacks],
            default_root_dir=str(args.output_dir),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )


def _named(train_dataset: Any, eval_dataset: Any) -> list[tuple[str, Any]]:
    found = [] if train_dataset is None else [("train_dataset", train_dataset)]
    if isinstance(eval_dataset, Mapping):
        return [*found, *((f"eval_dataset[{key!r}]", each) for key, each in eval_dataset.items())]
    return found if eval_dataset is None else [*found, ("eval_dataset", eval_dataset)]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
