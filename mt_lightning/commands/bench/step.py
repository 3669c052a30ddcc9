"""`megatrain bench step`: a step on pages against plain Lightning and against the bound.

[Note: the bound]
No step is faster than its work on all processors at once, nor than its bytes at the drive's speed:
max((computing + updating) / processors, bytes read / rate, bytes written / rate). Processor time is
that of plain Lightning, which recomputes where the pages did; bytes are those that the plan of the
budget moves. Plain Lightning itself is above the bound where its own threads idle, or where two
processors share one core. All contestants take turns of a few steps in one process; figures are
medians.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from mt_lightning.commands.bench import io
from mt_lightning.commands.bench.step_runs import (
    Size,
    Speed,
    Turn,
    run_paged,
    run_plain,
    smallest_gb,
)
from mt_lightning.engine.options import Durability
from mt_lightning.errors import StepError

FITS = "fits"
SMALLEST = "smallest"
PLAIN = "plain"
RECOMPUTED = "plain again"
_PROBE_BYTES = 256 << 20
_BYTES_PER_PARAM = 16
"""Weight, gradient and two values of AdamW, in fp32."""
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        size: The model and its batch.
        budgets: "fits", "smallest", a share of weights, gradients and state ("25%"), or GiB.
        balances: Seconds of the drive for each second of computing; none leaves its speed alone.
        speed: How fast the drive is made where there are no balances.
        durability: When steps are committed.
        num_turns: Turns of each contestant.
        num_steps: Timed steps of a turn.
        directory: Where pages lie.
    """

    size: Size
    budgets: Sequence[str]
    balances: Sequence[float]
    speed: Speed
    durability: Durability
    num_turns: int
    num_steps: int
    directory: Path


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One contestant.

    Attributes:
        name: "plain", "plain again" (layers run again in backward) or the budget.
        budget_gib: The budget, None for plain Lightning and for the default.
        balance: Seconds of the drive for each second of computing, None where not set.
        num_params: Parameters.
        seconds: A step.
        cpu_seconds: Processor time of a step.
        of_plain: Its time over that of plain Lightning, the median over the turns.
        bound_s: What no step is faster than.
        of_bound: Its time over the bound.
        s_per_billion: Seconds for each billion of parameters.
        read_bytes: Read in a step.
        written_bytes: Written in a step.
        recomputed: Whether units ran again in backward.
        stall_s: Seconds that a step waited for pages, updates or memory.
    """

    name: str
    budget_gib: float | None
    balance: float | None
    num_params: int
    seconds: float
    cpu_seconds: float
    of_plain: float
    bound_s: float
    of_bound: float
    s_per_billion: float
    read_bytes: float
    written_bytes: float
    recomputed: bool
    stall_s: float


@dataclass(frozen=True)
class _Contestant:
    name: str
    budget_gib: float | None
    balance: float | None
    speed: Speed


def measure(settings: Settings, progress: Progress) -> list[StepTime]:
    """Let all contestants take turns.

    Args:
        settings: What to measure.
        progress: Where to show how far it is.

    Raises:
        BudgetError: A budget is too small.
        StepError: A contestant computed other losses than plain Lightning.
    """
    with tempfile.TemporaryDirectory(prefix=".megatrain-bench-", dir=settings.directory) as folder:
        root = Path(folder)
        task = progress.add_task("step", total=None)
        contestants, own_speed = _contestants(settings, root)
        turns: dict[_Contestant | str, list[Turn]] = {}
        progress.update(task, total=settings.num_turns * (len(contestants) + 2))
        for _ in range(settings.num_turns):
            for name in (PLAIN, RECOMPUTED):
                turn = run_plain(
                    settings.size, settings.num_steps + 1, root, recompute=name == RECOMPUTED
                )
                turns.setdefault(name, []).append(turn)
                progress.advance(task)
            for contestant in contestants:
                turns.setdefault(contestant, []).append(_run(settings, contestant, root))
                progress.advance(task)
    losses = turns[PLAIN][0].losses
    for contestant, taken in turns.items():
        if any(turn.losses != losses for turn in taken):
            raise StepError(f"{contestant} computed other losses than plain Lightning")
    plan = next(turn.plan for each in contestants for turn in turns[each])
    assert plan is not None
    plain = {name: turns[name] for name in (PLAIN, RECOMPUTED)}
    results = [
        _result(
            _Contestant(name, None, None, Speed()),
            plain[name],
            plain,
            plan.num_params,
            _compute_s(plain[name]),
        )
        for name in plain
    ]
    for each in contestants:
        bound_s = _bound_s(turns[each][0], plain, _slower(each.speed, own_speed))
        results.append(_result(each, turns[each], plain, plan.num_params, bound_s))
    return results


def _contestants(settings: Settings, root: Path) -> tuple[list[_Contestant], Speed]:
    """Return who takes part, and the speed of the drive itself."""
    num_steps = settings.num_steps + 1
    compute_s = _cpu_s(run_plain(settings.size, num_steps, root, recompute=True)) / num_processors()
    own = _own_speed(root)
    contestants = []
    for name in settings.budgets:
        budget_gib = _budget_gib(name, settings, root)
        contestant = _Contestant(name, budget_gib, None, settings.speed)
        if not settings.balances:
            contestants.append(contestant)
            continue
        plan = _run(settings, replace(contestant, speed=Speed()), root, num_steps=1).plan
        assert plan is not None
        for balance in settings.balances:
            drive_s = balance * compute_s
            speed = Speed(
                read_bytes_per_s=max(1.0, plan.read_bytes) / drive_s,
                write_bytes_per_s=max(1.0, plan.written_bytes) / drive_s,
            )
            if _moves(plan):
                contestants.append(replace(contestant, balance=balance, speed=speed))
        if not _moves(plan):
            contestants.append(contestant)
    return contestants, own


def _moves(plan: object) -> bool:
    return bool(getattr(plan, "read_bytes", 0) or getattr(plan, "written_bytes", 0))


def _own_speed(root: Path) -> Speed:
    """Return what the drive does when it reads and writes at once."""
    with Progress(disable=True) as silent:
        results = io.measure([root], _PROBE_BYTES, 3, silent, with_fio=False)
    both = next(moved for moved in results if moved.operation == io.BOTH)
    return Speed(read_bytes_per_s=both.read_bytes_per_s, write_bytes_per_s=both.write_bytes_per_s)


def _slower(a: Speed, b: Speed) -> Speed:
    return Speed(
        read_bytes_per_s=min(a.read_bytes_per_s, b.read_bytes_per_s),
        write_bytes_per_s=min(a.write_bytes_per_s, b.write_bytes_per_s),
    )


def _budget_gib(name: str, settings: Settings, root: Path) -> float | None:
    if name == FITS:
        return None
    if name == SMALLEST:
        return smallest_gb(settings.size, root, settings.durability)
    if not name.endswith("%"):
        return float(name)
    plan = _run(settings, _Contestant(FITS, None, None, Speed()), root, num_steps=1).plan
    assert plan is not None
    return float(name[:-1]) / 100 * _BYTES_PER_PARAM * plan.num_params / _GIB


def _run(
    settings: Settings, contestant: _Contestant, root: Path, num_steps: int | None = None
) -> Turn:
    return run_paged(
        settings.size,
        settings.num_steps + 1 if num_steps is None else num_steps,
        root,
        max_ram_gb=contestant.budget_gib,
        durability=settings.durability,
        speed=contestant.speed,
    )


def num_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def _bound_s(turn: Turn, plain: dict[str, list[Turn]], speed: Speed) -> float:
    plan = turn.plan
    assert plan is not None
    others = plain[RECOMPUTED if turn.recomputed else PLAIN]
    return max(
        _compute_s(others),
        plan.read_bytes / speed.read_bytes_per_s,
        plan.written_bytes / speed.write_bytes_per_s,
    )


def _compute_s(turns: list[Turn]) -> float:
    """Return what computing and updating take where every processor is busy."""
    return statistics.median(_cpu_s(turn) for turn in turns) / num_processors()


def _result(
    contestant: _Contestant,
    turns: list[Turn],
    plain: dict[str, list[Turn]],
    num_params: int,
    bound_s: float,
) -> StepTime:
    seconds = statistics.median(second for turn in turns for second in turn.seconds)
    ratios = [_s(turn) / _s(other) for turn, other in zip(turns, plain[PLAIN], strict=True)]
    return StepTime(
        name=contestant.name,
        budget_gib=contestant.budget_gib,
        balance=contestant.balance,
        num_params=num_params,
        seconds=seconds,
        cpu_seconds=statistics.median(_cpu_s(turn) for turn in turns),
        of_plain=statistics.median(ratios),
        bound_s=bound_s,
        of_bound=seconds / bound_s,
        s_per_billion=seconds / num_params * 1e9,
        read_bytes=statistics.median(turn.read_bytes for turn in turns),
        written_bytes=statistics.median(turn.written_bytes for turn in turns),
        recomputed=turns[-1].recomputed,
        stall_s=statistics.median(sum(turn.stalls.values()) for turn in turns),
    )


def _s(turn: Turn) -> float:
    return statistics.median(turn.seconds)


def _cpu_s(turn: Turn) -> float:
    return statistics.median(turn.cpu_seconds)
