"""The run of `megatrain demo` and `megatrain train`: measure, train, measure again."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from mt_lightning.callbacks.recorder import paging_engine
from mt_lightning.commands.recipe import apply, choices_table, choose
from mt_lightning.commands.settings import check_complete
from mt_lightning.commands.types import check_types
from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import CausalLMModule, TextDataModule
from mt_lightning.huggingface.text_samples import generate

log = logging.getLogger(__name__)

_NUM_PROMPTS = 2
_MOST_SHOWN = 400  # characters of a prompt


def train(settings: DictConfig, console: Console) -> float:
    """Train as the settings say and show the result.

    Args:
        settings: the composed Hydra config.
        console: where tables and texts go.

    Returns:
        The validation perplexity after the training, NaN without validation data.

    Raises:
        ConfigError: if a setting is missing or wrong.
        KeyboardInterrupt: if the run was stopped; what was trained has been saved.
    """
    check_complete(settings)
    check_types(settings)
    _check_strategy(settings)
    if settings.recipe:
        choices = choose(settings, given_names())
        apply(settings, choices)
        console.print(choices_table(choices))
    if settings.resume:
        _resume(settings)
    disable_progress_bar()
    _quiet_warnings()
    seed_everything(settings.seed, verbose=False)
    data: TextDataModule = instantiate(settings.data, _convert_="all")
    data.setup()
    module: CausalLMModule = instantiate(settings.model, _convert_="all")
    trainer = build_trainer(settings)
    output_dir = Path(settings.output_dir)
    _show_start(console, settings, module, output_dir)

    samples = _Samples(settings.samples, module, data)
    was = ""
    if not settings.resume:  # what the model was before lies in the past
        before = _measure(trainer, module, data)
        was = "" if isnan(before) else f" (was {before:.2f})"
        samples.show(console, f"Before: {_quality(before)}")
    try:
        with _ctrl_c_raises(trainer):
            trainer.fit(module, datamodule=data, ckpt_path=settings.get("ckpt_path"))
    except KeyboardInterrupt:
        _after_interrupt(console, settings, trainer, module, data, output_dir)
        raise
    after = _measure(trainer, module, data)
    title = f"After {trainer.global_step} steps: {_quality(after)}{was}"
    samples.show(console, title)
    if settings.save_model:
        _save(console, module, data.tokenizer, output_dir)
    console.print(f"Metrics and settings: {output_dir}", highlight=False, soft_wrap=True)
    return after


def build_trainer(settings: DictConfig) -> Trainer:
    """Build the Trainer with its strategy, callbacks and logger."""
    parts = {
        "strategy": _build(settings.strategy),
        "callbacks": [_build(callback) for callback in settings.callbacks.values()],
        "logger": _build(settings.logger),
    }
    return instantiate(settings.trainer, **parts, _convert_="all")


def given_names() -> set[str]:
    """Return the names of the settings that were given on the command line."""
    if not HydraConfig.initialized():
        return set()
    overrides = OverridesParser.create().parse_overrides(list(HydraConfig.get().overrides.task))
    return {override.key_or_group for override in overrides}


def _check_strategy(settings: DictConfig) -> None:
    strategy = settings.strategy
    if isinstance(strategy, DictConfig) and "_target_" not in strategy:
        raise ConfigError(
            f"strategy=auto is plain Lightning, and has no {', '.join(map(str, strategy))}. Leave "
            "hardware=... out, or set strategy=megatrain."
        )


def _resume(settings: DictConfig) -> None:
    strategy = settings.strategy
    if not isinstance(strategy, DictConfig) or not strategy.get("offload_dir"):
        raise ConfigError(
            "resume=true goes on from the commits of a run: name its directory with "
            "strategy.offload_dir=... (it must have been given when the run began)."
        )
    OmegaConf.update(strategy, "on_existing", "resume", force_add=True)


def _build(setting: Any) -> Any:
    # A name ("auto") or a switch (False) is itself.
    return instantiate(setting, _convert_="all") if isinstance(setting, DictConfig) else setting


@contextmanager
def _ctrl_c_raises(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except SystemExit as exit_request:
        if not trainer.interrupted:
            raise
        # Lightning exits with 1 and leaves the signal ignored: a second Ctrl-C could not stop us.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt from exit_request


def _measure(trainer: Trainer, module: CausalLMModule, data: TextDataModule) -> float:
    if data.val_dataset is None:
        return float("nan")
    with _ctrl_c_raises(trainer):
        metrics = trainer.validate(module, datamodule=data, verbose=False)
    return metrics[0]["val_perplexity"]


def _quality(perplexity: float) -> str:
    return "no validation data" if isnan(perplexity) else f"perplexity {perplexity:.2f}"


def _show_start(
    console: Console, settings: DictConfig, module: CausalLMModule, output_dir: Path
) -> None:
    table = Table.grid(padding=(0, 2))
    num_parameters = sum(p.numel() for p in module.parameters())
    model_name = settings.model.model
    name = model_name if isinstance(model_name, str) else model_name._target_.rpartition(".")[2]
    strategy = settings.strategy
    strategy_name = strategy if isinstance(strategy, str) else strategy._target_.rpartition(".")[2]
    for key, value in (
        ("model", f"{name}, {num_parameters / 1e6:.1f} million parameters"),
        ("data", _data_name(settings.data)),
        ("strategy", strategy_name),
        ("steps", str(settings.trainer.max_steps)),
        ("output", str(output_dir)),
    ):
        table.add_row(Text(key, style="dim"), Text(value))
    console.print(table)


def _data_name(data: DictConfig) -> str:
    source = data.get("dataset") or data
    return str(source.get("path") or "Shakespeare") if isinstance(source, DictConfig) else "given"


class _Samples:
    """What the model writes, before and after the training."""

    def __init__(self, settings: DictConfig, module: CausalLMModule, data: TextDataModule) -> None:
        self._module = module
        self._tokenizer = data.tokenizer
        self._max_new_tokens: int = settings.max_new_tokens
        prompts = settings.prompts
        self._prompts = data.prompts(_NUM_PROMPTS) if prompts is None else list(prompts)

    def show(self, console: Console, title: str) -> None:
        texts: list[Text] = []
        for prompt in self._prompts:
            written = generate(self._module.model, self._tokenizer, prompt, self._max_new_tokens)
            given = prompt if isinstance(prompt, str) else str(self._tokenizer.decode(prompt))
            if len(given) > _MOST_SHOWN:
                given = f"... {given[-_MOST_SHOWN:]}"
            shown = Text(_printable(given), style="dim")
            texts += [shown.append(_printable(written).rstrip(), style="not dim"), Text()]
        panel = Panel(
            Group(*texts[:-1]) if texts else Text("no samples.prompts"),
            title=title,
            title_align="left",
        )
        console.print(panel)


def _printable(text: str) -> str:
    # A model with random weights writes control characters too.
    return "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text)


def _save(
    console: Console, module: CausalLMModule, tokenizer: PreTrainedTokenizerBase, output_dir: Path
) -> None:
    folder = output_dir / "model"
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    console.print(f"Model, for from_pretrained: {folder}", highlight=False, soft_wrap=True)


def _after_interrupt(
    console: Console,
    settings: DictConfig,
    trainer: Trainer,
    module: CausalLMModule,
    data: TextDataModule,
    output_dir: Path,
) -> None:
    console.print(f"Stopped after {trainer.global_step} steps.", highlight=False)
    engine = paging_engine(trainer)
    if engine is not None and engine.plan is not None:
        places = ", ".join(engine.plan.directories)
        is_given = settings.strategy.get("offload_dir") is not None
        fate = "kept" if is_given else "removed at exit; set strategy.offload_dir to keep them"
        console.print(f"Pages: {places} ({fate})", highlight=False, soft_wrap=True)
    if settings.save_model and trainer.global_step:
        _save(console, module, data.tokenizer, output_dir)
    console.print(f"Metrics and settings: {output_dir}", highlight=False, soft_wrap=True)


def _quiet_warnings() -> None:
    # The text is mapped from disk and costs nothing to serve.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    # data.val_fraction=0 is said on purpose.
    warnings.filterwarnings("ignore", message="Total length of .* across ranks is zero.*")
