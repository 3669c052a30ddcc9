"""What state a class of torch keeps is found on short dimensions, as on the true ones."""

from __future__ import annotations

import pytest
import torch

from mt_lightning.engine.state_plan import probe_small
from mt_lightning.optim.shadow import check_separable, probe_state

SHAPES = [(5,), (8, 8), (1, 6), (6, 1), (2, 7), (4, 3, 5), (3, 3, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["Adafactor", "AdamW", "Muon", "ASGD", "Rprop"])
def test_a_trial_on_short_dimensions_finds_the_same_state(
    name: str, shape: tuple[int, ...]
) -> None:
    made = getattr(torch.optim, name, None)
    if made is None or (name == "Muon" and len(shape) != 2):
        pytest.skip("it does not step such parameters")
    optimizer = made([torch.nn.Parameter(torch.zeros(shape))])
    small = probe_small(optimizer, 0, shape, torch.float32)
    true = probe_state(optimizer, 0, shape, torch.float32)
    assert small.keys() == true.keys()
    for key, value in true.items():
        if isinstance(value, torch.Tensor):
            assert small[key].shape == value.shape
            assert small[key].dtype == value.dtype


def test_a_trial_takes_no_memory_of_the_parameters_size() -> None:
    optimizer = torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(2, 2))])
    state = probe_small(optimizer, 0, (1 << 40, 1 << 39), torch.float32)
    assert state["row_var"].shape == (1 << 40, 1)
    assert state["col_var"].shape == (1, 1 << 39)


class _MadeEarly(torch.optim.SGD):
    """Has its state from the start, and cannot step without."""

    def __init__(self, params) -> None:
        super().__init__(params, lr=0.1)
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"].add_(param.grad)
            param.sub_(0.1 * self.state[param]["sum"])


def test_state_that_a_class_makes_as_it_is_built_is_found() -> None:
    optimizer = _MadeEarly([torch.nn.Parameter(torch.zeros(6, 2))])
    assert probe_state(optimizer, 0, (4,), torch.float32)["sum"].shape == (4,)
    assert not optimizer.state[optimizer.param_groups[0]["params"][0]]["sum"].any()
    check_separable(optimizer, 0, 2)
