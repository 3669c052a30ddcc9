"""Conversations as text, and which part of it the assistant wrote.

[Note: what the assistant wrote]
A chat template with `{% generation %}` blocks says it itself. Of any other, the text of the
messages before a turn, with the prompt for the next answer, is a prefix of the text with that
turn: what follows it is the answer, with the token that ends it. Templates that write earlier
turns differently once later ones follow (as those do that drop earlier reasoning) have no such
prefix, and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.data.messages import ANSWERING_ROLE, Message

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """Renders conversations.

    Args:
        tokenizer: Has the special tokens, and a template of its own.
        template: A template in place of its own: the text, or the path of a file.

    Raises:
        ConfigError: There is none, or offsets of tokens are not known.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | Path | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.text = template_text(tokenizer, template)
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(tokenizer).__name__} does not say which characters a token stands for, so "
                "answers cannot be found in conversations. Load a fast tokenizer (use_fast=True)."
            )
        self._marks_answers = _GENERATION.search(self.text) is not None

    def encode(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        tools: Any = None,
        first_trained: int = 0,
        finds_answers: bool = True,
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and whether each is part of an answer.

        Args:
            messages: With `role` and `content`, as `as_messages` returns them.
            where: Which row it is, for messages.
            tools: What the template is given besides.
            first_trained: Answers of earlier messages are not marked.
            finds_answers: False: every token is marked.

        Raises:
            ConfigError: The template fails, or does not show what the assistant wrote.
        """
        whole = self._render(messages, where, tools)
        check_unicode(whole, where)
        found = self._tokenizer(
            whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids: list[int] = list(found["input_ids"])
        if not finds_answers:
            return ids, [True] * len(ids)
        if self._marks_answers:
            spans = self._marked_spans(messages, where, tools, first_trained)
        else:
            spans = self._spans(messages, where, tools, first_trained, whole)
        offsets: list[tuple[int, int]] = list(found["offset_mapping"])
        trained = [any(a <= s and e <= b for a, b in spans) and s < e for s, e in offsets]
        return ids, trained

    def _spans(
        self, messages: Sequence[Message], where: str, tools: Any, first: int, whole: str
    ) -> list[tuple[int, int]]:
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != ANSWERING_ROLE or i < first:
                continue
            before = self._render(messages[:i], where, tools, asks=True)
            with_it = self._render(messages[: i + 1], where, tools)
            if not (whole.startswith(with_it) and with_it.startswith(before)):
                raise ConfigError(
                    f"{where}: the chat template writes message {i} differently once it is part of "
                    "a longer conversation, so its tokens cannot be found. Set data.chat_template "
                    "to a template with {% generation %} blocks, give each answer as a sample of "
                    "its own (prompt and completion), or set data.loss_on='all'."
                )
            spans.append((len(before), len(before) + self._length(with_it[len(before) :])))
        return spans

    def _marked_spans(
        self, messages: Sequence[Message], where: str, tools: Any, first: int
    ) -> list[tuple[int, int]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        special: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        render: Any = render_jinja_template
        _, marked = render(
            conversations=[list(messages)],
            tools=tools,
            chat_template=self.text,
            return_assistant_tokens_mask=True,
            **special,
        )
        start = len(self._render(messages[:first], where, tools)) if first else 0
        return [(a, b) for a, b in marked[0] if a >= start]

    def _length(self, answer: str) -> int:
        """Return the length of an answer without the blanks behind the token that ends it."""
        stripped = answer.rstrip()
        ends = any(stripped.endswith(token) for token in self._tokenizer.all_special_tokens)
        return len(stripped) if ends else len(answer)

    def _render(
        self, messages: Sequence[Message], where: str, tools: Any, *, asks: bool = False
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),  # pyright: ignore[reportArgumentType]
                    tools=tools,
                    chat_template=self.text,
                    add_generation_prompt=asks,
                    tokenize=False,
                )
            )
        # A template is a program: what it raises is its author's choice.
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(
                f"{where}: the chat template fails on messages of {roles or 'nobody'}: {error}. "
                "Correct the messages, or set data.chat_template to another template."
            ) from error


def template_text(tokenizer: PreTrainedTokenizerBase, template: str | Path | None) -> str:
    """Return the text of a template.

    Raises:
        ConfigError: There is none.
    """
    if template is not None:
        text = str(template)
        is_path = "{" not in text
        if is_path and not Path(text).expanduser().is_file():
            raise ConfigError(
                f"data.chat_template={text!r} is neither a file nor the text of a template."
            )
        return Path(text).expanduser().read_text(encoding="utf-8") if is_path else text
    own: Any = tokenizer.chat_template
    if isinstance(own, Mapping):
        own = own.get("default")
    if not own:
        raise ConfigError(
            f"the data are conversations, and the tokenizer ({type(tokenizer).__name__}, "
            f"{tokenizer.name_or_path or 'no name'}) has no chat template. Use the tokenizer of a "
            "chat model, or set data.chat_template to a template or to the path of one."
        )
    return str(own)


def check_unicode(text: str, where: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write and no tokenizer reads.

    Raises:
        ConfigError: The text has one; the message says where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: character {error.start} is half of a pair "
            f"(\\u{ord(text[error.start]):04x}), as a text has it that was cut inside an emoji. "
            "Correct the row, or leave it out."
        ) from error
