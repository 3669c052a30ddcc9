"""A sample as tokens, with a mark on those that are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.data.kinds import Kind, LossOn, check_loss_on, kind_of, renamed
from mt_lightning.huggingface.data.messages import Message, as_messages
from mt_lightning.huggingface.data.template import ChatTemplate, check_unicode, template_text

Overlong = Literal["cut", "drop", "refuse"]


@dataclass
class Encoded:
    """One sample.

    Attributes:
        ids: Its tokens.
        trained: Whether each of them is a label.
        num_tokens: Tokens that it had before it was cut.
        ends: Whether the last token is the one that ends a text.
        roles: Who wrote each message of it, if it has any.
    """

    ids: list[int]
    trained: list[bool]
    num_tokens: int
    ends: bool
    roles: list[str]


@dataclass(kw_only=True)
class Facts:
    """What is known of the samples of a data set.

    Attributes:
        num_rows: Rows that were read.
        num_samples: Samples that came of them.
        num_tokens: Their tokens.
        num_trained: Those of them that are labels.
        num_cut: Samples that were cut.
        num_cut_tokens: Tokens that cutting took away.
        num_overlong: Rows that were left out since they are too long.
        num_untrained: Rows that were left out since no token of them is trained.
        num_ending: Samples that end in the token that ends a text.
        longest: Tokens of the longest row, before it was cut.
        largest_id: The largest token.
        roles: Messages of each role, in the rows that were read.
    """

    num_rows: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    num_cut: int = 0
    num_cut_tokens: int = 0
    num_overlong: int = 0
    num_untrained: int = 0
    num_ending: int = 0
    longest: int = 0
    largest_id: int = 0
    roles: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, sample: Encoded) -> None:
        """Count a sample that is kept."""
        self.num_samples += 1
        self.num_tokens += len(sample.ids)
        self.num_trained += sum(sample.trained)
        self.num_cut += sample.num_tokens > len(sample.ids)
        self.num_cut_tokens += sample.num_tokens - len(sample.ids)
        self.num_ending += sample.ends
        self.largest_id = max(self.largest_id, *sample.ids)

    @property
    def trained_share(self) -> float:
        """Trained tokens of all, from 0 to 1."""
        return self.num_trained / max(1, self.num_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name."""
        return dataclasses.asdict(self)


