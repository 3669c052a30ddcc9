"""Conversations as lists of messages, those of ShareGPT among them, and who speaks in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mt_lightning.errors import ConfigError

Message = Mapping[str, Any]

ANSWERING_ROLE = "assistant"
"""The role whose messages are answers."""

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ANSWERING_ROLE,
    ANSWERING_ROLE: ANSWERING_ROLE,
}


def as_messages(messages: Any, where: str) -> Sequence[Message]:
    """Return a conversation as messages with `role` and `content`.

    Those of ShareGPT (`from` and `value`) are rewritten; its roles are system, human and gpt.

    Args:
        messages: What the column holds.
        where: Which row it is, for messages of errors.

    Raises:
        ConfigError: It is no conversation.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise ConfigError(
            f"{where}: a conversation is a list of messages with role and content, not "
            f"{'an empty list' if messages == [] else f'a {type(messages).__name__}'}."
        )
    return [_message(message, f"{where}: message {i}") for i, message in enumerate(messages)]


def role_names(roles: Mapping[str, int]) -> str:
    """Return the roles of conversations and how often each was seen, "" where there are none."""
    return ", ".join(f"{role!r} ({count:,} messages)" for role, count in roles.items())


def _message(message: Any, where: str) -> Message:
    if isinstance(message, Mapping):
        if "role" in message:
            return message
        if "from" in message and "value" in message:
            return _from_sharegpt(message, where)
    there = ", ".join(map(str, message)) if isinstance(message, Mapping) else repr(message)
    raise ConfigError(
        f'{where} has no role, but {there[:80]}. A message is {{"role": "user", "content": "..."}}'
        ', or in the form of ShareGPT {"from": "human", "value": "..."}.'
    )


def _from_sharegpt(message: Message, where: str) -> Message:
    role = message["from"]
    if role not in _SHAREGPT_ROLES:
        raise ConfigError(
            f"{where} is from {role!r}; known in the form of ShareGPT are "
            f"{', '.join(_SHAREGPT_ROLES)}. Write its messages with role and content, where every "
            "role that the chat template knows can be used."
        )
    return {"role": _SHAREGPT_ROLES[role], "content": message["value"]}
