"""Lightning's own callbacks, as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

import mt_lightning as mt
from tests.faults.nets import (
    Evaluated,
    Net,
    assert_same,
    assert_usable,
    fit,
    loader,
    make_trainer,
    parameters_of,
)

BOTH = pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}], ids=["eager", "clip"])


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@BOTH
def test_model_checkpoint(tmp_path: Path, settings: Any) -> None:
    saved = {}
    for strategy in ("megatrain", "auto"):
        directory = tmp_path / strategy
        callback = ModelCheckpoint(
            directory, monitor="train_loss", save_top_k=2, save_last=True, every_n_train_steps=2
        )
        fit(
            Net(), tmp_path, strategy, max_steps=8, callbacks=[callback],
            enable_checkpointing=True, **settings,
        )  # fmt: skip
        saved[strategy] = {path.name: load(path) for path in sorted(directory.glob("*.ckpt"))}
    paged, plain = saved["megatrain"], saved["auto"]
    assert paged.keys() == plain.keys()
    assert len(paged) == 3
    for name, checkpoint in paged.items():
        assert_same(checkpoint["state_dict"], plain[name]["state_dict"])
        mine, theirs = (c["optimizer_states"][0] for c in (checkpoint, plain[name]))
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            assert_same(mine["state"][index], state)


@pytest.mark.parametrize(("first", "second"), [("megatrain", "auto"), ("auto", "megatrain")])
def test_checkpoints_are_exchanged_with_plain_lightning(
    tmp_path: Path, first: str, second: str
) -> None:
    module, plain = Net(), Net()
    for each, saver, resumer in ((module, first, second), (plain, "auto", "auto")):
        path = tmp_path / f"{saver}.ckpt"
        fit(Net(), tmp_path, saver, max_steps=8).save_checkpoint(path)
        fit(each, tmp_path, resumer, max_steps=12, ckpt_path=path)
    assert_usable(module, parameters_of(plain))


def test_weights_only_checkpoint(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "kept", save_weights_only=True, every_n_train_steps=4)
    module = Net()
    trainer = fit(module, tmp_path, "megatrain", callbacks=[callback], enable_checkpointing=True)
    path = Path(callback.best_model_path)
    assert "optimizer_states" not in load(path)
    assert_usable(Net.load_from_checkpoint(path), parameters_of(module))
    trainer.save_checkpoint(tmp_path / "again.ckpt", weights_only=True)
    assert_same(load(tmp_path / "again.ckpt")["state_dict"], parameters_of(module))
    with pytest.raises(KeyError, match="weights_only"):
        fit(module, tmp_path, "megatrain", ckpt_path=path, max_steps=6)
    assert_usable(module, parameters_of(module))


def evaluated_fit(root: Path, strategy: Any, callbacks: list[Any], **settings: Any) -> Any:
    module = Evaluated()
    settings = {"max_steps": 8, "val_check_interval": 2, "limit_val_batches": 2, **settings}
    trainer = make_trainer(root, strategy, callbacks=callbacks, **settings)
    trainer.fit(module, loader(), loader(2))
    return module, trainer


@BOTH
def test_early_stopping(tmp_path: Path, settings: Any) -> None:
    ends = []
    for strategy in ("megatrain", "auto"):
        callback = EarlyStopping("val_loss", patience=1, mode="max")
        module, trainer = evaluated_fit(tmp_path, strategy, [callback], **settings)
        ends.append((trainer.global_step, parameters_of(module), callback.best_score))
    assert ends[0][0] == ends[1][0] < 8
    assert_same(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][2], ends[1][2])


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_learning_rate_monitor_and_summary(tmp_path: Path, capsys: Any) -> None:
    metrics = []
    for strategy in ("megatrain", "auto"):
        logger = CSVLogger(tmp_path, name=strategy)
        fit(
            Scheduled(), tmp_path, strategy, logger=logger, log_every_n_steps=1,
            enable_model_summary=True,
            callbacks=[LearningRateMonitor("step"), ModelSummary(max_depth=2), Timer()],
        )  # fmt: skip
        metrics.append((Path(logger.log_dir) / "metrics.csv").read_text())
    assert metrics[0] == metrics[1]
    assert "lr-AdamW" in metrics[0]
    tables = [part for part in capsys.readouterr().out.split("\n\n") if "Block" in part]
    assert not tables or tables[0].split("Modules")[0] == tables[-1].split("Modules")[0]


def test_gradient_accumulation_scheduler(tmp_path: Path) -> None:
    modules = []
    for strategy in ("megatrain", "auto"):
        callback = GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})
        module = Net()
        trainer = fit(module, tmp_path, strategy, callbacks=[callback], max_steps=-1, max_epochs=3)
        modules.append((trainer.global_step, parameters_of(module)))
    assert modules[0][0] == modules[1][0] == 8 + 2 + 4
    assert_same(modules[0][1], modules[1][1])


class Tunable(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-4

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def test_lr_find_then_fit(tmp_path: Path) -> None:
    found = []
    for strategy in (mt.MegaTrainStrategy(tmp_path / "pages"), "auto"):
        module = Tunable()
        trainer = make_trainer(tmp_path, strategy)
        finder = Tuner(trainer).lr_find(module, loader(), num_training=20, update_attr=True)
        assert finder is not None
        trainer.fit(module, loader())
        found.append((finder.results, module.lr, parameters_of(module)))
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]
    assert_same(found[0][2], found[1][2])
