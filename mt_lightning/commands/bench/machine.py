"""`megatrain bench machine`: the rates that planning needs, kept in the machine profile."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table

from mt_lightning.commands.bench import adamw, io
from mt_lightning.planning.profile import MachineProfile

RAW = "raw"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SIDE = 1536
"""Rows and columns of the matrices: large enough that no more speed is to be had."""
_SHORT_SIDE = 256
_LONGEST_S = 2.0
"""Where one product would take longer it is measured on the short side."""
_NUM_ROUNDS = 5
_FRESH_BYTES = 64 << 20
_GIB = 1 << 30


def measure(
    directories: Sequence[Path], io_bytes: int, num_params: int, progress: Progress
) -> MachineProfile:
    """Measure drives, memory, arithmetic and the update.

    Args:
        directories: Where drives are measured; nothing is left in them.
        io_bytes: Bytes of each of two files in each directory.
        num_params: Parameters of the update.
        progress: Where to show how far it is.

    Raises:
        ConfigError: There is no such directory, or too little room in it.
        StorageError: A drive failed.
    """
    drives = [
        io.measure([directory], io_bytes, _NUM_ROUNDS, progress, with_fio=False)
        for directory in directories
    ]
    threads = torch.get_num_threads()
    speeds = adamw.measure(num_params, [threads], _NUM_ROUNDS, progress)
    beside = (adamw.LOOP, adamw.ONE_PASS)  # the state of both is raw, as that of the fused one
    updates = {_form(s.name): s.params_per_s for s in speeds if s.name not in beside}
    fused = next(speed for speed in speeds if speed.name == adamw.FUSED)
    memory_bytes_per_s = fused.params_per_s * fused.bytes_per_param / fused.share_of_roof
    return MachineProfile(
        measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        num_threads=threads,
        memory_bytes_per_s=memory_bytes_per_s,
        flops_per_s=measure_flops(progress),
        update_params_per_s=updates,
        fresh_bytes_per_s=measure_fresh(),
        drives=io.drive_rates([moved for drive in drives for moved in drive]),
    )


def measure_flops(progress: Progress) -> Mapping[str, float]:
    """Return floating-point operations in a second of matrix products, by dtype."""
    task = progress.add_task("arithmetic", total=len(DTYPES))
    rates = {}
    for name, dtype in DTYPES.items():
        side = _SHORT_SIDE
        seconds = _product_s(side, dtype, num_rounds=1)
        # Some processors have no arithmetic of a dtype, and take a minute for one large product.
        if seconds * (_SIDE / side) ** 3 < _LONGEST_S:
            side = _SIDE
        rates[name] = 2 * side**3 / _product_s(side, dtype)
        progress.advance(task)
    return rates


def _product_s(side: int, dtype: torch.dtype, num_rounds: int = _NUM_ROUNDS) -> float:
    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype)
    return median_s(lambda: torch.mm(a, b, out=out), num_rounds)


def measure_fresh() -> float:
    """Return bytes of memory that one thread touches for the first time in a second.

    In small pages, as the heap of a process that has run for a while consists of.
    """
    fresh: list[float] = []
    for _ in range(_NUM_ROUNDS):
        mapping = mmap.mmap(-1, _FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
        block = torch.frombuffer(mapping, dtype=torch.float32)
        begin = time.perf_counter()
        block.zero_()
        middle = time.perf_counter()
        block.zero_()
        # What is left is what the kernel took.
        fresh.append(2 * middle - begin - time.perf_counter())
    return _FRESH_BYTES / max(statistics.median(fresh), 1e-9)


def median_s(run: Callable[[], object], num_rounds: int = _NUM_ROUNDS) -> float:
    """Return the seconds that a call takes."""
    run()
    times = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _form(name: str) -> str:
    """Return what a profile calls a form of state."""
    return {adamw.FUSED: RAW}.get(name, name)


def profile_table(profile: MachineProfile, path: Path) -> Table:
    """Show a profile."""
    table = Table(
        title=f"{profile.host}, {profile.num_threads} threads",
        title_justify="left",
        title_style="bold",
        caption=f"kept in {path}",
        caption_justify="left",
    )
    for heading in ("what", "rate"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    if profile.memory_bytes_per_s is not None:
        table.add_row("memory", f"{profile.memory_bytes_per_s / 1e9:.1f} GB/s", end_section=True)
    if profile.fresh_bytes_per_s is not None:
        table.add_row("memory, first touch", f"{profile.fresh_bytes_per_s / 1e9:.1f} GB/s")
    for i, (dtype, rate) in enumerate(profile.flops_per_s.items(), 1):
        last = i == len(profile.flops_per_s)
        table.add_row(f"matrix product, {dtype}", f"{rate / 1e9:.0f} GFLOP/s", end_section=last)
    for i, (form, rate) in enumerate(profile.update_params_per_s.items(), 1):
        last = i == len(profile.update_params_per_s)
        table.add_row(f"AdamW, {form}", f"{rate / 1e9:.2f} G parameters/s", end_section=last)
    for drive in profile.drives:
        for verb, rate in (
            ("reads", drive.read_bytes_per_s),
            ("writes", drive.write_bytes_per_s),
            ("reads beside writes", drive.mixed_read_bytes_per_s),
            ("writes beside reads", drive.mixed_write_bytes_per_s),
        ):
            table.add_row(f"{drive.directory}: {verb}", f"{rate / 1e9:.2f} GB/s")
    return table
