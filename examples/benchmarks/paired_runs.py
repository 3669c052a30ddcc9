"""Runs that differ in the optimizer's state alone, remembered one by one, and what they say.

[Note: paired runs]
Two runs of one seed see the same weights at the start and the same batches in the same order, so
the gap of their validation losses holds far less noise than either loss. The gap is read two-sided:
a coded state that ends *better* than float32 by more than chance is as unfaithful as one that ends
worse. The spread from seed to seed stands beside it as the scale of what does not matter.

A cache file knows a format by its name only. When the code of a format changes, or what "dynamic"
chooses, its runs must be made anew: take another file.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contenders import BASELINE, bits_per_value
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
_T95 += (2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)


class RunCache:
    """Results of finished runs: a file with one JSON object a line, appended as they finish.

    Args:
        path: The file; None remembers nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._losses: dict[str, float] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._losses[_name(entry["run"])] = entry["validation_loss"]

    def find(self, run: dict[str, Any]) -> float | None:
        """Return the validation loss of a run; None if it has not finished yet."""
        return self._losses.get(_name(run))

    def add(self, run: dict[str, Any], validation_loss: float, **more: Any) -> None:
        """Remember a run.

        Args:
            run: All that it depends on.
            validation_loss: How it ended.
            more: What else to write beside it.
        """
        self._losses[_name(run)] = validation_loss
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"run": run, "validation_loss": validation_loss, **more})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def complete(
    cache: RunCache,
    runs: Sequence[dict[str, Any]],
    train: Callable[[dict[str, Any], Progress], float],
) -> None:
    """Take the runs that are missing in the cache.

    Args:
        cache: Where finished runs are.
        runs: What each depends on.
        train: Takes one run and returns its validation loss.
    """
    with Progress(console=Console(stderr=True)) as progress:
        total = progress.add_task("Runs", total=len(runs))
        for run in runs:
            if cache.find(run) is None:
                start = time.perf_counter()
                loss = train(run, progress)
                cache.add(run, loss, seconds=round(time.perf_counter() - start, 1))
            progress.advance(total)


def show(title: str, comparisons: Sequence[Comparison], *, as_data: bool) -> None:
    """Print comparisons, as a table or as JSON."""
    if as_data:
        print(as_json(comparisons))
    else:
        Console().print(table_of(title, comparisons))


def _name(run: dict[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One format beside float32, over all seeds.

    Attributes:
        format: Its name.
        beta2: Decay of the second moment.
        bits_per_value: Bits of each moment of an element, None where it varies.
        num_seeds: Number of pairs.
        baseline_loss: Mean validation loss with float32 state.
        seed_deviation: Standard deviation of that loss from seed to seed.
        loss: Mean validation loss with coded state.
        gap: Mean of the paired differences, coded minus float32.
        interval: Half the width of the 95 % confidence interval of `gap`.
        verdict: What may be said.
    """

    format: str
    beta2: float
    bits_per_value: float | None
    num_seeds: int
    baseline_loss: float
    seed_deviation: float
    loss: float
    gap: float
    interval: float
    verdict: str


def compare(
    format: str, beta2: float, baseline: Sequence[float], coded: Sequence[float]
) -> Comparison:
    """Compare paired runs.

    Args:
        format: Name of the format.
        beta2: Decay of the second moment.
        baseline: Validation losses with float32 state, one per seed.
        coded: Those with coded state, in the same order.
    """
    gaps = [b - a for a, b in zip(baseline, coded, strict=True)]
    gap, interval, deviation = statistics.mean(gaps), math.inf, math.nan
    if len(gaps) > 1:
        quantile = _T95[len(gaps) - 2] if len(gaps) - 2 < len(_T95) else 1.96
        interval = quantile * statistics.stdev(gaps) / math.sqrt(len(gaps))
        deviation = statistics.stdev(baseline)
    return Comparison(
        format=format,
        beta2=beta2,
        bits_per_value=bits_per_value(format),
        num_seeds=len(gaps),
        baseline_loss=statistics.mean(baseline),
        seed_deviation=deviation,
        loss=statistics.mean(coded),
        gap=gap,
        interval=interval,
        verdict=_verdict(gap, interval, deviation),
    )


def _verdict(gap: float, interval: float, deviation: float) -> str:
    if math.isinf(interval):
        return "one seed: no verdict"
    if not math.isfinite(gap):
        return "diverged"
    side = "worse" if gap > 0 else "better"
    if abs(gap) <= interval:
        return "no difference seen"
    if abs(gap) <= deviation:
        return f"{side}, by less than seeds differ"
    return f"{side}, by more than seeds differ"


def table_of(title: str, comparisons: Sequence[Comparison]) -> Table:
    """Return comparisons as a table for the terminal.

    Its columns: bits per value; float32's mean validation loss and its deviation from seed to seed;
    the mean gap, coded minus float32, and half its confidence interval.
    """
    table = Table(title=title, box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("beta2", "format", "bits", "seeds", "fp32", "s.d.", "gap", "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict")
    for c in comparisons:
        table.add_row(
            f"{c.beta2:g}",
            c.format,
            "varies" if c.bits_per_value is None else f"{c.bits_per_value:.3f}",
            str(c.num_seeds),
            f"{c.baseline_loss:.4f}",
            f"{c.seed_deviation:.4f}",
            f"{c.gap:+.4f}",
            f"+-{c.interval:.4f}",
            c.verdict,
        )
    return table


def collect(
    cache: RunCache, runs: Sequence[dict[str, Any]], formats: Sequence[str]
) -> list[Comparison]:
    """Compare every format with float32 over the seeds that have both, per beta2.

    Args:
        cache: Finished runs.
        runs: All runs of the experiment, each with "format", "beta2" and "seed" among its keys.
        formats: The formats to compare.
    """
    comparisons = []
    for beta2 in sorted({run["beta2"] for run in runs}, reverse=True):
        for format in formats:
            pairs = []
            for run in runs:
                if run["format"] == format and run["beta2"] == beta2:
                    pair = cache.find({**run, "format": BASELINE}), cache.find(run)
                    if None not in pair:
                        pairs.append(pair)
            if pairs:
                comparisons.append(compare(format, beta2, *zip(*pairs, strict=True)))
    return comparisons


def as_json(comparisons: Sequence[Comparison]) -> str:
    """Return comparisons as JSON; numbers that JSON lacks become null."""
    rows = [
        {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(comparison).items()
        }
        for comparison in comparisons
    ]
    return json.dumps(rows, indent=2)
