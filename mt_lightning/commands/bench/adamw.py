"""`megatrain bench adamw`: how fast each form of optimizer state is updated.

[Note: how it is timed]
All forms and torch's fused AdamW take turns, so that whatever else the machine does hits all alike,
and the median of the rounds counts. The roof is what the same number of threads moves through
memory in a plain addition of arrays that no cache holds, measured in the same rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.progress import Progress
from rich.table import Table

from mt_lightning.optim import lossless
from mt_lightning.optim.loop_step import stepper_for
from mt_lightning.optim.packed.formats import FORMATS
from mt_lightning.optim.packed.place import Place
from mt_lightning.optim.packed.random import key
from mt_lightning.optim.packed.records import FP32, Format
from mt_lightning.optim.packed.scalars import AdamScalars
from mt_lightning.optim.packed.update import adamw_step
from mt_lightning.optim.shadow import Target, snapshot

FUSED = "torch fused"
LOOP = "torch"
"""AdamW without `fused=True`, which goes through memory once for each of its operations."""
ONE_PASS = "one pass"
"""What takes its place on pages, to the same bits."""
LOSSLESS = "lossless"
_GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
_CHUNK_NUMEL = 1 << 20
_WARM_STEPS = 3
_WIDTH = 1024
"""Columns of the one tensor."""
_ROOF_PASSES = 3
"""An addition in place reads two arrays and writes one."""


@dataclass(frozen=True)
class Speed:
    """One form under one number of threads.

    Attributes:
        name: The form.
        threads: Threads of the update.
        params_per_s: Parameters updated in a second, the median round.
        bytes_per_param: Bytes of weights, gradients and state that one update moves.
        share_of_roof: Those bytes, against what memory moved in the same time.
        against_fused: Its rate over that of torch's fused AdamW.
    """

    name: str
    threads: int
    params_per_s: float
    bytes_per_param: float
    share_of_roof: float
    against_fused: float


def measure(
    num_params: int, threads: Sequence[int], num_rounds: int, progress: Progress
) -> list[Speed]:
    """Time every form of state.

    Args:
        num_params: Parameters of the one tensor.
        threads: Numbers of threads to try.
        num_rounds: How often all forms take turns.
        progress: Where to show how far it is.
    """
    before = torch.get_num_threads()
    results: list[Speed] = []
    task = progress.add_task("adamw", total=len(threads) * num_rounds)
    try:
        for number in threads:
            torch.set_num_threads(number)
            contestants = _contestants(num_params)
            roof = _Roof(num_params)
            times: dict[str, list[float]] = {name: [] for name in contestants}
            roofs = []
            for _ in range(num_rounds):
                roofs.append(_timed(roof.run))
                for name, (run, _) in contestants.items():
                    times[name].append(_timed(run))
                progress.advance(task)
            roof_rate = _ROOF_PASSES * 4 * num_params / statistics.median(roofs)
            fused = statistics.median(times[FUSED])
            for name, (_, num_bytes) in contestants.items():
                taken = statistics.median(times[name])
                results.append(
                    Speed(
                        name,
                        number,
                        num_params / taken,
                        num_bytes,
                        num_bytes * num_params / taken / roof_rate,
                        fused / taken,
                    )
                )
    finally:
        torch.set_num_threads(before)
    return results


class _Roof:
    def __init__(self, numel: int) -> None:
        self._a, self._b = torch.rand(numel), torch.rand(numel)

    def run(self) -> None:
        self._a.add_(self._b)


def _contestants(numel: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Return what to run for each form, and the bytes it moves per parameter."""
    weights_and_gradient = 12.0
    result: dict[str, tuple[Callable[[], object], float]] = {
        FUSED: (_Torch(numel, fused=True).run, weights_and_gradient + 16),
        LOOP: (_Torch(numel, fused=False).run, weights_and_gradient + 16),
        ONE_PASS: (_OnePass(numel).run, weights_and_gradient + 16),
    }
    for format in FORMATS.values():
        packed = _Packed(numel, format)
        for _ in range(_WARM_STEPS):
            packed.run()
        state = 2 * format.state_bytes(_place(numel)) / numel
        result[format.name] = (packed.run, weights_and_gradient + state)
    coded = _Coded(numel)
    for _ in range(_WARM_STEPS):
        coded.run()
    result[LOSSLESS] = (coded.run, weights_and_gradient + 2 * coded.num_bytes / numel)
    return result


