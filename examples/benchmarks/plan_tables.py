"""The tables of docs/planning.md: footprints, large models, orders of work, figures of others.

    python examples/benchmarks/plan_tables.py

Nothing is trained: all of it is planned, and played in virtual time.
"""

from __future__ import annotations

import argparse
import dataclasses

from mt_lightning.commands.plan.model import find_model, worker_for
from mt_lightning.engine.options import Options
from mt_lightning.planning.advice import Adviser
from mt_lightning.planning.footprint import footprint
from mt_lightning.planning.machines import (
    GIB,
    Drive,
    Machine,
    changed,
    find_machine,
    parse_drives,
)
from mt_lightning.planning.planner import Answer, answer
from mt_lightning.planning.simulation import simulate
from mt_lightning.planning.tiers import Model
from mt_lightning.planning.training import Training

BUSY, BOUND, MOST_TRIES = 0.95, 0.90, 24
SIZES = ("8B", "14B", "32B", "70B", "100B", "30B-A3B", "120B-A5B", "1T-A32B")


def gib(nbytes: float) -> str:
    """Return bytes in GiB."""
    return f"{nbytes / GIB:,.1f}"


def planned(model: Model, machine_name: str, training: Training) -> Answer:
    """Plan one run on a preset."""
    return answer(model, training, find_machine(machine_name), worker_for(model))


def footprints() -> None:
    """Print what 100B take in memory and on pages."""
    model = find_model("100B")
    for precision in ("32-true", "bf16-mixed"):
        for form in (False, True):
            training = Training(
                precision=precision, options=Options(max_ram_gb=64, optimizer_compression=form)
            )
            found = planned(model, "h200", training)
            print(f"\n100B, {precision}, state {'packed' if form else 'raw'}, max_ram_gb=64; GiB")
            print("| item | in memory | ours: device | ours: RAM | ours: disk |")
            for item in footprint(found):
                cells = (item.in_memory, item.device, item.ram, item.disk)
                print(f"| {item.name} | {' | '.join(map(gib, cells))} |")


