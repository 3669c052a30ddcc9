"""What this machine was measured to do: rates of drives, memory, arithmetic and the update.

[Note: whose profile] Rates of another machine are worse than none, because they look right. A
profile therefore names the machine it was taken on, a drive is found by the number of its device,
and reading a profile elsewhere is an error unless it is asked for.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import psutil

from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.tiers.filesystem import existing_parent
from mt_lightning.tiers.pagefile import storage_error, write_whole

FORMAT = "mt_lightning machine profile"
VERSION = 2
_MOST_BYTES = 1 << 20
"""A larger file is no profile."""
_GIB = 1 << 30
_REMEDY = "Measure anew: megatrain bench machine."


@dataclass(frozen=True, kw_only=True)
class Host:
    """Which machine a profile belongs to.

    Attributes:
        processor: Its name.
        num_processors: Logical processors, whether or not this process may use them.
        memory_gib: Memory in GiB, rounded.
    """

    processor: str
    num_processors: int
    memory_gib: int

    def __post_init__(self) -> None:
        _check_text("processor", self.processor)
        _check_count("num_processors", self.num_processors)
        _check_count("memory_gib", self.memory_gib)

    @classmethod
    def here(cls) -> Host:
        """Describe this machine."""
        return cls(
            processor=_processor_name(),
            num_processors=os.cpu_count() or 1,
            memory_gib=max(1, round(psutil.virtual_memory().total / _GIB)),
        )

    def __str__(self) -> str:
        """Say it in a few words."""
        return f"{self.num_processors} x {self.processor}, {self.memory_gib} GiB"


@dataclass(frozen=True, kw_only=True)
class DriveRates:
    """What a drive moves, by the code that moves pages.

    Attributes:
        directory: Where it was measured.
        device: Number of the device, "major:minor", as `device_of` gives it.
        file_system: Its type, such as "ext4".
        direct: Whether the bytes went around the page cache.
        read_bytes_per_s: Reading alone, checksums compared.
        write_bytes_per_s: Writing alone, the sync at the end included.
        mixed_read_bytes_per_s: Reading while as much is written.
        mixed_write_bytes_per_s: Writing while as much is read.
        read_cpu_s_per_gib: Processor time of a GiB read.
        write_cpu_s_per_gib: Processor time of a GiB written.
    """

    directory: str
    device: str
    file_system: str
    direct: bool
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_read_bytes_per_s: float
    mixed_write_bytes_per_s: float
    read_cpu_s_per_gib: float
    write_cpu_s_per_gib: float

    def __post_init__(self) -> None:
        for name in ("directory", "device", "file_system"):
            _check_text(name, getattr(self, name))
        if not isinstance(self.direct, bool):
            raise ValueError(f"direct must be true or false, not {self.direct!r}")
        for name in _NUMBERS_OF_A_DRIVE:
            _check_rate(name, getattr(self, name))


_NUMBERS_OF_A_DRIVE = tuple(f.name for f in fields(DriveRates) if "_per_" in f.name)


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """Rates of one machine.

    Attributes:
        host: The machine.
        measured_at: When, in ISO 8601 with the time zone.
        num_threads: Threads that computed.
        memory_bytes_per_s: Bytes moved through memory by `num_threads`, reads and writes added up.
            None where it was not measured.
        flops_per_s: Floating-point operations in a second of a matrix product, by the name of the
            dtype ("float32", "bfloat16").
        update_params_per_s: Parameters that AdamW updates in a second, by the form of its state
            ("raw", "lossless", "dynamic", or the name of a format).
        fresh_bytes_per_s: Memory that a thread touches for the first time in a second, page by
            page. None where it was not measured.
        drives: The drives.
    """

    host: Host = field(default_factory=Host.here)
    measured_at: str
    num_threads: int
    memory_bytes_per_s: float | None = None
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    update_params_per_s: Mapping[str, float] = field(default_factory=dict)
    fresh_bytes_per_s: float | None = None
    drives: tuple[DriveRates, ...] = ()

    def __post_init__(self) -> None:
        _check_text("measured_at", self.measured_at)
        _check_count("num_threads", self.num_threads)
        for name in ("memory_bytes_per_s", "fresh_bytes_per_s"):
            if getattr(self, name) is not None:
                _check_rate(name, getattr(self, name))
        for name in ("flops_per_s", "update_params_per_s"):
            for key, rate in getattr(self, name).items():
                _check_rate(f"{name} of {key!r}", rate)

    def drive(self, directory: str | os.PathLike[str]) -> DriveRates | None:
        """Return the rates of the drive under a directory, None where it was not measured.

        Args:
            directory: It need not exist yet.
        """
        device = device_of(directory)
        return next((drive for drive in self.drives if drive.device == device), None)

    def with_drives(self, drives: tuple[DriveRates, ...]) -> MachineProfile:
        """Return a profile with these rates in place of earlier ones of the same drives."""
        devices = {drive.device for drive in drives}
        kept = tuple(drive for drive in self.drives if drive.device not in devices)
        return replace(self, drives=(*kept, *drives))

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the profile, old or new as a whole whatever happens.

        Args:
            path: The file; None means `profile_path()`. Its directory is made.

        Returns:
            The file.

        Raises:
            StorageError: It cannot be written.
        """
        where = profile_path() if path is None else Path(path)
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            write_whole(where, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())
        except OSError as error:
            raise storage_error(error, "cannot write the machine profile", str(where)) from error
        return where

    @classmethod
    def load(
        cls, path: str | os.PathLike[str] | None = None, *, of_any_machine: bool = False
    ) -> MachineProfile:
        """Read a profile.

        Args:
            path: The file; None means `profile_path()`.
            of_any_machine: Whether a profile of another machine will do, to plan for that one.

        Raises:
            ConfigError: It is no profile, is damaged, or belongs to another machine or version.
            StorageError: It does not exist or cannot be read.
        """
        where = profile_path() if path is None else Path(path)
        try:
            with where.open("rb") as file:
                text = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise StorageError(
                error.errno, f"no machine profile: {error.strerror}. {_REMEDY}", str(where)
            ) from error
        try:
            profile = _decode(text)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{where} is not a machine profile that can be read: {error}. {_REMEDY}"
            ) from None
        if not of_any_machine and profile.host != (here := Host.here()):
            raise ConfigError(
                f"{where} was measured on another machine ({profile.host}); this one is {here}. "
                f"{_REMEDY}"
            )
        return profile


