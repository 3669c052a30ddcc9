"""The options of the kit: one name and one meaning in Python, YAML and on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mt_lightning.errors import ConfigError
from mt_lightning.optim.codec import COMPRESSIONS
from mt_lightning.tiers.patience import DISK_FULL_TIMEOUT_S

OnExisting = Literal["error", "resume", "overwrite"]
Durability = Literal["auto", "step", "checkpoint"]
Nonfinite = Literal["propagate", "skip", "raise"]

_MOST_GIB = 1e9
"""More than any machine has; bytes are counted in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user can set; every error names the field."""

    offload_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """One directory, or a list with one per drive; None: a fresh one under the trainer's root."""

    on_existing: OnExisting = "error"
    """What to do with a directory that holds a committed run: refuse, go on with it, discard it."""

    max_vram_gb: float | None = None
    """Device budget in GiB; on a CPU it says one line and is ignored."""

    max_ram_gb: float | None = None
    """Host budget in GiB; None: 80 % of what cgroup and host leave free."""

    max_disk_gb: float | None = None
    """Disk ceiling in GiB; None: what is free, less a margin."""

    optimizer_compression: bool | str = False
    """How optimizer state is kept. False: as it is. "lossless": every bit, with about 5/6 of the
    bytes read and written. True: 2-8 bits per value, for Adam and AdamW. A format: that one."""

    layer_major: bool | Literal["auto"] = "auto"
    """Run accumulated batches through the model unit by unit, so that weights are read twice per
    step however many they are. "auto": where that saves reads, and the first window, run in both
    orders, shows the same losses and gradients."""

    recompute: bool | Literal["auto"] = "auto"
    """Recompute activations in backward. True: those of every unit. False: of none; that they find
    no room in max_ram_gb is an error. "auto": of those units that find no room."""

    durability: Durability = "auto"
    """When what was trained is made durable. "step": every step. "checkpoint": what fits in RAM
    stays there, and is committed when a checkpoint is saved, every five minutes, and at the end.
    "auto": "checkpoint" where weights, gradients and state all fit in max_ram_gb, else "step"."""

    nonfinite: Nonfinite = "propagate"
    """What a NaN or infinite gradient does."""

    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    """What fp32 gradients are when they wait for the update: "bf16" rounds each as it arrives."""

    units: str | Sequence[str] | None = None
    """Class names that form a unit; None: found by rule."""

    resident: str | Sequence[str] | None = None
    """Names of modules, or the ends of names, whose weights stay in memory for the whole run: what
    code reads outside of their forward. None: no module."""

    disk_full_timeout_s: float = DISK_FULL_TIMEOUT_S
    """How long a run waits for space when its disk is full, in seconds; 0 fails at once."""

    direct_storage: bool | Literal["auto"] = False
    """Read pages by kvikio (extra `gds`). True warns where it cannot be had; "auto" asks for it
    where the run computes on a CUDA device."""

    def __post_init__(self) -> None:
        """Check every field."""
        _choice("on_existing", self.on_existing, ("error", "resume", "overwrite"))
        _choice("durability", self.durability, ("auto", "step", "checkpoint"))
        _choice("nonfinite", self.nonfinite, ("propagate", "skip", "raise"))
        _choice("layer_major", self.layer_major, ("auto", True, False))
        _choice("recompute", self.recompute, ("auto", True, False))
        _choice("gradient_dtype", self.gradient_dtype, ("fp32", "bf16"))
        _choice("direct_storage", self.direct_storage, ("auto", True, False))
        for name in ("max_vram_gb", "max_ram_gb", "max_disk_gb"):
            value: Any = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value <= _MOST_GIB):
                raise ConfigError(
                    f"{name}={value!r}: give a positive number of GiB, up to {_MOST_GIB:g}, or "
                    "None."
                )
        wait: Any = self.disk_full_timeout_s
        if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not wait >= 0:
            raise ConfigError(
                f"disk_full_timeout_s={wait!r}: give seconds, 0 to fail at once, or infinity."
            )
        _choice("optimizer_compression", self.optimizer_compression, COMPRESSIONS)
        if self.offload_dir is not None:
            _names(
                "offload_dir", self.offload_dir, (str, os.PathLike), "a directory, a list of them"
            )
        for name, what in (("units", "a class name"), ("resident", "the name of a module")):
            if (value := getattr(self, name)) is not None:
                names = _names(name, value, (str,), f"{what} in quotes, a list of them")
                object.__setattr__(self, name, names)

    @property
    def storage(self) -> dict[str, Any]:
        """Those of the page files, as `open_machine` takes them."""
        names = ("disk_full_timeout_s", "direct_storage")
        return {name: getattr(self, name) for name in names}

    @property
    def directories(self) -> list[str] | None:
        """The directories as a list, None where none was given."""
        given = self.offload_dir
        if given is None:
            return None
        if isinstance(given, (str, os.PathLike)):
            return [os.fspath(given)]
        return [os.fspath(item) for item in given]


def _names(name: str, value: Any, kinds: tuple[type, ...], what: str) -> tuple[Any, ...]:
    items = (value,) if isinstance(value, kinds) else value
    good = isinstance(items, Sequence) and not isinstance(items, (str, bytes))
    if not good or not items or not all(isinstance(i, kinds) and str(i) for i in items):
        raise ConfigError(f"{name}={value!r}: give {what}, or None.")
    return tuple(items)


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is item or value == item and type(value) is type(item) for item in allowed):
        choices = ", ".join(repr(item) for item in allowed)
        raise ConfigError(f"{name}={value!r}: choose one of {choices}.")
