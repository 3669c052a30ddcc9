"""Near-ties of a router: the backward pass trains the experts that made the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning.engine.routing import Routes

WIDTH, NUM_EXPERTS, NUM_LAYERS = 32, 4, 3


class Noise:
    """Adds a last bit to scores, other ones each time that a layer runs, as a kernel might."""

    def __init__(self) -> None:
        self.on = False
        self.num_runs: dict[int, int] = {}

    def __call__(self, index: int, scores: Tensor) -> Tensor:
        if not self.on:
            return scores
        run = self.num_runs[index] = self.num_runs.get(index, 0) + 1
        signs = torch.ones(NUM_EXPERTS)
        signs[run % 2 :: 2] = -1
        return torch.nextafter(scores, signs * torch.inf)


class Experts(nn.Module):
    def __init__(self, index: int, how: str, noise: Noise) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        with torch.no_grad():
            self.router.weight[1:] = self.router.weight[:1]  # each choice is a tie
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))
        self.index, self.how, self.noise = index, how, noise

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        # Scores are no part of the output, so that only the choice tells one run from another.
        noisy = self.noise(self.index, scores.detach())
        if self.how == "topk":
            chosen = torch.topk(noisy, 2, dim=-1).indices
        elif self.how == "method":
            chosen = noisy.topk(2)[1]
        else:
            chosen = noisy.argmax(-1, keepdim=True)
        out = x + 0 * scores.sum()
        for expert, module in enumerate(self.experts):
            rows = (chosen == expert).any(-1)
            out = out.index_add(0, rows.nonzero()[:, 0], torch.tanh(module(x[rows])))
        return out


class Net(LightningModule):
    def __init__(self, how: str, noise: Noise) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts(i, how, noise) for i in range(NUM_LAYERS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Net, strategy: Any) -> dict[str, Tensor]:
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(batches, 8))  # pyright: ignore[reportArgumentType]
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("how", ["topk", "method", "argmax"])
def test_the_choice_of_the_forward_is_that_of_the_backward(tmp_path: Path, how: str) -> None:
    noise = Noise()
    noise.on = True
    expected = fit(Net(how, noise), "auto")
    noise.num_runs.clear()
    strategy = mt.MegaTrainStrategy(tmp_path, max_ram_gb=0.1, recompute=True)
    actual = fit(Net(how, noise), strategy)
    assert noise.num_runs == dict.fromkeys(range(NUM_LAYERS), 2), "each layer ran again"
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("how", ["topk", "method", "argmax"])
def test_without_it_the_noise_would_be_seen(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Routes, "executed", lambda self, choices: choices.clear())
    with pytest.raises((AssertionError, CheckpointError)):
        test_the_choice_of_the_forward_is_that_of_the_backward(tmp_path, how)


class Scored(Net):
    """Scores weigh the experts, so they are trained too."""

    def __init__(self, noise: Noise) -> None:
        super().__init__("topk", noise)
        for layer in self.layers:
            layer.forward = self.run.__get__(layer)  # type: ignore[attr-defined]

    @staticmethod
    def run(layer: Any, x: Tensor) -> Tensor:
        scores = layer.router(x)
        noise = layer.noise(layer.index, scores.detach()) - scores.detach()
        values, chosen = torch.topk(scores + noise, 2)
        weights = F.softmax(values, -1)
        out = x
        for expert, module in enumerate(layer.experts):
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)
            out = out + weight * torch.tanh(module(x))
        return out


def test_scores_of_the_kept_choice_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = Noise()
    noise.on = True
    expected = fit(Scored(noise), "auto")

    def largest_error(directory: Path) -> float:
        noise.num_runs.clear()
        strategy = mt.MegaTrainStrategy(directory, max_ram_gb=0.1, recompute=True)
        actual = fit(Scored(noise), strategy)
        return max(float((actual[n] - value).abs().max()) for n, value in expected.items())

    assert largest_error(tmp_path / "kept") < 1e-7, "the last bit of scores"
    monkeypatch.setattr(Routes, "executed", lambda self, choices: choices.clear())
    assert largest_error(tmp_path / "chosen anew") > 1e-4


def test_units_without_a_choice_are_let_alone() -> None:
    routes, choices = Routes(nn.Linear(2, 2)), []
    with routes.recording(choices) as mode:
        assert mode is not None
        torch.ones(2) + 1
    routes.executed(choices)
    with routes.recording(choices) as mode:
        assert mode is None
