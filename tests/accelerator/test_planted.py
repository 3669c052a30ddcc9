"""Bugs put into the engine show as wrong bits, or as an error, on a device that is late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_lightning.engine.gradients import PageGrads
from mt_lightning.engine.leaving import Leaving
from mt_lightning.pager.device_pool import DeviceEntry, DevicePool
from mt_lightning.tiers.accelerator import AcceleratorLink

from ..graphs.nets import Frozen, Net
from .runs import Scaled, check, link_of, smallest_vram_gb

Plant = Callable[[pytest.MonkeyPatch], None]
NUM_SEEDS = 4


def unwaited_weights(patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for the copy of weights."""
    patch.setattr(AcceleratorLink, "wait", lambda self, upload: upload.frame.tensor)


def unwaited_gradients(patch: pytest.MonkeyPatch) -> None:
    """The update does not wait for the copy of gradients."""
    patch.setattr(PageGrads, "ram", property(lambda self: self._ram, PageGrads.ram.fset))
    patch.setattr(Leaving, "expect", lambda self, page: None)


def forgotten_change(patch: pytest.MonkeyPatch) -> None:
    """A page that was updated is not brought again."""
    patch.setattr(DevicePool, "changes", lambda self, page: None)
    patch.setattr(DeviceEntry, "is_of", lambda self, version: True)


def overwritten_source(patch: pytest.MonkeyPatch) -> None:
    """What is on the host is given to another page before it was copied."""
    upload = AcceleratorLink.upload

    def too_late(self: AcceleratorLink, host: torch.Tensor, frame: Any, after: Any = None) -> Any:
        begun = upload(self, host.clone(), frame, after)
        assert begun.host is not None
        begun.host.fill_(0xFF)
        return begun

    patch.setattr(AcceleratorLink, "upload", too_late)


def forgotten_edit(patch: pytest.MonkeyPatch) -> None:
    """What user code wrote to a parameter on the device does not come home."""
    patch.setattr(DevicePool, "_bring_home", lambda self, entry, source: None)


def old_parameter(patch: pytest.MonkeyPatch) -> None:
    """A parameter outside units is not brought after its update."""
    patch.setattr(DevicePool, "changed", lambda self, page: None)


def lost_sum(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a second batch replaces that of the first."""
    download = AcceleratorLink.download

    def replacing(self: Any, tensor: Any, into: Any, *, add: bool = False) -> Any:
        del add
        return download(self, tensor, into)

    patch.setattr(AcceleratorLink, "download", replacing)


@pytest.mark.parametrize(
    ("plant", "make", "mode"),
    [
        (unwaited_weights, Net, "eager"),
        (unwaited_gradients, Net, "clipped"),
        (forgotten_change, Net, "eager"),
        (overwritten_source, Frozen, "eager"),
        (forgotten_edit, Scaled, "eager"),
        (old_parameter, Scaled, "eager"),
        (lost_sum, Net, "accumulated"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planted_bugs_are_noticed(
    plant: Plant, make: type[Net], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = smallest_vram_gb(make)
    options: dict[str, Any] = {"max_vram_gb": 3 * smallest, "nonfinite": "raise"}
    check(make, mode, link_of("accelerator", 0), tmp_path / "right", **options)
    plant(monkeypatch)

    def is_caught(seed: int) -> bool:
        try:
            check(make, mode, link_of("accelerator", seed), tmp_path / str(seed), **options)
        except Exception:
            return True
        return False

    assert any(is_caught(seed) for seed in range(NUM_SEEDS))
