"""The comparison itself: one bit anywhere must make it fail."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from .outcome import Outcome, assert_equal, differences, not_finite
from .recipe import Recipe
from .runs import forget_plain_outcomes, plain_outcome

RECIPE = Recipe(model="convnet", optimizer="adam_foreach", structure="int_buffer")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return plain_outcome(RECIPE)


def test_plain_lightning_equals_itself(outcome: Outcome) -> None:
    forget_plain_outcomes()
    again = plain_outcome(RECIPE)
    assert again is not outcome
    assert_equal(outcome, again)


@pytest.mark.parametrize(
    "part", ["/parameter/", "/buffer/", "/losses/", "/evaluation", "/checkpoint/", "/rng"]
)
def test_one_bit_is_seen(outcome: Outcome, part: str) -> None:
    names = [name for name, tensor in outcome.tensors.items() if part in name and tensor.numel()]
    assert names
    for name in (names[0], names[-1]):
        sabotaged = copy.deepcopy(outcome)
        _flip_last_bit(sabotaged.tensors[name])
        assert [each.split(":")[0] for each in differences(outcome, sabotaged)] == [name]
        with pytest.raises(AssertionError, match="1 of "):
            assert_equal(outcome, sabotaged)


def test_missing_shapes_strides_and_values_are_seen(outcome: Outcome) -> None:
    sabotaged = copy.deepcopy(outcome)
    missing, reshaped, *_ = [name for name in outcome.tensors if "/parameter/" in name]
    del sabotaged.tensors[missing]
    sabotaged.tensors[reshaped] = sabotaged.tensors[reshaped][None]
    sabotaged.tensors["extra"] = torch.zeros(1)
    sabotaged.values["fit1/global_step"] += 1
    found = "\n".join(differences(outcome, sabotaged))
    assert f"{missing}: missing" in found
    assert f"{reshaped}: " in found
    assert "extra: not in the reference" in found
    assert "fit1/global_step: 6 became 7" in found


def test_what_proves_nothing_is_named() -> None:
    outcome = Outcome()
    outcome.add("fine", torch.ones(2))
    outcome.add("broken", torch.tensor([1.0, float("nan")]))
    assert not_finite(outcome) == ["broken"]


def test_records_are_copies() -> None:
    outcome, tensor = Outcome(), torch.ones(3, 2).t()
    outcome.add("nest", {"list": [tensor, 5], "text": "a"})
    tensor.zero_()
    assert outcome.tensors["nest/list/0"].sum() == 6
    assert outcome.tensors["nest/list/0"].stride() == (1, 2)
    assert outcome.values["nest/list/1"] == 5
    assert outcome.values["nest/text"] == "a"


def _flip_last_bit(tensor: Tensor) -> None:
    """Change the lowest bit of the last element."""
    last = tensor.view(-1)[-1:]
    last.view(torch.uint8)[0] ^= 1
