"""What the strategy cannot serve is refused before the first batch; the module stays as it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision, HalfPrecision
from torch import Tensor, nn

import mt_lightning as mt

from .nets import (
    WIDTH,
    Net,
    assert_fresh_run_works,
    assert_usable,
    fit,
    loader,
    make_trainer,
    parameters_of,
)


class _Seen(Callback):
    """Notes whether a batch was reached."""

    def __init__(self) -> None:
        self.reached = False

    def on_train_batch_start(self, *_: Any) -> None:
        self.reached = True


def refused(
    module: Net,
    root: Path,
    strategy: Any = None,
    error: type[Exception] = mt.ConfigError,
    **settings: Any,
) -> str:
    """Return the message of the refusal; check that it came first and left nothing behind."""
    before, seen = parameters_of(module), _Seen()
    callbacks = [*settings.pop("callbacks", []), seen]
    directory = root / "pages"
    strategy = strategy or mt.MegaTrainStrategy(offload_dir=directory)
    with pytest.raises(error) as caught:
        fit(module, root, strategy, callbacks=callbacks, **settings)
    assert not seen.reached
    assert_usable(module, before)
    assert not list(directory.glob("pages/*")), "page files were left behind"
    return str(caught.value)


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_precision(tmp_path: Path, precision: Any) -> None:
    with pytest.raises(mt.ConfigError, match=r"precision.*'bf16-mixed'"):
        make_trainer(tmp_path, "megatrain", precision=precision)


@pytest.mark.parametrize(
    "plugin", [HalfPrecision("16-true"), DoublePrecision()], ids=lambda each: type(each).__name__
)
def test_precision_plugin(tmp_path: Path, plugin: Any) -> None:
    with pytest.raises(mt.ConfigError, match=r"precision.*'bf16-mixed'"):
        make_trainer(tmp_path, "megatrain", plugins=[plugin])


def test_16_mixed_becomes_bf16_mixed_as_in_lightning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        trainer = make_trainer(tmp_path, "megatrain", precision="16-mixed")
    assert trainer.precision == "bf16-mixed"


@pytest.mark.parametrize("strategy", ["megatrain", mt.MegaTrainStrategy()], ids=["name", "object"])
def test_two_devices(tmp_path: Path, strategy: Any) -> None:
    assert "Trainer(devices=1)" in refused(Net(), tmp_path, strategy, devices=2)


def test_two_nodes(tmp_path: Path) -> None:
    assert "Trainer(num_nodes=1)" in refused(Net(), tmp_path, num_nodes=2)


class _OtherAccelerator(CPUAccelerator):
    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        del devices
        return [torch.device("meta")]


def test_other_accelerator(tmp_path: Path) -> None:
    message = refused(Net(), tmp_path, accelerator=_OtherAccelerator())
    assert "Trainer(accelerator='cpu')" in message


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    module, directory = Net(), tmp_path / "pages"
    trainer = make_trainer(tmp_path, mt.MegaTrainStrategy(offload_dir=directory))
    before = parameters_of(module)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(mt.ConfigError, match=f"(?s){platform}.*strategy='auto'"):
        trainer.fit(module, loader())
    monkeypatch.undo()
    assert_usable(module, before)
    assert not directory.exists()


@pytest.mark.parametrize(
    "callback",
    [
        StochasticWeightAveraging(swa_lrs=1e-2),
        WeightAveraging(),
        EMAWeightAveraging(),
        ModelPruning("l1_unstructured", amount=0.5),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callback(tmp_path: Path, callback: Callback) -> None:
    message = refused(Net(), tmp_path, callbacks=[callback])
    assert type(callback).__name__ in message
    assert "Trainer(callbacks=[...])" in message


def test_async_checkpoint_io(tmp_path: Path) -> None:
    message = refused(Net(), tmp_path, plugins=[AsyncCheckpointIO()])
    assert "AsyncCheckpointIO" in message
    assert "Trainer(plugins=[...])" in message


def test_unknown_unit_class(tmp_path: Path) -> None:
    strategy = mt.MegaTrainStrategy(offload_dir=tmp_path / "pages", units=["Block", "Blok"])
    message = refused(Net(), tmp_path, strategy)
    assert "units=" in message
    assert "no module of class Blok" in message
    assert "Block, LayerNorm" in message


def test_a_unit_class_within_another(tmp_path: Path) -> None:
    strategy = mt.MegaTrainStrategy(offload_dir=tmp_path / "pages", units=["Block", "LayerNorm"])
    message = refused(Net(), tmp_path, strategy)
    assert "each LayerNorm lies in a module of another of these classes" in message


# --- modules ----------------------------------------------------------------------------------


class _Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, sparse=True)


def test_sparse_embedding(tmp_path: Path) -> None:
    message = refused(_Sparse(), tmp_path)
    assert "embedding (Embedding)" in message
    assert "sparse=False" in message


class _Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lazy(x).sum()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:The total number of parameters detected may be inaccurate")
def test_lazy_module(tmp_path: Path) -> None:
    module = _Lazy()
    with pytest.raises(mt.ConfigError, match=r"lazy.*one batch"):
        fit(module, tmp_path, mt.MegaTrainStrategy(offload_dir=tmp_path / "pages"))
    with torch.no_grad():
        module(torch.ones(2, WIDTH))
    fit(module, tmp_path, mt.MegaTrainStrategy(offload_dir=tmp_path / "pages"))


# --- optimizers -------------------------------------------------------------------------------


class _With(Net):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


class Coupled(torch.optim.SGD):
    """Counts in its param group what all parameters see."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["k"])
        return loss


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.num_steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / self.num_steps)
        return loss


