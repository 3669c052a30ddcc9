"""Failures that last are tried again without long pauses."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_lightning.tiers.patience.RETRY_WAITS_S", (0.001, 0.002, 0.004))
