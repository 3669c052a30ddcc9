"""What the planner says of runs on this machine, against what they took.

    python examples/benchmarks/plan_accuracy.py

Each run is a process of its own on a slowed-down drive. What the planner is told of this machine is
measured by other things than these runs: units run one by one in memory, before and after each run;
memory; blocks through the slowed-down drive; and updates and the kit's own work by runs of another
model. Times mean little where others use the processors: on a shared machine run it as

    chrt -r 1 python examples/benchmarks/plan_accuracy.py
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from transformers import LlamaConfig, LlamaForCausalLM

from mt_lightning.commands.bench.machine import measure_flops, measure_fresh, median_s
from mt_lightning.commands.plan.model import worker_for
from mt_lightning.engine.options import Options
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.planning.machines import GIB, Device, Drive, Machine
from mt_lightning.planning.planner import Answer, answer
from mt_lightning.planning.process import process_peak
from mt_lightning.planning.simulation import simulate
from mt_lightning.planning.tiers import Model
from mt_lightning.planning.timed import timed
from mt_lightning.planning.training import Training
from mt_lightning.planning.work import ModelWork
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.doubles import ThrottledStore
from mt_lightning.tiers.heap import give_back_heap
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.store import FileStore, Store

_PROBE_BYTES = 64 << 20
NUM_UNTIMED_STEPS, NUM_TIMED_STEPS = 2, 3
CALIBRATION = "20M"
SHAPES = {
    "20M": {"hidden_size": 384, "num_hidden_layers": 10, "intermediate_size": 1056},
    "12M": {"hidden_size": 256, "num_hidden_layers": 12, "intermediate_size": 704},
    "27M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408},
    "52M": {"hidden_size": 512, "num_hidden_layers": 16, "intermediate_size": 1408},
    "61M": {"hidden_size": 768, "num_hidden_layers": 8, "intermediate_size": 2112},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run; `ram_gb` is the budget, rates are those of the drive in MB/s."""

    shape: str
    ram_gb: float
    batch_size: int = 2
    sequence_length: int = 128
    micros: int = 1
    layer_major: bool = False
    form: bool | str = False
    clips: bool = False
    precision: str = "32-true"
    durability: Literal["step", "checkpoint"] = "step"
    read_mb: float = 400.0
    write_mb: float = 400.0


CASES = [
    Case(shape="27M", ram_gb=0.10),
    Case(shape="27M", ram_gb=0.10, form=True),
    Case(shape="27M", ram_gb=0.10, form="lossless"),
    Case(shape="27M", ram_gb=0.15, clips=True),
    Case(shape="27M", ram_gb=0.10, micros=4),
    Case(shape="27M", ram_gb=0.10, micros=4, layer_major=True),
    Case(shape="27M", ram_gb=0.12, batch_size=8, sequence_length=256, form=True),
    Case(shape="52M", ram_gb=0.10, write_mb=200.0),
    Case(shape="52M", ram_gb=0.20, read_mb=200.0, form=True),
    Case(shape="52M", ram_gb=0.15, micros=4, layer_major=True, form=True),
    Case(shape="61M", ram_gb=0.20, read_mb=800.0, write_mb=800.0),
    Case(shape="61M", ram_gb=0.15, batch_size=4, sequence_length=256, form=True),
    Case(shape="12M", ram_gb=0.05, batch_size=4, read_mb=100.0, write_mb=100.0),
    Case(shape="12M", ram_gb=0.05, batch_size=4, precision="bf16-mixed"),
    Case(shape="27M", ram_gb=1.0, durability="checkpoint"),
    Case(shape="52M", ram_gb=0.15, micros=2, layer_major=True, form="lossless", clips=True),
]


