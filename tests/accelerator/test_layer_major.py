"""Batches that run unit by unit on a device: the bits of the usual order, and few bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning.engine import executor
from mt_lightning.engine.inputs.ram_mover import RamMover
from mt_lightning.engine.window import draws
from mt_lightning.engine.window.draws import NOTHING, advance, count_draws, same_generators
from mt_lightning.engine.window.sums import WindowSums
from mt_lightning.tiers.link import Link

from ..graphs.nets import NUM_LAYERS, WIDTH, Block, Dropped, Lengths, Net, Shared, assert_same
from .runs import GIB, Scaled, link_of, smallest_vram_gb
from .test_bytes import GRAD_BYTES, PAGE_BYTES, count_uploads

ROWS = 16
"""So that an input has 4 KiB, and can leave the device."""
INPUT_BYTES = ROWS * WIDTH * 4


def train(
    module: Net,
    root: Path,
    strategy: Any = "auto",
    *,
    num_micros: int = 4,
    num_steps: int = 3,
    num_rows: int = ROWS,
) -> Net:
    """Train for some steps of so many batches each."""
    torch.manual_seed(1)
    rows: Any = torch.randn(num_rows * num_micros * num_steps, WIDTH)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=num_steps,
        accumulate_grad_batches=num_micros,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(module, DataLoader(rows, batch_size=num_rows))
    return module


def paged(
    module: Net, root: Path, link: Link, factor: float, **settings: Any
) -> mt.MegaTrainStrategy:
    """Train on a double of a device, with so many times its smallest budget."""
    options = {"recompute": True, "layer_major": True, **settings.pop("options", {})}
    strategy = mt.MegaTrainStrategy(
        _link=link,
        max_ram_gb=0.5,
        max_vram_gb=factor * smallest_vram_gb(type(module)),
        durability="step",
        **options,
    )
    train(module, root, strategy, **settings)
    return strategy


@pytest.mark.parametrize(
    ("make", "factor"),
    [(Net, 1.4), (Dropped, 1.8), (Scaled, 1.4), (Scaled, 30.0), (Lengths, 1.4), (Lengths, 1.8)],
)
def test_batches_that_run_unit_by_unit_train_the_same_weights(
    make: type[Net], factor: float, tmp_path: Path
) -> None:
    module = make()
    kind = "delayed" if factor == 1.8 else "accelerator"
    strategy = paged(module, tmp_path / "paged", link_of(kind, 7), factor)
    assert_same(module, train(make(), tmp_path / "plain"))
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert strategy.engine.plan.order == "layer-major"


def test_by_itself_the_first_window_is_compared_and_the_order_taken(tmp_path: Path) -> None:
    module = Dropped()
    options = {"layer_major": "auto"}
    strategy = paged(module, tmp_path / "paged", link_of("accelerator", 5), 1.6, options=options)
    assert_same(module, train(Dropped(), tmp_path / "plain"))
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert "the same, bit for bit" in strategy.engine.plan.order_reason
    assert strategy.engine.plan.order == "layer-major"


def test_gradients_that_are_rounded_are_added_up_in_either_order_alike(tmp_path: Path) -> None:
    nets = {}
    for layer_major in (False, "auto"):
        nets[layer_major] = Net()
        options = {"layer_major": layer_major, "gradient_dtype": "bf16"}
        root = tmp_path / str(layer_major)
        link = link_of("accelerator", 5)
        strategy = paged(nets[layer_major], root, link, 1.6, options=options)
    assert_same(nets["auto"], nets[False])
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert strategy.engine.plan.order == "layer-major"
    assert "the same, bit for bit" in strategy.engine.plan.order_reason


def test_where_all_weights_stay_on_the_device_the_order_stays_too(tmp_path: Path) -> None:
    options = {"layer_major": "auto"}
    strategy = paged(Net(), tmp_path, link_of("accelerator", 5), 30.0, options=options)
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert strategy.engine.plan.order == "usual"


@pytest.mark.parametrize("factor", [2.2, pytest.param(2.6, marks=pytest.mark.slow)])
def test_a_step_brings_the_weights_of_one_batch_however_many_it_has(
    factor: float, tmp_path: Path
) -> None:
    """The first window runs in the usual order, so a step more tells what the others take.

    Beside a sum of gradients there is room for the largest gradient that is added to it.
    """

    def moved(num_micros: int, num_steps: int, num_rows: int) -> tuple[int, int]:
        root = tmp_path / f"{num_micros} {num_steps}"
        settings: dict[str, Any] = {"num_micros": num_micros, "num_steps": num_steps}
        settings |= {"num_rows": num_rows, "options": {"_depth": 0}}
        strategy = paged(Net(), root, link_of("accelerator", 2), factor, **settings)
        assert strategy.engine is not None
        stats = strategy.engine.stats
        return stats.bytes_uploaded, stats.bytes_downloaded

    limit = int(factor * smallest_vram_gb(Net) * GIB) - 4 * WIDTH * 4 * WIDTH
    input_bytes = 2 * INPUT_BYTES
    counted = count_uploads(limit, 3, input_bytes) - count_uploads(limit, 2, input_bytes)
    for num_micros in (2, 16):
        num_rows = 2 * ROWS // num_micros  # the same inputs, in few batches and in many
        (up_2, down_2), (up_3, down_3) = (moved(num_micros, n, num_rows) for n in (2, 3))
        assert up_3 - up_2 == counted * PAGE_BYTES
        assert down_3 - down_2 == NUM_LAYERS * GRAD_BYTES, "gradients leave once"
    usual = moved(4, 1, ROWS)
    assert usual[0] > 1.5 * counted * PAGE_BYTES, "the usual order brings them for each batch"
    assert usual[1] == 4 * NUM_LAYERS * GRAD_BYTES


def test_inputs_go_to_ram_and_come_back(tmp_path: Path) -> None:
    module = Net()
    strategy = paged(module, tmp_path / "paged", link_of("accelerator", 3), 1.45)
    assert_same(module, train(Net(), tmp_path / "plain"))
    assert strategy.engine is not None
    stats = strategy.engine.stats
    assert stats.inputs_offloaded_bytes >= 8 * INPUT_BYTES
    assert stats.inputs_returned_bytes == stats.inputs_offloaded_bytes
    assert stats.vram_peak_bytes <= 1.45 * smallest_vram_gb(Net) * (1 << 30)


@pytest.mark.parametrize("missing", ["wait", "sum"])
def test_what_is_not_waited_for_or_added_is_noticed(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "wait":
        monkeypatch.setattr(RamMover, "end_read", _without_wait)
    else:
        monkeypatch.setattr(WindowSums, "add", _replacing)
    expected = train(Net(), tmp_path / "plain")

    def is_caught(seed: int) -> bool:
        module = Net()
        try:
            paged(module, tmp_path / str(seed), link_of("accelerator", seed), 1.45)
            assert_same(module, expected)
        except Exception:
            return True
        return False

    assert any(is_caught(seed) for seed in range(4))


def _replacing(self: Any, page: Any, param: int, grad: Tensor) -> None:
    self.expect(page)
    self._there[page.index][param] = grad.clone()


def _without_wait(self: Any, item: Any) -> None:
    frame, copy, tensor = item.frame, item.copy, item.ref()
    with torch.inference_mode(False), torch.no_grad():
        tensor.data = copy.taken.shape.on(frame.tensor)
    item.read = item.frame = item.copy = None
    item.away = False


# -- random numbers of a device -------------------------------------------------------------------


class Philox:
    """A generator as those of devices are: a seed, and a count that each kernel adds to."""

    def __init__(self) -> None:
        self.state = philox(11, 0)

    def draw(self, like: Tensor) -> Tensor:
        seed, offset = self.state.view(torch.int64).tolist()
        self.state = philox(seed, offset + 4 * like.numel())
        generator = torch.Generator().manual_seed(seed * 1_000_003 + offset)
        return torch.rand(like.shape, generator=generator)


def philox(seed: int, offset: int) -> Tensor:
    return torch.tensor([seed, offset]).view(torch.uint8)


DEVICE = Philox()


class DroppedThere(Net):
    """Draws its masks on the device."""

    class block(Block):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * (DEVICE.draw(y) > 0.2)


@pytest.fixture
def device_generator(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def give(device: torch.device, state: Tensor | None) -> None:
        assert state is not None
        DEVICE.state = state

    for module in (executor, draws):
        monkeypatch.setattr(module, "take_rng", lambda device: DEVICE.state)
        monkeypatch.setattr(module, "give_rng", give)
    return lambda: setattr(DEVICE, "state", philox(11, 0))


@pytest.mark.parametrize("layer_major", [True, "auto"])
def test_masks_drawn_on_the_device_are_those_of_the_usual_order(
    layer_major: Any, device_generator: Callable[[], None], tmp_path: Path
) -> None:
    module, expected = DroppedThere(), DroppedThere()
    device_generator()
    train(expected, tmp_path / "plain")
    reached = DEVICE.state
    device_generator()
    options = {"layer_major": layer_major}
    strategy = paged(module, tmp_path / "paged", link_of("accelerator", 5), 1.6, options=options)
    assert_same(module, expected)
    assert torch.equal(DEVICE.state, reached), "later draws would differ"
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    assert strategy.engine.plan.order == "layer-major"


def test_masks_of_a_generator_that_is_not_told_apart_are_noticed(
    device_generator: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, expected = DroppedThere(), DroppedThere()
    device_generator()
    train(expected, tmp_path / "plain")
    device_generator()
    monkeypatch.setattr(draws, "give_rng", lambda device, state: None)
    paged(module, tmp_path / "paged", link_of("accelerator", 5), 1.6)
    with pytest.raises(AssertionError):
        assert_same(module, expected)


def test_draws_of_a_device_are_counted_and_skipped() -> None:
    host = torch.get_rng_state()
    before, after = (host, philox(5, 8)), (host, philox(5, 24))
    assert count_draws(before, after) == (0, 16)
    assert same_generators(advance(before, (0, 16)), after)
    assert count_draws(before, (host, philox(6, 24))) is None
    assert count_draws(before, before) == NOTHING
    other = advance(before, None)
    assert other[1] is not None
    assert other[1].dtype == torch.uint8
    assert not torch.equal(other[1], philox(5, 8))


def test_the_host_draws_beside_the_device() -> None:
    torch.manual_seed(0)
    before = (torch.get_rng_state(), philox(5, 8))
    torch.rand(7)
    after = (torch.get_rng_state(), philox(5, 12))
    assert count_draws(before, after) == (7, 4)
    assert same_generators(advance(before, (7, 4)), after)


def test_tied_weights_of_several_units_differ_by_rounding_alone(tmp_path: Path) -> None:
    module = Shared()
    paged(module, tmp_path / "paged", link_of("accelerator", 1), 1.6, num_steps=2)
    expected = train(Shared(), tmp_path / "plain", num_steps=2)
    for actual, plain in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual, plain, rtol=0, atol=2e-5)
