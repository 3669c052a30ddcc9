"""What is planned is what a run reserves; what cannot fit is refused at once, with a way out."""

from __future__ import annotations

import dataclasses
import gc
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from mt_lightning.commands.plan.model import find_model, worker_for
from mt_lightning.engine.engine import Engine
from mt_lightning.engine.machine import open_machine
from mt_lightning.engine.options import Options
from mt_lightning.errors import ConfigError
from mt_lightning.planning.advice import Adviser
from mt_lightning.planning.costs import Prices, costs_of
from mt_lightning.planning.footprint import footprint
from mt_lightning.planning.machines import GIB, changed, find_machine, parse_drives
from mt_lightning.planning.planner import Answer, answer
from mt_lightning.planning.process import process_peak
from mt_lightning.planning.tiers import Model, lay_out, place, tiers_of
from mt_lightning.planning.training import Training

from .begun import attached


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=256,
        )
    )  # fmt: skip


def on_meta() -> Model:
    with torch.device("meta"):
        return Model.of("llama", llama())


@pytest.fixture(scope="module")
def hundred() -> Model:
    return find_model("100B")


@pytest.fixture(scope="module")
def found(hundred: Model) -> Answer:
    training = Training(
        accumulate_grad_batches=8,
        sequence_length=1024,
        options=Options(optimizer_compression=True, layer_major=True),
    )
    return answer(hundred, training, find_machine("h200"), worker_for(hundred))


@pytest.mark.parametrize("max_ram_gb", [0.0019, 0.0022, 0.01])
@pytest.mark.parametrize("form", [False, "lossless", True])
@pytest.mark.parametrize(("micros", "schedule"), [(1, "eager"), (4, "eager"), (1, "deferred")])
def test_a_run_takes_the_plan_that_was_made_without_weights(
    tmp_path: Path, max_ram_gb: float, form: bool | str, micros: int, schedule: str
) -> None:
    options = Options(max_ram_gb=max_ram_gb, optimizer_compression=form)
    training = Training(
        accumulate_grad_batches=micros, clips_norm=schedule == "deferred", options=options
    )
    machine, model = find_machine("dgx-spark"), on_meta()
    build = lay_out(model, training)
    planned = place(build, training, machine)

    engine = attached(llama(), tmp_path / "pages", training)
    ran, disk_bytes = engine.plan, engine.disk_bytes
    engine.detach()
    engine.machine.close()
    assert ran is not None
    assert dataclasses.replace(planned, directories=ran.directories) == ran
    assert tiers_of(build, planned, None, training, machine).disk_bytes == disk_bytes


@pytest.mark.parametrize("form", [False, "lossless", True])
def test_a_run_with_masters_takes_the_plan_that_was_made(tmp_path: Path, form: bool | str) -> None:
    options = Options(max_ram_gb=0.03, optimizer_compression=form)
    training = Training(precision="bf16-true", options=options)
    machine, model = find_machine("dgx-spark"), on_meta()
    build = lay_out(model, training)
    planned = place(build, training, machine)
    root = llama()
    directory = str(tmp_path / "pages")
    engine = Engine(root, open_machine([directory], "error"), options, masters=True)
    engine.prepare()
    engine.attach([training.make_optimizer(root)], schedule=training.schedule, micro_batches=1)
    ran = engine.plan
    engine.detach()
    engine.machine.close()
    assert ran is not None
    changed = {"directories": ran.directories, "order_reason": ran.order_reason}
    assert dataclasses.replace(planned, **changed) == ran
    numel = sum(p.numel() for p in root.parameters())
    assert planned.rest_bytes == planned.grad_bytes == 2 * numel


def test_what_cannot_fit_is_refused_in_under_a_second_without_being_run() -> None:
    model = find_model("1T-A32B")

    def never(training: Training):
        raise AssertionError("the model was run")

    small = answer(model, Training(), find_machine("rtx4090"), never, advises=False)
    assert not small.fits
    assert small.time is None
    assert all(p.is_meta for p in model.root.parameters())

    times = []
    gc.disable()  # it would look through what all other tests have left
    try:
        for _ in range(3):
            start = time.thread_time()
            answer(model, Training(), find_machine("rtx4090"), never, advises=False)
            times.append(time.thread_time() - start)
    finally:
        gc.enable()
    assert min(times) < 1