class CountingInPlace(Counting):
    """Counts its steps in a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.num_steps = torch.zeros(())


class NormInside(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        for param in params:
            param.sub_(param.grad / (norm + 1e-6), alpha=self.param_groups[0]["lr"])
        return loss


OPTIMIZERS = {
    "LBFGS": (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS"),
    "SparseAdam": (lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam"),
    "differentiable": (
        lambda m: torch.optim.Adam(m.parameters(), differentiable=True),
        "differentiable=False",
    ),
    "param group": (lambda m: Coupled(m.parameters(), lr=0.1), "Coupled couples.*k"),
    "attribute": (lambda m: Counting(m.parameters(), lr=0.1), "Counting couples.*num_steps"),
    "tensor attribute": (
        lambda m: CountingInPlace(m.parameters(), lr=0.1),
        "CountingInPlace couples.*num_steps",
    ),
    "norm inside": (lambda m: NormInside(m.parameters(), lr=0.1), "NormInside couples"),
    "no module parameter": (
        lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(3, 7))], lr=0.1),
        r"\(3, 7\).*not a parameter of the module.*nn.Parameter",
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer(tmp_path: Path, kind: str) -> None:
    make, expected = OPTIMIZERS[kind]
    message = refused(_With(make), tmp_path)
    assert re.search(expected, message), message


class _TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.parameters(), lr=0.1),
            torch.optim.SGD([self.layers[0].out.bias], lr=0.1),
        ]


def test_parameter_in_two_optimizers(tmp_path: Path) -> None:
    message = refused(_TwoOptimizers(), tmp_path)
    assert "layers.0.out.bias is in two optimizers" in message
    assert "configure_optimizers" in message


def test_configure_optimizers_raises(tmp_path: Path) -> None:
    def fail(module: Net) -> Any:
        raise KeyError("no such optimizer")

    module = _With(fail)
    refused(module, tmp_path, error=KeyError)
    module.make = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)
    assert_fresh_run_works(module, tmp_path)


def test_refusal_then_the_same_trainer_and_directory_work(tmp_path: Path) -> None:
    module = _With(lambda m: torch.optim.LBFGS(m.parameters()))
    trainer: Trainer = make_trainer(tmp_path, mt.MegaTrainStrategy(offload_dir=tmp_path / "pages"))
    with pytest.raises(mt.ConfigError):
        trainer.fit(module, loader())
    module.make = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)
    trainer.fit(module, loader())
    plain = Net()
    fit(plain, tmp_path)
    assert_usable(module, parameters_of(plain))
