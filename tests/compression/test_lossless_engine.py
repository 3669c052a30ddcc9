"""Bit-lossless state on pages: plain Lightning's bits, in fewer bytes on disk."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mt_lightning import MegaTrainStrategy, StorageError
from mt_lightning.engine.ending import Ending
from mt_lightning.engine.update import Updater

from .net import WIDTH, Net, assert_same_training, fit, make_net
from .test_packed_engine import paged

MAKERS: dict[str, Any] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
    "fused": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
    "amsgrad": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, amsgrad=True),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9),
    "adafactor": lambda net: torch.optim.Adafactor([p for p in net.parameters() if p.numel()]),
}


@functools.cache
def trained_plainly(kind: str) -> Net:
    net = make_net(MAKERS[kind])
    fit(net)
    return net


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("smallest", [True, False], ids=["smallest", "ample"])
def test_every_optimizer_keeps_its_bits(kind: str, smallest: bool) -> None:
    plain, trained = trained_plainly(kind), make_net(MAKERS[kind])
    trainer = fit(trained, paged(MAKERS[kind], smallest=smallest, optimizer_compression="lossless"))
    assert_same_training(plain, trained)
    expected = plain.trainer.optimizers[0].state_dict()["state"]
    found = trainer.optimizers[0].state_dict()["state"]
    assert found.keys() == expected.keys()
    for index, entries in expected.items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(found[index][key]), torch.as_tensor(value)), key


@pytest.fixture(scope="module", params=[10, pytest.param(50, marks=pytest.mark.slow)])
def many_steps(request: pytest.FixtureRequest) -> dict[Any, Net]:
    """Train with raw and with coded state."""
    nets = {False: make_net(MAKERS["adamw"]), "lossless": make_net(MAKERS["adamw"])}
    for compression, net in nets.items():
        fit(net, paged(MAKERS["adamw"], optimizer_compression=compression), max_steps=request.param)
    return nets


def test_parameters_are_those_of_raw_state_after_many_steps(many_steps: dict[Any, Net]) -> None:
    assert_same_training(many_steps[False], many_steps["lossless"])


def test_fewer_bytes_are_read_and_written_than_raw(many_steps: dict[Any, Net]) -> None:
    moved = {}
    for compression, net in many_steps.items():
        stats = net.trainer.strategy.engine.stats
        moved[compression] = stats.bytes_read + stats.bytes_written
    assert moved["lossless"] < moved[False]


def strategy_of(kind: Any) -> Any:
    return "auto" if kind == "plain" else paged(MAKERS["adamw"], optimizer_compression=kind)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Give a checkpoint after eight steps, of a run that is made once."""
    directory = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(kind: Any) -> Path:
        path = directory / f"{kind}.ckpt"
        fit(make_net(MAKERS["adamw"]), strategy_of(kind), max_steps=8).save_checkpoint(path)
        return path

    return make


@functools.cache
def straight() -> Net:
    net = make_net(MAKERS["adamw"])
    fit(net, "auto", max_steps=10)
    return net


def go_on(kind: Any, path: Path) -> Net:
    net = make_net(MAKERS["adamw"])
    fit(net, strategy_of(kind), max_steps=10, ckpt_path=path)
    return net


@pytest.mark.parametrize("wrote", [False, "lossless"])
@pytest.mark.parametrize("reads", [False, "lossless", "plain"])
def test_checkpoints_are_those_of_plain_lightning(
    half: Callable[[Any], Path], wrote: Any, reads: Any
) -> None:
    """Raw, lossless and plain Lightning read each other's: all of them keep every bit."""

    # A paged run goes on as if it had not been interrupted.
    expected = go_on("plain", half("plain")) if reads == "plain" else straight()
    assert_same_training(expected, go_on(reads, half(wrote)))


def test_a_flipped_bit_in_coded_state_is_found(tmp_path: Path) -> None:
    class Flips(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.trainer.strategy.engine.live.drain()
                for path in tmp_path.glob("pages/p*.state.*"):
                    data = bytearray(path.read_bytes())
                    data[5000] ^= 16
                    path.write_bytes(data)

    torch.manual_seed(0)
    net = Flips(MAKERS["adamw"])
    strategy = paged(MAKERS["adamw"], optimizer_compression="lossless", offload_dir=tmp_path)
    with pytest.raises(StorageError, match="state"):
        fit(net, strategy)


def test_state_stays_visible_after_fit_and_survives_a_copy() -> None:
    net = make_net(MAKERS["adamw"])
    trainer = fit(net, MegaTrainStrategy(max_ram_gb=1, optimizer_compression="lossless"))
    optimizer = trainer.optimizers[0]
    param: nn.Parameter = net.layers[0].up.weight
    assert optimizer.state[param]["exp_avg"].shape == param.shape
    assert len(optimizer.state) == len(list(net.parameters()))


class Scaled(Net):
    """Has a parameter outside of units, which is updated on the training thread."""

    def __init__(self, make_optimizer: Any) -> None:
        super().__init__(make_optimizer)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale.mean()


def test_updates_on_the_training_thread_need_no_frame_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rings: list[Any] = []
    num_inline, update, one_at_a_time = [], Updater.update, threading.Lock()

    def while_worker_holds_all(updater: Any, job: Any) -> Ending:
        with one_at_a_time:
            if not updater._inline:
                rings[:] = [updater._stream._streams]
                return update(updater, job)
            held = [frame for ring in rings for frame in iter(ring.acquire, None)]
            ending = update(updater, job)
            num_inline.append(len(held))
            for frame in held:
                rings[0].release(frame)
            return ending

    paged_by_step = MegaTrainStrategy(
        max_ram_gb=0.5, optimizer_compression="lossless", durability="step"
    )
    plain, trained = Scaled(MAKERS["adamw"]), Scaled(MAKERS["adamw"])
    trained.load_state_dict(plain.state_dict())
    fit(plain)
    monkeypatch.setattr(Updater, "update", while_worker_holds_all)
    fit(trained, paged_by_step)
    assert_same_training(plain, trained)
    assert max(num_inline) > 0
