"""Several drives: what each of them moves in the run in virtual time is what it moves in a run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt
from mt_lightning.commands.plan.model import worker_for
from mt_lightning.engine.options import Options
from mt_lightning.planning.machines import GIB, Drive, changed, find_machine
from mt_lightning.planning.planner import Answer, answer
from mt_lightning.planning.simulation import simulate
from mt_lightning.planning.tiers import Model
from mt_lightning.planning.training import Training
from mt_lightning.tiers import store as store_module
from mt_lightning.tiers.store import FileStore, Store
from mt_lightning.tiers.wrapped import WrappedStore

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but")
T = TypeVar("T")
MAX_RAM_GB, LENGTH, NUM_WARM, NUM_STEPS = 0.006, 16, 2, 6


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=300,
        )
    )  # fmt: skip


def plan(sizes: list[int], form: bool, **rates: float) -> Answer:
    machine = find_machine("dgx-spark")
    drive = dataclasses.replace(machine.drives[0], **rates)
    drives = tuple(dataclasses.replace(drive, size_bytes=size) for size in sizes)
    with torch.device("meta"):
        model = Model.of("llama", llama())
    options = Options(max_ram_gb=MAX_RAM_GB, durability="step", optimizer_compression=form)
    training = Training(sequence_length=LENGTH, precision="32-true", options=options)
    found = answer(
        model, training, changed(machine, drives=drives), worker_for(model, on_host=True)
    )
    assert found.fits, found.lacks
    return found


class Counting(WrappedStore):
    """Counts the bytes of each directory."""

    def __init__(self, inner: FileStore) -> None:
        super().__init__(inner)
        self.files = inner
        self.moved: Counter[tuple[str, str]] = Counter()

    def _run(self, op: str, name: str, nbytes: int, call: Callable[[], T], offset: int = 0) -> T:
        done = call()
        if op in ("read", "write"):
            self.moved[self.files.path_of(name).parents[1].name, op] += nbytes
        return done


def train(directories: list[Path], form: bool) -> list[tuple[int, int]]:
    """Train, and return what each directory read and wrote."""
    stores: list[Counting] = []

    def wrap(inner: Store) -> Store:
        assert isinstance(inner, FileStore)
        stores.append(Counting(inner))
        return stores[0]

    class Begin(pl.Callback):
        moved: Counter[tuple[str, str]] = Counter()

        def on_train_batch_start(self, trainer: pl.Trainer, *given: Any) -> None:
            if given[-1] == NUM_WARM:
                trainer.strategy.engine.live.drain()  # type: ignore[attr-defined]
                self.moved = Counter(stores[0].moved)

    begin = Begin()
    trainer = pl.Trainer(
        strategy=mt.MegaTrainStrategy(
            offload_dir=directories,
            max_ram_gb=MAX_RAM_GB,
            durability="step",
            optimizer_compression=form,
            _wrap_store=wrap,
        ),
        accelerator="cpu",
        max_steps=NUM_WARM + NUM_STEPS,
        callbacks=[begin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directories[0].parent,
    )
    ids = torch.randint(0, 300, (NUM_WARM + NUM_STEPS, LENGTH))
    trainer.fit(mt.CausalLMModule(llama()), DataLoader([{"input_ids": row} for row in ids]))
    # All is written by now: at the end of a step some of it is still on its way.
    moved = stores[0].moved - begin.moved
    return [(moved[d.name, "read"], moved[d.name, "write"]) for d in directories]


@pytest.mark.parametrize("form", [False, True])
@pytest.mark.parametrize("sizes", [(8 * GIB, 8 * GIB), (9 * GIB, 3 * GIB, 3 * GIB)])
def test_each_drive_moves_in_virtual_time_what_it_moves_in_a_run(
    sizes: tuple[int, ...], form: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / f"drive{number}" for number in range(len(sizes))]
    room = dict(zip(directories, sizes, strict=True))

    def free(directory: Path) -> int:
        return room[directory] - sum(f.stat().st_size for f in (directory / "pages").iterdir())

    monkeypatch.setattr(store_module, "free_bytes", free)
    ran = train(directories, form)
    played = simulate(plan(list(sizes), form), num_warm=NUM_WARM, num_steps=NUM_STEPS).drive_bytes
    everything = sum(read for read, _ in ran)
    for (read, written), of_run in zip(played, ran, strict=True):
        assert NUM_STEPS * written == pytest.approx(of_run[1], rel=0.01)
        assert NUM_STEPS * read == pytest.approx(of_run[0], abs=0.05 * everything)


def test_the_slowest_drive_sets_the_time_and_a_second_one_helps_less_than_twice() -> None:
    rates = {"read_bytes_per_s": 2e8, "write_bytes_per_s": 2e8}
    size = 8 * GIB
    one, two = (simulate(plan([size] * n, False, **rates)).step_s for n in (1, 2))
    assert one / 2 < two < one
    even = plan([size, size], False, **rates)
    slow = dataclasses.replace(even.machine.drives[1], read_bytes_per_s=2e7, write_bytes_per_s=2e7)
    machine = changed(even.machine, drives=(even.machine.drives[0], slow))
    uneven = dataclasses.replace(even, machine=machine)
    alone = plan([size], False, read_bytes_per_s=2e7, write_bytes_per_s=2e7)
    assert two < simulate(uneven).step_s < simulate(alone).step_s
    moved = (1e9, 1e9)
    assert machine.disk_seconds(*moved) == slow.seconds(0.5e9, 0.5e9)


def test_shares_follow_the_room_of_the_drives() -> None:
    small, large = (
        Drive(name="", size_bytes=n, read_bytes_per_s=1e9, write_bytes_per_s=1e9) for n in (10, 30)
    )
    machine = changed(find_machine("h100"), drives=(small, large))
    assert machine.drive_shares == [0.25, 0.75]
