"""What state a class of torch keeps is found on short dimensions, as on the true ones."""

from __future__ import annotations

import pytest
import torch

from mt_lightning.engine.state_plan import probe_small
from mt_lightning.optim.shadow import probe_state

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