def smallest(adviser: Adviser, training: Training, share: float) -> Answer | None:
    """Return the smallest step, to an eighth, that computes for a share of the time as played."""
    found = adviser.break_even(training, share)
    for _ in range(MOST_TRIES):
        if found is None or simulate(found, num_steps=1).compute_share >= share:
            break
        # What does not overlap shows in the played step only.
        micros = found.training.accumulate_grad_batches
        more = dataclasses.replace(
            found.training, accumulate_grad_batches=micros + max(1, micros // 8)
        )
        found = adviser.answer(more)
    return found


def hundred() -> None:
    """Print the smallest steps of 100B that computing bounds, on several machines."""
    model = find_model("100B")
    print(
        "\n| 100B on | state | tokens | s, sweeps | s, played | busy | tokens/s | RAM GiB | days |"
    )
    for name in ("h200", "h100", "rtx5090", "rtx4090"):
        adviser = Adviser(model, find_machine(name), worker_for(model))
        for form in (False, True):
            training = Training(
                sequence_length=2048,
                accumulate_grad_batches=2,
                options=Options(optimizer_compression=form, layer_major=True),
            )
            even = smallest(adviser, training, BOUND)
            if even is None or even.time is None or even.tiers is None:
                print(f"| {name} | {form} | none |")
                continue
            played = simulate(even, num_steps=1)
            per_s = even.time.tokens / played.step_s
            print(
                f"| {name} | {form} | {even.time.tokens:,} | {even.time.seconds:,.1f} | "
                f"{played.step_s:,.1f} | {played.compute_share:.0%} | {per_s:,.0f} | "
                f"{gib(even.tiers.ram_peak_bytes)} | {1e9 / per_s / 86400:,.0f} |"
            )


def machine_for(size: str) -> Machine:
    """Return an H200 with four PCIe 5 drives, larger where a model does not fit it."""
    machine = find_machine("h200")
    if size == "1T-A32B":
        machine = changed(machine, device_memory_bytes=288 * GIB, drives=parse_drives("8xgen5"))
    return machine


def ram_gb(size: str) -> float:
    """Return a budget: one that holds what units receive in a step that keeps the device busy."""
    return 512 if size in ("70B", "100B", "120B-A5B", "1T-A32B") else 128


def sizes() -> None:
    """Print the smallest batch of each model with which an H200 computes nearly all the time."""
    print(
        "\n| on an H200, packed | RAM GiB | disk GiB | tokens per step | s/step | busy | tokens/s |"
    )
    for size in SIZES:
        model = find_model(size)
        adviser = Adviser(model, machine_for(size), worker_for(model))
        training = Training(
            sequence_length=2048,
            accumulate_grad_batches=2,
            options=Options(optimizer_compression=True, layer_major=True, max_ram_gb=ram_gb(size)),
        )
        even = smallest(adviser, training, BUSY)
        if even is None or even.time is None or even.tiers is None:
            print(f"| {size} | none |", flush=True)
            continue
        played = simulate(even, num_steps=1)
        per_s = even.time.tokens / played.step_s
        print(
            f"| {size} | {gib(even.tiers.ram_peak_bytes)} | {even.tiers.disk_bytes / GIB:,.0f} | "
            f"{even.time.tokens:,} | {played.step_s:,.1f} | {played.compute_share:.0%} | "
            f"{per_s:,.0f} | {1e9 / per_s / 86400:,.1f} |",
            flush=True,
        )


def least_ram() -> None:
    """Print the least RAM with which 100B on an H200 is bound by computing."""
    model = find_model("100B")
    print("\n| tokens per step on h200, packed state | least max_ram_gb | s/step |")
    adviser = Adviser(model, find_machine("h200"), worker_for(model))
    for micros in (16, 32, 64):
        training = Training(
            sequence_length=2048,
            accumulate_grad_batches=micros,
            options=Options(optimizer_compression=True, layer_major=True),
        )
        one = adviser.answer(training)
        if one is None or one.time is None or one.time.compute_share < 0.9:
            print(f"| {micros * 2048:,} | none |")
            continue
        least = adviser.least_ram(one)
        assert least.time is not None
        ram = least.training.options.max_ram_gb
        print(f"| {micros * 2048:,} | {ram:g} | {least.time.seconds:,.1f} |")


def orders() -> None:
    """Play models on an H200 in several orders of work."""
    print("\n| model, 16 x 2048 tokens | unit by unit, packed | raw | usual order | no overlap |")
    for size in SIZES:
        model = find_model(size)
        worker = worker_for(model)
        machine, cells = machine_for(size), []
        for form, order, overlaps in (
            (True, True, True),
            (False, True, True),
            (True, False, True),
            (True, True, False),
        ):
            options = Options(
                max_ram_gb=128, optimizer_compression=form, layer_major=order, durability="step"
            )
            training = Training(sequence_length=2048, accumulate_grad_batches=16, options=options)
            found = answer(model, training, machine, worker, advises=False)
            if not found.fits:
                cells.append("does not fit")
                continue
            played = simulate(found, num_steps=1, num_warm=2, overlaps=overlaps)
            cells.append(f"{played.step_s:,.1f} s, {played.compute_share:.0%}")
        print(f"| {size} | {' | '.join(cells)} |", flush=True)


def published() -> None:
    """Compare with figures of others."""
    print("\n| figure | published | from its settings |")
    drive = Drive(name="", size_bytes=1, read_bytes_per_s=5.4e9, write_bytes_per_s=5.4e9)
    for name, params, told in (("ZeRO-3, 70B", 70e9, "336 s"), ("ZeRO-3, 13B", 13e9, "68-91 s")):
        # fp32 masters and two moments are read and written by each update.
        seconds = drive.seconds(12 * params, 12 * params)
        print(f"| {name}, update from a drive of 5.4 GB/s | {told} | {seconds:.0f} s |")
    model = find_model("14B")
    for tokens in (8192, 16384, 32768):
        training = Training(
            sequence_length=2048,
            accumulate_grad_batches=tokens // 2048,
            options=Options(layer_major=True, recompute=True),
        )
        found = planned(model, "gh200", training)
        assert found.time is not None, found.lacks
        played, alone = simulate(found, num_steps=1), simulate(found, num_steps=1, overlaps=False)
        rate = found.time.flops / 1e12
        print(
            f"| 14B on a GH200, {tokens:,} tokens per step | 264 TFLOP/s | "
            f"{rate / played.step_s:.0f}, without overlap {rate / alone.step_s:.0f} |"
        )


TABLES = {
    "footprints": footprints,
    "sizes": sizes,
    "hundred": hundred,
    "least-ram": least_ram,
    "orders": orders,
    "published": published,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)} (default: all)")
    for table in parser.parse_args().tables or TABLES:
        TABLES[table]()
