"""`mt.Trainer` on a device: the losses, weights and predictions of the CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mt_lightning as mt
from mt_lightning.huggingface.trainer import trainer as module
from mt_lightning.huggingface.trainer.device import accelerator_of

from ..huggingface.trainer_cases import arguments, gpt2, losses, samples
from .runs import fake_link


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_device_trains_and_predicts_as_the_cpu_does(
    max_grad_norm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> tuple[Any, Any, Any]:
        model = gpt2()
        args = arguments(
            tmp_path / name,
            max_steps=3,
            gradient_accumulation_steps=2,
            max_grad_norm=max_grad_norm,
        )
        trainer = mt.Trainer(model, args, train_dataset=samples(16), eval_dataset=samples(4))
        trainer.train()
        return trainer, trainer.predict(samples(4)), model

    expected, predicted, plain = run("cpu")
    new_strategy, links = module.new_strategy, []

    def on_device(**settings: Any) -> mt.MegaTrainStrategy:
        strategy = new_strategy(**settings)
        links.append(fake_link(len(links)))
        strategy._seams["link"] = links[-1]
        return strategy

    monkeypatch.setattr(module, "new_strategy", on_device)
    trainer, found, paged = run("device")
    assert links
    assert losses(trainer) == losses(expected)
    assert (found.predictions == predicted.predictions).all()  # pyright: ignore[reportAttributeAccessIssue]
    for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_gpu_computes_unless_it_is_asked_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def arguments_for(num_gpus: int, *, use_cpu: bool) -> Any:
        return SimpleNamespace(use_cpu=use_cpu, n_gpu=num_gpus, per_device_train_batch_size=4)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert accelerator_of(arguments_for(0, use_cpu=False)) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert accelerator_of(arguments_for(1, use_cpu=True)) == "cpu"
    assert accelerator_of(arguments_for(1, use_cpu=False)) == "gpu"


def test_one_of_several_gpus_computes_with_the_batch_of_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args: Any = SimpleNamespace(use_cpu=False, n_gpu=2, per_device_train_batch_size=4)
    with caplog.at_level(logging.WARNING):
        assert accelerator_of(args) == "gpu"
    assert args._n_gpu == 1
    assert "one of 2 GPUs, and a batch has the 4 samples of one" in caplog.text
