"""`megatrain bench prefetch`: what prediction is worth, on traces of accesses.

[Note: two figures] What is given up and what is read ahead are measured apart. Without reading
ahead a hit is an access whose page was kept, and the oracle, which knows the future, has the most
of them (Belady). With reading ahead a hit is an access whose page was kept or had been asked for in
time; an oracle that reads ahead has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.progress import Progress
from rich.table import Table

from mt_lightning.commands.bench.replay import play_ahead, play_lru, play_oracle, play_predicted
from mt_lightning.commands.bench.traces import Trace


@dataclass(frozen=True)
class Comparison:
    """One trace on one number of frames; counted after the first quarter of the steps.

    Attributes:
        trace: Its name.
        units: Units of the trace.
        frames: How many of them RAM holds.
        lru: Share of accesses that hit, the least recently used page given up.
        predicted: The same, the page given up that is expected to be needed last.
        oracle: The same, the page given up that is needed last.
        of_oracle: `predicted` over `oracle`.
        in_time: Share of accesses that hit with reading ahead.
        precision: Pages read ahead that were used before they were given up.
        reads: Pages read with reading ahead, over those that the oracle reads.
    """

    trace: str
    units: int
    frames: int
    lru: float
    predicted: float
    oracle: float
    of_oracle: float
    in_time: float
    precision: float
    reads: float


def compare(
    traces: Sequence[Trace], shares: Sequence[float], depth: int, progress: Progress
) -> list[Comparison]:
    """Play every trace.

    Args:
        traces: The traces.
        shares: Frames as a share of the units.
        depth: How many units are looked ahead.
        progress: Where to show how far it is.
    """
    task = progress.add_task("prefetch", total=len(traces) * len(shares))
    results = []
    for trace in traces:
        for share in shares:
            results.append(_compare(trace, max(2, int(share * trace.num_units)), depth))
            progress.advance(task)
    return results


def _compare(trace: Trace, num_frames: int, depth: int) -> Comparison:
    lru = play_lru(trace, num_frames)
    oracle = play_oracle(trace, num_frames)
    predicted = play_predicted(trace, num_frames)
    ahead = play_ahead(trace, num_frames, depth)
    return Comparison(
        trace=trace.name,
        units=trace.num_units,
        frames=num_frames,
        lru=lru.hit_rate,
        predicted=predicted.hit_rate,
        oracle=oracle.hit_rate,
        of_oracle=predicted.hit_rate / oracle.hit_rate if oracle.hits else 1.0,
        in_time=ahead.hit_rate,
        precision=ahead.precision,
        reads=ahead.reads / max(oracle.reads, 1),
    )


def as_dicts(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return the results as JSON data."""
    return [asdict(comparison) for comparison in comparisons]


def comparison_table(comparisons: Sequence[Comparison], depth: int) -> Table:
    """Show the results."""
    table = Table(
        title="Hits: kept (no reading ahead), and in time (with reading ahead)",
        title_justify="left",
        title_style="bold",
        caption=f"looking {depth} units ahead; useful: pages read ahead and used; reads: per read "
        "of the oracle",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    headings = ("trace", "frames", "LRU", "predicted", "oracle", "of oracle")
    for heading in (*headings, "in time", "useful", "reads"):
        justify = "left" if heading == "trace" else "right"
        table.add_column(heading, justify=justify, no_wrap=heading == "trace")
    for i, row in enumerate(comparisons):
        last = i + 1 == len(comparisons) or comparisons[i + 1].trace != row.trace
        table.add_row(
            row.trace,
            f"{row.frames}/{row.units}",
            f"{row.lru:.1%}",
            f"{row.predicted:.1%}",
            f"{row.oracle:.1%}",
            f"{row.of_oracle:.3f}",
            f"{row.in_time:.1%}",
            f"{row.precision:.1%}",
            f"{row.reads:.2f}",
            end_section=last,
        )
    return table