def make_model(shape: str) -> LlamaForCausalLM:
    """Build a Llama of one of the shapes."""
    config = LlamaConfig(
        **SHAPES[shape],
        num_attention_heads=SHAPES[shape]["hidden_size"] // 64,
        num_key_value_heads=SHAPES[shape]["hidden_size"] // 64,
        vocab_size=2048,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def settings(case: Case) -> Training:
    """Return what the planner is told of a run."""
    return Training(
        batch_size=case.batch_size,
        sequence_length=case.sequence_length,
        accumulate_grad_batches=case.micros,
        precision=case.precision,
        clips_norm=case.clips,
        options=Options(
            max_ram_gb=case.ram_gb,
            optimizer_compression=case.form,
            layer_major=case.layer_major,
            durability=case.durability,
        ),
    )


# -- one run, in a process of its own ------------------------------------------------------------


def run(case: Case, directory: str) -> dict[str, float]:
    """Train and return what it took."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    import mt_lightning as mt
    from mt_lightning.callbacks.memory import MemorySampler, process_memory_bytes

    class Watch(pl.Callback):
        marks: list[dict[str, float]] = []
        program_bytes = 0

        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            # Nothing is under way any more: what is not in frames is the program's.
            give_back_heap()
            held = trainer.strategy.engine.machine.arena.held_bytes
            self.program_bytes = process_memory_bytes() - held

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step > len(self.marks):
                stats = trainer.strategy.engine.stats.snapshot()
                self.marks.append({"step_s": time.perf_counter(), **stats})

    warnings.filterwarnings("ignore")
    with torch.device("meta"):
        model = make_model(case.shape)
    module = mt.CausalLMModule(model)
    num_steps = NUM_UNTIMED_STEPS + NUM_TIMED_STEPS
    rows = num_steps * case.micros * case.batch_size
    ids = torch.randint(0, 2048, (rows, case.sequence_length))
    data = DataLoader([{"input_ids": row} for row in ids], batch_size=case.batch_size)
    strategy = mt.MegaTrainStrategy(
        offload_dir=directory,
        max_ram_gb=case.ram_gb,
        optimizer_compression=case.form,
        layer_major=case.layer_major,
        durability=case.durability,
        _wrap_store=functools.partial(throttled, case),
    )
    watch, sampler = Watch(), MemorySampler(0.01)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=num_steps,
        precision=case.precision,
        accumulate_grad_batches=case.micros,
        gradient_clip_val=1.0 if case.clips else None,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    sampler.start()
    trainer.fit(module, data)
    sampler.stop()
    first, last = watch.marks[NUM_UNTIMED_STEPS - 1], watch.marks[-1]
    per_step = {name: (last[name] - first[name]) / NUM_TIMED_STEPS for name in last}
    return {
        **per_step,
        "ram_peak_bytes": strategy.engine.stats.ram_peak_bytes,
        "process_bytes": sampler.peak_bytes,
        "program_bytes": watch.program_bytes,
    }


def throttled(case: Case, store: Store) -> ThrottledStore:
    """Slow a store down."""
    return ThrottledStore(store, case.read_mb * 1e6, case.write_mb * 1e6)


def run_apart(case: Case, directory: str | None) -> dict[str, float]:
    """Run in a fresh process."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        text = json.dumps({"case": dataclasses.asdict(case), "directory": place})
        command = [sys.executable, __file__, "--one", text]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# -- the rates of this machine ------------------------------------------------------------


def latency_s(case: Case, directory: str | None) -> float:
    """Measure what a block takes beside its bytes, one after the other through the slow drive."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        files = FileStore([place])
        files.create("probe", _PROBE_BYTES)
        queue = IOQueue(throttled(case, files), 1)
        frame = Frame(BLOCK_BYTES)
        offsets = range(0, _PROBE_BYTES, BLOCK_BYTES)
        begin = time.perf_counter()
        for offset in offsets:
            queue.write("probe", [(offset, frame.memory)]).wait()
            queue.read("probe", [(offset, frame.memory)]).wait()
        spent = time.perf_counter() - begin
        queue.close()
        files.close()
    bare = _PROBE_BYTES / 1e6 * (1 / case.read_mb + 1 / case.write_mb)
    return max(0.0, spent - bare) / (2 * len(offsets))


def machine_of(case: Case, measured: dict[str, Any]) -> Machine:
    """Describe this machine with the drive of a case."""
    drive = Drive(
        name="slowed down",
        size_bytes=10**12,
        read_bytes_per_s=case.read_mb * 1e6,
        write_bytes_per_s=case.write_mb * 1e6,
        mixed_bytes_per_s=(case.read_mb + case.write_mb) * 1e6,
        latency_s=measured["latency_s"],
    )
    return Machine(
        name="here",
        device=Device(
            name="CPU",
            memory_bytes=None,
            flops_per_s=measured["flops_per_s"],
            memory_bytes_per_s=measured["ram_bytes_per_s"],
        ),
        ram_bytes=64 * GIB,
        ram_bytes_per_s=measured["ram_bytes_per_s"],
        drives=(drive,),
        update_params_per_s=measured["updates"],
        unit_s=measured["unit_s"],
        fresh_bytes_per_s=measured["fresh_bytes_per_s"],
        measured=True,
    )


def plan(case: Case, measured: dict[str, Any], works: list[ModelWork]) -> Answer:
    """Ask the planner.

    Args:
        case: The run.
        measured: The rates of this machine.
        works: What units took, measured before and after the run.
    """
    before, after = (work.units for work in works)
    units = tuple(
        dataclasses.replace(
            a,
            forward_s=(a.forward_s + b.forward_s) / 2,
            backward_s=(a.backward_s + b.backward_s) / 2,
        )
        for a, b in zip(before, after, strict=True)
    )
    work = dataclasses.replace(works[0], units=units)
    return answer(model_of(case), settings(case), machine_of(case, measured), lambda _: work)


def model_of(case: Case) -> Model:
    """Return the model of a run, on meta."""
    with torch.device("meta"):
        return Model.of(case.shape, make_model(case.shape))


def time_units(case: Case) -> ModelWork:
    """Run units of a model in memory."""
    model, training = model_of(case), settings(case)
    return timed(model, worker_for(model, on_host=True)(training), training)


def measure_machine(directory: str | None) -> dict[str, Any]:
    """Measure what the planner is told of this machine."""
    case = Case(shape=CALIBRATION, ram_gb=0.08)
    with Progress(disable=True) as progress:
        flops = measure_flops(progress)
    rows = torch.randn(1 << 24)
    measured: dict[str, Any] = {
        "flops_per_s": dict(flops),
        "ram_bytes_per_s": 2 * rows.nbytes / median_s(functools.partial(rows.add_, 1.0)),
        "fresh_bytes_per_s": measure_fresh(),
        "latency_s": latency_s(case, directory),
        "updates": {},
    }
    num_params = model_of(case).num_params
    for form in (False, "lossless", True):
        case = dataclasses.replace(case, form=form)
        run_apart(case, directory)  # compiles kernels, which takes memory once on a machine
        took = run_apart(case, directory)
        name = {False: "raw", True: "dynamic"}.get(form, form)
        measured["updates"][name] = num_params / took["update_s"]
        measured["program_bytes"] = took["program_bytes"]
        measured["unit_s"] = took["paging_s"] / (2 * len(model_of(case).units))
    return measured


def off(planned: float, ran: float) -> str:
    """Say how far a plan is off; nothing where the run took none of it."""
    return f"{planned / ran - 1:+.1%}" if ran else ""


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--directory", default=None, help="where pages lie")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of the runs (default: all)")
    parser.add_argument(
        "--measured",
        type=Path,
        default=Path("measured.json"),
        help="rates of this machine, measured where the file does not exist",
    )
    parser.add_argument("--json", default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    if arguments.one:
        given = json.loads(arguments.one)
        print(json.dumps(run(Case(**given["case"]), given["directory"])))
        return
    measured = json.loads(arguments.measured.read_text()) if arguments.measured.exists() else None
    if measured is None:
        measured = measure_machine(arguments.directory)
        arguments.measured.write_text(json.dumps(measured))
    print(json.dumps(measured))
    print("plan and run: GiB counted, GiB of the process, s/step, MB read, MB written; s by sweeps")
    rows = []
    for number in arguments.cases or range(len(CASES)):
        case = CASES[number]
        before = time_units(case)
        took = run_apart(case, arguments.directory)
        works = [before, time_units(case)]
        planned = plan(case, measured, works)
        assert planned.tiers is not None, planned.lacks
        assert planned.time is not None, planned.lacks
        process = process_peak(planned.tiers, int(measured["program_bytes"]))
        played = simulate(planned)
        pairs = [
            (planned.tiers.ram_peak_bytes / GIB, took["ram_peak_bytes"] / GIB),
            (process.most / GIB, took["process_bytes"] / GIB),
            (played.step_s, took["step_s"]),
            (played.read_bytes / 1e6, took["bytes_read"] / 1e6),
            (played.written_bytes / 1e6, took["bytes_written"] / 1e6),
            (planned.time.seconds, took["step_s"]),
        ]
        words = f"{case.shape} {case.ram_gb:g} GiB, {case.micros}x{case.batch_size}x"
        words += f"{case.sequence_length}, {case.form}, {case.read_mb:g}/{case.write_mb:g} MB/s"
        words += " unit by unit" * case.layer_major + " clipped" * case.clips
        words += " bf16" * (case.precision != "32-true")
        words += " checkpoint" * (case.durability != "step")
        shown = "  ".join(f"{a:8.3f} {b:8.3f} {off(a, b):>6}" for a, b in pairs)
        waits = planned.time.bottleneck
        print(f"{number:2} {words:62} {shown} {waits}", flush=True)
        parts = {"busy_s": played.busy_s, "stall_s": played.stall_s, "run": took}
        parts["units"] = [[(w.forward_s, w.backward_s) for w in work.units] for work in works]
        rows.append({"number": number, "case": words, "pairs": pairs, "waits_for": waits, **parts})
        rows[-1]["process_least_gib"] = process.least / GIB
        if arguments.json:
            data = {"measured": measured, "rows": rows}
            Path(arguments.json).write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
