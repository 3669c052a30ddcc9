"""A tokenizer that knows conversations, and samples of every kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_lightning.huggingface.byte_tokenizer import byte_tokenizer

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, which does not say what the assistant wrote."""

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same, which does."""

FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% else %}...{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""One that writes earlier answers differently."""

NUM_TOKENS = 259


def chat_tokenizer(template: str | None = CHAT) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})  # pyright: ignore
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def conversations(count: int) -> list[dict[str, Any]]:
    return [{"messages": turns(f"what is {i}?", f"it is {'x' * (i % 7)}.")} for i in range(count)]


def marked(tokenizer: Any, ids: Sequence[int], trained: Iterable[Any]) -> str:
    """Return a text with what is trained in brackets."""
    text, inside = "", False
    for token, flag in zip(ids, trained, strict=True):
        if bool(flag) != inside:
            text += "]" if inside else "["
            inside = bool(flag)
        text += tokenizer.decode([token])
    return text + "]" * inside


def shown(tokenizer: Any, sample: Mapping[str, Any]) -> str:
    return marked(tokenizer, sample["input_ids"].tolist(), sample["labels"] != -100)


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
