"""Evaluation, prediction, callbacks and checkpoints of `mt.Trainer`, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    EvalPrediction,
    TrainerCallback,
)

import mt_lightning as mt
from mt_lightning.errors import BudgetError, ConfigError
from mt_lightning.huggingface import session
from mt_lightning.huggingface.byte_tokenizer import byte_tokenizer
from tests.huggingface.trainer_cases import arguments, llama, losses, samples

TIMES = ("runtime", "per_second", "preparation_time")


@pytest.fixture(autouse=True)
def session_of_its_own() -> Iterator[None]:
    yield
    session.reset()


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not key.endswith(TIMES)}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    guessed = np.asarray(prediction.predictions)[:, :-1].argmax(-1)
    labels = np.asarray(prediction.label_ids)[:, 1:]
    return {"accuracy": float((guessed == labels)[labels != -100].mean())}


class Accuracy:
    """Adds up batch by batch."""

    def __init__(self) -> None:
        self.right = self.number = 0

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        guessed = torch.as_tensor(prediction.predictions)[:, :-1].argmax(-1)
        labels = torch.as_tensor(prediction.label_ids)[:, 1:]
        self.right += int((guessed == labels)[labels != -100].sum())
        self.number += int((labels != -100).sum())
        return {"accuracy": self.right / self.number} if compute_result else {}


class Recorder(TrainerCallback):
    """Writes down what is called, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _record(name: str) -> Any:
    def event(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert kwargs["model"] is not None
        self.events.append(f"{name} {state.global_step}")

    return event


for _name in ("train_begin", "epoch_begin", "step_begin", "substep_end", "step_end", "log"):
    setattr(Recorder, f"on_{_name}", _record(_name))
for _name in ("evaluate", "save", "prediction_step", "train_end", "predict"):
    setattr(Recorder, f"on_{_name}", _record(_name))


SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "per_device_eval_batch_size": 4,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_a_loss",
    "save_total_limit": 1,
    "include_num_input_tokens_seen": "all",
    "logging_steps": 3,
}


@pytest.mark.parametrize("best", ["last", "first"])
def test_a_run_with_evaluations_logs_calls_and_leaves_what_theirs_does(
    best: str, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "greater_is_better": best == "first"}
    runs = []
    for name, make in (("theirs", transformers.Trainer), ("ours", mt.Trainer)):
        recorder = Recorder()
        trainer = make(
            model=llama(),
            args=arguments(tmp_path / name, **settings),
            train_dataset=samples(21),
            eval_dataset={"a": samples(10), "b": samples(5, length=9)},
            compute_metrics=accuracy,
            callbacks=[recorder],
        )
        trainer.train()
        runs.append((trainer, recorder))
    (theirs, their_events), (ours, our_events) = runs
    assert our_events.events == their_events.events
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert without_times(mine) == pytest.approx(without_times(other), abs=1e-5)
    for name in ("best_metric", "best_global_step", "num_input_tokens_seen", "epoch", "max_steps"):
        assert getattr(ours.state, name) == pytest.approx(getattr(theirs.state, name)), name
    folders = [
        sorted(path.name for path in (tmp_path / name).glob("checkpoint-*"))
        for name in ("theirs", "ours")
    ]
    assert folders[1] == folders[0]
    assert str(ours.state.best_model_checkpoint).endswith(folders[0][0])
    for name, param in ours.model.named_parameters():
        torch.testing.assert_close(param, theirs.model.get_parameter(name), atol=1e-6, rtol=1e-5)


def test_evaluate_and_predict_give_what_theirs_do(tmp_path: Path) -> None:
    data = [*samples(6), *samples(3, length=9)]
    results = []
    for make in (transformers.Trainer, mt.Trainer):
        args = arguments(tmp_path, per_device_eval_batch_size=3)
        trainer = make(model=llama(), args=args, eval_dataset=data, compute_metrics=accuracy)
        results.append((trainer.evaluate(), trainer.predict(data)))
    (their_metrics, theirs), (metrics, ours) = results
    assert without_times(metrics) == pytest.approx(
        {k: v for k, v in without_times(their_metrics).items() if k in metrics}, abs=1e-5
    )
    assert metrics.keys() >= {"eval_loss", "eval_accuracy", "eval_samples_per_second"}
    np.testing.assert_allclose(ours.predictions, theirs.predictions, atol=1e-5)
    np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-5)


