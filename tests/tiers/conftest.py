from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mt_lightning.tiers.arena import Frame


@pytest.fixture
def filled() -> Callable[..., Frame]:
    """Give a function that makes a frame with reproducible random bytes."""

    def make(nbytes: int, seed: int = 0) -> Frame:
        frame = Frame(nbytes)
        frame.memory[:] = np.random.default_rng(seed).bytes(frame.nbytes)
        return frame

    return make
