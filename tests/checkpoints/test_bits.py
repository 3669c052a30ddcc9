"""A linked checkpoint holds the bits that a standard one holds, and a run goes on from either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mt_lightning as mt

from ..resume.run import assert_goes_on_as, train
from ..resume.run import paged as paged_run
from .runs import Net, assert_same_tree, end_of, fit, linked, manifest_of, paged, saved

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You defined a `validation_step` but have no",
)

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd with momentum": {"optimizer": "sgd"},
    "lossless": {"compression": "lossless"},
    "packed": {"compression": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_formats_hold_the_same_and_go_on_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    optimizer = KINDS[kind].get("optimizer", "adamw")
    compression = {"optimizer_compression": KINDS[kind].get("compression", False)}
    standard = mt.PagedCheckpointIO()
    trainer = fit(
        tmp_path, paged(tmp_path / "a", **compression), module=Net(optimizer), io=linked()
    )
    path, plain = tmp_path / "linked.ckpt", tmp_path / "plain.ckpt"
    trainer.save_checkpoint(path)
    standard.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(False), plain)
    manifest = manifest_of(path)
    assert len(manifest.tensors) > 20
    found = standard.load_checkpoint(path)
    found.pop("megatrain_run")
    assert_same_tree(found, standard.load_checkpoint(plain))
    assert found["state_dict"]._metadata == trainer.lightning_module.state_dict()._metadata

    straight = fit(
        tmp_path, paged(tmp_path / "b", **compression), module=Net(optimizer), max_steps=10
    )
    goes_on = fit(
        tmp_path,
        paged(tmp_path / "c", **compression),
        module=Net(optimizer),
        max_steps=10,
        ckpt_path=path,
    )
    assert_same_tree(end_of(goes_on), end_of(straight))
    if not compression["optimizer_compression"]:
        assert_same_tree(
            end_of(straight), end_of(fit(tmp_path, "auto", module=Net(optimizer), max_steps=10))
        )


@pytest.mark.parametrize(
    ("stop", "workers"),
    [(3, 0), (13, 2), *(pytest.param(stop, 0, marks=pytest.mark.slow) for stop in (8, 11))],
)
def test_it_goes_on_exactly_from_the_middle_of_an_epoch(
    tmp_path: Path, stop: int, workers: int
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    expected = train("auto", workers=workers)
    saving = ModelCheckpoint(tmp_path / "ck", every_n_train_steps=stop, save_top_k=-1)
    first = train(
        paged_run(tmp_path / "a"),
        workers=workers,
        plugins=[linked()],
        more_callbacks=[saving],
        max_steps=stop + 2,
    )
    first.trainer.strategy._close()
    (path,) = [p for p in (tmp_path / "ck").iterdir() if f"step={stop}.ckpt" in p.name]
    second = train(
        paged_run(tmp_path / "b"), workers=workers, seed=99, ckpt_path=path, more_callbacks=[saving]
    )
    assert assert_goes_on_as(expected, second) == stop


def test_coded_state_stays_coded(tmp_path: Path) -> None:
    class Saving(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 4:
                self.trainer.save_checkpoint(tmp_path / "some.ckpt")
                self.trainer.save_checkpoint(tmp_path / "again.ckpt")

    lossless = {"optimizer_compression": "lossless"}
    straight = fit(tmp_path, paged(tmp_path / "a", **lossless), module=Saving(), io=linked())
    manifest = manifest_of(tmp_path / "some.ckpt")
    coded = [file for file in manifest.files.values() if file.coding is not None]
    assert len(coded) == sum(".state." in name for name in manifest.files) > 3
    goes_on = fit(tmp_path, paged(tmp_path / "b", **lossless), ckpt_path=tmp_path / "some.ckpt")
    assert_same_tree(end_of(goes_on), end_of(straight))
    io = mt.PagedCheckpointIO()
    io.remove_checkpoint(tmp_path / "some.ckpt")
    plain = io.load_checkpoint(tmp_path / "again.ckpt")["optimizer_states"][0]["state"]
    four = end_of(fit(tmp_path, "auto", max_steps=4))["state"][0]
    assert_same_tree(plain, four)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_state_is_coded_again_where_the_largest_chunk_is_of_a_page_without_unit(
    tmp_path: Path, optimizer: str
) -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__(optimizer)
            self.wide = torch.nn.Parameter(torch.ones(40, 1, 100))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) + self.wide.pow(2).mean()

    settings = {"optimizer_compression": "lossless"}
    expected = end_of(fit(tmp_path, "auto", module=Wide(), max_steps=8))
    first = fit(tmp_path, paged(tmp_path / "a", **settings), module=Wide(), io=linked())
    first.save_checkpoint(tmp_path / "some.ckpt")
    strategy = paged(tmp_path / "b", **settings)
    path = tmp_path / "some.ckpt"
    goes_on = fit(tmp_path, strategy, module=Wide(), max_steps=8, ckpt_path=path)
    assert_same_tree(end_of(goes_on), expected)


def test_a_hook_that_reads_coded_state_is_told(tmp_path: Path) -> None:
    class Reading(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            (state,) = checkpoint["optimizer_states"]
            state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] + 1

        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / "some.ckpt")

    strategy = paged(tmp_path / "a", optimizer_compression="lossless")
    with pytest.raises(mt.ConfigError, match="without data"):
        fit(tmp_path, strategy, module=Reading(), io=linked())
    assert not (tmp_path / "some.ckpt").exists()


def test_weights_alone(tmp_path: Path) -> None:
    trainer = fit(tmp_path, paged(tmp_path / "a"), io=linked())
    path = tmp_path / "weights.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    assert all(".weight." in name for name in manifest_of(path).files)
    found = mt.PagedCheckpointIO().load_checkpoint(path)
    assert "optimizer_states" not in found
    module = Net()
    module.load_state_dict(found["state_dict"])
    assert_same_tree(module.state_dict(), trainer.lightning_module.state_dict())


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_other_loops_load_it(tmp_path: Path, verb: str) -> None:
    from .runs import loader

    class Evaluated(Net):
        validation_step = Net.training_step
        test_step = Net.training_step
        predict_step = Net.training_step

    path = saved(tmp_path)
    module = Evaluated()
    trainer = fit(tmp_path, paged(tmp_path / "b"), module=module, max_steps=1)
    getattr(trainer, verb)(module, loader(), ckpt_path=path)
    expected = mt.PagedCheckpointIO().load_checkpoint(path)["state_dict"]
    for name, param in module.named_parameters():
        assert torch.equal(param, expected[name]), name


def test_what_hooks_put_into_a_checkpoint_is_in_it(tmp_path: Path) -> None:
    class Hooked(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]
            weights["layers.0.up.weight"].mul_(2)
            weights["layers.0.down.weight"] = weights["layers.0.down.weight"] * 3
            checkpoint["part"] = (weights["layers.2.up.weight"].T[3:5, ::2], {"n": [1, None]})
            del weights["layers.1.norm.bias"]

    trainer = fit(tmp_path, paged(tmp_path / "a"), module=Hooked(), io=linked())
    path = tmp_path / "some.ckpt"
    trainer.save_checkpoint(path)
    now = trainer.lightning_module.state_dict()
    found = mt.PagedCheckpointIO().load_checkpoint(path)
    weights = found["state_dict"]
    # Behind a fit the state dict is that of the module itself, here as in plain Lightning.
    assert torch.equal(weights["layers.0.up.weight"], now["layers.0.up.weight"])
    assert torch.equal(weights["layers.0.down.weight"], now["layers.0.down.weight"] * 3)
    assert torch.equal(found["part"][0], now["layers.2.up.weight"].T[3:5, ::2])
    assert found["part"][1] == {"n": [1, None]}
    assert "layers.1.norm.bias" not in weights
