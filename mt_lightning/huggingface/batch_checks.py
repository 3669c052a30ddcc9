"""What a batch has to be for a model, checked by shapes, and on a CPU by values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mt_lightning.errors import ConfigError

IGNORED_LABEL = -100


def most_positions(model: nn.Module) -> int | None:
    """Return how many tokens of a sequence a model takes, None where it does not say."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def check_length(num_tokens: int, most: int | None, way_out: str) -> None:
    """Refuse a sequence that is longer than the positions of a model.

    Args:
        num_tokens: Tokens of the sequence.
        most: What `most_positions` says.
        way_out: What to change.

    Raises:
        ConfigError: It is longer.
    """
    if most is not None and num_tokens > most:
        raise ConfigError(
            f"a batch has sequences of {num_tokens} tokens, and the model takes {most} "
            f"(max_position_embeddings of its config). {way_out}"
        )


def check_tokens(batch: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse tokens that a model has no embedding for; looked at on a CPU only.

    Raises:
        ConfigError: There is such a token.
    """
    ids = batch.get("input_ids")
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(ids, Tensor) or not isinstance(embedding, nn.Embedding):
        return
    if ids.device.type == "cpu" and ids.numel() and int(ids.max()) >= embedding.num_embeddings:
        raise ConfigError(
            f"a batch has token {int(ids.max())}, and the model has embeddings for "
            f"{embedding.num_embeddings} (0 to {embedding.num_embeddings - 1}): the tokenizer is "
            "not that of the model. Use the model's own, or resize_token_embeddings()."
        )


def check_labels(batch: Mapping[str, Any]) -> None:
    """Refuse a batch without any label; looked at on a CPU only.

    Raises:
        ConfigError: All labels are -100: the loss would be the mean of nothing.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.device.type != "cpu" or labels.dim() < 2:
        return
    if not bool((labels[..., 1:] != IGNORED_LABEL).any()):
        raise ConfigError(
            f"all labels of a batch of {len(labels)} rows are -100: nothing is trained, and the "
            "loss is the mean of nothing. See that rows have answers that are not cut off, give "
            "larger batches, or leave such rows out."
        )
