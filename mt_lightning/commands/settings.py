"""Find the Hydra settings and make every argument of a `_target_` settable.

[Note: Settings that are not written] The YAML files hold only what differs from the defaults of
the classes that they name. Hydra refuses to set a key that is not written, so an override such as
`trainer.accumulate_grad_batches=4` is looked up in the signature of the `_target_` and, if it is an
argument there, handed to Hydra as `++trainer.accumulate_grad_batches=4`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import MissingConfigException
from hydra.utils import get_object
from omegaconf import MISSING, DictConfig, OmegaConf

from mt_lightning.commands.words import nearest, sort_words
from mt_lightning.errors import ConfigError
from mt_lightning_command import CONFIG_NAME, VERSION_BASE, settings_folders

_SEARCH_PATH = "hydra.searchpath"


def settings_directory() -> Path:
    """Return `conf/`: inside the package where it was installed, beside it in a clone."""
    for folder in settings_folders():
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise ConfigError(
        "The settings folder conf/ is neither in the package nor beside it. "
        "Reinstall the package: pip install --force-reinstall mt-lightning."
    )


def group_choices() -> dict[str, list[str]]:
    """Return the groups of `conf/`, each with its choices."""
    folders = sorted(path for path in settings_directory().iterdir() if path.is_dir())
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """Rewrite a Hydra command line so that all settings can be set, in any order.

    See [Note: Settings that are not written].

    Args:
        arguments: flags and overrides, as Hydra takes them.

    Raises:
        ConfigError: if a word is no setting, or a setting is not known where it would go to.
        HydraException: if an override cannot be parsed.
    """
    groups = group_choices()
    flags, overrides = sort_words(arguments, groups)
    parsed = OverridesParser.create().parse_overrides(overrides)
    plain = [item for item in parsed if _is_plain_value(item, groups)]
    if not parsed:
        return flags
    settings = _compose(parsed, groups, flags)
    completed = {str(item.input_line): _complete(item, settings, groups) for item in plain}
    return [*flags, *(completed.get(word, word) for word in overrides)]


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


def _is_plain_value(override: Override, groups: Mapping[str, Sequence[str]]) -> bool:
    name = override.key_or_group
    known = name in groups or name.partition(".")[0] == "hydra"
    return override.type is OverrideType.CHANGE and not known and "/" not in name


def _compose(
    parsed: Sequence[Override], groups: Mapping[str, Sequence[str]], flags: Sequence[str]
) -> DictConfig:
    """Compose the settings that are written, with the chosen groups."""
    choices = [str(item.input_line) for item in parsed if item.key_or_group in groups]
    searched = [str(item.input_line) for item in parsed if item.key_or_group == _SEARCH_PATH]
    extra = get_args_parser().parse_args(list(flags)).config_dir
    if extra is not None:
        searched.append(f"{_SEARCH_PATH}=[file://{Path(extra).absolute()}]")
    with initialize_config_dir(str(settings_directory()), version_base=VERSION_BASE):
        try:
            return compose(CONFIG_NAME, overrides=[*searched, *_first_choices(choices)])
        except MissingConfigException as error:
            group, _, choice = str(error.missing_cfg_file).rpartition("/")
            options = list(error.options or [])
            meant = nearest(choice, options)
            if not meant:
                raise
            raise ConfigError(
                f"{group}={choice}: there is no such choice; did you mean {group}={meant}? Those "
                f"of {group} are {', '.join(options)}."
            ) from None


def _first_choices(choices: Sequence[str]) -> list[str]:
    # A sweep over a group ("model=tiny,smollm2") is looked up in its first choice.
    return [choice.split(",")[0] for choice in choices if "[" not in choice and "{" not in choice]


def _complete(override: Override, settings: DictConfig, groups: Mapping[str, Sequence[str]]) -> str:
    line = str(override.input_line)
    name = override.key_or_group
    _check_known(name, settings, groups)
    parent_key, _, name = name.rpartition(".")
    _check_switch(override, settings, parent_key, name)
    parent = OmegaConf.select(settings, parent_key, throw_on_missing=False) if parent_key else None
    if not isinstance(parent, DictConfig) or name in parent or "_target_" not in parent:
        return line
    target = str(parent._target_)
    parameters = _parameters(target)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if name in parameters or takes_any:
        return f"++{line}"
    meant = nearest(name, parameters)
    hint = f"did you mean {parent_key}.{meant}?" if meant else f"it takes {', '.join(parameters)}."
    raise ConfigError(f"{override.key_or_group}: {target} has no setting {name!r}; {hint}")


def _check_known(name: str, settings: DictConfig, groups: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError where a part of the name is not written, and cannot be an argument."""
    node: Any = settings
    path = ""
    for part in name.split("."):
        if not isinstance(node, DictConfig) or "_target_" in node:
            return
        if part not in node:
            known: list[str] = sorted({str(key) for key in node} | set([] if path else groups))
            meant = nearest(part, known)
            hint = f"did you mean {path}{meant}?" if meant else f"known are {', '.join(known)}."
            raise ConfigError(
                f"{name}: there is no setting {path + part!r}; {hint} To add one, write +{name}=..."
            )
        node = None if OmegaConf.is_missing(node, part) else node[part]
        path += f"{part}."


def _check_switch(override: Override, settings: DictConfig, parent_key: str, name: str) -> None:
    """Raise ConfigError where a switch of ours gets what is no switch: "no" would count as true."""
    parent = (
        OmegaConf.select(settings, parent_key, throw_on_missing=False) if parent_key else settings
    )
    if not isinstance(parent, DictConfig) or "_target_" in parent:
        return  # a class checks its own
    written: Any = OmegaConf.to_container(parent, resolve=False)
    value = override.value()
    refers = override.is_sweep_override() or (isinstance(value, str) and "${" in value)
    if isinstance(written.get(name), bool) and not isinstance(value, bool) and not refers:
        raise ConfigError(
            f"{override.input_line}: {override.key_or_group} is a switch; set it to true or false."
        )


def _parameters(target: str) -> Mapping[str, inspect.Parameter]:
    found = inspect.signature(get_object(target)).parameters
    return {name: parameter for name, parameter in found.items() if not name.startswith("_")}