def test_metrics_batch_by_batch_are_those_of_all_at_once(tmp_path: Path) -> None:
    data = samples(10)
    args = arguments(tmp_path, per_device_eval_batch_size=4)
    whole = mt.Trainer(llama(), args, eval_dataset=data, compute_metrics=accuracy).evaluate()
    args = arguments(tmp_path, per_device_eval_batch_size=4, batch_eval_metrics=True)
    by_batch = mt.Trainer(llama(), args, eval_dataset=data, compute_metrics=Accuracy()).evaluate()
    assert by_batch["eval_accuracy"] == pytest.approx(whole["eval_accuracy"])


def test_predictions_that_do_not_fit_are_refused_with_their_size(tmp_path: Path) -> None:
    mt.init(max_ram_gb=0.001)
    args = arguments(tmp_path, per_device_eval_batch_size=4)
    data = samples(300)
    trainer = mt.Trainer(llama(), args, eval_dataset=data, compute_metrics=accuracy)
    needed = 300 * 12 * (97 * 4 + 8) / (1 << 30)
    message = rf"75 batches need {needed:.2f} GiB of RAM.*batch_eval_metrics=True"
    with pytest.raises(BudgetError, match=message) as caught:
        trainer.evaluate()
    assert caught.value.smallest_gb == pytest.approx(needed)


@pytest.mark.parametrize("asked", ["last", "named"])
def test_a_run_goes_on_from_a_checkpoint_exactly(asked: str, tmp_path: Path) -> None:
    data = samples(21)
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5}

    def make(**more: Any) -> mt.Trainer:
        args = arguments(tmp_path / "out", **{**settings, **more})
        return mt.Trainer(llama(), args, train_dataset=data)

    whole = make()
    whole.train()
    folder = tmp_path / "out" / "checkpoint-5"
    if asked == "last":
        (tmp_path / "out" / "checkpoint-8" / "trainer_state.json").unlink()  # not complete
    torch.manual_seed(99)
    resumed = make()
    resumed.train(resume_from_checkpoint=True if asked == "last" else str(folder))
    assert resumed.state.global_step == 8
    assert losses(resumed) == losses(whole)
    assert [each["step"] for each in resumed.state.log_history[:8]] == list(range(1, 9))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_interrupted_run_goes_on_in_its_directory(tmp_path: Path) -> None:
    data = samples(21)

    class Break(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    def train(*callbacks: TrainerCallback, pages: str) -> mt.Trainer:
        mt.init(offload_dir=tmp_path / pages, durability="step")
        args = arguments(tmp_path / "out", max_steps=8)
        trainer = mt.Trainer(llama(), args, train_dataset=data, callbacks=list(callbacks))
        trainer.train()
        return trainer

    whole = train(pages="whole")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(Break(), pages="broken")
    session._runs.clear()  # what a new process knows
    import gc

    gc.collect()
    mt.init(offload_dir=tmp_path / "broken", on_existing="resume")
    args = arguments(tmp_path / "out", max_steps=8)
    resumed = mt.Trainer(llama(), args, train_dataset=data, eval_dataset=data)
    with pytest.raises(mt.ConfigError, match="fit first"):
        resumed.evaluate()  # of which weights? The run stays
    resumed.train()
    assert losses(resumed) == losses(whole)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_callbacks_stop_a_run(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        max_steps=40,
        learning_rate=0.0,  # the second evaluation is as good as the first
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        greater_is_better=False,
    )
    counts = []
    for make in (transformers.Trainer, mt.Trainer):
        trainer = make(
            model=llama(),
            args=args,
            train_dataset=samples(21),
            eval_dataset=samples(4),
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        )
        trainer.train()
        counts.append(trainer.state.global_step)
    assert counts == [6, 6]


def test_a_saved_model_is_read_by_transformers(tmp_path: Path) -> None:
    trainer = mt.Trainer(
        llama(),
        arguments(tmp_path / "out", max_steps=2, save_strategy="epoch", save_only_model=True),
        train_dataset=samples(16),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    trainer.save_state()
    for folder in (tmp_path / "saved", tmp_path / "out" / "checkpoint-2"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        for one, other in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert (folder / "tokenizer.json").exists()
    with pytest.raises(ConfigError, match=r"has no trainer.ckpt.*save_only_model=True"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    with pytest.raises(ConfigError, match="holds no complete checkpoint-N"):
        trainer.train(resume_from_checkpoint=True)


def test_callbacks_that_look_at_gradients_are_refused(tmp_path: Path) -> None:
    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            pass

    with pytest.raises(ConfigError, match="Watch overrides on_pre_optimizer_step"):
        mt.Trainer(llama(), arguments(tmp_path), callbacks=[Watch()])
    with pytest.raises(ConfigError, match="callbacks holds a str"):
        mt.Trainer(llama(), arguments(tmp_path), callbacks=["wandb"])  # type: ignore[list-item]
