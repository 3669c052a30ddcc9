"""Optimizer state from one form to another: torch's own, lossless and packed."""

from __future__ import annotations

from typing import Any

import torch

from mt_lightning.errors import ConfigError
from mt_lightning.optim.compressed_adamw import (
    LOSSLESS,
    lossless_moments,
    lossless_state,
    memory_order,
)
from mt_lightning.optim.packed.formats import DYNAMIC, FORMATS, choose, named
from mt_lightning.optim.packed.place import Place
from mt_lightning.optim.packed.random import key as key_of
from mt_lightning.optim.packed.update import decode, encode

PLAIN = "adamw"
"""The form of torch.optim.AdamW and torch.optim.Adam: step, exp_avg, exp_avg_sq."""

FORMS = (PLAIN, LOSSLESS, DYNAMIC, *FORMATS)
"""What state can be converted to."""

_TORCH_ONLY = {
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


def convert_state(state: dict[str, Any], to: str, *, key: int = 0) -> dict[str, Any]:
    """Convert the state of one parameter.

    Packing fp32 state rounds it. Packed state decodes to what it stands for, and packing that again
    gives the same bytes, but for C5, whose columns are fitted anew (see `encode`).

    Args:
        state: `step` with `exp_avg` and `exp_avg_sq`, or what `CompressedAdamW` documents; empty
            where the parameter was never stepped.
        to: "adamw", "lossless", "dynamic" or a packed format.
        key: `random.key` of seed, step and position; decides how v is rounded.

    Returns:
        The state in the form `to`, which shares no memory with `state`.

    Raises:
        ConfigError: There is no such form, or `state` has none that is known.
    """
    if to not in FORMS:
        raise ConfigError(f"There is no form {to!r} of state. Use one of {', '.join(FORMS)}.")
    if not state:
        return {}
    shape, stride, moments = _read(state)
    numel = moments.numel() // 2
    exp_avg, exp_avg_sq = moments[:numel], moments[numel:]
    result: dict[str, Any] = {"step": torch.as_tensor(state["step"]).float().clone()}
    if to == PLAIN:
        for name, value in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            result[name] = value.clone().as_strided(shape, stride)
        return result
    result |= {"shape": shape, "stride": stride}
    if to == LOSSLESS:
        return result | {LOSSLESS: lossless_state(moments)}
    place = Place.of(shape, stride)
    format = choose(to, place)
    packed = torch.zeros(format.state_bytes(place), dtype=torch.uint8)
    encode(format, exp_avg, exp_avg_sq, packed, key=key, width=place.width)
    return result | {"format": format.name, "packed": packed}


def convert_state_dict(state_dict: dict[str, Any], to: str) -> dict[str, Any]:
    """Convert what `state_dict()` of an AdamW, Adam or CompressedAdamW returned.

    Args:
        state_dict: State of the optimizer.
        to: "adamw" for torch.optim.AdamW and torch.optim.Adam, else the `format` of a
            CompressedAdamW.

    Returns:
        A state dict for the other optimizer; nothing of it shares memory with `state_dict`.

    Raises:
        ConfigError: There is no such form, the state has none that is known, or it has a third
            moment (amsgrad=True).
    """
    groups, states, position = [], {}, 0
    for group in state_dict["param_groups"]:
        groups.append(convert_group(group, to))
        for param in group["params"]:
            state = state_dict["state"].get(param, {})
            if state:
                salt = key_of_state(group, state, position)
                states[param] = convert_state(state, to, key=salt)
            position += 1
    return {**state_dict, "state": states, "param_groups": groups}


def key_of_state(group: dict[str, Any], state: dict[str, Any], position: int) -> int:
    """Return the `key` with which `convert_state` packs a parameter's state.

    Args:
        group: Its param group.
        state: Its state.
        position: Its position over all groups, in order.
    """
    return key_of(group.get("seed", 0), int(state.get("step", 0)), position)


def convert_group(group: dict[str, Any], to: str) -> dict[str, Any]:
    """Return a param group's settings for the optimizer that reads state in the form `to`.

    Args:
        group: A param group of a state dict, in any form.
        to: As in `convert_state_dict`.

    Raises:
        ConfigError: The group has a third moment (amsgrad=True).
    """
    kept = {k: v for k, v in group.items() if k not in _TORCH_ONLY and k not in ("format", "seed")}
    kept.setdefault("decoupled_weight_decay", True)
    kept["params"] = list(group["params"])
    if to == PLAIN:
        own = {k: v for k, v in group.items() if k in _TORCH_ONLY}
        if "format" in group:  # a CompressedAdamW rounds as torch's fused step does
            own["fused"] = True
        return {**_TORCH_ONLY, **own, **kept}
    if group.get("amsgrad"):
        raise ConfigError(
            "State of amsgrad=True has a third moment, which no packed format keeps. Train with "
            "amsgrad=False, or keep the checkpoint as it is."
        )
    return {**kept, "format": to, "seed": group.get("seed", 0)}


def _read(state: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    """Return shape, strides, and m with v behind it in memory order (float32, 1-D)."""
    if "exp_avg" in state and "max_exp_avg_sq" not in state:
        exp_avg = state["exp_avg"]
        shape = tuple(exp_avg.shape)
        stride = memory_order(exp_avg)
        parts = [
            torch.empty_strided(shape, stride)
            .copy_(state[name])
            .as_strided((exp_avg.numel(),), (1,))
            for name in ("exp_avg", "exp_avg_sq")
        ]
        return shape, stride, torch.cat(parts)
    if ({"packed", "format"} <= set(state) or LOSSLESS in state) and "shape" in state:
        shape, stride = tuple(state["shape"]), tuple(state["stride"])
        place = Place.of(shape, stride)
        if LOSSLESS in state:
            return shape, stride, lossless_moments(state[LOSSLESS], place.numel)
        format, packed = named(state["format"]), state["packed"]
        return shape, stride, torch.cat(decode(format, packed, place.numel, width=place.width))
    raise ConfigError(
        f"State with {', '.join(sorted(state))} is neither of AdamW (step, exp_avg, exp_avg_sq) "
        "nor of CompressedAdamW (step, shape, stride, and lossless or packed and format)."
    )
