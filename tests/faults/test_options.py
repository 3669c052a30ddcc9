"""Every option with values that make no sense, or that this version does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import mt_lightning as mt

NAN, INF = float("nan"), float("inf")

WRONG: list[tuple[str, Any]] = [
    *[
        (name, value)
        for name in ("max_ram_gb", "max_vram_gb", "max_disk_gb")
        for value in (0, -1, -0.5, NAN, INF, "4", "all", True, [1.0], {})
    ],
    *[("on_existing", value) for value in ("Resume", "delete", None, True, 1, "")],
    *[("durability", value) for value in ("always", "never", None, 1)],
    *[("nonfinite", value) for value in ("ignore", None, True, "")],
    *[("layer_major", value) for value in ("yes", 0, 1, None)],
    *[("recompute", value) for value in ("no", 0, 1, None)],
    *[("optimizer_compression", value) for value in ("int8", "auto", None, 8, 1, "r1")],
    *[("units", value) for value in ([], (), "", [""], 5, [5], nn.Linear, [nn.Linear], {"a": 1})],
    *[("offload_dir", value) for value in ([], (), "", [""], 5, [5], [None], b"pages", True, {})],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_wrong_value_is_refused_at_once(name: str, value: Any) -> None:
    with pytest.raises(mt.ConfigError, match=f"^{name}") as caught:
        mt.MegaTrainStrategy(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) > len(f"{name}={value!r}") + 10, "no way out is named"


def test_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="max_ram"):
        mt.MegaTrainStrategy(max_ram=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options",
    [
        {"max_ram_gb": 1},
        {"max_disk_gb": 0.5},
        {"offload_dir": Path("a")},
        {"offload_dir": ["a", Path("b")]},
        {"offload_dir": ("a",)},
        {"units": "Block"},
        {"units": ["Block", "Head"]},
        {"layer_major": False, "recompute": True, "durability": "step"},
        {"durability": "checkpoint"},
        {"recompute": False},
        {"optimizer_compression": False},
        {"optimizer_compression": True},
        {"optimizer_compression": "lossless"},
        {"optimizer_compression": "R1"},
    ],
    ids=str,
)
def test_good_value_is_taken(options: dict[str, Any]) -> None:
    mt.MegaTrainStrategy(**options)
    assert not Path("a").exists(), "nothing may be made before a run"


@pytest.mark.parametrize("format", ["safetensors", None])
def test_checkpoint_format(format: Any) -> None:
    with pytest.raises(mt.ConfigError, match="^format"):
        mt.PagedCheckpointIO(format=format)
