"""What `megatrain bench gpu` measures: tokens and arithmetic per second of models of a given size.

[Note: what counts as arithmetic] Six operations for each parameter and token, forward and backward
together, whatever runs again in backward: what the model needs, not what the device does.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich import box
from rich.table import Table
from torch.utils.data import DataLoader

from mt_lightning.errors import ConfigError
from mt_lightning.strategy import MegaTrainStrategy

GIB = 1 << 30
_VOCAB = 32000
_HEAD_WIDTH = 128
_SHAPES = {
    "tiny": (128, 2),
    "1B": (2048, 18),
    "7B": (4096, 32),
    "14B": (5120, 40),
    "30B": (6656, 52),
}
"""Width and number of layers."""
SIZES = tuple(_SHAPES)
_PLAIN_BYTES = 16
"""Of a parameter, its gradient and two values of optimizer state, in fp32."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained.

    Attributes:
        size: A name of `SIZES`.
        batch: Sequences of a step.
        length: Tokens of a sequence.
        steps: Timed steps, after one that is not.
        precision: As of the Trainer.
    """

    size: str
    batch: int
    length: int
    steps: int
    precision: str


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What some steps took.

    Attributes:
        name: "paged" or "plain".
        size: Of the model.
        params: Parameters, in elements.
        batch: Sequences of a step.
        step_s: Seconds of a step, the median.
        tokens_per_s: Tokens of a step by its seconds.
        tflops: 6 x parameters x tokens per second, in 10^12.
        device_peak_gib: Most bytes allocated on the device.
        uploaded_gib: Weights copied to the device in a step.
        error: Why there are no figures, empty where there are.
    """

    name: str
    size: str
    params: int
    batch: int
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    tflops: float = 0.0
    device_peak_gib: float = 0.0
    uploaded_gib: float = 0.0
    error: str = ""


def device_to_measure() -> torch.device:
    """Return the accelerator.

    Raises:
        ConfigError: There is none.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in ("cuda", "xpu"):
        raise ConfigError(
            "bench gpu measures an accelerator, and torch finds none here that it can use (CUDA, "
            "ROCm or XPU). On a CPU, use `megatrain bench step`."
        )
    return found


def _module() -> Any:
    """Return torch's module of the accelerator."""
    return torch.get_device_module(device_to_measure())


def build(size: str, *, device: str) -> Any:
    """Build a Llama of some size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, num_layers = _SHAPES[size]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=int(8 * width / 3 + 255) // 256 * 256,
        num_hidden_layers=num_layers,
        num_attention_heads=width // _HEAD_WIDTH,
        num_key_value_heads=width // _HEAD_WIDTH,
        vocab_size=_VOCAB,
        use_cache=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def num_params(size: str) -> int:
    """Count the parameters of a size."""
    return sum(param.numel() for param in build(size, device="meta").parameters())


class _Model(LightningModule):
    def __init__(self, size: str, *, on_meta: bool) -> None:
        super().__init__()
        self._size, self._on_meta = size, on_meta
        self.network: Any = None

    def configure_model(self) -> None:
        if self.network is None:
            self.network = build(self._size, device="meta" if self._on_meta else "cpu")
            if not self._on_meta:
                self.network.gradient_checkpointing_enable({"use_reentrant": False})

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        del batch_idx
        return self.network(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class _Marks(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []
        self.uploaded: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        torch.accelerator.synchronize()
        self.times.append(time.perf_counter())
        strategy = trainer.strategy
        if isinstance(strategy, MegaTrainStrategy) and strategy.engine is not None:
            self.uploaded.append(strategy.engine.stats.bytes_uploaded)


def measure(work: Work, root: Path, *, paged: bool, **options: Any) -> Speed:
    """Train for a few steps.

    Args:
        work: What.
        root: Where pages lie.
        paged: On pages, or by plain Lightning.
        **options: Of the strategy.
    """
    params, name = num_params(work.size), "paged" if paged else "plain"
    found = {"name": name, "size": work.size, "params": params, "batch": work.batch}
    if not paged and params * _PLAIN_BYTES > _module().mem_get_info()[1]:
        return Speed(**found, error=f"needs {params * _PLAIN_BYTES / GIB:.0f} GiB of device memory")
    _module().reset_peak_memory_stats()
    marks = _Marks()
    try:
        with TemporaryDirectory(dir=root) as directory:
            strategy: Any = MegaTrainStrategy(f"{directory}/pages", **options) if paged else "auto"
            _fit(work, strategy, marks, directory, on_meta=paged)
    except torch.OutOfMemoryError:
        return Speed(**found, error="out of device memory")
    finally:
        gc.collect()
        _module().empty_cache()
    seconds = sorted(b - a for a, b in zip(marks.times, marks.times[1:], strict=False))
    step_s, tokens = seconds[len(seconds) // 2], work.batch * work.length
    moved = marks.uploaded[-1] - marks.uploaded[0] if marks.uploaded else 0
    return Speed(
        **found,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        tflops=6 * params * tokens / step_s / 1e12,
        device_peak_gib=_module().max_memory_allocated() / GIB,
        uploaded_gib=moved / work.steps / GIB,
    )


def _fit(work: Work, strategy: Any, marks: _Marks, root: str, *, on_meta: bool) -> None:
    num_steps = work.steps + 1
    tokens = torch.randint(_VOCAB, (num_steps * work.batch, work.length))
    precision: Any = work.precision
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_steps=num_steps,
        default_root_dir=root,
        callbacks=[marks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(tokens, work.batch)  # pyright: ignore[reportArgumentType]
    trainer.fit(_Model(work.size, on_meta=on_meta), loader)


def as_dicts(speeds: list[Speed]) -> list[dict[str, Any]]:
    """Return the figures as plain values."""
    return [asdict(speed) for speed in speeds]


def speed_table(speeds: list[Speed], title: str) -> Table:
    """Show the figures."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for column in ("model", "batch", "", "s per step", "tokens/s", "TFLOP/s", "device", "uploaded"):
        table.add_column(column, justify="left" if column in ("model", "") else "right")
    for speed in speeds:
        cells = [f"{speed.size} ({speed.params / 1e9:.2f}e9)", str(speed.batch), speed.name]
        if speed.error:
            cells.append(speed.error)
        else:
            cells += [f"{speed.step_s:.2f}", f"{speed.tokens_per_s:.0f}", f"{speed.tflops:.1f}"]
            cells += [f"{speed.device_peak_gib:.1f} GiB", f"{speed.uploaded_gib:.1f} GiB"]
        table.add_row(*cells)
    return table
