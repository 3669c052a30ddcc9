"""Paged training on a real device: bits, budgets, overlap, and what is left after an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning.optim.masters import join, split

from .reference import (
    BATCH,
    NUM_STEPS,
    Halves,
    Net,
    assert_same,
    data,
    deterministic,
    fit,
    train_masters,
    train_reference,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA or ROCm"),
]

GIB = 1 << 30
SETTINGS: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
CUDA = torch.device("cuda", 0)


class Evaluated(Net):
    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


@pytest.fixture(autouse=True)
def same_bits_each_time(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic():
        yield


def smallest_vram_gb(root: Path) -> float:
    with pytest.raises(mt.BudgetError) as refusal:
        fit(Net(), mt.MegaTrainStrategy(max_vram_gb=1e-6), root, **SETTINGS)
    assert refusal.value.smallest_gb is not None
    return refusal.value.smallest_gb


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0, 100.0])
@pytest.mark.parametrize("recompute", [True, "auto"])
def test_bits_are_those_of_the_reference(
    clip_norm: float | None, factor: float, recompute: Any, tmp_path: Path
) -> None:
    module = Net()
    strategy = mt.MegaTrainStrategy(
        max_vram_gb=factor * smallest_vram_gb(tmp_path), recompute=recompute, durability="step"
    )
    fit(module, strategy, tmp_path, gradient_clip_val=clip_norm, **SETTINGS)
    assert_same(module, train_reference(CUDA, clip_norm=clip_norm))


def test_late_compute_changes_no_bit(tmp_path: Path) -> None:
    expected = train_reference(CUDA)
    for cycles in (10_000, 1_000_000, 20_000_000):
        module = Net()
        module.on_forward = lambda cycles=cycles: torch.cuda._sleep(cycles)
        strategy = mt.MegaTrainStrategy(
            max_vram_gb=1.2 * smallest_vram_gb(tmp_path), durability="step"
        )
        fit(module, strategy, tmp_path, **SETTINGS)
        assert_same(module, expected)


def test_the_budget_holds_from_setup_to_the_end_of_a_test(tmp_path: Path) -> None:
    budget_gb = smallest_vram_gb(tmp_path)
    # What one unit computes beside its weights: a few activations, and their gradients.
    activation_bytes = 20 * BATCH * 4 * Net().layers[0].up.weight.numel()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    module = Evaluated()
    strategy = mt.MegaTrainStrategy(max_vram_gb=budget_gb, recompute=True, durability="step")
    trainer = fit(module, strategy, tmp_path, **SETTINGS)
    rows: Any = DataLoader(data(), BATCH)  # pyright: ignore[reportArgumentType]
    trainer.test(module, rows, verbose=False)
    peak = torch.cuda.max_memory_allocated() - before
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    assert peak <= budget_gb * GIB + activation_bytes
    assert peak < whole, "the whole model was on the device"


def test_copies_run_beside_kernels(tmp_path: Path) -> None:
    module = Net()
    module.on_forward = lambda: torch.cuda._sleep(2_000_000)
    strategy = mt.MegaTrainStrategy(
        max_vram_gb=2.5 * smallest_vram_gb(tmp_path), recompute=True, durability="step"
    )
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        fit(module, strategy, tmp_path, **SETTINGS)
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"HtoD": [], "DtoH": [], "kernel": []}
    for event in profiler.events() or []:
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        kind = next((each for each in ("HtoD", "DtoH") if each in event.name), "kernel")
        spans[kind].append((event.time_range.start, event.time_range.end))
    for kind in ("HtoD", "DtoH"):
        beside = sum(
            any(a < stop and b > start for a, b in spans["kernel"]) for start, stop in spans[kind]
        )
        assert beside > len(spans[kind]) / 4, f"{beside} of {len(spans[kind])} {kind} copies"


def test_running_out_of_memory_leaves_the_pages_at_a_step(tmp_path: Path) -> None:
    class Greedy(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == NUM_STEPS - 2:
                torch.empty(1 << 50, device=self.device)
            return super().training_step(batch, batch_idx)

    module = Greedy()
    strategy = mt.MegaTrainStrategy(max_vram_gb=2 * smallest_vram_gb(tmp_path), durability="step")
    with pytest.raises(torch.OutOfMemoryError):
        fit(module, strategy, tmp_path, **SETTINGS)
    assert_same(module, train_reference(CUDA, num_steps=NUM_STEPS - 2))


@pytest.mark.parametrize("starts_on", ["cpu", "cuda:0"])
def test_a_plain_loop_on_pages_gives_the_same_bits(starts_on: str, tmp_path: Path) -> None:
    module = Net().to(starts_on)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    with mt.page(module, optimizer, offload_dir=tmp_path / "pages", device=CUDA):
        torch.manual_seed(2)
        for rows in data().split(BATCH):
            optimizer.zero_grad()
            module.training_step(rows.to(CUDA), 0).backward()
            optimizer.step()
    assert_same(module, train_reference(CUDA))


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_what_fits_is_trained_as_by_plain_lightning_there(
    optimizer: Any, settings: dict[str, Any], clip_norm: float | None, tmp_path: Path
) -> None:
    plain, module = Net(optimizer, **settings), Net(optimizer, **settings)
    fit(plain, "auto", tmp_path / "plain", gradient_clip_val=clip_norm, **SETTINGS)
    strategy = mt.MegaTrainStrategy()
    fit(module, strategy, tmp_path / "paged", gradient_clip_val=clip_norm, **SETTINGS)
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert strategy.engine.plan.on_device is not None
    assert strategy.engine.plan.on_device.updates
    assert_same(module, plain.cpu())


def test_masters_of_what_fits_are_stepped_there(tmp_path: Path) -> None:
    module, strategy = Halves(), mt.MegaTrainStrategy()
    fit(module, strategy, tmp_path, precision="bf16-true", **SETTINGS)
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert strategy.engine.plan.on_device is not None
    assert strategy.engine.plan.on_device.updates
    assert_same(module, train_masters(CUDA))


def test_halves_of_masters_are_those_of_the_host() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 22,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 0x7FFF8000])
    master = torch.cat([bits, ends, ends - 2**31]).int().view(torch.float32)
    found = []
    for device in ("cpu", CUDA):
        weight = torch.empty(master.shape, dtype=torch.bfloat16, device=device)
        rest = torch.empty(master.shape, dtype=torch.int16, device=device)
        split(master.to(device), weight, rest)
        joined = join(weight, rest, torch.empty(master.shape, device=device))
        found.append([each.cpu() for each in (weight, rest, joined)])
    for host, there in zip(*found, strict=True):
        assert torch.equal(host.view(torch.uint8), there.view(torch.uint8))


def test_a_run_that_fits_goes_on_from_its_commit(tmp_path: Path) -> None:
    module = Net()
    runs: Any = ((3, "error"), (NUM_STEPS, "resume"))
    for num_steps, on_existing in runs:
        module = Net(torch.optim.AdamW, fused=True)
        strategy = mt.MegaTrainStrategy(tmp_path / "pages", on_existing=on_existing)
        fit(module, strategy, tmp_path, max_steps=num_steps, **SETTINGS)
    plain = Net(torch.optim.AdamW, fused=True)
    fit(plain, "auto", tmp_path / "plain", **SETTINGS)
    assert_same(module, plain.cpu())


@pytest.mark.parametrize("factor", [1.5, 3.0])
@pytest.mark.parametrize("layer_major", [True, "auto"])
def test_batches_that_run_unit_by_unit_draw_the_same_masks(
    factor: float, layer_major: Any, tmp_path: Path
) -> None:
    def train(order: Any) -> tuple[Net, mt.MegaTrainStrategy]:
        module = Net()
        strategy = mt.MegaTrainStrategy(
            max_vram_gb=factor * smallest_vram_gb(tmp_path),
            layer_major=order,
            recompute=True,
            durability="step",
        )
        settings = {"accumulate_grad_batches": 2, "max_steps": 4, "max_epochs": 2}
        fit(module, strategy, tmp_path / str(order), **settings, **SETTINGS)
        return module, strategy

    module, strategy = train(layer_major)
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert strategy.engine.plan.order == "layer-major"
    assert_same(module, train(False)[0])


def test_a_step_on_a_stream_of_its_own_waits_for_its_weights(tmp_path: Path) -> None:
    class Aside(Net):
        stream: torch.cuda.Stream | None = None

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.stream = self.stream or torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = super().training_step(batch, batch_idx)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss

    expected = Net()
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": 2, **SETTINGS}
    gb = 1.5 * smallest_vram_gb(tmp_path)
    options: dict[str, Any] = {"max_vram_gb": gb, "durability": "step"}
    usual = mt.MegaTrainStrategy(layer_major=False, **options)
    fit(expected, usual, tmp_path / "usual", **settings)
    module = Aside()
    fit(module, mt.MegaTrainStrategy(layer_major=True, **options), tmp_path / "aside", **settings)
    assert_same(module, expected)


def test_staging_is_page_locked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(Net(), mt.MegaTrainStrategy(), tmp_path, **SETTINGS)
    assert "page-locked" not in caplog.text
