"""Draw one step of a trace that `mt.PagingTrace` wrote: the picture of docs/profiling.md.

python examples/benchmarks/draw_trace.py trace.json 5 docs/timeline.png
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLORS = {
    "forward": "#4daf4a",
    "recompute": "#a6d854",
    "backward of": "#377eb8",
    "update": "#984ea3",
    "wait": "#e41a1c",
    "read": "#1b9e77",
    "write": "#ff9f40",
    "sync": "#a65628",
    "paging": "#999999",
}
GROUPS = {
    "step optimizer": "update", "encode": "update", "decode": "update", "update": "update",
    "bind": "paging", "rebind": "paging", "take gradient": "paging", "end backward": "paging",
    "step": "paging", "end of batch": "paging", "zero grad": "paging", "spill inputs": "paging",
    "write record": "sync",
}  # fmt: skip


def group_of(event: dict[str, Any]) -> str | None:
    """Return what a span is drawn as, None where it is not."""
    phase = event["cat"]
    if phase.startswith("wait for"):
        return "wait"
    return phase if phase in COLORS else GROUPS.get(phase)


def main() -> None:
    """Draw a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("step", type=int)
    parser.add_argument("picture")
    given = parser.parse_args()
    with open(given.trace) as file:
        events = json.load(file)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    (step,) = (e for e in spans if e["name"] == f"step ({given.step})")
    begin, end = step["ts"], step["ts"] + step["dur"]
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tracks = [tid for tid in sorted(names) if names[tid] != "steps"]
    for row, tid in enumerate(tracks):
        inside = [e for e in spans if e["tid"] == tid and e["ts"] < end]
        inside = [e for e in inside if e["ts"] + e["dur"] > begin]
        # What lies inside another span is drawn over it.
        for event in sorted(
            (e for e in inside if e["ts"] < end), key=lambda e: (e["ts"], -e["dur"])
        ):
            group = group_of(event)
            if group is not None:
                left, right = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
                axes.barh(
                    -row, (right - left) / 1e3, 0.8, (left - begin) / 1e3, color=COLORS[group]
                )
    short = {"MainThread": "training", "megatrain-update_0": "update worker"}
    labels = [short.get(names[tid], names[tid].replace("megatrain-io-", "I/O ")) for tid in tracks]
    axes.set_yticks([-row for row in range(len(tracks))], labels)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("ms")
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in COLORS.items()],
        loc="outside upper center", ncols=len(COLORS), frameon=False,
    )  # fmt: skip
    figure.savefig(given.picture, dpi=80)


if __name__ == "__main__":
    main()
