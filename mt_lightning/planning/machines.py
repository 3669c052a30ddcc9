"""Machines to plan for: their memories, links, drives and rates.

[Note: data sheets are not measurements] Rates of a preset come from data sheets, lowered to what
programs usually reach of them. What is planned for such a machine is modelled. A profile of this
machine (`megatrain bench machine`) holds what was measured here.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mt_lightning.errors import ConfigError

GIB = 1 << 30
_TB = 10**12
_MOST = 1e30
"""Of bytes, and of anything in a second."""


@dataclass(frozen=True, kw_only=True)
class Drive:
    """One drive.

    Attributes:
        name: What it is.
        size_bytes: Room for the files of a run.
        read_bytes_per_s: Reading alone.
        write_bytes_per_s: Writing alone, as long as one likes: not the burst that a cache takes.
        mixed_bytes_per_s: Reads and writes together, added up, half of each. None: the drive takes
            turns, so each direction costs the time that it takes alone.
        endurance_bytes: What may be written in its life; None where nobody says.
        price: What it costs, in any currency; None where it does not matter.
        source: Where the numbers are from.
        latency_s: What a request of a block takes beside its bytes; others go on meanwhile.
    """

    name: str
    size_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float | None = None
    endurance_bytes: float | None = None
    price: float | None = None
    source: str = ""
    latency_s: float = 1e-4

    def __post_init__(self) -> None:
        _check_positive("a drive's", self)

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return how long the drive works to read and write so many bytes side by side."""
        alone = (read_bytes / self.read_bytes_per_s, written_bytes / self.write_bytes_per_s)
        if self.mixed_bytes_per_s is None:
            return sum(alone)
        # What both directions share is moved at the common rate, the rest of one at its own.
        return max(*alone, (read_bytes + written_bytes) / self.mixed_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computes.

    Attributes:
        name: What it is.
        memory_bytes: Its own memory; None where it computes in the host's.
        flops_per_s: Of matrix products, by dtype ("float32", "bfloat16"): what they reach.
        memory_bytes_per_s: Bytes of element-wise operations in a second.
        up_bytes_per_s: From host to device.
        down_bytes_per_s: Back.
        launch_s: What each operation costs however small it is.
        watts: What it draws at work.
        source: Where the numbers are from.
    """

    name: str
    memory_bytes: int | None
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    launch_s: float = 0.0
    watts: float = 0.0
    source: str = ""

    def seconds(self, flops: float, moved_bytes: float, num_ops: int, dtype: str) -> float:
        """Return how long it computes."""
        products = flops / self.flops_per_s[dtype]
        return max(products + moved_bytes / self.memory_bytes_per_s, num_ops * self.launch_s)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host with one device.

    Attributes:
        name: What it is.
        device: What computes.
        ram_bytes: Memory of the host.
        ram_bytes_per_s: Bytes that updates move through it in a second.
        drives: The drives that pages lie on.
        update_params_per_s: Parameters updated in a second by the form of their state, where that
            was measured.
        host_watts: What the host and its drives draw beside the device.
        unit_s: What the kit costs each time that a unit runs.
        fresh_bytes_per_s: Memory that a thread touches for the first time in a second; None where
            that costs nothing.
        measured: Whether rates were measured on this machine.
    """

    name: str
    device: Device
    ram_bytes: int
    ram_bytes_per_s: float
    drives: tuple[Drive, ...]
    update_params_per_s: dict[str, float] = field(default_factory=dict)
    host_watts: float = 150.0
    unit_s: float = 0.0
    fresh_bytes_per_s: float | None = None
    measured: bool = False

    def __post_init__(self) -> None:
        _check_positive("a machine's", self)

    @property
    def on_host(self) -> bool:
        """Whether the host itself computes."""
        return self.device.memory_bytes is None

    @property
    def disk_bytes(self) -> int:
        """Room on all drives."""
        return sum(drive.size_bytes for drive in self.drives)

    @property
    def watts(self) -> float:
        """What it draws at work."""
        return self.device.watts + self.host_watts

    def disk_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return how long the drives work at once; pages lie on them by their room."""
        if not read_bytes and not written_bytes:
            return 0.0
        if not self.drives:
            return math.inf
        return max(
            drive.seconds(share * read_bytes, share * written_bytes)
            for drive, share in zip(self.drives, self.drive_shares, strict=True)
        )

    def file_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return how long the drive of one file works, on average over the drives."""
        if not read_bytes and not written_bytes:
            return 0.0
        if not self.drives:
            return math.inf
        return sum(
            share * drive.seconds(read_bytes, written_bytes)
            for drive, share in zip(self.drives, self.drive_shares, strict=True)
        )

    @property
    def drive_shares(self) -> list[float]:
        """The share of the pages that lies on each drive."""
        return [drive.size_bytes / self.disk_bytes for drive in self.drives]


def _check_positive(whose: str, item: Any) -> None:
    for each in fields(item):
        value = getattr(item, each.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        may_be_zero = each.name in ("host_watts", "unit_s", "price", "latency_s")
        if number and not (value > 0 or (may_be_zero and value == 0)):
            raise ConfigError(
                f"{whose} {each.name} is {value:g}: it must be above 0. Give a positive number."
            )


def _device(
    name: str,
    memory_gib: float,
    fp32: float,
    bf16: float,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    watts: float,
    source: str,
) -> Device:
    """Describe an accelerator by its data sheet.

    Large matrix products reach about 7/10 of the dense peak, element-wise kernels 8/10 of the
    memory's bandwidth, and transfers 8/10 of the link's.
    """
    return Device(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        flops_per_s={"float32": 0.7 * fp32 * 1e12, "bfloat16": 0.7 * bf16 * 1e12},
        memory_bytes_per_s=0.8 * memory_gb_per_s * 1e9,
        up_bytes_per_s=0.8 * link_gb_per_s * 1e9,
        down_bytes_per_s=0.8 * link_gb_per_s * 1e9,
        launch_s=5e-6,
        watts=watts,
        source=source,
    )


_GEN4_X16, _GEN5_X16 = 31.5, 63.0
"""GB/s in each direction."""

DEVICES = {
    "rtx3090": _device(
        "RTX 3090", 24, 35.6, 71, 936, _GEN4_X16, 350, "NVIDIA GA102 white paper, 2021"
    ),
    "rtx4090": _device(
        "RTX 4090", 24, 82.6, 165.2, 1008, _GEN4_X16, 450, "NVIDIA Ada white paper, 2023"
    ),
    "rtx5090": _device(
        "RTX 5090", 32, 104.8, 209.5, 1792, _GEN5_X16, 575, "NVIDIA RTX Blackwell white paper, 2025"
    ),
    "a6000": _device(
        "RTX A6000", 48, 38.7, 154.8, 768, _GEN4_X16, 300, "NVIDIA RTX A6000 data sheet"
    ),
    "h100": _device(
        "H100 SXM", 80, 66.9, 989.4, 3350, _GEN5_X16, 700, "NVIDIA H100 data sheet (dense)"
    ),
    "h200": _device(
        "H200 SXM", 141 * 1e9 / GIB, 66.9, 989.4, 4800, _GEN5_X16, 700, "NVIDIA H200 data sheet"
    ),
    "gh200": _device(
        "GH200", 96 * 1e9 / GIB, 66.9, 989.4, 4000, 450, 700, "NVIDIA GH200 data sheet (96 GB HBM3)"
    ),
    # One memory for processor and accelerator: nothing has to go over a link.
    "dgx-spark": replace(
        _device("DGX Spark", 1, 31, 125, 273, 273, 140, "NVIDIA DGX Spark data sheet"),
        memory_bytes=None,
        up_bytes_per_s=math.inf,
        down_bytes_per_s=math.inf,
    ),
}
"""Accelerators by name; TFLOP/s without sparsity, sums in fp32."""

DRIVES = {
    "gen3": Drive(
        name="PCIe 3 x4 drive, consumer", size_bytes=2 * _TB, read_bytes_per_s=3.5e9,
        write_bytes_per_s=1.2e9, endurance_bytes=1200 * _TB, price=120,
        source="Samsung 970 EVO Plus 2 TB, writes beyond its cache",
    ),
    "gen4": Drive(
        name="PCIe 4 x4 drive, consumer", size_bytes=4 * _TB, read_bytes_per_s=7.0e9,
        write_bytes_per_s=1.5e9, endurance_bytes=2400 * _TB, price=300,
        source="Samsung 990 PRO 4 TB, writes beyond its cache",
    ),
    "gen4-server": Drive(
        name="PCIe 4 x4 drive, data centre", size_bytes=int(3.84 * _TB), read_bytes_per_s=6.8e9,
        write_bytes_per_s=4.0e9, endurance_bytes=7008 * _TB, price=500,
        source="Samsung PM9A3 3.84 TB, 1 drive write a day for 5 years",
    ),
    "gen5": Drive(
        name="PCIe 5 x4 drive, data centre", size_bytes=int(7.68 * _TB), read_bytes_per_s=14.0e9,
        write_bytes_per_s=10.0e9, endurance_bytes=14016 * _TB, price=1100,
        source="Micron 9550 PRO 7.68 TB, 1 drive write a day for 5 years",
    ),
}  # fmt: skip
"""Drives by name."""


def _host(device: str, ram_gib: float, ram_gb_per_s: float, drives: list[str], watts: float):
    return Machine(
        name=DEVICES[device].name,
        device=DEVICES[device],
        ram_bytes=int(ram_gib * GIB),
        ram_bytes_per_s=ram_gb_per_s * 1e9,
        drives=tuple(DRIVES[drive] for drive in drives),
        host_watts=watts,
    )


MACHINES = {
    "rtx3090": _host("rtx3090", 64, 40, ["gen4"], 120),
    "rtx4090": _host("rtx4090", 64, 60, ["gen4"], 120),
    "rtx5090": _host("rtx5090", 96, 70, ["gen4"], 120),
    "a6000": _host("a6000", 128, 120, ["gen4"], 150),
    "h100": _host("h100", 1024, 250, ["gen5"] * 4, 400),
    "h200": _host("h200", 1024, 250, ["gen5"] * 4, 400),
    "gh200": _host("gh200", 480 * 1e9 / GIB, 400, ["gen4-server"] * 2, 300),
    "dgx-spark": _host("dgx-spark", 128 * 1e9 / GIB, 200, ["gen4"], 60),
}
"""Presets; RAM and drives are those of a usual host, and can be replaced."""


def find_machine(name: str) -> Machine:
    """Return a preset.

    Raises:
        ConfigError: There is none of that name.
    """
    key = name.lower().replace("_", "-").replace(" ", "")
    aliases = {key, key.removeprefix("nvidia-"), key.replace("-", ""), f"rtx{key}"}
    aliases |= {"dgx-spark"} & ({"dgx-spark"} if key in ("spark", "dgxspark") else set())
    found = next((MACHINES[alias] for alias in sorted(aliases) if alias in MACHINES), None)
    if found is None:
        near = difflib.get_close_matches(key.replace("-", ""), MACHINES, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"machine {name!r} is not known.{meant} Choose one of {', '.join(MACHINES)}; 'here' "
            "for this machine; the path of a profile (megatrain bench machine writes one); or give "
            "numbers: machine=custom with device_gb, tflops, ram_gb, link_gb_per_s, drives."
        )
    return found


def parse_drives(text: str) -> tuple[Drive, ...]:
    """Read drives such as "4xgen5", "gen4" or "gen5,gen4".

    Raises:
        ConfigError: A name is not known, or a number is not one.
    """
    drives: list[Drive] = []
    for part in text.lower().split(","):
        count, times, name = part.strip().rpartition("x")
        if times and not count.isdigit():
            count, name = "", part.strip()
        number = int(count) if count else 1
        if name not in DRIVES or not 1 <= number <= 64:
            raise ConfigError(
                f"drives={text!r}: {part.strip()!r} is no drive. Give a kind, or a number and a "
                f"kind as in 4xgen5; kinds are {', '.join(DRIVES)}."
            )
        drives += [DRIVES[name]] * number
    return tuple(drives)


def changed(machine: Machine, **changes: Any) -> Machine:
    """Return the machine with what was given in place of its own; None stands for its own.

    Args:
        machine: The machine.
        **changes: Of `Machine`, or of its device as `device_...`, or of all drives as `drive_...`.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    of_device = {n.removeprefix("device_"): v for n, v in given.items() if n.startswith("device_")}
    of_drives = {n.removeprefix("drive_"): v for n, v in given.items() if n.startswith("drive_")}
    own = {n: v for n, v in given.items() if not n.startswith(("device_", "drive_"))}
    for name, value in given.items():
        numbers = value.values() if isinstance(value, dict) else (value,)
        for number in numbers:
            if not isinstance(number, (int, float)):
                continue
            if not number > 0:
                raise ConfigError(
                    f"{name} is {number:g}: it must be above 0. Give a positive number."
                )
            if not number < _MOST:
                raise ConfigError(
                    f"{name} is {number:g}: no machine has that. Give a number below {_MOST:g}."
                )
    if "memory_bytes" in of_device and machine.on_host:
        raise ConfigError(
            f"{machine.name} computes in the memory of the host: it has no device memory to set. "
            "Set the RAM, or choose a machine with an accelerator."
        )
    drives = own.pop("drives", machine.drives)
    return replace(
        machine,
        device=replace(machine.device, **of_device),
        drives=tuple(replace(drive, **of_drives) for drive in drives),
        **own,
    )
