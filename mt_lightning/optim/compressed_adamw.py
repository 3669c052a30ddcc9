"""AdamW and Adam whose state takes 2-8 bits per value: for any training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from typing_extensions import override

from mt_lightning.errors import ConfigError
from mt_lightning.optim import lossless
from mt_lightning.optim.packed.formats import choose
from mt_lightning.optim.packed.place import Place
from mt_lightning.optim.packed.random import key
from mt_lightning.optim.packed.reference import fused_step
from mt_lightning.optim.packed.scalars import AdamScalars
from mt_lightning.optim.packed.update import adamw_step
from mt_lightning.pages.layout import strided_span

LOSSLESS = "lossless"
"""The format that keeps every bit, at about 27 bits per value."""


class CompressedAdamW(torch.optim.Optimizer):
    """AdamW, or Adam with `decoupled_weight_decay=False`, on compressed state.

    Parameters and gradients are float32 on the CPU. With `format="fp32"` or `"lossless"` it takes
    the very steps of `torch.optim.AdamW(fused=True)`; the packed formats are lossy against it, and
    exact as storage: what a checkpoint holds is what training goes on with.

    The state of a parameter is `step` (float32, 0-D), `shape` and `stride` (tuples: the memory
    order of the parameter, in which state is kept) and either `lossless`, the stream, or `packed`
    with the name of its `format`: the one of the group, or what "dynamic" chose. Both are uint8,
    1-D.

    Random bits (C5 draws none) depend on the seed, the step and the position of the parameter over
    all groups, so a resumed run goes on as an uninterrupted one; the order of the groups must not
    change.

    Args:
        params: Parameters or param groups; a group may have its own `format`.
        lr: Learning rate, a number or a 0-D tensor.
        betas: Decay of the two moments.
        eps: Added to the root.
        weight_decay: Weight decay.
        format: "dynamic" (fp32 for 1-D and tiny tensors, m8v8 for small ones, C5 or R1 elsewhere),
            "fp32", "m8v8", "C5", "m4v4", "R2", "R1", "R0" or "lossless".
        decoupled_weight_decay: Whether weights decay by themselves (AdamW), not through gradients.
        maximize: Whether to climb.
        seed: Seed of stochastic rounding.

    Raises:
        ConfigError: A setting is out of range, or there is no such format.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        format: str = "dynamic",
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "format": format,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "seed": seed,
        }
        _check(defaults)
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its settings are checked like those of the constructor."""
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            ConfigError: A parameter or gradient is not dense, float32 and on the CPU.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        position = -1
        for group in self.param_groups:
            for param in group["params"]:
                position += 1
                grad = param.grad
                if grad is not None:
                    _check_tensor("parameter", param, position)
                    _check_tensor("gradient", grad, position)
                    self._step_one(group, param, grad, position)
        return loss

    def _step_one(
        self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, position: int
    ) -> None:
        state = self.state[param]
        if not state:
            state.update(_fresh_state(group["format"], param))
        state["step"] += 1
        count = int(state["step"])
        scalars = AdamScalars.of(group, count, group["decoupled_weight_decay"])
        flat, slope = _flat(param, param), _flat(grad, param)
        if group["format"] == LOSSLESS:
            state[LOSSLESS] = _lossless_step(flat, slope, state[LOSSLESS], scalars)
        else:
            place = Place.of(state["shape"], state["stride"])
            format = choose(group["format"], place)
            salt, width = key(group["seed"], count, position), place.width
            adamw_step(format, flat, slope, state["packed"], scalars, key=salt, width=width)
        if not _is_dense(param):
            param.copy_(flat.view(param.shape))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Args:
            state_dict: State of a `CompressedAdamW` with the same formats.

        Raises:
            ConfigError: The state has another form. It is never converted silently.
        """
        # torch casts every tensor of the state to the dtype of its parameter, bytes too. So they
        # travel through it in a box, packed behind the user's own hooks and opened before them.
        before = self.register_load_state_dict_pre_hook(_box)
        after = self.register_load_state_dict_post_hook(_unbox, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()


class _Box:
    """Holds the state of one parameter, which torch hands on as it is."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }


def _box(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved_groups = state_dict["param_groups"]
    params: Iterable[tuple[Any, torch.Tensor, str]] = (
        (saved_id, param, group["format"])
        for saved, group in zip(saved_groups, optimizer.param_groups, strict=False)
        for saved_id, param in zip(saved["params"], group["params"], strict=False)
    )
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=False):
        if saved.get("format") != group["format"]:
            found = f"format={saved['format']!r}" if "format" in saved else "no packed state"
            raise ConfigError(
                f"The optimizer state has {found}, and this CompressedAdamW has "
                f"format={group['format']!r}. {_WAY_OUT}"
            )
    states = dict(state_dict["state"])
    for saved_id, param, format in params:
        if saved_id in states:
            _check_state(states[saved_id], param, format)
            states[saved_id] = {"box": _Box(states[saved_id])}
    return {**state_dict, "state": states}


def _unbox(optimizer: torch.optim.Optimizer) -> None:
    for param, state in list(optimizer.state.items()):
        if "box" in state:
            optimizer.state[param] = state["box"].state


_WAY_OUT = (
    "It is never converted silently: convert the checkpoint with `megatrain export IN OUT "
    "--optimizer FORM`, or the state with "
    "mt_lightning.optim.convert.convert_state_dict(state_dict, to=...)."
)


def _check_state(state: dict[str, Any], param: torch.Tensor, format: str) -> None:
    expected = _description(format, param)
    name = LOSSLESS if format == LOSSLESS else "packed"
    missing = [key for key in (*expected, name) if key not in state]
    if missing or "exp_avg" in state:
        raise ConfigError(
            f"The optimizer state of a parameter of shape {tuple(param.shape)} holds "
            f"{', '.join(sorted(state))}, and format={format!r} keeps "
            f"{', '.join(sorted((*expected, name, 'step')))}. {_WAY_OUT}"
        )
    saved = {key: state[key] for key in expected}
    saved |= {key: tuple(saved[key]) for key in ("shape", "stride")}
    if (saved["shape"], saved["stride"]) != (expected["shape"], expected["stride"]):
        raise ConfigError(
            f"The optimizer state is for a parameter of {_words(saved)} and was given to one of "
            f"{_words(expected)}: it belongs to another model, or to another memory format of it."
        )
    if saved != expected:
        raise ConfigError(
            f"The optimizer state of a parameter of shape {tuple(param.shape)} is in format "
            f"{saved['format']!r}, and format={format!r} keeps it in {expected['format']!r}. "
            f"{_WAY_OUT}"
        )
    value = state[name]
    shape = tuple(value.shape) if format == LOSSLESS else (_state_bytes(format, param),)
    if value.dtype != torch.uint8 or tuple(value.shape) != shape:
        raise ConfigError(
            f"The optimizer state of a parameter of shape {tuple(param.shape)} is {value.dtype} "
            f"{tuple(value.shape)}, and format={format!r} keeps torch.uint8 {shape}. {_WAY_OUT}"
        )


def _words(description: dict[str, Any]) -> str:
    return f"shape {description['shape']} and strides {description['stride']}"


def _description(format: str, param: torch.Tensor) -> dict[str, Any]:
    """Return what the state of a parameter says of itself."""
    shape, stride = tuple(param.shape), memory_order(param)
    described: dict[str, Any] = {"shape": shape, "stride": stride}
    if format != LOSSLESS:
        described["format"] = choose(format, Place.of(shape, stride)).name
    return described


def _state_bytes(format: str, param: torch.Tensor) -> int:
    place = Place.of(tuple(param.shape), memory_order(param))
    return choose(format, place).state_bytes(place)


def _fresh_state(format: str, param: torch.Tensor) -> dict[str, Any]:
    state = {"step": torch.zeros((), dtype=torch.float32), **_description(format, param)}
    if format == LOSSLESS:
        state[LOSSLESS] = lossless_state(torch.zeros(2 * param.numel()))
    else:
        state["packed"] = torch.zeros(_state_bytes(format, param), dtype=torch.uint8)
    return state


def lossless_state(moments: torch.Tensor) -> torch.Tensor:
    """Return the stream (uint8) of m and behind it v (float32, 1-D)."""
    raw = moments.view(torch.uint8)
    stream = torch.empty(lossless.max_encoded(raw.numel()), dtype=torch.uint8)
    return stream[: lossless.encode(raw, stream)].clone()


def lossless_moments(stream: torch.Tensor, numel: int) -> torch.Tensor:
    """Return m and behind it v (float32, 1-D) of `numel` elements each."""
    moments = torch.empty(2 * numel)
    lossless.decode(stream, moments.view(torch.uint8))
    return moments


def _lossless_step(
    param: torch.Tensor, grad: torch.Tensor, stream: torch.Tensor, scalars: AdamScalars
) -> torch.Tensor:
    numel = param.numel()
    moments = lossless_moments(stream, numel)
    fused_step(param, grad, moments[:numel], moments[numel:], scalars)
    return lossless_state(moments)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlap, in any order."""
    return strided_span(tuple(tensor.shape), tuple(tensor.stride())) == tensor.numel()


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in whose order state is kept: its own where dense, else contiguous."""
    if _is_dense(tensor):
        return tuple(tensor.stride())
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def _flat(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as 1-D in the memory order of `like`: a view where it has that order."""
    tensor = tensor.detach()
    if not _is_dense(like):
        return tensor.contiguous().view(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride()).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _check(settings: dict[str, Any]) -> None:
    ranges = {
        "lr": float(settings["lr"]) >= 0.0,
        "betas": all(0.0 <= float(beta) < 1.0 for beta in settings["betas"]),
        "eps": settings["eps"] >= 0.0,
        "weight_decay": settings["weight_decay"] >= 0.0,
    }
    for name, fits in ranges.items():
        if not fits:
            raise ConfigError(
                f"CompressedAdamW({name}={settings[name]}) is out of range: betas lie in [0, 1), "
                "lr, eps and weight_decay at or above 0."
            )
    if settings["format"] != LOSSLESS:
        choose(settings["format"], Place(0, 1))


def _check_tensor(what: str, tensor: torch.Tensor, position: int) -> None:
    kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
    if tensor.layout != torch.strided:
        way_out = "Use sparse=False in the embedding."
    elif tensor.dtype != torch.float32:
        way_out = "Keep the parameter in float32 and compute in less under torch.autocast."
    elif tensor.device.type != "cpu":
        way_out = "Keep the parameter on the CPU; strategy='megatrain' does, and computes on GPUs."
    else:
        return
    raise ConfigError(
        f"CompressedAdamW updates dense float32 tensors on the CPU; the {what} at position "
        f"{position} is {kind}. {way_out}"
    )