def profile_path() -> Path:
    """Return where the profile of this machine lies, whether or not it exists.

    `$MT_LIGHTNING_CACHE/machine.json`, else `$XDG_CACHE_HOME/mt_lightning/machine.json`, else
    `~/.cache/mt_lightning/machine.json`.
    """
    own = os.environ.get("MT_LIGHTNING_CACHE")
    if own:
        return Path(own).expanduser().absolute() / "machine.json"
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The standard has relative paths ignored.
    root = Path(shared) if os.path.isabs(shared) else Path("~/.cache").expanduser()
    return root / "mt_lightning" / "machine.json"


def device_of(path: str | os.PathLike[str]) -> str:
    """Return the number of the device that a path lies on, or would, as "major:minor"."""
    number = os.stat(existing_parent(path)).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def _decode(text: bytes) -> MachineProfile:
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it is longer than {_MOST_BYTES} bytes")
    data = json.loads(text)
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ValueError(f"it does not say that it is an {FORMAT!r}")
    if (version := data.pop("version", None)) != VERSION:
        raise ValueError(f"its version is {version!r}, this program reads {VERSION}")
    data["host"] = _made(Host, data.get("host"))
    drives = data.get("drives")
    if not isinstance(drives, list):
        raise ValueError("drives must be a list")
    data["drives"] = tuple(_made(DriveRates, drive) for drive in drives)
    for name in ("flops_per_s", "update_params_per_s"):
        if not isinstance(data.get(name), dict):
            raise ValueError(f"{name} must be a table of names and rates")
    return _made(MachineProfile, data)


def _made(kind: type[Any], data: object) -> Any:
    names = {each.name for each in fields(kind)}
    if not isinstance(data, dict) or data.keys() != names:
        found = sorted(data.keys() ^ names) if isinstance(data, dict) else data
        raise ValueError(f"fields of {kind.__name__} are missing or unknown: {found!r}")
    return kind(**data)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text, not {value!r}")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a whole number above 0, not {value!r}")


def _check_rate(name: str, value: object) -> None:
    if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):  # type: ignore[arg-type]
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}")


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.machine() or "unknown")
