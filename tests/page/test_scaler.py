"""A plain loop with torch's GradScaler gives the same bits, scales and skipped steps on pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer

import mt_lightning as mt
from mt_lightning.errors import StepError
from mt_lightning.paging.scaling import ScalerGuard

from ..accelerator.runs import link_of
from .loops import adamw, differences, loss_of, make

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "fused": lambda net: AdamW(net.parameters(), lr=1e-2, fused=True),
    "momentum": lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scaler_of(**settings: Any) -> GradScaler:
    """Begin with a scale that fp16 cannot hold, and grow soon."""
    return GradScaler("cpu", **{"init_scale": 2.0**20, "growth_interval": 2, **settings})


def loop(
    make_optimizer: Callable[[nn.Module], Optimizer],
    clip: str,
    pages: dict[str, Any] | None = None,
) -> tuple[list[Any], int]:
    """Train; return all that must be the same, and how many steps were taken."""
    net, optimizer = make(make_optimizer)
    scaler, seen, num_steps = scaler_of(), [], 0
    handle = mt.page(net, optimizer, **pages) if pages is not None else None
    for step in range(12):
        for half in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(net, (2 * step + half) % 12) / 2
            scaler.scale(loss).backward()
            seen.append(loss.detach())
        if clip == "norm":
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            seen.append(norm.nan_to_num(nan=-1.0))
        elif clip == "value":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(net.parameters(), 1e-3)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        num_steps += scaler.get_scale() >= before
        seen.append(torch.tensor(scaler.get_scale()))
        optimizer.zero_grad()
    if handle is not None:
        assert handle.num_steps == num_steps
        handle.close()
    seen.extend(param.detach().clone() for param in net.parameters())
    for param in net.parameters():
        state = optimizer.state[param]
        seen.extend(torch.as_tensor(state[key]) for key in sorted(state))
    return seen, num_steps


@pytest.mark.parametrize(
    ("kind", "clip", "where"),
    [
        ("adamw", "norm", "ram"),
        ("fused", "none", "ram"),
        ("fused", "value", "smallest"),
        ("momentum", "norm", "smallest"),
        ("adamw", "norm", "device"),
        ("momentum", "none", "home"),
    ],
)
def test_equals_the_loop_without_pages(kind: str, clip: str, where: str) -> None:
    pages: dict[str, Any] = {"_slice_bytes": 4096}
    if where == "smallest":
        with pytest.raises(mt.BudgetError) as caught:
            mt.page(*make(OPTIMIZERS[kind]), max_ram_gb=1e-6, _slice_bytes=4096)
        pages["max_ram_gb"] = caught.value.smallest_gb
    elif where in ("device", "home"):
        pages.update(_link=link_of("accelerator", 1), max_vram_gb=0.1)
        pages["durability"] = "step" if where == "device" else "auto"
    expected, num_steps = loop(OPTIMIZERS[kind], clip)
    assert 2 < num_steps < 12, "some are skipped, some are not"
    actual, _ = loop(OPTIMIZERS[kind], clip, pages)
    assert differences(expected, actual) == []


def test_a_scale_that_is_no_power_of_two_is_refused_and_training_goes_on() -> None:
    net, optimizer = make()
    with mt.page(net, optimizer) as paged:
        scaler = scaler_of(init_scale=3.0)
        scaler.scale(loss_of(net)).backward()
        with pytest.raises(StepError, match="the GradScaler's scale is 3"):
            scaler.step(optimizer)
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
        assert paged.num_steps == 1


def test_a_scaler_without_gradients_says_what_it_says_without_pages() -> None:
    said = []
    for pages in (False, True):
        net, optimizer = make()
        handle = mt.page(net, optimizer) if pages else None
        scaler = scaler_of()
        scaler.scale(torch.ones(1))
        with pytest.raises(AssertionError) as caught:
            scaler.step(optimizer)
        said.append(str(caught.value))
        if handle is not None:
            handle.close()
    assert said[0] == said[1] != ""


def test_scalers_of_other_models_are_left_alone_and_nothing_stays_behind() -> None:
    method = GradScaler._unscale_grads_
    net, optimizer = make()
    other, its = make()
    with mt.page(net, optimizer):
        assert GradScaler._unscale_grads_ is not method
        scaler = scaler_of(init_scale=3.0)
        scaler.scale(loss_of(other)).backward()
        scaler.step(its)
        assert scaler.get_scale() == 3.0
    assert GradScaler._unscale_grads_ is method
    assert "_step_supports_amp_scaling" not in vars(optimizer)


def test_a_guard_that_forgets_the_scale_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = loop(adamw, "none")
    answer = ScalerGuard.answer

    def wrong(self: ScalerGuard, optimizer: Any, inv_scale: Any, found_inf: Any) -> Any:
        return answer(self, optimizer, torch.ones_like(inv_scale), found_inf)

    monkeypatch.setattr(ScalerGuard, "answer", wrong)
    assert differences(expected, loop(adamw, "none", {})[0])
