"""Text that a model writes: once, or after every validation of a fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from transformers import PreTrainedTokenizerBase

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.loading import load_tokenizer

log = logging.getLogger(__name__)

FILE_NAME = "samples.txt"


class TextSamples(Callback):
    """Continue prompts after every validation, and keep what was written.

    Each sample goes to the log, to `samples.txt` under the Trainer's `log_dir`, and to TensorBoard
    where that is a logger. The state of the global RNG is left as it was: training is the same with
    this callback and without it.

    Args:
        prompts: the texts to continue.
        tokenizer: a tokenizer, or a name or path for `load_tokenizer`.
        max_new_tokens: how far each is continued, in tokens.

    Raises:
        ConfigError: if there is no prompt, or no token to write.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        tokenizer: str | PreTrainedTokenizerBase,
        max_new_tokens: int = 32,
    ) -> None:
        if isinstance(prompts, str) or not prompts:
            raise ConfigError(f"prompts={prompts!r}: give a list of at least one text.")
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens}: give 1 or more.")
        self.prompts = list(prompts)
        self.max_new_tokens = max_new_tokens
        self.tokenizer = (
            tokenizer
            if isinstance(tokenizer, PreTrainedTokenizerBase)
            else load_tokenizer(tokenizer)
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write one sample for each prompt."""
        if trainer.sanity_checking:
            return
        model: Any = getattr(pl_module, "model", pl_module)
        if not callable(getattr(model, "generate", None)):
            raise ConfigError(
                f"TextSamples needs a model with generate(); {type(pl_module).__name__} has none "
                "as its .model. Use CausalLMModule, or remove the callback."
            )
        path = Path(trainer.log_dir or trainer.default_root_dir) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        step = trainer.global_step
        with path.open("a") as file:
            for number, prompt in enumerate(self.prompts):
                text = prompt + generate(model, self.tokenizer, prompt, self.max_new_tokens)
                log.info("step %d: %s", step, text)
                file.write(f"--- step {step}\n{text}\n")
                for logger in trainer.loggers:
                    if isinstance(logger, TensorBoardLogger):
                        logger.experiment.add_text(f"samples/{number}", text, step)


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[int],
    max_new_tokens: int,
) -> str:
    """Continue a prompt by sampling; the same weights give the same continuation.

    The state of the global RNG is left as it was.

    Args:
        model: a Hugging Face model.
        tokenizer: its tokenizer.
        prompt: the text to continue, or its tokens.
        max_new_tokens: how far.
    """
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    inputs = torch.tensor([ids], device=model.device)
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=tokenizer.pad_token_id,
        )
    model.train(was_training)
    return str(tokenizer.decode(output[0][inputs.shape[1] :], skip_special_tokens=True))
