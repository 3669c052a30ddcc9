"""What bounds the speed of a run, and the one setting that would move it.

[Note: what an estimate says] Time that training waited for the drive is taken to shrink with the
bytes that are moved. It is an upper bound: what no longer waits for one thing may wait for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mt_lightning.callbacks.meter import StepRecord
from mt_lightning.engine.plan import Plan

GIB = 1 << 30
_WORTH_TELLING = 0.02
"""A setting that saves less than this share of a step is not named."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the advice depends on beside the times."""

    plan: Plan
    free_bytes: int
    """Memory that the host could give in addition."""
    accumulate: int
    """Batches per step."""
    num_workers: int
    """Of the training data loader."""
    compresses: bool
    """Whether optimizer state is compressed."""
    has_fused: bool
    """Whether the optimizer has a fused form that is not used."""
    units_kept: int
    units_run: int
    graph_bytes: int
    """Most bytes that kept graphs have held."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What bounds the speed, and what would move it."""

    bottleneck: str
    """"compute", "drive reads", "drive writes", "update", "memory", "device", "paging" or
    "host code"."""
    share: float
    """Its share of the step, from 0 to 1."""
    setting: str
    """The setting, and what it would save; a sentence."""

    @property
    def text(self) -> str:
        """Both as text."""
        return f"Bottleneck: {self.bottleneck} ({self.share:.0%} of a step). {self.setting}"


def advise(records: Sequence[StepRecord], at: Situation) -> Advice:
    """Name the bottleneck of steps and one setting that would move it.

    What training waited for while the update worker waited for the drive counts as the drive's.

    Args:
        records: Steps, without those that fill memory.
        at: The run.
    """
    mean = {
        name: fmean(getattr(r, name) for r in records)
        for name in (
            "wall_s", "compute_s", "recompute_s", "paging_s", "host_s", "between_s",
            "stall_read_s", "stall_write_s", "stall_memory_s", "stall_device_s", "stall_update_s",
            "behind_read_s", "behind_write_s", "read_bytes", "written_bytes",
        )
    }  # fmt: skip
    waited_s = mean["stall_memory_s"] + mean["stall_update_s"]
    behind_s = mean["behind_read_s"] + mean["behind_write_s"]
    # An update done by the training thread waits for nobody else.
    scale = min(1.0, waited_s / behind_s) if behind_s > 0 else 0.0
    reads_s, writes_s = scale * mean["behind_read_s"], scale * mean["behind_write_s"]
    left = 1 - (reads_s + writes_s) / waited_s if waited_s > 0 else 0.0
    parts = {
        "compute": mean["compute_s"],
        "drive reads": mean["stall_read_s"] + reads_s,
        "drive writes": mean["stall_write_s"] + writes_s,
        "update": left * mean["stall_update_s"],
        "memory": left * mean["stall_memory_s"],
        "device": mean["stall_device_s"],
        "paging": mean["paging_s"],
        "host code": mean["host_s"],
    }
    wall_s = mean["wall_s"]
    bottleneck = max(parts, key=lambda name: parts[name])
    setting = {
        "compute": _for_compute,
        "drive reads": _for_reads,
        "drive writes": _for_writes,
        "update": _for_update,
        "memory": _for_memory,
        "host code": _for_host,
    }.get(bottleneck, _for_nothing)(parts, mean, at)
    share = parts[bottleneck] / wall_s if wall_s > 0 else 0.0
    return Advice(bottleneck=bottleneck, share=share, setting=setting)


_Parts = dict[str, float]


def _saves(seconds: float) -> str:
    return f"saves up to {seconds:.2g} s a step."


def _ram(at: Situation, more_bytes: float) -> str:
    limit = at.plan.ram_limit_bytes
    return f"max_ram_gb={limit / GIB:.3g} -> {(limit + more_bytes) / GIB:.3g}"


def _for_compute(parts: _Parts, mean: _Parts, at: Situation) -> str:
    again_s, num_more = mean["recompute_s"], at.units_run - at.units_kept
    if again_s < _WORTH_TELLING * mean["wall_s"]:
        waits = 1 - (parts["compute"] + parts["host code"]) / mean["wall_s"]
        return f"No setting of paging would move it: all of paging takes {waits:.0%} of a step."
    # What few units have kept says little of the others.
    if at.units_kept >= at.units_run / 2 and num_more > 0:
        more_bytes = at.graph_bytes / at.units_kept * num_more
        if more_bytes <= at.free_bytes:
            what = f"{_ram(at, more_bytes)} keeps what units save for backward instead of running"
            return f"{what} them again: {_saves(again_s)}"
    what = "More max_ram_gb keeps what units save for backward (recompute='auto') instead of"
    return f"{what} running them again: {_saves(again_s)}"


