"""What precision="bf16-true" means, as a loop that keeps fp32 masters of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mt_lightning import MegaTrainStrategy

VOCAB, WIDTH = 64, 48
NUM_SAMPLES, BATCH = 12, 2

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t())
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.drop = nn.Dropout(0.1)
        # As rotary embeddings keep them: more exact than the weights.
        self.register_buffer("waves", torch.linspace(1.0, 1.01, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.norm(x).float() * self.waves).to(x.dtype)
        return x + self.drop(self.down(F.gelu(self.up(y)))) * self.gain + self.empty.sum()


class Net(LightningModule):
    def __init__(self, make_optimizer: MakeOptimizer, *, tied: bool = False) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH) * 0.1)  # outside of units
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def predict_step(self, batch: Tensor) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        scheduler: dict[str, Any] = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def make_net(make_optimizer: MakeOptimizer, *, tied: bool = False, dropout: bool = True) -> Net:
    seed_everything(0)
    net = Net(make_optimizer, tied=tied)
    for layer in net.layers:
        layer.drop.p = 0.1 * dropout
    return net


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(torch.randint(VOCAB, (NUM_SAMPLES, 9), generator=generator), batch_size=BATCH)


def trainer(strategy: Any, *, max_steps: int = 5, **settings: Any) -> Trainer:
    return Trainer(
        strategy=strategy,
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"precision": "bf16-true", "max_epochs": -1, **settings},
    )


def paged(**settings: Any) -> MegaTrainStrategy:
    return MegaTrainStrategy(**{"max_ram_gb": 0.1, "_slice_bytes": 16384, **settings})


def fit(net: Net, strategy: Any, *, ckpt_path: Any = None, **settings: Any) -> Trainer:
    """Train on fixed tokens; deterministic given the network."""
    seed_everything(1)
    made = trainer(strategy, **settings)
    made.fit(net, loader(), ckpt_path=ckpt_path)
    return made


def rounded(values: Tensor) -> Tensor:
    """Return the nearest bfloat16 of each value, ties away from zero."""
    bits = values.detach().contiguous().numpy().reshape(-1).view(np.uint32)
    upper = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    weight = torch.from_numpy(upper.view(np.int16)).view(torch.bfloat16).view(values.shape)
    return torch.empty_like(values, dtype=torch.bfloat16).copy_(weight)


class Reference:
    """Trains with bfloat16 weights; the optimizer has fp32 masters, and fp32 gradients.

    Args:
        net: The network, in fp32; its parameters are the masters from now on.
    """

    def __init__(self, net: Net) -> None:
        self.masters = net
        self.net = copy.deepcopy(net)
        configured = net.configure_optimizers()
        self.optimizer = configured["optimizer"]
        self.scheduler = configured["lr_scheduler"]["scheduler"]
        self.pairs = list(zip(net.parameters(), self.net.parameters(), strict=True))
        self.show()

    def show(self) -> None:
        for master, weight in self.pairs:
            weight.data = rounded(master)

    def fit(
        self,
        *,
        max_steps: int = 5,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
    ) -> Reference:
        seed_everything(1)
        num_steps = 0
        while num_steps < max_steps:
            for index, batch in enumerate(loader()):
                loss = self.net.training_step(batch, index) / accumulate_grad_batches
                loss.backward()
                if (index + 1) % accumulate_grad_batches:
                    continue
                for master, weight in self.pairs:
                    master.grad = None if weight.grad is None else weight.grad.float()
                    weight.grad = None
                self.clip(gradient_clip_val, gradient_clip_algorithm)
                self.optimizer.step()
                self.scheduler.step()
                self.show()
                num_steps += 1
                if num_steps == max_steps:
                    break
        return self

    def clip(self, value: float | None, algorithm: str) -> None:
        if value is not None and algorithm == "norm":
            nn.utils.clip_grad_norm_(self.masters.parameters(), value)
        elif value is not None:
            nn.utils.clip_grad_value_(self.masters.parameters(), value)


def masters_of(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Join what a finished paged fit shows: bfloat16 weights, and the rests beside the state."""
    joined = {}
    for name, param in net.named_parameters():
        assert param.dtype == torch.bfloat16
        if not param.numel():
            continue
        upper = param.detach().contiguous().view(torch.int16).numpy().astype(np.int64)
        lower = optimizer.state[param]["master_rest"].contiguous().numpy().astype(np.int64)
        bits = ((upper << 16) + lower).astype(np.uint32).view(np.float32)
        joined[name] = torch.from_numpy(np.atleast_1d(bits)).view(param.shape)
    return joined


def assert_same(expected: Reference, net: Net, optimizer: torch.optim.Optimizer) -> None:
    """Compare losses, weights, masters and optimizer state, bit for bit."""
    assert net.losses
    last = expected.net.losses[-len(net.losses) :]
    assert torch.equal(torch.stack(last), torch.stack(net.losses))
    for (name, weight), found in zip(
        expected.net.named_parameters(), net.parameters(), strict=True
    ):
        assert torch.equal(weight, found), name
    masters = masters_of(net, optimizer)
    for name, master in expected.masters.named_parameters():
        assert not master.numel() or torch.equal(masters[name], master), name
    for (name, before), after in zip(expected.net.named_buffers(), net.buffers(), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after), name
    for (name, master), param in zip(
        expected.masters.named_parameters(), net.parameters(), strict=True
    ):
        state, found = expected.optimizer.state[master], optimizer.state[param]
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), (name, key)
