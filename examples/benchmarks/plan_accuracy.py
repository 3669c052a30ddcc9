"""What the planner says of runs on this machine, against what they took.

    python examples/benchmarks/plan_accuracy.py

Each run is a process of its own on a slowed-down drive. How fast this machine computes and updates
is measured first: by forward and backward of one of the models in memory, and by runs that page it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mt_lightning.commands.plan.model import worker_for
from mt_lightning.engine.options import Options
from mt_lightning.planning.machines import GIB, Device, Drive, Machine
from mt_lightning.planning.planner import Answer, answer
from mt_lightning.planning.simulation import simulate
from mt_lightning.planning.tiers import Model
from mt_lightning.planning.training import Training

NUM_UNTIMED_STEPS, NUM_TIMED_STEPS = 2, 3
SHAPES = {
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
            durability="step",
        ),
    )


# -- one run, in a process of its own ------------------------------------------------------------


def memory_bytes() -> int:
    """Return the anonymous and shared memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class Sampler(threading.Thread):
    """Notes the most memory that this process holds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        """Look every 10 ms."""
        while not self.done.wait(0.01):
            self.peak_bytes = max(self.peak_bytes, memory_bytes())


def run(case: Case, directory: str) -> dict[str, float]:
    """Train and return what it took."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    import mt_lightning as mt
    from mt_lightning.tiers.doubles import ThrottledStore

    class Watch(pl.Callback):
        marks: list[tuple[float, int, int]] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step > len(self.marks):
                stats = trainer.strategy.engine.stats
                self.marks.append((time.perf_counter(), stats.bytes_read, stats.bytes_written))

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
        durability="step",
        _wrap_store=functools.partial(
            ThrottledStore,
            read_bytes_per_s=case.read_mb * 1e6,
            write_bytes_per_s=case.write_mb * 1e6,
        ),
    )
    watch, sampler = Watch(), Sampler()
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
    base = memory_bytes()
    sampler.start()
    trainer.fit(module, data)
    sampler.done.set()
    first, last = watch.marks[NUM_UNTIMED_STEPS - 1], watch.marks[-1]
    stats = strategy.engine.stats
    return {
        "step_s": (last[0] - first[0]) / NUM_TIMED_STEPS,
        "read_bytes": (last[1] - first[1]) / NUM_TIMED_STEPS,
        "written_bytes": (last[2] - first[2]) / NUM_TIMED_STEPS,
        "ram_peak_bytes": stats.ram_peak_bytes,
        "process_bytes": sampler.peak_bytes,
        "base_bytes": base,
        "update_params_per_s": model.num_parameters() * num_steps / max(stats.update_s, 1e-9),
    }


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


def seconds_of(call: Any, least_s: float = 0.3) -> float:
    """Return how long a call takes: the shortest of several."""
    call()
    times, begin = [], time.perf_counter()
    while time.perf_counter() - begin < least_s or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def rates() -> tuple[dict[str, float], float]:
    """Measure matrix products by dtype, and bytes of element-wise operations, in a second."""
    flops = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        left, right = torch.randn(256, 512, dtype=dtype), torch.randn(512, 1408, dtype=dtype)
        flops[name] = 2 * 256 * 512 * 1408 / seconds_of(functools.partial(torch.mm, left, right))
    rows = torch.randn(256, 1408)
    return flops, 3 * rows.nbytes / seconds_of(functools.partial(torch.mul, rows, rows))


def computing_s(shape: str, training: Training) -> float:
    """Measure forward and backward of a model in memory."""
    model = make_model(shape)
    ids = torch.randint(0, 2048, (training.batch_size, training.sequence_length))

    def once() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return seconds_of(once, 2.0)


