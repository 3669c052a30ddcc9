"""For any model: the plan is what a run finds at its start, and the change that is named helps."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from mt_lightning.commands.plan.model import worker_for
from mt_lightning.engine.options import Options
from mt_lightning.errors import BudgetError
from mt_lightning.planning.machines import GIB, Machine, changed, find_machine, parse_drives
from mt_lightning.planning.planner import answer
from mt_lightning.planning.tiers import Model, lay_out, place, tiers_of
from mt_lightning.planning.training import Training

from .begun import attached

SHAPES = st.fixed_dictionaries(
    {
        "hidden_size": st.sampled_from([16, 32, 48, 80]),
        "intermediate_size": st.sampled_from([24, 64, 200]),
        "num_hidden_layers": st.integers(1, 4),
        "vocab_size": st.sampled_from([7, 64, 500, 4000]),
        "tie_word_embeddings": st.booleans(),
    }
)
FORMS = st.sampled_from([False, "lossless", True])


def llama(shape: dict) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    )


def on_meta(shape: dict) -> Model:
    with torch.device("meta"):
        return Model.of("llama", llama(shape))


@settings(max_examples=8, deadline=None)
@given(
    shape=SHAPES,
    form=FORMS,
    micros=st.sampled_from([1, 2, 5]),
    clips=st.booleans(),
    durability=st.sampled_from(["auto", "step", "checkpoint"]),
    share=st.floats(0.0, 2.0),
)
def test_a_run_finds_at_its_start_what_was_planned(
    shape: dict, form: bool | str, micros: int, clips: bool, durability: str, share: float
) -> None:
    machine, model = find_machine("dgx-spark"), on_meta(shape)

    def asked(max_ram_gb: float) -> Training:
        options = Options(
            max_ram_gb=max_ram_gb, optimizer_compression=form, durability=durability  # type: ignore[arg-type]
        )  # fmt: skip
        return Training(accumulate_grad_batches=micros, clips_norm=clips, options=options)

    build = lay_out(model, asked(1.0))
    small = place(build, asked(1.0), machine).min_ram_bytes / GIB
    everything = 16 * model.num_params / GIB
    training = asked(1.001 * small + share * everything)
    root = llama(shape)
    with tempfile.TemporaryDirectory() as place_of_pages:
        planned = place(build, training, machine)
        engine = attached(root, Path(place_of_pages) / "pages", training)
        ran, disk_bytes = engine.plan, engine.disk_bytes
        engine.detach()
        engine.machine.close()
    assert ran is not None
    # All of it: bytes in each tier, bytes that a step moves, the smallest budget.
    assert dataclasses.replace(planned, directories=ran.directories) == ran
    assert tiers_of(build, planned, None, training, machine).disk_bytes == disk_bytes


@settings(max_examples=4, deadline=None)
@given(shape=SHAPES, form=FORMS)
def test_the_smallest_budget_that_is_named_works_and_less_does_not(
    shape: dict, form: bool | str
) -> None:
    def asked(max_ram_gb: float) -> Training:
        return Training(options=Options(max_ram_gb=max_ram_gb, optimizer_compression=form))

    machine, model = find_machine("dgx-spark"), on_meta(shape)
    with pytest.raises(BudgetError) as caught:
        place(lay_out(model, asked(1e-9)), asked(1e-9), machine)
    least_gb = caught.value.smallest_gb
    assert least_gb is not None
    with tempfile.TemporaryDirectory() as pages:
        engine = attached(llama(shape), Path(pages) / "works", asked(least_gb))
        engine.detach()
        engine.machine.close()
        less = asked(least_gb - 2e-6)  # it is rounded up to a millionth
        with pytest.raises(BudgetError, match=f"{least_gb:.6f}"):
            attached(llama(shape), Path(pages) / "does_not", less)


def changed_as_said(words: str, training: Training, machine: Machine) -> tuple[Training, Machine]:
    """Do what the planner said to do."""
    options = training.options
    if "drives" in words and (found := re.match(r"use (\d+) drives of", words)):
        return training, dataclasses.replace(machine, drives=machine.drives[:1] * int(found[1]))
    if found := re.match(r"use (\d+) GiB of RAM", words):
        return training, changed(machine, ram_bytes=int(found[1]) * GIB)
    if found := re.match(r"use a device with (\d+) GiB", words):
        return training, changed(machine, device_memory_bytes=int(found[1]) * GIB)
    if words.startswith("keep no checkpoints"):
        return dataclasses.replace(training, num_checkpoints=0), machine
    if words.startswith("leave max_disk_gb out"):
        return dataclasses.replace(
            training, options=dataclasses.replace(options, max_disk_gb=None)
        ), machine
    values = dict(re.findall(r"(\w+)=([\w.]+)", words))
    of_options = {
        name: True if text == "True" else float(text)
        for name, text in values.items()
        if name in ("max_ram_gb", "optimizer_compression")
    }
    rest = {name: int(text) for name, text in values.items() if name not in of_options}
    return dataclasses.replace(
        training, options=dataclasses.replace(options, **of_options), **rest
    ), machine


SEEN: set[str] = set()
"""First words of the changes that were named, so that the test is known to have tried several."""


def test_the_change_that_is_named_makes_it_fit() -> None:
    SEEN.clear()
    _check_remedies()
    assert {"set", "use", "keep", "leave"} & SEEN >= {"set", "use"}


MODEL = on_meta({"hidden_size": 48, "intermediate_size": 200, "num_hidden_layers": 2,
                 "vocab_size": 4000})  # fmt: skip
WORKER = worker_for(MODEL)
"""Counts each batch once, for all examples."""


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    form=FORMS,
    batch=st.sampled_from([1, 4, 64]),
    length=st.sampled_from([64, 4096]),
    checkpoints=st.sampled_from([0, 3]),
    max_ram_gb=st.sampled_from([None, 0.01, 0.1, 1.0]),
    max_disk_gb=st.sampled_from([None, 0.001, 100.0]),
    ram_gib=st.sampled_from([0.01, 0.5, 16.0]),
    device_gib=st.sampled_from([0.002, 0.1, 16.0]),
    disk_mib=st.sampled_from([0.5, 20.0, 1e5]),
)
def _check_remedies(
    form: bool | str,
    batch: int,
    length: int,
    checkpoints: int,
    max_ram_gb: float | None,
    max_disk_gb: float | None,
    ram_gib: float,
    device_gib: float,
    disk_mib: float,
) -> None:
    machine = changed(
        find_machine("rtx4090"),
        ram_bytes=int(ram_gib * GIB),
        device_memory_bytes=int(device_gib * GIB),
        drives=parse_drives("2xgen4"),
        drive_size_bytes=GIB + int(disk_mib * 2**20),
    )
    training = Training(
        batch_size=batch,
        sequence_length=length,
        num_checkpoints=checkpoints,
        options=Options(max_ram_gb=max_ram_gb, max_disk_gb=max_disk_gb, optimizer_compression=form),
    )
    found = answer(MODEL, training, machine, WORKER)
    assert found.fits == (not found.lacks)
    if found.fits or not found.remedy:
        return
    SEEN.add(found.remedy.split()[0])
    after, better = changed_as_said(found.remedy, training, machine)
    assert (after, better) != (training, machine), found.remedy
    again = answer(MODEL, after, better, WORKER, advises=False)
    assert again.fits, (found.lacks, found.remedy, again.lacks)
