"""The answers of `megatrain plan` as tables and as JSON data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mt_lightning.planning.advice import Best
from mt_lightning.planning.costs import Costs
from mt_lightning.planning.footprint import Item
from mt_lightning.planning.machines import GIB, Machine
from mt_lightning.planning.on_device import stays_there
from mt_lightning.planning.planner import Answer
from mt_lightning.planning.process import process_peak
from mt_lightning.planning.simulation import Simulated
from mt_lightning.planning.training import Training

_MOST_DRIVES = 8
"""Shown one by one."""


def size(nbytes: float) -> str:
    """Return bytes for people."""
    if nbytes < GIB:
        return f"{nbytes / 2**20:,.1f} MiB"
    return f"{nbytes / GIB:,.2f} GiB" if nbytes < 100 * GIB else f"{nbytes / GIB:,.0f} GiB"


def show(
    console: Console, found: Answer, best: Best | None, costs: Costs | None, items: list[Item]
) -> None:
    """Print an answer."""
    console.print(_head(found))
    if not found.fits:
        _show_lacks(console, found)
        return
    console.print(_tiers(found))
    if found.time is not None:
        console.print(_time(found))
    if best is not None:
        console.print(_best(best))
    if costs is not None:
        console.print(_costs(costs))
    if items:
        console.print(footprint_table(items, found.training.precision))
    for line in _notes(found):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _table(title: str, *headings: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in (0, 3) else "right")
    return table


def _head(found: Answer) -> Table:
    table = Table.grid(padding=(0, 2))
    for key, value in describe(found).items():
        table.add_row(Text(key, style="dim"), Text(value))
    return table


def describe(found: Answer) -> dict[str, str]:
    """Say in words what was asked."""
    training, machine = found.training, found.machine
    drives = ", ".join(sorted({drive.name for drive in machine.drives})) or "none"
    return {
        "model": f"{found.model.name}, {_count(found.model.num_params)} parameters, "
        f"{len(found.model.units)} units",
        "machine": f"{machine.name}; {size(machine.ram_bytes)} of RAM; "
        f"{len(machine.drives)} x {drives}",
        "step": f"{training.accumulate_grad_batches} x {training.batch_size} x "
        f"{training.sequence_length} = {training.tokens_per_step:,} tokens, {training.precision}, "
        f"{training.optimizer}, state {_form(training)}",
    }


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.2f} million"


def _form(training: Training) -> str:
    form = training.options.optimizer_compression
    if form is False:
        return "raw"
    return "in 2-8 bits per value (lossy)" if form is True else str(form)


def _show_lacks(console: Console, found: Answer) -> None:
    console.print(Text("does not fit", style="bold red"))
    for lack in found.lacks:
        console.print(Text(f"  {lack}"), soft_wrap=True)
    remedy = found.remedy or "no single change that was tried makes it fit"
    console.print(Text(f"  cheapest change: {remedy}"), soft_wrap=True)


def _tiers(found: Answer) -> Table:
    tiers = found.tiers
    assert tiers is not None
    table = _table("Bytes", "tier", "item", "bytes", "of")
    if tiers.device:
        _tier_rows(table, "device", tiers.device, tiers.device_limit_bytes)
    _tier_rows(table, "RAM, max_ram_gb", tiers.ram, tiers.ram_limit_bytes)
    if tiers.ram_beside_bytes:
        table.add_row("RAM, beside it", "activations of a unit", size(tiers.ram_beside_bytes))
        peak = process_peak(tiers, 0)
        table.add_row("", "freed memory kept", size(peak.most - peak.least))
    if tiers.locked_bytes:
        table.add_row(
            "RAM, page-locked", "buffers of copies to and from the device", size(tiers.locked_bytes)
        )
    _tier_rows(table, "disk", tiers.disk, tiers.disk_limit_bytes)
    return table


def _tier_rows(table: Table, tier: str, items: dict[str, int], limit: int) -> None:
    for number, (item, nbytes) in enumerate(items.items()):
        table.add_row("" if number else tier, item, size(nbytes))
    table.add_row("", "sum", size(sum(items.values())), size(limit), end_section=True, style="bold")


def _time(found: Answer) -> Table:
    time = found.time
    assert time is not None
    table = _table("Time", "phase", "times", "seconds", "waits for")
    for phase in time.phases:
        table.add_row(phase.name, str(phase.times), f"{phase.seconds:,.3g}", phase.bottleneck)
    table.add_row("step", "", f"{time.seconds:,.3g}", time.bottleneck, style="bold")
    rows = (
        ("tokens per second", f"{time.tokens_per_s:,.4g}"),
        ("TFLOP/s of the model", f"{time.flops_per_s / 1e12:,.4g}"),
        ("share of the time that computes", f"{time.compute_share:.0%}"),
        ("read, written per step", f"{size(time.read_bytes)}, {size(time.written_bytes)}"),
    )
    for name, value in rows:
        table.add_row(name, "", value)
    return table


def _best(best: Best) -> Table:
    table = _table("Fastest settings", "", "tokens/s", "s per step", "settings")
    rows = (("same bits as plain Lightning", best.exact), ("lossy state", best.lossy))
    last = ("computing sets the time from", best.break_even)
    for name, one in (*rows, last, ("  with twice as many, the least RAM", best.least_ram)):
        if one is None or one.time is None:
            if name == last[0]:
                table.add_row(name, "", "", "no batch that was tried")
            continue
        words = settings(one)
        if one is best.break_even:
            words = f"{one.time.tokens:,} tokens per step; {words}"
        if one is best.least_ram:
            words = f"max_ram_gb={one.training.options.max_ram_gb:g} {words}"
        table.add_row(name, f"{one.time.tokens_per_s:,.4g}", f"{one.time.seconds:,.3g}", words)
    return table


def settings(one: Answer) -> str:
    """Return settings as they are typed."""
    options, training = one.training.options, one.training
    assert one.plan is not None
    words = [
        f"optimizer_compression={options.optimizer_compression!r}",
        f"recompute={options.recompute!r}",
        f"durability={one.plan.durability!r}",
    ]
    if training.accumulate_grad_batches > 1:
        words.insert(0, f"layer_major={options.layer_major!r}")
        words.insert(0, f"accumulate_grad_batches={training.accumulate_grad_batches}")
    return f"{' '.join(words)}; pages in {one.placement}"


def _costs(costs: Costs) -> Table:
    table = _table("Costs", "", "")
    for name, value in _cost_rows(costs):
        table.add_row(name, value)
    return table


def _cost_rows(costs: Costs) -> Iterator[tuple[str, str]]:
    yield "written per step", f"{costs.written_per_step / 1e12:,.4g} TB"
    if costs.steps_per_drive_life is not None:
        yield "steps until the drives are worn out", f"{costs.steps_per_drive_life:,.0f}"
    rows = (
        ("steps", costs.steps, "{:,.0f}"),
        ("days", costs.days, "{:,.1f}"),
        ("lives of the drives", costs.drive_lives, "{:,.3g}"),
        ("energy, kWh", costs.energy_kwh, "{:,.0f}"),
        ("energy, price", costs.energy_price, "{:,.2f}"),
        ("rent", costs.rent, "{:,.2f}"),
    )
    for name, value, form in rows:
        if value is not None:
            yield name, form.format(value)


def played_table(played: Simulated) -> Table:
    """Show a step that was played in virtual time."""
    table = _table("A step, played", "", "seconds", "share")
    table.add_row("step", f"{played.step_s:,.3g}", "", style="bold")
    for part, seconds in played.busy_s.items():
        if seconds:
            table.add_row(f"{part} busy", f"{seconds:,.3g}", f"{seconds / played.step_s:.0%}")
    for what, seconds in played.stall_s.items():
        name = f"computing waits for {'a read' if what == 'read' else what}"
        table.add_row(name, f"{max(0.0, seconds):,.3g}", f"{seconds / played.step_s:.0%}")
    table.add_row("read, written", f"{size(played.read_bytes)}, {size(played.written_bytes)}")
    for number, moved in enumerate(
        played.drive_bytes[: _MOST_DRIVES * (len(played.drive_bytes) > 1)]
    ):
        table.add_row(f"  drive {number + 1}", ", ".join(map(size, moved)))
    table.add_row("peak of what max_ram_gb counts", size(played.ram_peak_bytes))
    return table


def footprint_table(items: list[Item], precision: str) -> Table:
    """Show training in memory beside training on pages."""
    table = _table(
        f"In memory and on pages, {precision}", "item", "in memory", "ours: device", "", ""
    )
    table.columns[3].header, table.columns[4].header = "ours: RAM", "ours: disk"
    table.columns[3].justify = "right"
    for item in items:
        cells = (item.in_memory, item.device, item.ram, item.disk)
        style = "bold" if item is items[-1] else ""
        table.add_row(item.name, *(size(c) if c else "-" for c in cells), style=style)
    return table


def _notes(found: Answer) -> Iterator[str]:
    machine = found.machine
    if not machine.measured:
        yield (
            f"Times on {machine.name} are modelled from data sheets; no run on an accelerator was "
            "measured yet."
        )
    else:
        yield (
            f"Rates of this machine: {machine.device.source}, its processors and drives. After a "
            "change of either: megatrain bench machine."
        )
    if found.work is not None and found.work.reason:
        yield f"Computing was estimated from the number of parameters: {found.work.reason}."
    if found.plan is not None and stays_there(found.plan):
        yield "All of it fits the device: it stays there and is updated there."
    elif found.plan is not None and found.plan.on_device is not None:
        yield f"The host updates: {found.plan.on_device.host_reason}."
    if found.plan is not None and found.plan.order == "undecided":
        yield (
            "Batches are taken to run unit by unit, as layer_major='auto' lets them when the first "
            "window has shown the same losses and gradients."
        )


def as_data(
    found: Answer, best: Best | None, costs: Costs | None, items: list[Item]
) -> dict[str, Any]:
    """Return an answer as JSON data; bytes and seconds."""
    data: dict[str, Any] = {
        **describe(found),
        "num_params": found.model.num_params,
        "fits": found.fits,
        "lacks": list(found.lacks),
        "remedy": found.remedy,
        "measured": found.machine.measured,
    }
    plan, tiers, time = found.plan, found.tiers, found.time
    if plan is not None and tiers is not None:
        data["plan"] = {
            "min_ram_bytes": plan.min_ram_bytes,
            "ram_limit_bytes": plan.ram_limit_bytes,
            "order": plan.order,
            "durability": plan.durability,
            "schedule": plan.schedule,
            "placement": found.placement,
            "updates_on": "device" if stays_there(plan) else "host",
        }
        peak = process_peak(tiers, 0)
        data["bytes"] = {
            "device": tiers.device,
            "ram": tiers.ram,
            "ram_beside": tiers.ram_beside_bytes,
            "ram_kept": peak.most - peak.least if found.machine.on_host else 0,
            "page_locked": tiers.locked_bytes,
            "disk": tiers.disk,
        }
    if time is not None:
        data["time"] = {
            "step_s": time.seconds,
            "bottleneck": time.bottleneck,
            "tokens_per_s": time.tokens_per_s,
            "tflops": time.flops_per_s / 1e12,
            "compute_share": time.compute_share,
            "read_bytes": time.read_bytes,
            "written_bytes": time.written_bytes,
            "phases": [
                {"name": p.name, "times": p.times, "seconds": p.seconds, "busy_s": p.busy_s}
                for p in time.phases
            ],
        }
    if best is not None:
        data["best"] = {
            name: None if one is None or one.time is None else _short(one)
            for name, one in vars(best).items()
        }
    if costs is not None:
        data["costs"] = vars(costs)
    if items:
        data["footprint"] = [vars(item) for item in items]
    return data


def finite(data: Any) -> Any:
    """Return JSON data with null where a number is infinite: JSON has no word for that."""
    if isinstance(data, dict):
        return {name: finite(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _short(one: Answer) -> dict[str, Any]:
    assert one.time is not None
    return {
        "settings": settings(one),
        "tokens_per_step": one.time.tokens,
        "step_s": one.time.seconds,
        "tokens_per_s": one.time.tokens_per_s,
        "compute_share": one.time.compute_share,
        "max_ram_gb": one.training.options.max_ram_gb,
    }


def machine_data(machine: Machine) -> dict[str, Any]:
    """Return the rates of a machine and where they are from."""
    return {
        "name": machine.name,
        "device": vars(machine.device),
        "ram_bytes": machine.ram_bytes,
        "drives": [vars(drive) for drive in machine.drives],
    }
