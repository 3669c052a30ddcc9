"""The loss of a training step, in chunks of tokens where the model allows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from mt_lightning.engine.compiled import is_compiled
from mt_lightning.losses.chunked import ChunkSize
from mt_lightning.losses.deferred import deferred_logits

_log = logging.getLogger(__name__)


class TrainingLoss:
    """Runs a causal language model and returns its loss.

    Args:
        chunk_size: tokens whose logits exist at once; None leaves the model alone.
    """

    def __init__(self, chunk_size: ChunkSize | None) -> None:
        self._chunk_size: ChunkSize | None = chunk_size
        self._has_spoken = False

    def __call__(self, model: nn.Module, run: Callable[[], Any]) -> Tensor:
        """Return the loss of what `run` returns, which runs `model`."""
        if self._chunk_size is None:
            return run().loss
        head = find_head(model)
        if isinstance(head, str):
            self._say(model, head)
            return run().loss
        with deferred_logits(head, self._chunk_size) as deferral:
            loss = run().loss
        if deferral.whole:
            self._say(model, f"its forward needs them for {deferral.whole[0]}")
        elif not deferral.chunked:
            self._say(model, "its forward does not take the loss from what its head gives")
        return loss

    def _say(self, model: nn.Module, why: str) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            _log.info(
                "%s computes the logits of all tokens at once: %s. Memory grows with tokens times "
                "vocabulary; loss_chunk_size=None silences this line.",
                type(model).__name__,
                why,
            )


def find_head(model: nn.Module) -> nn.Linear | str:
    """Return the head of a causal language model, or why its logits cannot be deferred."""
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    head = None if inner is None else inner.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"its head is {type(head).__name__}, not a Linear"
    if any(is_compiled(module) and head in module.modules() for module in model.modules()):
        return "it is compiled"
    return head
