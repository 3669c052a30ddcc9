"""What the columns of a data set say about its samples."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from mt_lightning.errors import ConfigError

Kind = Literal["text", "messages", "completion"]
LossOn = Literal["auto", "all", "assistant", "completion"]

COLUMNS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The columns of each kind; the first kind whose columns are there is taken."""

RAW_COLUMNS = ("messages", "prompt", "completion", "text", "tools")
"""Every column that is read."""

_OTHER_NAMES = {
    "conversations": "messages",
    "conversation": "messages",
    "instruction": "prompt",
    "question": "prompt",
    "response": "completion",
    "output": "completion",
    "answer": "completion",
    "content": "text",
}


def kind_of(columns: Iterable[str], asked: Kind | Literal["auto"] = "auto") -> Kind:
    """Return what samples with these columns are.

    Args:
        columns: Their names.
        asked: The kind that they have to be; "auto" takes what fits.

    Raises:
        ConfigError: A column is missing; the message names the nearest that is there.
    """
    names = list(columns)
    kinds: list[Kind] = list(COLUMNS) if asked == "auto" else [asked]
    for kind in kinds:
        if all(column in names for column in COLUMNS[kind]):
            return kind
    needed = ", or ".join(" and ".join(map(repr, COLUMNS[kind])) for kind in kinds)
    raise ConfigError(
        f"the data have the columns {', '.join(map(repr, names)) or '(none)'}; needed: {needed}. "
        f"{_hint(names, kinds)}"
    )


def unread_columns(columns: Iterable[str], kind: Kind) -> list[str]:
    """Return the columns that samples of a kind leave aside."""
    read = COLUMNS[kind] if kind == "text" else (*COLUMNS[kind], "tools")
    return [column for column in columns if column not in read]


UNREAD_MESSAGE = (
    "%s: samples are made of %s; not read: %s. What the model shall see of them has to be in the "
    "columns that are read."
)
"""What is said of columns that are not read; `unread_words` fills it."""


def unread_words(name: str, unread: Iterable[str], kind: Kind) -> tuple[str, str, str]:
    """Return the words of `UNREAD_MESSAGE`."""
    read = " and ".join(map(repr, COLUMNS[kind]))
    return name, read, ", ".join(map(repr, unread))


def check_loss_on(kind: Kind, loss_on: LossOn) -> LossOn:
    """Return which tokens are trained, "auto" made definite.

    Raises:
        ConfigError: There are no such tokens in samples of this kind.
    """
    if loss_on not in get_args(LossOn):
        raise ConfigError(
            f"data.loss_on={loss_on!r} is unknown; set it to one of {', '.join(get_args(LossOn))}."
        )
    allowed: dict[Kind, LossOn] = {"messages": "assistant", "completion": "completion"}
    if loss_on == "auto":
        return allowed.get(kind, "all")
    if loss_on not in ("all", allowed.get(kind)):
        raise ConfigError(
            f"data.loss_on={loss_on!r} does not fit samples with "
            f"{' and '.join(map(repr, COLUMNS[kind]))}; set it to 'auto', 'all'"
            f"{f' or {allowed[kind]!r}' if kind in allowed else ''}."
        )
    return loss_on


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse names of columns that are not read.

    Args:
        columns: Our name of a column to its name in the data.

    Raises:
        ConfigError: There is one.
    """
    for ours in columns:
        if ours not in RAW_COLUMNS:
            raise ConfigError(
                f"data.columns names {ours!r}, which is not read; it takes "
                f"{', '.join(RAW_COLUMNS)}."
            )


def renamed(row: Any, columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return a row under our names.

    Args:
        row: What the data set gives.
        columns: Our name of a column to its name there.
        where: Which row it is, for messages.

    Raises:
        ConfigError: It is no mapping, or a column is not there.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"{where} is a {type(row).__name__}; samples are mappings from columns to values, "
            'such as {"text": "..."}.'
        )
    for ours, theirs in columns.items():
        if theirs not in row:
            raise ConfigError(
                f"{where} has no column {theirs!r} (data.columns.{ours}), but "
                f"{', '.join(map(repr, row))}. {_nearest(theirs, row)}"
            )
    kept = {name: value for name, value in row.items() if name not in columns.values()}
    return kept | {ours: row[theirs] for ours, theirs in columns.items()}


def _hint(names: list[str], kinds: list[Kind]) -> str:
    wanted = [column for kind in kinds for column in COLUMNS[kind] if column not in names]
    pairs: dict[str, str] = {}
    for name in names:
        ours = _OTHER_NAMES.get(name.lower())
        close = difflib.get_close_matches(name.lower(), wanted, n=1, cutoff=0.6)
        ours = ours if ours in wanted else (close[0] if close else None)
        if ours is not None and ours not in pairs:
            pairs[ours] = name
    if not pairs:
        return "Rename the columns, or name them in data.columns, as in data.columns.text=body."
    likely = " and ".join(f"{theirs!r} for {ours!r}" for ours, theirs in pairs.items())
    settings = " ".join(f"data.columns.{ours}={theirs}" for ours, theirs in pairs.items())
    return f"Did you mean {likely}? Rename, or set {settings}."


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else "Set it to one of them."
