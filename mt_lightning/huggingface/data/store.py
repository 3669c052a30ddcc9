"""Samples of a data set, tokenised once into flat files that are mapped.

[Note: files of a store]
A folder of the cache, named by all that its contents depend on: `tokens` (ids), `trained` (one byte
each), `starts` (int64, one more than there are samples) and `facts.json`. It appears whole or not
at all. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.data.encoding import Encoder, Facts
from mt_lightning.huggingface.data.kinds import (
    UNREAD_MESSAGE,
    Kind,
    check_loss_on,
    unread_columns,
    unread_words,
)
from mt_lightning.huggingface.data.messages import ANSWERING_ROLE, role_names
from mt_lightning.huggingface.data.sources import Rows
from mt_lightning.huggingface.token_file import token_dtype, tokenizer_key
from mt_lightning.huggingface.tokenising import tokenising

log = logging.getLogger(__name__)

_FORMAT_VERSION = 2


@dataclass(frozen=True)
class Store:
    """Where the samples of a data set lie.

    Attributes:
        folder: The folder of the cache.
        dtype: Of the ids.
        facts: What is known of the samples.
    """

    folder: Path
    dtype: np.dtype
    facts: Facts

    def tokens(self) -> NDArray[np.integer]:
        """Map the ids of all samples."""
        return np.memmap(self.folder / "tokens", dtype=self.dtype, mode="r")

    def trained(self) -> NDArray[np.uint8]:
        """Map the marks of all samples."""
        return np.memmap(self.folder / "trained", dtype=np.uint8, mode="r")

    def starts(self) -> NDArray[np.int64]:
        """Return where each sample begins, and where the last one ends."""
        return np.fromfile(self.folder / "starts", dtype=np.int64)


def open_store(
    rows: Rows, columns: dict[str, str], encoder: Encoder, folder: Path
) -> tuple[Store, Kind]:
    """Return the store of a data set, made if it is not there.

    Args:
        rows: The data set.
        columns: Our name of a column to its name there.
        encoder: Makes samples of rows.
        folder: Where stores are kept.

    Raises:
        ConfigError: The data set is empty, no sample can be trained on, or the marks are wrong.
    """
    names = {theirs: ours for ours, theirs in columns.items()}
    found = [names.get(name, name) for name in rows.columns]
    kind = encoder.kind(found)
    unread = unread_columns(found, kind)
    if unread:
        log.warning(UNREAD_MESSAGE, *unread_words(rows.name, unread, kind))
    place = folder / _key(rows, columns, encoder, kind)
    dtype = token_dtype(encoder.tokenizer)
    if not (place / "facts.json").exists():
        _write(rows, columns, encoder, place, dtype)
    facts = Facts(**json.loads((place / "facts.json").read_text()))
    check_facts(facts, kind, encoder, rows.name)
    return Store(place, dtype, facts), kind


def check_facts(facts: Facts, kind: Kind, encoder: Encoder, name: str) -> None:
    """Refuse samples that cannot be what was meant, and say what was left out.

    Raises:
        ConfigError: There is nothing to train on, or all of a conversation would be.
    """
    if facts.num_rows == 0:
        raise ConfigError(f"{name} is empty: it has 0 rows. Give one with rows in it.")
    if facts.num_samples == 0:
        cut = f"{facts.num_overlong} of more than {encoder.max_tokens} tokens were left out, "
        roles = ""
        if facts.roles and ANSWERING_ROLE not in facts.roles:
            roles = (
                f" Answers are the messages of role {ANSWERING_ROLE!r}; seen were "
                f"{role_names(facts.roles)}: rename the role that answers."
            )
        raise ConfigError(
            f"{name} has {facts.num_rows} rows, and none of them can be trained on (0 % trained "
            f"tokens): {cut * bool(facts.num_overlong)}{facts.num_untrained} have no trained token "
            f"(all labels are -100).{roles} The longest row has {facts.longest} tokens: raise "
            "data.sequence_length, see that there are answers in the rows, or set "
            "data.loss_on='all'."
        )
    if check_loss_on(kind, encoder.loss_on) != "all" and facts.trained_share == 1:
        raise ConfigError(
            f"{name}: all {facts.num_tokens} tokens would be trained (100 %), the questions too. "
            "The chat template marks everything as an answer, or the prompts are empty: set "
            "data.chat_template, or data.loss_on='all' if that is meant."
        )
    left_out = facts.num_overlong + facts.num_untrained
    if left_out:
        log.warning(
            "%s: %d of %d rows are left out: %d are longer than %s tokens, %d have no trained "
            "token (before the cut, if one was made). See data.sequence_length and data.overlong.",
            name,
            left_out,
            facts.num_rows,
            facts.num_overlong,
            encoder.max_tokens,
            facts.num_untrained,
        )
    if facts.num_ending == 0:
        log.warning(
            "%s: no sample ends in the end-of-text token %r: a model trained on them does not "
            "learn to stop. Raise data.sequence_length if all were cut, or see the chat template.",
            name,
            encoder.tokenizer.eos_token,
        )


def _key(rows: Rows, columns: dict[str, str], encoder: Encoder, kind: Kind) -> str:
    digest = xxhash.xxh3_128()
    digest.update(tokenizer_key(encoder.tokenizer).encode())
    settings: dict[str, Any] = {
        "version": _FORMAT_VERSION,
        "columns": columns,
        "kind": kind,
        "loss_on": check_loss_on(kind, encoder.loss_on),
        "max_tokens": encoder.max_tokens,
        "overlong": encoder.overlong,
        "rows": rows.key(),
        "template": encoder.template_key(kind),
    }
    digest.update(json.dumps(settings, sort_keys=True).encode())
    return digest.hexdigest()


def _write(
    rows: Rows, columns: dict[str, str], encoder: Encoder, place: Path, dtype: np.dtype
) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(f".{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    facts, starts = Facts(), array("q", [0])
    try:
        with (
            (partial / "tokens").open("wb") as tokens,
            (partial / "trained").open("wb") as marks,
            tokenising(rows.name, rows.num_lines()) as advance,
        ):
            for where, row in rows:
                sample = encoder.kept(row, columns, where, facts)
                advance(1)
                if sample is None:
                    continue
                tokens.write(np.asarray(sample.ids, dtype=dtype).tobytes())
                marks.write(bytes(sample.trained))
                starts.append(starts[-1] + len(sample.ids))
        (partial / "starts").write_bytes(np.asarray(starts, dtype=np.int64).tobytes())
        (partial / "facts.json").write_text(json.dumps(facts.as_dict()))
        try:
            partial.rename(place)
        except OSError:
            if not (place / "facts.json").exists():  # else another process was sooner
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
