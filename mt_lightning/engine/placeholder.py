"""What a parameter holds while its bytes are elsewhere."""

from __future__ import annotations

import torch


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one NaN expanded to `shape`.

    Shape, dtype and device stay true and four bytes are held; computing with it gives NaN, not a
    silently wrong number, and writing to it raises.
    """
    kinds = dtype.is_floating_point or dtype.is_complex
    value = float("nan") if kinds else torch.iinfo(dtype).min if dtype != torch.bool else False
    return torch.full((1,) * len(shape), value, dtype=dtype, device=device).expand(shape)
