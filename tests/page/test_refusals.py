"""What would not be the plain loop is refused, by name, and changes nothing."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, AdamW, Optimizer

import mt_lightning as mt
from mt_lightning.errors import ConfigError, StepError

from .loops import Net, loss_of, make

Parts = tuple[Net, Optimizer, mt.Paged]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    net, optimizer = make()
    with mt.page(net, optimizer, offload_dir=tmp_path / "pages") as paged:
        yield net, optimizer, paged


def _clip_part(net: Net, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(net.blocks.parameters(), 0.1)


def _clip_twice(net: Net, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def _backward_after_clipping(net: Net, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    loss_of(net).backward()


def _by_hand(net: Net, optimizer: Optimizer) -> None:
    net.head.weight.grad = torch.ones_like(net.head.weight)
    try:
        optimizer.step()
    finally:
        net.head.weight.grad = None


def _penalty(net: Net, optimizer: Optimizer) -> None:
    sum((p.square().sum() for p in net.parameters()), torch.zeros(())).backward()
    optimizer.step()


def _replaced(net: Net, optimizer: Optimizer) -> None:
    kept, net.blocks[0].up = net.blocks[0].up, nn.Linear(16, 32)
    try:
        optimizer.step()
    finally:
        net.blocks[0].up = kept


REFUSED: dict[str, tuple[Callable[[Net, Optimizer], Any], str]] = {
    "clip a part": (_clip_part, "clipped together"),
    "clip twice": (_clip_twice, "clipped twice"),
    "backward after clipping": (_backward_after_clipping, "Clip once"),
    "another norm": (
        lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 1.0, norm_type=1.0),
        "norm_type",
    ),
    "gradients by hand": (_by_hand, "p.grad was set by hand"),
    "a penalty over weights": (_penalty, "weight_decay"),
    "modules replaced": (_replaced, "page it again"),
    "zeros": (lambda _, optimizer: optimizer.zero_grad(set_to_none=False), "set_to_none"),
    "zero a part": (lambda net, _: net.blocks[0].zero_grad(), "of the model"),
    "a copy": (lambda net, _: copy.deepcopy(net), "copy"),
    "another dtype": (lambda net, _: net.half(), "no other device or dtype"),
    "another dtype of a part": (lambda net, _: net.blocks[0].double(), "no other device or dtype"),
    "a group more": (
        lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "add_param_group",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_and_training_goes_on(parts: Parts, what: str) -> None:
    net, optimizer, paged = parts
    before = {name: value.clone() for name, value in net.state_dict().items()}
    loss_of(net).backward()
    act, words = REFUSED[what]
    with pytest.raises(StepError, match=words):
        act(net, optimizer)
    assert paged.num_steps == 0
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    net.zero_grad()
    loss_of(net).backward()
    optimizer.step()
    assert paged.num_steps == 1
    assert all(bool(value.isfinite().all()) for value in net.state_dict().values())


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (lambda: mt.page(*make(lambda net: LBFGS(net.parameters()))), "LBFGS"),
        (lambda: mt.page(nn.DataParallel(Net())), "the module inside"),
        (lambda: mt.page(Net(), layer_major=True), "your loop"),
        (lambda: mt.page(AdamW([nn.Parameter(torch.ones(1))])), "torch.nn.Module"),  # type: ignore[arg-type]
    ],
)
def test_is_refused_at_the_start(
    start: Callable[[], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        start()
    assert list(tmp_path.iterdir()) == []


def test_gradients_that_no_page_holds_are_refused() -> None:
    net, optimizer = make()
    loss_of(net).backward()
    with pytest.raises(ConfigError, match="zero_grad"):
        mt.page(net, optimizer)


def test_a_model_is_on_pages_once(parts: Parts) -> None:
    with pytest.raises(ConfigError, match="on pages already"):
        mt.page(parts[0], parts[1])


def test_stays_where_it_is_asked_to(parts: Parts) -> None:
    net, optimizer, _ = parts
    assert net.to("cpu").float() is net
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(net)).backward()
    scaler.step(optimizer)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net, optimizer = make()
    kept = [set(vars(module)) for module in net.modules()], set(vars(optimizer))
    (inside,) = nn.utils.clip_grad_norm_.__closure__
    function = inside.cell_contents
    paged = mt.page(net, optimizer)
    assert inside.cell_contents is not function
    paged.close()
    paged.close()
    assert inside.cell_contents is function
    assert ([set(vars(module)) for module in net.modules()], set(vars(optimizer))) == kept
    assert list(tmp_path.iterdir()) == []
    loss_of(net.double()).backward()
    with pytest.raises(StepError, match="closed"):
        paged.commit()
    gone = weakref.ref(net)
    del net, optimizer, paged
    gc.collect()
    assert gone() is None


def test_runs_what_is_not_trained(tmp_path: Path) -> None:
    net, _ = make()
    expected = loss_of(net).detach()
    with mt.page(net, offload_dir=tmp_path), torch.inference_mode():
        assert torch.equal(loss_of(net), expected)