@pytest.mark.parametrize(
    ("changes", "settings", "remedy"),
    [
        ({}, {"max_ram_gb": 0.001}, "set max_ram_gb=0.07"),
        ({"drive_size_bytes": 20 << 30}, {}, None),
        ({"drive_size_bytes": 4 << 30}, {"max_disk_gb": 0.001}, "leave max_disk_gb out"),
        ({"device_memory_bytes": 1 << 16}, {}, "use a device with 24 GiB"),
    ],
)
def test_the_cheapest_change_that_makes_it_fit_is_named(
    changes: dict[str, int], settings: dict[str, float], remedy: str | None
) -> None:
    model = on_meta()
    machine = changed(find_machine("rtx4090"), **changes)
    training = Training(sequence_length=64, options=Options(**settings))
    one = answer(model, training, machine, worker_for(model))
    assert one.fits == (remedy is None)
    assert one.remedy == (remedy or "")
    assert len(one.lacks) == (remedy is not None)


def test_disk_that_is_too_small_takes_packed_state_or_more_drives(hundred: Model) -> None:
    machine = changed(find_machine("h200"), drives=parse_drives("gen5"), drive_size_bytes=10**12)
    training = Training(sequence_length=64)
    one = answer(hundred, training, machine, None)
    assert one.remedy.startswith("set optimizer_compression=True")
    packed = dataclasses.replace(training, options=Options(optimizer_compression=True))
    assert answer(hundred, packed, machine, None).fits
    machine = changed(machine, drive_size_bytes=5 * 10**11)
    assert answer(hundred, training, machine, None).remedy.startswith("use 8 drives")


def test_computing_is_counted_as_the_formula_says(hundred: Model) -> None:
    training = Training(sequence_length=1024)
    work = worker_for(hundred)(training)
    assert work.reason == ""
    config = hundred.root.config
    looked_up = config.vocab_size * config.hidden_size
    formula = 6 * (hundred.num_params - looked_up) * training.tokens
    attention = 6 * config.num_hidden_layers * training.tokens**2 * config.hidden_size
    assert work.flops == pytest.approx(formula + attention, rel=0.02)
    rows = training.tokens * config.hidden_size * 4
    assert [w.input_bytes for w in work.units[1:]] == [rows] * (len(work.units) - 1)


def test_long_sequences_take_no_mask_and_half_of_the_products_of_attention() -> None:
    model = find_model("1M")
    config = model.root.config
    short, long = (worker_for(model)(Training(sequence_length=n)) for n in (1024, 16384))
    for one, other in zip(short.units, long.units, strict=True):
        assert other.live_bytes <= 16.1 * one.live_bytes
    layer = next(i for i, u in enumerate(model.units) if "layers" in u.name)
    attention = 2 * 16384**2 * config.num_attention_heads * config.head_dim
    assert long.units[layer].flops - 16 * short.units[layer].flops == pytest.approx(
        attention * 15 / 16, rel=0.01
    )


def test_experts_that_no_token_goes_to_do_not_compute() -> None:
    model = find_model("30B-A3B")
    training = Training(sequence_length=256)
    work = worker_for(model)(training)
    assert work.reason == ""
    active = work.flops / (6 * training.tokens)
    assert 2.7e9 < active < 3.4e9
    assert 30e9 < model.num_params < 31e9


def test_a_model_of_any_kind_is_estimated_from_its_parameters() -> None:
    with torch.device("meta"):
        root = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model = Model.of("stack", root)
    training = Training(batch_size=2, sequence_length=8)
    one = answer(model, training, find_machine("h100"), worker_for(model))
    assert one.work is not None
    assert "not known" in one.work.reason
    assert one.work.flops == 6 * 16 * 4 * 256 * 256
    assert one.time is not None


def test_times_add_up_and_name_what_they_wait_for(found: Answer) -> None:
    time_ = found.time
    assert time_ is not None
    assert time_.seconds == pytest.approx(sum(p.times * p.seconds for p in time_.phases))
    assert time_.tokens_per_s == pytest.approx(8 * 1024 / time_.seconds)
    for phase in time_.phases:
        assert phase.seconds >= max(phase.busy_s.values())
    assert time_.bottleneck in {phase.bottleneck for phase in time_.phases}
    slow = changed(found.machine, drive_read_bytes_per_s=1e8)
    worker = lambda training: found.work  # noqa: E731
    again = answer(found.model, found.training, slow, worker, build=found.build).time
    assert again is not None
    assert again.bottleneck == "drives"
    assert again.seconds > 2 * time_.seconds


def test_a_larger_step_is_bound_by_computing(hundred: Model, found: Answer) -> None:
    adviser = Adviser(hundred, found.machine, worker_for(hundred))
    even = adviser.break_even(found.training)
    assert even is not None
    assert even.time is not None
    assert even.time.compute_share >= 0.9
    fewer = dataclasses.replace(
        even.training, accumulate_grad_batches=even.training.accumulate_grad_batches // 2
    )
    below = adviser.answer(fewer)
    assert below is not None
    assert below.time is not None
    assert below.time.compute_share < 0.9
    least = adviser.least_ram(even, share=0.8)
    assert least.training.options.max_ram_gb is not None
    assert even.plan is not None
    assert least.training.options.max_ram_gb * GIB < even.plan.ram_limit_bytes
    assert least.time is not None
    assert 0.8 <= least.time.compute_share < even.time.compute_share


