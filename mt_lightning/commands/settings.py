"""Find the Hydra settings and make every argument of a `_target_` settable.

[Note: Settings that are not written] The YAML files hold only what differs from the defaults of
the classes that they name. Hydra refuses to set a key that is not written, so an override such as
`trainer.accumulate_grad_batches=4` is looked up in the signature of the `_target_` and, if it is an
argument there, handed to Hydra as `++trainer.accumulate_grad_batches=4`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.utils import get_object
from omegaconf import MISSING, DictConfig, OmegaConf

from mt_lightning.errors import ConfigError

CONFIG_NAME = "config"
VERSION_BASE = "1.3"
_PACKAGE = Path(__file__).parent.parent


def settings_directory() -> Path:
    """Return `conf/`: inside the package where it was installed, beside it in a clone."""
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise ConfigError(
        f"The settings folder conf/ is neither in {_PACKAGE} nor beside it. "
        "Reinstall the package: pip install --force-reinstall mt-lightning."
    )


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """Rewrite the overrides of a Hydra command line so that all settings can be set.

    See [Note: Settings that are not written].

    Args:
        arguments: flags and overrides, as Hydra takes them.

    Raises:
        ConfigError: if a setting is not an argument of the class that it would go to.
        HydraException: if an override cannot be parsed, or names a group choice that is not there.
    """
    overrides = list(get_args_parser().parse_args(list(arguments)).overrides)
    parsed = OverridesParser.create().parse_overrides(overrides)
    plain = [item for item in parsed if _is_plain_value(item)]
    if not plain:
        return list(arguments)
    groups = {path.name for path in settings_directory().iterdir() if path.is_dir()}
    choices = [str(item.input_line) for item in parsed if item.key_or_group in groups]
    with initialize_config_dir(str(settings_directory()), version_base=VERSION_BASE):
        settings = compose(CONFIG_NAME, overrides=_first_choices(choices))
    completed = {str(item.input_line): _complete(item, settings) for item in plain}
    return [completed.get(argument, argument) for argument in arguments]


def check_complete(settings: DictConfig, path: str = "") -> None:
    """Refuse settings that still need a value.

    Args:
        settings: The composed config, or a part of it.
        path: Where that part is.

    Raises:
        ConfigError: Names what is missing.
    """
    missing = list(_missing_keys(OmegaConf.to_container(settings, resolve=False), path))
    if missing:
        raise ConfigError(
            f"The chosen settings need a value for {', '.join(missing)}. "
            f"Give it on the command line: {missing[0]}=..."
        )


def _missing_keys(node: Any, path: str) -> Iterator[str]:
    # Not OmegaConf.missing_keys: it fails at a reference to a missing value.
    if node == MISSING:
        yield path
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _missing_keys(value, f"{path}.{key}" if path else str(key))


def _is_plain_value(override: Override) -> bool:
    return override.type is OverrideType.CHANGE and "." in override.key_or_group


def _first_choices(choices: Sequence[str]) -> list[str]:
    # A sweep over a group ("model=tiny,smollm2") is looked up in its first choice.
    return [choice.split(",")[0] for choice in choices if "[" not in choice and "{" not in choice]


def _complete(override: Override, settings: DictConfig) -> str:
    line = str(override.input_line)
    parent_key, _, name = override.key_or_group.rpartition(".")
    parent = OmegaConf.select(settings, parent_key, throw_on_missing=False)
    if not isinstance(parent, DictConfig) or name in parent or "_target_" not in parent:
        return line
    target = str(parent._target_)
    parameters = _parameters(target)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if name in parameters or takes_any:
        return f"++{line}"
    close = difflib.get_close_matches(name, parameters, n=1)
    hint = (
        f"did you mean {parent_key}.{close[0]}?" if close else f"it takes {', '.join(parameters)}."
    )
    raise ConfigError(f"{override.key_or_group}: {target} has no setting {name!r}; {hint}")


def _parameters(target: str) -> Mapping[str, inspect.Parameter]:
    found = inspect.signature(get_object(target)).parameters
    return {name: parameter for name, parameter in found.items() if not name.startswith("_")}
