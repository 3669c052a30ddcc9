"""Tell the words of `megatrain train` apart: Hydra's flags, and settings; say what is neither."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from hydra._internal.utils import get_args_parser

from mt_lightning.errors import ConfigError


def sort_words(
    arguments: Sequence[str], groups: Mapping[str, Collection[str]]
) -> tuple[list[str], list[str]]:
    """Return the flags, with their values, and the settings; each in the order they came in.

    `+GROUP=CHOICE` is taken for `GROUP=CHOICE`: every group has a choice already, which Hydra would
    have it say.

    Args:
        arguments: the words after the command.
        groups: the choices of each group.

    Raises:
        ConfigError: if a word is neither a flag of Hydra nor a setting.
    """
    parser = get_args_parser()
    options, unknown = parser.parse_known_intermixed_args(list(arguments))
    for word in unknown:
        bare = word.lstrip("-")
        example = bare if "=" in bare else f"{bare}=..."
        raise ConfigError(
            f"{word} is no flag of `megatrain train`. Settings are written without dashes: "
            f"{example}. With dashes they are those of `megatrain fit`."
        )
    given = list(options.overrides)
    for index, word in enumerate(given):
        if "=" not in word and not word.startswith("~"):
            follows = given[index + 1] if index + 1 < len(given) else None
            raise ConfigError(_no_setting(word, follows, groups))
    left = Counter(given)
    flags = []
    for word in arguments:
        if left[word]:
            left[word] -= 1
        else:
            flags.append(word)
    return flags, [_plain_group(word, groups) for word in given]


def nearest(word: str, known: Collection[str]) -> str:
    """Return the known word that is most like a misspelt one, "" if none is."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), "")


def _no_setting(word: str, follows: str | None, groups: Mapping[str, Collection[str]]) -> str:
    if word in groups:
        meant = f"{word}=CHOICE, of {', '.join(sorted(groups[word]))}"
    elif homes := [group for group, choices in groups.items() if word in choices]:
        meant = " or ".join(f"{group}={word}" for group in sorted(homes))
    elif follows is not None and "=" not in follows:
        meant = f"{word}={follows}"
    else:
        meant = f"{word}=VALUE"
    return f"{word!r} is no setting: settings are GROUP=CHOICE or NAME=VALUE. Write {meant}."


def _plain_group(word: str, groups: Mapping[str, Collection[str]]) -> str:
    name = word.partition("=")[0]
    return word[1:] if name.startswith("+") and name[1:] in groups else word