def test_the_footprint_splits_what_the_tiers_hold(found: Answer) -> None:
    *items, total = footprint(found)
    assert [item.name for item in items] == [
        "weights", "gradients", "optimizer state", "activations"
    ]  # fmt: skip
    assert found.tiers is not None
    assert total.device == found.tiers.device_bytes
    assert total.ram == found.tiers.ram_peak_bytes
    assert total.disk == found.tiers.disk_bytes
    assert total.in_memory == sum(item.in_memory for item in items)
    params = found.model.num_params
    assert [item.in_memory for item in items[:3]] == [2 * params, 2 * params, 12 * params]


def test_the_peak_of_the_process_lies_between_nothing_kept_and_what_is_usual() -> None:
    model, machine = on_meta(), find_machine("dgx-spark")
    training = Training(sequence_length=64, options=Options(max_ram_gb=0.01))
    tiers = answer(model, training, machine, worker_for(model, on_host=True)).tiers
    assert tiers is not None
    peak = process_peak(tiers, 300 << 20)
    assert peak.least == (300 << 20) + tiers.ram_peak_bytes + tiers.ram_beside_bytes
    assert peak.most - peak.least == tiers.ram_limit_bytes // 8


def test_costs(found: Answer) -> None:
    costs = costs_of(found, Prices(tokens=1e9, per_hour=2.0, per_kwh=0.25))
    assert found.time is not None
    assert costs.steps == pytest.approx(1e9 / 8192)
    assert costs.days == pytest.approx(costs.steps * found.time.seconds / 86400)
    assert costs.rent == pytest.approx(costs.days * 24 * 2)
    assert costs.energy_kwh == pytest.approx(costs.days * 24 * found.machine.watts / 1000)
    life = sum(drive.endurance_bytes for drive in found.machine.drives)  # type: ignore[misc]
    assert costs.steps_per_drive_life == pytest.approx(life / found.time.written_bytes)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"sequence_length": -5}, "sequence_length=-5"),
        ({"accumulate_grad_batches": 1.5}, "accumulate_grad_batches=1.5"),
        ({"precision": "16-true"}, "precision='16-true'"),
        ({"optimizer": "lion"}, "optimizer='lion'"),
        ({"num_checkpoints": -1}, "num_checkpoints=-1"),
        ({"options": Options(layer_major=True)}, "accumulate_grad_batches"),
        (
            {"options": Options(layer_major=True, recompute=False), "accumulate_grad_batches": 2},
            "contradict",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Training(**settings)


def test_machines_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="machine 'abacus' is not known"):
        find_machine("abacus")
    for text in ("5xfloppy", "0xgen4", "gen4,", "-1xgen4"):
        with pytest.raises(ConfigError, match="is no drive"):
            parse_drives(text)
    with pytest.raises(ConfigError, match=r"ram_bytes is -1.*above 0"):
        changed(find_machine("h100"), ram_bytes=-1)
    with pytest.raises(ConfigError, match=r"flops_per_s is 0.*above 0"):
        changed(find_machine("h100"), device_flops_per_s={"float32": 0.0, "bfloat16": 1.0})
    with pytest.raises(ConfigError, match="no device memory"):
        changed(find_machine("dgx-spark"), device_memory_bytes=1 << 30)
    with pytest.raises(ConfigError, match="prices|per_hour"):
        Prices(per_hour=float("nan"))


def test_gradients_come_as_graphs_go() -> None:
    model, machine = on_meta(), changed(find_machine("dgx-spark"), ram_bytes=GIB)
    training = Training(sequence_length=64, clips_norm=True, options=Options(max_ram_gb=0.5))
    found = answer(model, training, machine, worker_for(model, on_host=True))
    assert found.tiers is not None
    assert found.work is not None
    assert found.build is not None
    ram, table = found.tiers.ram, found.build.table
    assert len(found.tiers.kept_graphs) == len(model.units)
    grads = sum(page.layout.grad_bytes for page in table)
    saved = sum(work.saved_bytes + work.input_bytes for work in found.work.units)
    alone = sum(page.layout.nbytes + page.state.nbytes for page in table)
    held = found.tiers.ram_peak_bytes - alone - ram["frames that state streams through"]
    assert max(grads, saved) <= held < grads + saved
