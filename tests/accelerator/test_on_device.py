"""What a run on a device changes beside pages: buffers, plans, refusals, and loops of one's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

import mt_lightning as mt
from mt_lightning.engine import memory
from mt_lightning.engine.on_device import give_rng, move_buffers, take_rng
from mt_lightning.paging.checks import device_of
from mt_lightning.plugins.device import refuse_devices
from mt_lightning.tiers.device import is_integrated

from ..graphs.nets import Net, assert_same, fit
from .fake import FakeDevice
from .runs import GIB, Scaled, fake_link, link_of, paged, smallest_vram_gb

META = torch.device("meta")


def test_buffers_and_metrics_follow_the_model_and_parameters_stay() -> None:
    root = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    root.add_module("mean", MeanMetric())
    params = {name: (param, param.data_ptr()) for name, param in root.named_parameters()}
    move_buffers(root, META)
    assert all(buffer.is_meta for buffer in root.buffers())
    metric = root.get_submodule("mean")
    assert isinstance(metric, MeanMetric)
    assert metric.device == META
    for name, param in root.named_parameters():
        assert (param, param.data_ptr()) == params[name]


def test_the_host_has_no_random_numbers_of_a_device() -> None:
    state = take_rng(torch.device("cpu"))
    assert state is None
    give_rng(torch.device("cpu"), state)


@pytest.mark.parametrize("kind", ["mps", "meta"])
def test_devices_without_streams_are_refused(kind: str) -> None:
    with pytest.raises(mt.ConfigError, match="cpu, cuda, xpu"):
        refuse_devices([torch.device(kind)])


def test_several_devices_are_refused() -> None:
    with pytest.raises(mt.ConfigError, match="one device, not 2"):
        refuse_devices([torch.device("cuda", 0), torch.device("cuda", 1)])


def test_a_model_computes_where_it_is_unless_asked() -> None:
    cpu = torch.device("cpu")
    assert device_of(nn.Linear(2, 2), None) == cpu
    assert device_of(nn.Linear(2, 2, device="meta"), None) == cpu
    assert device_of(nn.Linear(2, 2), "cuda:1") == torch.device("cuda", 1)


def test_the_start_table_has_rows_of_the_device(tmp_path: Path) -> None:
    gb = 1.5 * smallest_vram_gb(Scaled)
    _, strategy = paged(Scaled, "eager", link_of("accelerator", 0), tmp_path, max_vram_gb=gb)
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    rows = {item: (size, place) for item, size, place in strategy.engine.plan.rows()}
    assert rows["budget max_vram_gb"][0] == int(gb * GIB)
    assert "weights as they are needed" in rows["budget max_vram_gb"][1]
    assert rows["  parameters outside units"][0] == 4096 + 7 * 4


def test_without_a_number_most_of_what_is_free_is_used(tmp_path: Path) -> None:
    class Small(FakeDevice):
        def free_bytes(self) -> int:
            return 10_000_000

    _, strategy = paged(Net, "eager", fake_link(0, Small), tmp_path)
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert strategy.engine.plan.on_device is not None
    assert strategy.engine.plan.on_device.limit_bytes == 7_000_000
    assert strategy.engine.plan.on_device.holds_all


class Integrated(FakeDevice):
    """Has no memory of its own."""

    shared = True


def budgets(root: Path, **options: float) -> tuple[int, int]:
    """Return the budgets of host and device on a machine with one memory."""
    strategy = mt.MegaTrainStrategy(_link=fake_link(0, Integrated), **options)  # pyright: ignore[reportArgumentType]
    fit(Net(), root, strategy)
    assert strategy.engine is not None
    plan = strategy.engine.plan
    assert plan is not None
    assert plan.on_device is not None
    return plan.ram_limit_bytes, plan.on_device.limit_bytes


def test_host_and_device_share_what_is_free_where_they_have_one_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_free_bytes", lambda: GIB)
    assert budgets(tmp_path) == (int(0.8 * GIB), int(0.7 * (GIB - int(0.8 * GIB))))
    assert budgets(tmp_path, max_ram_gb=0.5) == (GIB // 2, int(0.7 * (GIB // 2)))
    assert budgets(tmp_path, max_vram_gb=0.5) == (int(0.8 * (GIB // 2)), GIB // 2)


def test_budgets_above_the_one_memory_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "host_free_bytes", lambda: GIB)
    budgets(tmp_path, max_ram_gb=0.6, max_vram_gb=0.3)
    assert "one memory" not in caplog.text
    budgets(tmp_path, max_ram_gb=0.6, max_vram_gb=0.6)
    assert "max_ram_gb=0.600 and max_vram_gb=0.600 are taken from one memory" in caplog.text


def test_an_integrated_device_is_known_by_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    for integrated in (True, False):
        properties = SimpleNamespace(is_integrated=integrated)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        assert is_integrated(torch.device("cuda", 0)) == integrated
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: SimpleNamespace())
    assert not is_integrated(torch.device("xpu", 0))


def test_staging_is_part_of_the_host_budget(tmp_path: Path) -> None:
    def smallest(link: object) -> float:
        with pytest.raises(mt.BudgetError) as refusal:
            fit(Net(), tmp_path, mt.MegaTrainStrategy(max_ram_gb=1e-5, _link=link))  # type: ignore[arg-type]
        assert refusal.value.smallest_gb is not None
        return refusal.value.smallest_gb

    more = smallest(link_of("accelerator", 0)) - smallest(link_of("delayed", 0))
    assert more * GIB == pytest.approx(fake_link(0).staging_bytes, abs=2000)


@pytest.mark.parametrize("kind", ["accelerator", "delayed"])
def test_a_loop_of_ones_own_trains_the_same_weights(kind: str, tmp_path: Path) -> None:
    def train(link: object = None) -> Scaled:
        model = Scaled()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = None
        if link is not None:
            handle = mt.page(
                model,
                optimizer,
                offload_dir=tmp_path / "pages",
                max_vram_gb=1.5 * smallest_vram_gb(Scaled),
                _link=link,  # type: ignore[arg-type]
            )
        torch.manual_seed(3)
        for _ in range(4):
            optimizer.zero_grad()
            model.loss(torch.randn(8, 64)).backward()
            optimizer.step()
        if handle is not None:
            handle.close()
        return model

    assert_same(train(link_of(kind, 4)), train())
