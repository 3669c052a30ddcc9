"""Whether a value that a user wrote is of the type that an argument is annotated with.

Only what is certain is refused: an annotation that is not understood takes anything, and so does
one of a class that YAML cannot write.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from mt_lightning.errors import ConfigError

_PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
}


def check_types(settings: DictConfig, path: str = "") -> None:
    """Refuse values of arguments that are of another type than their class says.

    Args:
        settings: The composed config, or a part of it; every `_target_` in it is looked at.
        path: Where that part is.

    Raises:
        ConfigError: Names the setting, its value and what it takes.
    """
    # With references in place of their values: those are checked where they are written.
    _check(OmegaConf.to_container(settings, resolve=False), path)


def _check(node: Any, path: str) -> None:
    if not isinstance(node, dict):
        return
    target = node.get("_target_")
    hints, defaults = _annotations(target) if isinstance(target, str) else ({}, {})
    for key, value in node.items():
        name = f"{path}.{key}" if path else str(key)
        if key in hints and value != defaults.get(key) and not fits(value, hints[key]):
            raise ConfigError(f"{name}={value!r}: give {described(hints[key])}.")
        _check(value, name)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value, as YAML gives it, may be of an annotated type."""
    if hint in (Any, object) or (isinstance(value, Mapping) and "_target_" in value):
        return True
    if isinstance(value, str) and ("${" in value or value == "???"):
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in arguments)
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole or (hint is float and isinstance(value, float))
    if hint in _PLAIN:
        return isinstance(value, hint)
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if issubclass(kind, (Sequence, set)) or kind is Iterable:
        each = arguments[0] if arguments and arguments[1:] in ((), (...,)) else Any
        return isinstance(value, (list, tuple)) and all(fits(item, each) for item in value)
    # A class: YAML writes numbers and switches, of which none is one.
    return not isinstance(value, (bool, int, float)) or isinstance(value, kind)


def described(hint: Any) -> str:
    """Return in words what YAML can give for an annotated type."""
    words = list(dict.fromkeys(_words(hint)))
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _words(hint: Any) -> list[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [word for each in arguments for word in _words(each)]
    if origin is Literal:
        return [repr(each) for each in arguments]
    if hint in _PLAIN:
        return [_PLAIN[hint]]
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return ["a mapping"]
    if isinstance(kind, type) and issubclass(kind, Sequence):
        return ["a list"]
    return [f"a {getattr(kind, '__name__', kind)}"]


def _annotations(target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the annotations of the arguments of a class or function, and their defaults."""
    found = get_object(target)
    function = found.__init__ if inspect.isclass(found) else found
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return {}, {}  # names that exist for type checkers only: nothing is certain then
    parameters = inspect.signature(found).parameters
    return hints, {name: each.default for name, each in parameters.items()}
