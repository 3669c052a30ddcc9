"""What a run leaves behind, and the comparison of two runs: bit for bit, with no tolerance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(kw_only=True)
class Outcome:
    """Everything about a run that must not depend on where its bytes lived."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Copies of parameters, buffers, losses, outputs, ... by a path-like name."""
    values: dict[str, Any] = field(default_factory=dict)
    """What is no tensor: counts, hyper-parameters, names."""

    def add(self, name: str, value: Any) -> None:
        """Record a tensor, a number or a nest of them under a name."""
        if isinstance(value, Tensor):
            self.tensors[name] = value.detach().clone(memory_format=torch.preserve_format)
        elif isinstance(value, dict):
            self.values[f"{name}/keys"] = sorted(str(key) for key in value)
            for key, item in value.items():
                self.add(f"{name}/{key}", item)
        elif isinstance(value, list | tuple):
            self.values[f"{name}/len"] = len(value)
            for index, item in enumerate(value):
                self.add(f"{name}/{index}", item)
        else:
            self.values[name] = value

    def add_module(self, name: str, module: nn.Module) -> None:
        """Record parameters, buffers and modes of a module."""
        for key, parameter in module.named_parameters():
            self.add(f"{name}/parameter/{key}", parameter)
            self.add(f"{name}/requires_grad/{key}", parameter.requires_grad)
            self.add(f"{name}/stride/{key}", parameter.stride())
        for key, buffer in module.named_buffers():
            self.add(f"{name}/buffer/{key}", buffer)
        self.add(f"{name}/training", module.training)


def differences(expected: Outcome, actual: Outcome) -> list[str]:
    """Name everything that differs, in the order in which the expected run recorded it."""
    found = _missing(expected.tensors, actual.tensors) + _missing(expected.values, actual.values)
    for name, tensor in expected.tensors.items():
        other = actual.tensors.get(name)
        if other is not None and (difference := _difference(tensor, other)):
            found.append(f"{name}: {difference}")
    for name, value in expected.values.items():
        if name in actual.values and actual.values[name] != value:
            found.append(f"{name}: {value!r} became {actual.values[name]!r}")
    return found


def assert_equal(expected: Outcome, actual: Outcome) -> None:
    """Raise AssertionError with the first differences, if there are any."""
    found = differences(expected, actual)
    if found:
        shown = "\n  ".join(found[:12])
        raise AssertionError(f"{len(found)} differences from plain Lightning, first:\n  {shown}")


def not_finite(outcome: Outcome) -> list[str]:
    """Name the tensors that hold NaN or infinity: equality would prove nothing about them."""
    return [
        name
        for name, tensor in outcome.tensors.items()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    ]


def _missing(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    return [f"{name}: missing" for name in expected if name not in actual] + [
        f"{name}: not in the reference" for name in actual if name not in expected
    ]


def _difference(expected: Tensor, actual: Tensor) -> str | None:
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return (
            f"{expected.dtype} {tuple(expected.shape)} became {actual.dtype} {tuple(actual.shape)}"
        )
    if torch.equal(expected, actual):
        return None
    unequal = expected.ne(actual)
    gap = (expected.double() - actual.double()).abs().max().item()
    return f"{int(unequal.sum())} of {expected.numel()} elements differ, by up to {gap:.3g}"
