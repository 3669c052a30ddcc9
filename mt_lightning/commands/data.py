"""What `megatrain data` shows: what a model would be trained on, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mt_lightning.commands.settings import check_complete
from mt_lightning.commands.types import check_types
from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import TextDataModule
from mt_lightning.huggingface.batch_checks import IGNORED_LABEL
from mt_lightning.huggingface.data.encoding import Facts
from mt_lightning.huggingface.data.messages import role_names

TRAINED_STYLE = "bold green"
_GIVEN_STYLE = "dim"
_PLAIN_MARKS = ("\u27e6", "\u27e7")
"""White square brackets, which no text has for itself."""


def show_data(settings: DictConfig, console: Console, number: int) -> None:
    """Show counts and one row of the training data.

    Args:
        settings: The composed Hydra config; the group `data` is used.
        console: Where it goes.
        number: Which row is shown.

    Raises:
        ConfigError: The data cannot be what was meant; or there is no such row.
    """
    check_complete(settings.data, "data")
    check_types(settings.data, "data")
    data = instantiate(settings.data, _convert_="all")
    if not isinstance(data, TextDataModule):
        raise ConfigError(
            f"data is a {type(data).__name__}; `megatrain data` shows those of "
            "mt_lightning.TextDataModule. Set data to one of its kinds: data=text."
        )
    data.setup()
    row, num_rows = _row(data, number)
    console.print(_table(data, num_rows))
    console.print(
        Panel(
            Group(*marked_texts(data.tokenizer, row, plain=not console.is_terminal)),
            title=f"Training row {number}: {len(row['input_ids'])} tokens",
            subtitle="trained tokens are "
            + (f"between {' and '.join(_PLAIN_MARKS)}" if not console.is_terminal else "bold"),
            title_align="left",
            subtitle_align="left",
        )
    )


def marked_texts(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Tensor], *, plain: bool
) -> list[Text]:
    """Return each sample of a row as a text in which trained tokens stand out.

    Args:
        tokenizer: Decodes.
        row: `input_ids`, and `labels` and `position_ids` where there are any.
        plain: Mark by brackets too, for a console without colours.
    """
    ids = row["input_ids"].tolist()
    labels = row.get("labels", row["input_ids"]).tolist()
    positions = row["position_ids"].tolist() if "position_ids" in row else list(range(len(ids)))
    starts = [i for i, position in enumerate(positions) if position == 0]
    texts = []
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        text = Text()
        for first, last in _runs([label != IGNORED_LABEL for label in labels[start:stop]]):
            part = slice(start + first, start + last)
            words = _printable(str(tokenizer.decode(ids[part])))
            trained = labels[part.start] != IGNORED_LABEL
            if trained and plain:
                words = f"{_PLAIN_MARKS[0]}{words}{_PLAIN_MARKS[1]}"
            text.append(words, style=TRAINED_STYLE if trained else _GIVEN_STYLE)
        texts.append(text)
    return texts


def _row(data: TextDataModule, number: int) -> tuple[dict[str, Tensor], int | None]:
    train: Any = data.train_dataset
    if not hasattr(train, "__getitem__") or not hasattr(train, "__len__"):
        rows = list(islice(train, number, number + 1))
        if not rows:
            raise ConfigError(f"the data have no row {number}; set --row to a smaller number.")
        return rows[0], None
    if not 0 <= number < len(train):
        raise ConfigError(
            f"the data have {len(train)} training rows; set --row from 0 to {len(train) - 1}."
        )
    return train[number], len(train)


def _table(data: TextDataModule, num_rows: int | None) -> Table:
    table = Table.grid(padding=(0, 2))
    length, val = data.sequence_length, data.val_dataset
    val_rows = "none" if val is None else str(len(val)) if hasattr(val, "__len__") else "a stream"  # pyright: ignore
    known = "of a stream" if num_rows is None else f"{num_rows:,}"
    lines = [("training rows", f"{known}, up to {length} tokens each"), ("validation", val_rows)]
    if data.facts is not None:
        lines += _counts(data.facts, data.tokenizer)
    elif num_rows is not None:
        lines += [("tokens", f"{num_rows * length:,} of a text in blocks, all trained")]
    if data.packing:
        lines.append(("packing", "several samples share a row; proved when training starts"))
    most = data.tokenizer.model_max_length
    if length > most:
        lines.append(("attention", f"the tokenizer's model takes {most} tokens, not {length}"))
    for key, value in lines:
        table.add_row(Text(key, style="dim"), Text(value))
    return table


def _counts(facts: Facts, tokenizer: PreTrainedTokenizerBase) -> Sequence[tuple[str, str]]:
    total = facts.num_samples
    left_out = facts.num_overlong + facts.num_untrained
    spoken = [("roles", role_names(facts.roles))] if facts.roles else []
    return [
        ("samples", f"{total:,} of {facts.num_rows:,} rows, validation included"),
        *spoken,
        (
            "tokens",
            f"{facts.num_tokens:,}, of which {facts.num_trained:,} are trained "
            f"({facts.trained_share:.1%})",
        ),
        ("end of text", f"{facts.num_ending:,} of {total:,} end in {tokenizer.eos_token!r}"),
        (
            "cut",
            f"{facts.num_cut:,} samples, {facts.num_cut_tokens:,} tokens; the longest has "
            f"{facts.longest:,}",
        ),
        (
            "left out",
            f"{left_out:,}: {facts.num_overlong:,} too long, {facts.num_untrained:,} without a "
            "trained token",
        ),
    ]


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the first place and the place after the last of each run of equal flags."""
    cuts = [i for i in range(1, len(flags)) if flags[i] != flags[i - 1]]
    return list(zip([0, *cuts], [*cuts, len(flags)], strict=True))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text)
