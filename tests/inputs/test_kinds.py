"""Whatever a unit receives: gradients are those of plain PyTorch, and memory is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .rig import INPUT_BYTES, ROWS, WIDTH, assert_equal, data, grads, rig, stack

NUM_LAYERS = 6

Run = Callable[[nn.ModuleList], Tensor]


class Layer(nn.Module):
    """Takes a tensor beside the first one, and more by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None, **more: Any) -> Tensor:
        if "inner" in more:
            x = checkpoint(self.inner, x, use_reentrant=False)
        y = self.linear(x)
        if other is not None:
            y = y * other
        if "mask" in more:
            y = y.masked_fill(more["mask"], 0.5)
        if "pair" in more:
            y = y * more["pair"][0] + more["pair"][1]
        if "index" in more:
            y = y + y[more["index"]]
        return functional.gelu(y)

    def inner(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


def chain(layers: nn.ModuleList, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


def plain(layers: nn.ModuleList) -> Tensor:
    return chain(layers, data()).square().mean()


def by_name(layers: nn.ModuleList) -> Tensor:
    x = data()
    for layer in layers:
        x = layer(x=x)
    return x.square().mean()


def shared_mask_and_pair(layers: nn.ModuleList) -> Tensor:
    mask, index = data() > 0.5, torch.arange(ROWS).flip(0)
    pair = (data().cos(), data().sin())
    return chain(layers, data(), mask=mask, pair=pair, index=index).square().mean()


def same_twice(layers: nn.ModuleList) -> Tensor:
    x = data()
    for layer in layers:
        x = layer(x, x)
    return x.square().mean()


def aliased(layers: nn.ModuleList) -> Tensor:
    x = data()
    for layer in layers:
        x = layer(x, x.view(ROWS, WIDTH))
    return x.square().mean()


def strided(layers: nn.ModuleList) -> Tensor:
    x = data()
    for layer in layers:
        x = layer(x.t().contiguous().t())
    return x.square().mean()


def views(layers: nn.ModuleList) -> Tensor:
    x = data()
    for layer in layers:
        x = torch.cat([x, x])[ROWS // 2 : ROWS // 2 + ROWS]
        x = layer(x)
    return x.square().mean()


def used_outside(layers: nn.ModuleList) -> Tensor:
    x = data()
    for layer in layers:
        x = layer(x) * x  # autograd saves x for itself
    return x.square().mean()


def all_hidden_states(layers: nn.ModuleList) -> Tensor:
    x, hidden = data(), []
    for layer in layers:
        x = layer(x)
        hidden.append(x)
    return torch.stack(hidden).square().mean()


def low_precision(layers: nn.ModuleList) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return chain(layers, data()).float().square().mean()


def leaf(layers: nn.ModuleList) -> Tensor:
    x = data().requires_grad_()
    loss = chain(layers, x).square().mean()
    x.register_hook(lambda grad: None)
    return loss


def empty_and_small(layers: nn.ModuleList) -> Tensor:
    return chain(layers, data(), torch.ones(1), extra=torch.empty(0, 3)).square().mean()


def sparse(layers: nn.ModuleList) -> Tensor:
    return chain(layers, data(), extra=torch.eye(ROWS).to_sparse()).square().mean()


def subclass(layers: nn.ModuleList) -> Tensor:
    class Marked(Tensor):
        pass

    return chain(layers, data(), extra=data().as_subclass(Marked)).square().mean()


def weight_of_another(layers: nn.ModuleList) -> Tensor:
    extra = nn.Parameter(data(), requires_grad=False)
    return chain(layers, data(), extra, view=extra.t()).square().mean()


def checkpoint_around_each(layers: nn.ModuleList) -> Tensor:
    x = data()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x.square().mean()


def checkpoint_around_several(layers: nn.ModuleList) -> Tensor:
    x = data()
    for start in range(0, len(layers), 2):
        x = checkpoint(chain, layers[start : start + 2], x, use_reentrant=False)
    return x.square().mean()


def checkpoint_inside(layers: nn.ModuleList) -> Tensor:
    return chain(layers, data(), inner=True).square().mean()


def saved_on_cpu(layers: nn.ModuleList) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return chain(layers, data()).square().mean()


KINDS: dict[Run, int] = {
    # How many inputs at least must go to disk where there is no room.
    plain: NUM_LAYERS - 2,
    by_name: NUM_LAYERS - 2,
    shared_mask_and_pair: NUM_LAYERS - 2,
    same_twice: NUM_LAYERS - 2,
    aliased: 0,
    strided: NUM_LAYERS - 2,
    views: 0,
    used_outside: 0,
    all_hidden_states: 0,
    low_precision: NUM_LAYERS - 2,
    leaf: NUM_LAYERS - 2,
    empty_and_small: NUM_LAYERS - 2,
    sparse: NUM_LAYERS - 2,
    subclass: NUM_LAYERS - 2,
    weight_of_another: NUM_LAYERS - 2,
    checkpoint_around_each: 0,
    checkpoint_around_several: 0,
    checkpoint_inside: NUM_LAYERS - 2,
    saved_on_cpu: 0,
}


LIMITS = [0, pytest.param(3 * INPUT_BYTES, marks=pytest.mark.slow), 1 << 30]


@pytest.mark.parametrize("limit_bytes", LIMITS)
@pytest.mark.parametrize("run", KINDS, ids=lambda run: run.__name__)
def test_gradients_are_those_of_plain_pytorch(run: Run, limit_bytes: int) -> None:
    layers = stack(NUM_LAYERS, Layer)
    run(layers).backward()
    expected = grads(layers)
    layers = stack(NUM_LAYERS, Layer)
    with rig(layers, limit_bytes) as made:
        for _ in range(2):
            loss = run(layers)
            loss.backward()
            assert_equal(grads(layers), expected)
            del loss
            made.assert_nothing_is_kept()
        made.tier.count()
        if limit_bytes == 1 << 30:
            assert made.stats.inputs_spilled_bytes == 0
        elif not limit_bytes:
            size = 2 if run is low_precision else 4
            assert made.stats.inputs_spilled_bytes >= 2 * KINDS[run] * ROWS * WIDTH * size
            assert made.stats.inputs_read_bytes == made.stats.inputs_spilled_bytes
        assert made.budget.peak_bytes <= made.budget.limit_bytes
