"""Which of the possible plans a run takes: when steps are committed, in which order batches run."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

from mt_lightning.engine.build import Build
from mt_lightning.engine.device_plan import plan_device, vram_limit_bytes
from mt_lightning.engine.memory import device_free_bytes
from mt_lightning.engine.plan import Plan, make_plan
from mt_lightning.errors import BudgetError
from mt_lightning.tiers.link import Link

Order = bool | Literal["auto"]
"""Whether batches may run unit by unit; "auto": where it moves fewer bytes and changes nothing."""


def choose_plan(
    build: Build,
    durability: str,
    *,
    schedule: str,
    micro_batches: int | None,
    layer_major: Order,
    link: Link | None = None,
    max_vram_gb: float | None = None,
    **facts: Any,
) -> Plan:
    """Decide when steps are committed, in which order batches run, and what stays where.

    Args:
        build: The pages.
        durability: What the user chose: "step", "checkpoint" or "auto".
        schedule: What updates could be: "eager" or "deferred".
        micro_batches: How many backward passes make a step, None where that is not known.
        layer_major: Whether they run unit by unit. With "auto" the plan is "undecided" where that
            moves fewer bytes and fits, else it is that of the usual order and says why.
        link: The way to a device that computes.
        max_vram_gb: Its budget.
        **facts: The rest of what `make_plan` asks for.

    Raises:
        BudgetError: The budget is too small.
    """
    common = {"schedule": schedule, "micro_batches": micro_batches, **facts}
    if link is None or link.unified:
        return _choose_order(build, durability, layer_major, crosses=False, **common)
    common["copies_bytes"] = link.staging_bytes
    place = partial(
        plan_device,
        build,
        str(link.device),
        vram_limit_bytes(max_vram_gb, device_free_bytes(link, facts["ram_limit_bytes"])),
        trains=facts["trains"],
        recompute=facts["recompute"],
    )
    on_device = place()
    crosses = on_device.sweep_bytes > 0
    plan = _choose_order(build, durability, layer_major, crosses=crosses, **common)
    if facts["trains"]:
        reason = _host_reason(build, plan)
        on_device = on_device if reason else place(at_home=True)
        if not (reason or on_device.updates):
            reason = "max_vram_gb does not hold gradients and optimizer state beside weights"
        on_device = dataclasses.replace(on_device, host_reason=reason)
    # Graphs hold memory of the device.
    return dataclasses.replace(plan, on_device=on_device, graph_bytes=0)


def _host_reason(build: Build, plan: Plan) -> str:
    """Return why a run that fits a device could not be updated there, empty where it could.

    [Note: coded state] It is coded since memory is short, and the codecs are the host's own code:
    a device would have to hold what it codes as it is, and there would be nothing gained by coding.
    """
    layouts = [page.state_layout for page in build.table]
    if any(each.slots or each.formats for each in layouts):
        return "optimizer_compression keeps state coded"
    if not plan.in_ram:
        return "max_ram_gb does not hold all of it, and commits are written from there"
    if plan.durability != "checkpoint":
        return "durability='step' commits each step"
    return ""


def _choose_order(
    build: Build, durability: str, layer_major: Order, *, crosses: bool, **common: Any
) -> Plan:
    """Decide in which order batches run; `crosses` says that a pass brings weights to a device."""
    if layer_major != "auto":
        plan = _choose(build, durability, layer_major=layer_major, **common)
        reason = "layer_major=True" if layer_major else ""
        return dataclasses.replace(plan, order_reason=reason)
    usual = _choose(build, durability, layer_major=False, **common)
    if not (usual.saves or crosses):
        return dataclasses.replace(usual, order_reason="no weight is read more than once per step")
    try:
        plan = _choose(build, durability, layer_major=True, **common)
    except BudgetError:
        reason = "max_ram_gb has no room for one more gradient of the largest parameter"
        return dataclasses.replace(usual, order_reason=reason)
    read_bytes, written_bytes = plan.usual_traffic
    return dataclasses.replace(
        plan,
        order="undecided",
        order_reason="it is run once more unit by unit, and compared",
        read_bytes=read_bytes,
        written_bytes=written_bytes,
    )


def decide(plan: Plan, reason: str, *, layer_major: bool) -> Plan:
    """Return an undecided plan as it is once the order of batches is known."""
    read_bytes, written_bytes = plan.window_traffic if layer_major else plan.usual_traffic
    return dataclasses.replace(
        plan,
        order="layer-major" if layer_major else "usual",
        order_reason=reason,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
    )


def _choose(
    build: Build, durability: str, *, schedule: str, micro_batches: int | None, **facts: Any
) -> Plan:
    """Decide when steps are committed, and with it what stays in RAM.

    [Note: no eager updates without a commit at every step] A step that breaks off after eager
    updates goes back to the last commit. Where that is far away, updates wait until the whole step
    is known: then nothing but the step that broke off is undone.
    """
    count = micro_batches or 1
    if durability != "step" and facts["trains"]:
        plan = make_plan(
            build,
            schedule="deferred",
            holds_grads=True,
            micro_batches=count,
            durability="checkpoint",
            **facts,
        )
        if plan.in_ram or durability == "checkpoint":
            return plan
    holds_grads = schedule == "deferred" or micro_batches != 1
    return make_plan(
        build, schedule=schedule, holds_grads=holds_grads, micro_batches=count, **facts
    )