def machine_of(case: Case, measured: dict[str, Any]) -> Machine:
    """Describe this machine with the drive of a case."""
    drive = Drive(
        name="slowed down",
        size_bytes=10**12,
        read_bytes_per_s=case.read_mb * 1e6,
        write_bytes_per_s=case.write_mb * 1e6,
        mixed_bytes_per_s=(case.read_mb + case.write_mb) * 1e6,
    )
    share = measured["share"]
    return Machine(
        name="here",
        device=Device(
            name="CPU",
            memory_bytes=None,
            flops_per_s={name: rate * share for name, rate in measured["flops"].items()},
            memory_bytes_per_s=measured["memory"] * share,
        ),
        ram_bytes=64 * GIB,
        ram_bytes_per_s=measured["memory"],
        drives=(drive,),
        update_params_per_s=measured["updates"],
        unit_s=1e-3,
        measured=True,
    )


def plan(case: Case, measured: dict[str, Any]) -> Answer:
    """Ask the planner."""
    with torch.device("meta"):
        model = Model.of(case.shape, make_model(case.shape))
    machine = machine_of(case, measured)
    return answer(model, settings(case), machine, worker_for(model, on_host=True))


def measure_machine(directory: str | None) -> dict[str, Any]:
    """Measure what the planner is told of this machine."""
    flops, memory = rates()
    measured: dict[str, Any] = {"flops": flops, "memory": memory, "share": 1.0, "updates": {}}
    case = Case(shape="27M", ram_gb=2.0)
    work = plan(case, measured).work
    assert work is not None
    device = machine_of(case, measured).device
    works = [*work.units, work.outside]
    told = sum(
        device.seconds(
            w.flops + w.backward_flops, w.moved_bytes + w.backward_moved_bytes, 0, "float32"
        )
        for w in works
    )
    measured["share"] = told / computing_s(case.shape, settings(case))
    for form in (False, "lossless", True):
        name = {False: "raw", True: "dynamic"}.get(form, form)
        took = run_apart(dataclasses.replace(case, form=form, ram_gb=0.1), directory)
        measured["updates"][name] = took["update_params_per_s"]
    return measured


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--directory", default=None, help="where pages lie")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of the runs (default: all)")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    if arguments.one:
        given = json.loads(arguments.one)
        print(json.dumps(run(Case(**given["case"]), given["directory"])))
        return
    measured = measure_machine(arguments.directory)
    print(json.dumps(measured))
    print("plan and run: GiB counted, GiB of the process, s/step, MB read, MB written; s by sweeps")
    rows = []
    for number in arguments.cases or range(len(CASES)):
        case = CASES[number]
        planned, took = plan(case, measured), run_apart(case, arguments.directory)
        assert planned.tiers is not None, planned.lacks
        assert planned.time is not None, planned.lacks
        process = took["base_bytes"] + planned.tiers.ram_peak_bytes + planned.tiers.ram_beside_bytes
        played = simulate(planned)
        pairs = [
            (planned.tiers.ram_peak_bytes / GIB, took["ram_peak_bytes"] / GIB),
            (process / GIB, took["process_bytes"] / GIB),
            (played.step_s, took["step_s"]),
            (played.read_bytes / 1e6, took["read_bytes"] / 1e6),
            (played.written_bytes / 1e6, took["written_bytes"] / 1e6),
            (planned.time.seconds, took["step_s"]),
        ]
        words = f"{case.shape} {case.ram_gb:g} GiB, {case.micros}x{case.batch_size}x"
        words += f"{case.sequence_length}, {case.form}, {case.read_mb:g}/{case.write_mb:g} MB/s"
        words += " unit by unit" * case.layer_major + " clipped" * case.clips
        words += " bf16" * (case.precision != "32-true")
        shown = "  ".join(f"{a:8.3f} {b:8.3f} {a / b - 1:+6.1%}" for a, b in pairs)
        waits = planned.time.bottleneck
        print(f"{number:2} {words:62} {shown} {waits}", flush=True)
        rows.append({"case": words, "pairs": pairs, "waits_for": waits})
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"measured": measured, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
