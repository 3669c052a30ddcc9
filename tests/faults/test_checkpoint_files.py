"""Checkpoint files that are missing, damaged, or belong to something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import mt_lightning as mt

from .nets import WIDTH, Net, assert_fresh_run_works, assert_usable, fit, parameters_of


def checkpoint(root: Path, module: Net | None = None) -> Path:
    """Save one at the end of an epoch, by plain Lightning."""
    path = root / "some.ckpt"
    fit(module or Net(), root, max_steps=8).save_checkpoint(path)
    return path


def refused(path: Path, root: Path, error: type[Exception], module: Net | None = None) -> str:
    module = module or Net()
    start = parameters_of(module)
    with pytest.raises(error) as caught:
        fit(module, root, mt.MegaTrainStrategy(root / "pages"), ckpt_path=path, max_steps=10)
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())
    assert parameters_of(module).keys() == start.keys()
    return str(caught.value)


def test_missing(tmp_path: Path) -> None:
    module = Net()
    start = parameters_of(module)
    assert "none.ckpt" in refused(tmp_path / "none.ckpt", tmp_path, FileNotFoundError, module)
    assert_usable(module, start)
    assert_fresh_run_works(module, tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_truncated(tmp_path: Path, kept: float) -> None:
    path = checkpoint(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    module = Net()
    start = parameters_of(module)
    assert f"{path} cannot be loaded" in refused(path, tmp_path, mt.ConfigError, module)
    assert_usable(module, start)
    assert_fresh_run_works(module, tmp_path)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    path.write_text("nothing of the kind")
    assert str(path) in refused(path, tmp_path, mt.ConfigError)


def test_pickled_objects_are_not_run(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    torch.save({"state_dict": {}, "callbacks": Net}, path)
    assert "weights_only=False" in refused(path, tmp_path, mt.ConfigError)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].out = nn.Linear(2 * WIDTH, WIDTH, bias=False)


def test_of_another_model(tmp_path: Path) -> None:
    module = Net()
    start = parameters_of(module)
    message = refused(checkpoint(tmp_path, Wider()), tmp_path, RuntimeError, module)
    assert "layers.1.out.bias" in message
    assert parameters_of(module)["layers.1.out.bias"].equal(start["layers.1.out.bias"])
    assert_fresh_run_works(module, tmp_path)


def test_of_another_optimizer(tmp_path: Path) -> None:
    module = Net()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)  # type: ignore[method-assign]
    path = checkpoint(tmp_path)
    message = refused(path, tmp_path, mt.ConfigError, module)
    assert "use the optimizer that wrote it" in message


def test_validation_of_a_damaged_file(tmp_path: Path) -> None:
    from .nets import Evaluated, loader, make_trainer

    path = tmp_path / "some.ckpt"
    path.write_bytes(b"damaged")
    module = Evaluated()
    start = parameters_of(module)
    trainer = make_trainer(tmp_path, "megatrain")
    with pytest.raises(mt.ConfigError):
        trainer.validate(module, loader(), ckpt_path=path, verbose=False)
    assert_usable(module, start)
    trainer.validate(module, loader(), verbose=False)
