"""Whether gradients are finite is told by a sum of squares first, and never wrongly."""

from __future__ import annotations

import pytest
import torch

from mt_lightning.optim.norm import all_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 7, 4097])
def test_one_value_that_is_not_finite_is_found(dtype: torch.dtype, numel: int) -> None:
    for value in (float("inf"), -float("inf"), float("nan")):
        grad = torch.ones(numel, dtype=dtype)
        grad[numel // 2] = value
        assert not all_finite(grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_whose_squares_overflow_are_finite(dtype: torch.dtype) -> None:
    assert all_finite(torch.full((33, 65), torch.finfo(dtype).max, dtype=dtype).t())
    assert all_finite(torch.empty(0, dtype=dtype))


def test_complex_gradients_are_looked_at() -> None:
    assert all_finite(torch.ones(3, dtype=torch.complex64))
    assert not all_finite(torch.tensor([complex(0.0, float("nan"))]))