class Encoder:
    """Turns rows into samples.

    Args:
        tokenizer: Tokenises.
        kind: What rows have to be; "auto" takes what their columns fit.
        loss_on: Which tokens are trained; "auto": answers of conversations, completions of
            prompts, and all of a text.
        max_tokens: The longest sample; None for any length.
        overlong: What happens to a longer one: "cut" at its end, "drop", or "refuse".
        chat_template: In place of the tokenizer's own.
        eos_id: The token that ends a text; None: the tokenizer's.

    Raises:
        ConfigError: A setting is none of those, or there is no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kind: Kind | Literal["auto"] = "auto",
        loss_on: LossOn = "auto",
        max_tokens: int | None = None,
        overlong: Overlong = "cut",
        chat_template: str | Path | None = None,
        eos_id: int | None = None,
    ) -> None:
        for name, value, choices in (
            ("kind", kind, ("auto", *get_args(Kind))),
            ("loss_on", loss_on, get_args(LossOn)),
            ("overlong", overlong, get_args(Overlong)),
        ):
            if value not in choices:
                raise ConfigError(
                    f"data.{name}={value!r} is unknown; set it to one of {', '.join(choices)}."
                )
        self.tokenizer = tokenizer
        self._eos_id: Any = tokenizer.eos_token_id if eos_id is None else eos_id
        self.loss_on: LossOn = loss_on
        self.max_tokens = max_tokens
        self.overlong: Overlong = overlong
        self._kind: Kind | Literal["auto"] = kind
        self._template = chat_template
        self._chat: ChatTemplate | None = None

    @property
    def chat(self) -> ChatTemplate:
        """The chat template, looked up on first use."""
        if self._chat is None:
            self._chat = ChatTemplate(self.tokenizer, self._template)
        return self._chat

    def kind(self, columns: Iterable[str]) -> Kind:
        """Return what rows with these columns are, and check that the settings fit them."""
        found = kind_of(columns, self._kind)
        check_loss_on(found, self.loss_on)
        return found

    def encode(self, row: Mapping[str, Any], where: str) -> Encoded:
        """Return a row as tokens, cut if that is asked for.

        Args:
            row: Columns and their values.
            where: Which row it is, for messages.

        Raises:
            ConfigError: The row does not hold what its columns promise, or is too long.
        """
        try:
            kind = self.kind(row)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        loss_on = check_loss_on(kind, self.loss_on)
        messages: Sequence[Message] = ()
        num_given = 0
        if kind == "messages":
            messages = as_messages(row["messages"], where)
        elif kind == "completion" and not isinstance(row["prompt"], str):
            messages, num_given = self._turns(row, where)
        if messages:
            ids, trained = self.chat.encode(
                messages,
                where,
                tools=row.get("tools"),
                first_trained=num_given,
                finds_answers=loss_on != "all",
            )
        elif kind == "text":
            ids = self._ended(self._tokens(row["text"], where, "text"))
            trained = [True] * len(ids)
        else:
            ids, trained = self._completion(row, where, trains_all=loss_on == "all")
        num_tokens = len(ids)
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            if self.overlong == "refuse":
                raise ConfigError(
                    f"{where} has {num_tokens} tokens, more than data.sequence_length="
                    f"{self.max_tokens}. Set it to {num_tokens}, or data.overlong to 'cut' or "
                    "'drop'."
                )
            ids, trained = ids[: self.max_tokens], trained[: self.max_tokens]
        last = next((i for i, flag in zip(ids[::-1], trained[::-1], strict=True) if flag), None)
        ends = last is not None and last == self._eos_id
        ends = ends and num_tokens == len(ids)
        return Encoded(ids, trained, num_tokens, ends, [str(each["role"]) for each in messages])

    def kept(
        self, row: Any, columns: Mapping[str, str], where: str, facts: Facts
    ) -> Encoded | None:
        """Return a row as a sample and count it; None where nothing of it can be trained on."""
        facts.num_rows += 1
        sample = self.encode(renamed(row, columns, where), where)
        facts.longest = max(facts.longest, sample.num_tokens)
        for role in sample.roles:
            facts.roles[role] = facts.roles.get(role, 0) + 1
        if self.overlong == "drop" and sample.num_tokens > len(sample.ids):
            facts.num_overlong += 1
            return None
        if not any(sample.trained[1:]):  # the first token is predicted from nothing
            facts.num_untrained += 1
            return None
        facts.add(sample)
        return sample

    def template_key(self, kind: Kind) -> str:
        """Return the chat template, where rows may depend on one.

        Args:
            kind: What the first row is; later ones may be of another kind.
        """
        if self._kind == "text":
            return ""
        if kind == "messages":
            return self.chat.text
        if self._template is not None:
            return template_text(self.tokenizer, self._template)
        return str(self.tokenizer.chat_template)

    def _turns(self, row: Mapping[str, Any], where: str) -> tuple[Sequence[Message], int]:
        """Return prompt and completion as one conversation, and the messages of the prompt.

        None at all where the completion is text, and the prompt has to be.
        """
        if isinstance(row["completion"], str):
            return (), 0
        for column in ("prompt", "completion"):
            if not isinstance(row[column], Sequence):
                raise ConfigError(
                    f"{where}: {column!r} is {_described(row[column])}; it has to be text, or "
                    "a list of messages. Correct the row, or leave it out."
                )
        return as_messages([*row["prompt"], *row["completion"]], where), len(row["prompt"])

    def _completion(
        self, row: Mapping[str, Any], where: str, *, trains_all: bool
    ) -> tuple[list[int], list[bool]]:
        prompt, completion = row["prompt"], row["completion"]
        # One by one, as the prompt is tokenised when the model is asked.
        before = self._tokens(prompt, where, "prompt")
        if before and before[-1] == self._eos_id:
            before = before[:-1]
        after = self._ended(self._tokens(completion, where, "completion", special=False))
        return before + after, [trains_all] * len(before) + [True] * len(after)

    def _tokens(self, text: Any, where: str, column: str, *, special: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise ConfigError(
                f"{where}: {column!r} is {_described(text)}; it has to be text. Correct the row, "
                "or leave it out."
            )
        check_unicode(text, where)
        found = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return [int(each) for each in found]

    def _ended(self, ids: list[int]) -> list[int]:
        eos = self._eos_id
        return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
