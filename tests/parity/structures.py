"""Changes to a network that a paging engine could trip over: odd sizes, strides, buffers, branches.

Each works on any network of the zoo, by replacing linear maps inside the layers or whole layers in
the list. The parameters stay those of ordinary modules: nothing here knows of paging.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from . import zoo


class OddSizes(nn.Module):
    """A linear map with more parameters, of sizes 0, 1 and 7."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))
        self.one = nn.Parameter(torch.full((), 0.5))
        self.inner = inner
        self.odd = nn.Parameter(torch.linspace(-1.0, 1.0, 7))

    def forward(self, hidden: Tensor) -> Tensor:
        shift = self.odd.sin().sum() * 0.01 + self.empty.sum()
        return self.inner(hidden) * (self.one + 0.5) + shift


class CallCounter(nn.Module):
    """A linear map that counts its calls in an integer buffer, which the result depends on."""

    calls: Tensor
    table: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.arange(5, dtype=torch.int32))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(hidden) * (1.0 + 0.01 * self.table[self.calls % 5])


class CheckpointedLinear(nn.Module):
    """A linear map whose user recomputes it in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.inner, hidden, use_reentrant=False)


class CheckpointedLayer(nn.Module):
    """A layer whose user recomputes it in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, hidden, *args, use_reentrant=False, **kwargs)


class ShiftedLayer(nn.Module):
    """A layer that adds a parameter last: its gradient needs nothing that the layer has saved."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.shift = nn.Parameter(torch.zeros(1))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self.layer(hidden, *args, **kwargs)
        if isinstance(result, tuple):
            return (result[0] + self.shift, *result[1:])
        return result + self.shift


class Gate(nn.Module):
    """A layer that can be left out: closed, it returns what it received."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.open = True

    def __getattr__(self, name: str) -> Any:
        # Models read attributes of their layers, such as `attention_type`.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.open:
            return self.layer(hidden, *args, **kwargs)
        if len(args) >= 5:  # a T5 block also hands on the two position biases it received
            return hidden, args[1], args[4]
        return hidden


def with_odd_sizes(name: str, network: nn.Module) -> None:
    """Give each layer parameters of sizes 0, 1 and 7."""
    for layer in zoo.layers_of(name, network):
        _wrap_first_linear(layer, OddSizes)


def with_int_buffer(name: str, network: nn.Module) -> None:
    """Give each layer integer buffers, one of them moved by every forward."""
    for layer in zoo.layers_of(name, network):
        _wrap_first_linear(layer, CallCounter)


def with_non_contiguous(name: str, network: nn.Module) -> None:
    """Lay out the matrices of each layer by columns, and one bias with a stride of two."""
    for layer in zoo.layers_of(name, network):
        for module in layer.modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 2:
                    columns = parameter.detach().t().contiguous().t()
                    setattr(module, key, nn.Parameter(columns))
                elif key == "bias" and isinstance(module, nn.LayerNorm):
                    spread = torch.zeros(2 * parameter.numel())[::2]
                    setattr(module, key, nn.Parameter(spread.copy_(parameter.detach())))


def with_block_called_twice(name: str, network: nn.Module) -> None:
    """Run the first layers of the list twice, the second time after the last layer."""
    layers = zoo.layers_of(name, network)
    num_layers = len(layers)
    # A T5 computes its position biases in the first block: call another one twice.
    layers.append(layers[1 if name == "t5" else 0])
    config = getattr(network, "config", None)
    for key in ("num_hidden_layers", "n_layer"):
        if getattr(config, key, None) == num_layers:
            setattr(config, key, num_layers + 1)


def with_checkpoints(name: str, network: nn.Module) -> None:
    """Let user code checkpoint a part of each layer, and the whole last layer."""
    layers = zoo.layers_of(name, network)
    for layer in layers:
        _wrap_first_linear(layer, CheckpointedLinear)
    layers[len(layers) - 1] = CheckpointedLayer(layers[len(layers) - 1])


def with_shift(name: str, network: nn.Module) -> None:
    """Let every layer add a parameter last."""
    layers = zoo.layers_of(name, network)
    for index, layer in enumerate(layers):
        layers[index] = ShiftedLayer(layer)


def with_gate(name: str, network: nn.Module) -> None:
    """Let the last layer be left out."""
    layers = zoo.layers_of(name, network)
    layers[len(layers) - 1] = Gate(layers[len(layers) - 1])


def gates_of(network: nn.Module) -> list[Gate]:
    """Return the layers of a network that can be left out."""
    return [module for module in network.modules() if isinstance(module, Gate)]


def _wrap_first_linear(layer: nn.Module, wrapper: type[nn.Module]) -> None:
    name, linear = next(
        (name, module)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    )
    parent_name, _, key = name.rpartition(".")
    setattr(layer.get_submodule(parent_name), key, wrapper(linear))