def _for_reads(parts: _Parts, mean: _Parts, at: Situation) -> str:
    plan = at.plan
    sweeps = 1 if plan.order == "layer-major" else at.accumulate
    of_weights, of_state = plan.sweep_bytes * sweeps, plan.state_bytes - plan.cached_state_bytes
    moved = max(1.0, mean["read_bytes"])

    def saved_s(num_bytes: float) -> float:
        return parts["drive reads"] * min(1.0, num_bytes / moved)

    if of_weights and plan.sweep_bytes / 2 <= at.free_bytes:
        what = "keeps all weights in RAM"
        return f"{_ram(at, plan.sweep_bytes / 2)} {what}: {_saves(saved_s(of_weights))}"
    if sweeps > 1:
        what = f"reads weights once for {sweeps} batches"
        return f"layer_major=True {what}: {_saves(saved_s(of_weights * (1 - 1 / sweeps)))}"
    if not of_weights and of_state and of_state <= at.free_bytes:
        what = "keeps optimizer state in RAM"
        return f"{_ram(at, of_state)} {what}: {_saves(saved_s(of_state))}"
    if of_weights >= of_state or at.compresses:
        return (
            f"accumulate_grad_batches={16 * at.accumulate} with layer_major reads the same bytes "
            "for 16 times the tokens; it makes the batch of a step larger."
        )
    what = "reads and writes 1/6 less of optimizer state, bit for bit the same"
    return f"optimizer_compression='lossless' {what}: {_saves(saved_s(of_state / 6))}"


def _for_writes(parts: _Parts, mean: _Parts, at: Situation) -> str:
    plan = at.plan
    moved = max(1.0, mean["written_bytes"])
    stays = plan.cached_state_bytes + (0 if plan.sweep_bytes else plan.weight_bytes)
    if plan.durability == "step" and stays:
        saved_s = parts["drive writes"] * min(1.0, stays / moved)
        what = "writes what fits in RAM every five minutes instead of every step"
        return f"durability='checkpoint' {what}: {_saves(saved_s)}"
    if not at.compresses:
        of_state = plan.state_bytes - plan.cached_state_bytes
        saved_s = parts["drive writes"] * min(1.0, of_state / 6 / moved)
        what = "writes 1/6 less of optimizer state, bit for bit the same"
        return f"optimizer_compression='lossless' {what}: {_saves(saved_s)}"
    return (
        f"accumulate_grad_batches={4 * at.accumulate} writes the same bytes for 4 times the "
        "tokens; it makes the batch of a step larger."
    )


def _for_update(parts: _Parts, mean: _Parts, at: Situation) -> str:
    if at.has_fused:
        what = "the optimizer's fused=True does the same arithmetic in one pass (it may round"
        return f"{what} differently): {_saves(parts['update'])}"
    return (
        f"accumulate_grad_batches={4 * at.accumulate} updates once for 4 times the tokens; it "
        "makes the batch of a step larger."
    )


def _for_memory(parts: _Parts, mean: _Parts, at: Situation) -> str:
    plan = at.plan
    more_bytes = 2 * (plan.weight_bytes + plan.grad_bytes) / max(1, plan.num_units)
    what = "lets a unit run while those before it are updated"
    return f"{_ram(at, more_bytes)} {what}: {_saves(parts['memory'])}"


def _for_host(parts: _Parts, mean: _Parts, at: Situation) -> str:
    between_s = mean["between_s"]
    if between_s > parts["host code"] / 2 and not at.num_workers:
        return f"DataLoader(num_workers=1) loads batches meanwhile: {_saves(between_s)}"
    return "Trainer(profiler='simple') names the hook, callback or logger that takes it."


def _for_nothing(parts: _Parts, mean: _Parts, at: Situation) -> str:
    if at.plan.order != "layer-major" and at.accumulate > 1:
        return "layer_major=True brings each unit in once for all batches of a step."
    return "Larger batches do the same work of paging for more tokens."
