"""torch.compile of units: the bits of compiled plain training, one graph for all layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt
from mt_lightning.engine.units import find_units

NUM_LAYERS = 4

pytestmark = [
    # What torch warns of while it traces, with or without pages.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Net(LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        compile_layers(self.layers, how)
        self.seen: list[Tensor] = []
        if how == "hooked":
            for layer in self.layers:
                layer.register_forward_hook(self._see)

    @torch.compiler.disable
    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output.detach())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def compile_layers(layers: nn.ModuleList, how: str) -> None:
    for index, layer in enumerate(layers):
        if how in ("call", "hooked"):
            layer.compile(backend="aot_eager")
        elif how == "wrapper":
            layers[index] = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
        elif how == "forward":
            layer.forward = torch.compile(layer.forward, backend="aot_eager")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def fit(module: LightningModule, strategy: Any, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    batches = torch.randn(12, 64, generator=torch.Generator().manual_seed(2))
    trainer.fit(module, DataLoader(batches, 2))  # pyright: ignore[reportArgumentType]
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


RECOMPUTED: Any = ({"recompute": True}, {})
KEPT: Any = ({"recompute": False}, {"gradient_clip_val": 0.1})
LAYER_MAJOR: Any = ({"layer_major": True}, {"accumulate_grad_batches": 2})


@pytest.mark.parametrize(
    ("how", "paging", "settings"),
    [
        pytest.param("call", *RECOMPUTED, id="call, recomputed"),
        pytest.param("call", *KEPT, id="call, kept and clipped"),
        pytest.param("call", *LAYER_MAJOR, id="call, layer-major", marks=pytest.mark.slow),
        pytest.param("hooked", *LAYER_MAJOR, id="hooked, layer-major"),
        pytest.param("wrapper", *KEPT, id="wrapper, kept and clipped", marks=pytest.mark.slow),
        pytest.param("wrapper", *LAYER_MAJOR, id="wrapper, layer-major"),
        pytest.param("forward", *RECOMPUTED, id="forward, recomputed"),
    ],
)
def test_compiled_units_give_the_bits_of_compiled_plain_training(
    tmp_path: Path, how: str, paging: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = fit(Net(how), "auto", **settings)
    num_graphs = counters["stats"]["unique_graphs"]
    assert 0 < num_graphs < NUM_LAYERS
    torch._dynamo.reset()
    counters.clear()
    strategy = mt.MegaTrainStrategy(tmp_path, max_ram_gb=0.00075, **paging)
    module = Net(how)
    assert_equal(fit(module, strategy, **settings), expected)
    if how != "hooked":  # hooks are traced in plain training only
        assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]


def test_hooks_of_a_compiled_unit_run_once(tmp_path: Path) -> None:
    plain, paged = Net("hooked"), Net("hooked")
    fit(plain, "auto")
    fit(paged, mt.MegaTrainStrategy(tmp_path, max_ram_gb=0.00075))
    assert len(plain.seen) == len(paged.seen) == 3 * NUM_LAYERS
    assert all(torch.equal(a, b) for a, b in zip(plain.seen, paged.seen, strict=True))


def test_a_compiled_unit_is_compiled_again_after_the_fit(tmp_path: Path) -> None:
    module = Net("call")
    calls = [layer._compiled_call_impl for layer in module.layers]
    fit(module, mt.MegaTrainStrategy(tmp_path, max_ram_gb=0.00075))
    assert [layer._compiled_call_impl for layer in module.layers] == calls
    assert "forward" not in vars(module.layers[0])


class Llama(LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=2,
                use_cache=False,
            )
        )
        compile_layers(self.model.model.layers, how)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = batch.abs().mul(20).long().clamp(max=63)
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("how", ["call", pytest.param("wrapper", marks=pytest.mark.slow)])
def test_compiled_layers_of_transformers_are_units(tmp_path: Path, how: str) -> None:
    expected = fit(Llama(how), "auto")
    torch._dynamo.reset()
    strategy = mt.MegaTrainStrategy(tmp_path, max_ram_gb=0.1, recompute=True)
    module = Llama(how)
    assert_equal(fit(module, strategy), expected)
    names = [unit.name for unit in find_units(module)]
    assert [name for name in names if "layers" in name] == [
        f"model.model.layers.{index}" for index in range(3)
    ]


class _Late(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            compile_layers(module.layers, "call")


def test_what_is_compiled_around_units_runs_them_as_ordinary_code(tmp_path: Path) -> None:
    expected = fit(Net("none"), "auto")
    compiled = Net("none")
    compiled.training_step = torch.compile(compiled.training_step, backend="aot_eager")
    budget = {"max_ram_gb": 0.00075}
    assert_equal(fit(compiled, mt.MegaTrainStrategy(tmp_path / "a", **budget)), expected)
    late = mt.MegaTrainStrategy(tmp_path / "b", **budget)
    assert_equal(fit(Net("none"), late, callbacks=[_Late()]), expected)


def test_a_plain_loop_may_compile_layers(tmp_path: Path) -> None:
    ends = []
    for pages in (None, tmp_path):
        torch._dynamo.reset()
        module = Net("call")
        optimizer = module.configure_optimizers()
        torch.manual_seed(1)
        with contextlib.ExitStack() as stack:
            if pages is not None:
                stack.enter_context(
                    mt.page(module, optimizer, offload_dir=pages, max_ram_gb=0.00075)
                )
            for _ in range(3):
                module.training_step(torch.randn(2, 64), 0).backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append({name: value.clone() for name, value in module.state_dict().items()})
    assert_equal(ends[1], ends[0])


def test_a_model_that_is_compiled_as_a_whole_is_refused(tmp_path: Path) -> None:
    module = torch.compile(Net("none"), backend="aot_eager")
    with pytest.raises(mt.ConfigError, match=r"layer\.compile\(\)"):
        fit(module, mt.MegaTrainStrategy(tmp_path / "a", max_ram_gb=0.1))  # type: ignore[arg-type]
    inner = Llama("none")
    inner.model.compile(backend="aot_eager")
    with pytest.raises(mt.ConfigError, match=r"model was compiled as a whole, and \d units"):
        fit(inner, mt.MegaTrainStrategy(tmp_path / "b", max_ram_gb=0.1))