def _gradient(numel: int) -> torch.Tensor:
    """Return a gradient whose rows differ in size, as those of a model do."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(-(-numel // _WIDTH), 1, generator=generator).pow(4)
    return (torch.randn(len(rows), _WIDTH, generator=generator) * rows * 1e-3).flatten()[:numel]


def _place(numel: int) -> Place:
    return Place(numel, _WIDTH, 2)


class _Torch:
    def __init__(self, numel: int, *, fused: bool) -> None:
        self._param = torch.nn.Parameter(torch.randn(numel))
        self._param.grad = _gradient(numel)
        self._optimizer = torch.optim.AdamW([self._param], fused=fused)
        self._optimizer.step()

    def run(self) -> None:
        self._optimizer.step()


class _OnePass:
    """Steps slices as pages do."""

    def __init__(self, numel: int) -> None:
        param, grad = torch.randn(numel), _gradient(numel)
        optimizer = torch.optim.AdamW([torch.nn.Parameter(param)])
        self._stepper, self._hyper = stepper_for(optimizer), snapshot(optimizer)
        self._targets = [
            Target(param[i : i + _CHUNK_NUMEL], grad[i : i + _CHUNK_NUMEL], 0, {}, first=i)
            for i in range(0, numel, _CHUNK_NUMEL)
        ]
        self.run()
        self.run()

    def run(self) -> None:
        for target in self._targets:
            (target.state,) = self._stepper.step(self._hyper, [target])


class _Packed:
    def __init__(self, numel: int, format: Format) -> None:
        self._format = format
        self._param, self._grad = torch.randn(numel), _gradient(numel)
        self._records = torch.zeros(format.state_bytes(_place(numel)), dtype=torch.uint8)
        self._step = 0

    def run(self) -> None:
        self._step += 1
        scalars = AdamScalars.of(_GROUP, self._step, True)
        adamw_step(
            self._format,
            self._param,
            self._grad,
            self._records,
            scalars,
            key=key(0, self._step, 0),
            width=_WIDTH,
        )


class _Coded:
    """Lossless state: expanded, stepped in fp32 and compressed again, chunk by chunk."""

    def __init__(self, numel: int) -> None:
        self._param, self._grad = torch.randn(numel), _gradient(numel)
        self._starts = range(0, numel, _CHUNK_NUMEL)
        longest = lossless.max_encoded(FP32.state_bytes(_place(_CHUNK_NUMEL)))
        self._plain = torch.zeros(FP32.state_bytes(_place(_CHUNK_NUMEL)), dtype=torch.uint8)
        self._streams = [torch.empty(longest, dtype=torch.uint8) for _ in self._starts]
        self._lengths = [0 for _ in self._starts]
        self._step = 0

    @property
    def num_bytes(self) -> int:
        return sum(self._lengths)

    def run(self) -> None:
        self._step += 1
        scalars = AdamScalars.of(_GROUP, self._step, True)
        for i, start in enumerate(self._starts):
            param = self._param[start : start + _CHUNK_NUMEL]
            plain = self._plain[: FP32.state_bytes(_place(param.numel()))]
            if self._step == 1:
                plain.zero_()
            else:
                lossless.decode(self._streams[i][: self._lengths[i]], plain)
            grad = self._grad[start : start + _CHUNK_NUMEL]
            adamw_step(FP32, param, grad, plain, scalars, key=0, first=start)
            self._lengths[i] = lossless.encode(plain, self._streams[i])


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def as_dicts(speeds: Sequence[Speed]) -> list[dict[str, object]]:
    """Return the results as JSON data."""
    return [asdict(speed) for speed in speeds]


def speed_table(speeds: Sequence[Speed], num_params: int) -> Table:
    """Show the results."""
    table = Table(
        title=f"AdamW on {num_params / 1e6:.0f}M parameters",
        title_justify="left",
        title_style="bold",
        caption="medians; all forms take turns",
        caption_justify="left",
    )
    for heading in ("state", "threads", "parameters/s", "bytes/parameter", "of roof", "of fused"):
        table.add_column(heading, justify="left" if heading == "state" else "right")
    for i, speed in enumerate(speeds):
        last = i + 1 == len(speeds) or speeds[i + 1].threads != speed.threads
        table.add_row(
            speed.name,
            str(speed.threads),
            f"{speed.params_per_s / 1e9:.2f} G",
            f"{speed.bytes_per_param:.1f}",
            f"{speed.share_of_roof:.0%}",
            f"{speed.against_fused:.2f}",
            end_section=last,
        )
    return table
