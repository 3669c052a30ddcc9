"""Whether a step takes the same time per parameter however many times the model exceeds memory.

    python examples/benchmarks/seconds_per_parameter.py
    python examples/benchmarks/seconds_per_parameter.py --times 4 16 --json seconds.json

A Llama gets deeper under one budget, until weights, gradients and state are so many times as large.
All depths take turns in one process, so that what else the machine does meets all alike; medians
over all steps but the first of each turn. Processor time depends less on others than time does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from mt_lightning.commands.bench.step_runs import Size, Speed, Turn, run_paged

BYTES_PER_PARAM = 16
"""Weight, gradient and two values of AdamW, in fp32."""
GIB = 1 << 30


def layers_for(times: float, options: argparse.Namespace) -> int:
    """Return how many layers make the model `times` as large as the budget."""
    width = options.width
    per_layer = 4 * width**2 + 3 * width * 4 * width + 2 * width
    wanted = times * options.max_ram_gb * GIB / BYTES_PER_PARAM - 2 * options.vocab * width
    return max(1, round(wanted / per_layer))


def row(times: float, turns: list[Turn]) -> dict[str, float]:
    """Return the figures of one depth."""
    plan = turns[0].plan
    assert plan is not None
    billions = plan.num_params / 1e9
    return {
        "times": times,
        "num_params": plan.num_params,
        "s_per_billion": median(s for turn in turns for s in turn.seconds) / billions,
        "cpu_s_per_billion": median(s for turn in turns for s in turn.cpu_seconds) / billions,
        "read_bytes_per_param": median(t.read_bytes for t in turns) / plan.num_params,
        "written_bytes_per_param": median(t.written_bytes for t in turns) / plan.num_params,
        "loss": turns[0].losses[-1],
    }


def table_of(rows: list[dict[str, float]]) -> Table:
    """Return the rows as a table for the terminal."""
    table = Table(
        title="Seconds of a step per billion parameters, bytes per parameter", title_justify="left"
    )
    for heading in ("of the budget", "parameters", "time", "CPU", "read, bytes", "written, bytes"):
        table.add_column(heading, justify="right")
    for each in rows:
        table.add_row(
            f"{each['times']:g}x",
            f"{each['num_params'] / 1e6:.0f}M",
            f"{each['s_per_billion']:.1f} s",
            f"{each['cpu_s_per_billion']:.1f} s",
            f"{each['read_bytes_per_param']:.1f}",
            f"{each['written_bytes_per_param']:.1f}",
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=float, nargs="+", default=[4, 8, 16])
    parser.add_argument("--max-ram-gb", type=float, default=0.141)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn")
    parser.add_argument("--dir", type=Path, default=Path(), help="where pages lie")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    options = parser.parse_args()
    turns: dict[float, list[Turn]] = {times: [] for times in options.times}
    for _ in range(options.turns):
        for times, taken in turns.items():
            size = Size(
                width=options.width,
                num_layers=layers_for(times, options),
                vocab=options.vocab,
                batch=options.batch,
                length=options.length,
            )
            with tempfile.TemporaryDirectory(prefix=".megatrain-", dir=options.dir) as folder:
                turn = run_paged(
                    size,
                    options.steps + 1,
                    Path(folder),
                    max_ram_gb=options.max_ram_gb,
                    durability="auto",
                    speed=Speed(),
                )
            taken.append(turn)
    rows = [row(times, taken) for times, taken in turns.items()]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))
    Console().print(table_of(rows))


if __name__ == "__main__":
    main()
