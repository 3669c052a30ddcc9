"""`megatrain fit`, `validate`, `test` and `predict`: Lightning's own command line, on pages."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from lightning.pytorch import LightningDataModule, LightningModule

from mt_lightning.errors import ConfigError

STAGES = ("fit", "validate", "test", "predict")
_QUIET = "JSONARGPARSE_DEPRECATION_WARNINGS"
_STRATEGY = "mt_lightning.MegaTrainStrategy"
_NAME = "megatrain"
_FLAG = "--trainer.strategy"
_EPILOG = "What the strategy can be told: megatrain {stage} --trainer.strategy.help " + _STRATEGY


def run_stage(stage: str, arguments: Sequence[str]) -> int:
    """Build module, data and Trainer as the words say, and run the stage.

    Args:
        stage: one of `STAGES`.
        arguments: the words after it, as LightningCLI takes them.

    Raises:
        ConfigError: if the words are those of another command.
        SystemExit: if the words cannot be read, or ask for help only.
    """
    # Lightning uses names that jsonargparse is about to drop; it is nothing that a user can change.
    os.environ.setdefault(_QUIET, "off")
    from lightning.pytorch.cli import LightningCLI

    class PagedCLI(LightningCLI):
        """Says in one sentence which argument a class has refused."""

        def instantiate_classes(self) -> None:
            try:
                super().instantiate_classes()
            except ValueError as error:
                refused = _refused(str(error))
                if not refused:
                    raise
                raise ConfigError(refused) from error

    import mt_lightning.callbacks
    import mt_lightning.huggingface  # noqa: F401 - their classes can then be named without a path

    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(
            f"`megatrain {stage}` does not take {arguments[0]!r}: its settings are flags, as in "
            f"--trainer.max_steps=3, or lie in a file: -c FILE. GROUP=CHOICE and SETTING=VALUE are "
            "those of `megatrain train`."
        )
    before = sys.argv
    # Not as args=: errors and help then name the program as it was called.
    sys.argv = [os.path.basename(before[0]) or "megatrain", stage, *_by_class(arguments)]
    try:
        PagedCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_defaults={"strategy": {"class_path": _STRATEGY}},
            parser_kwargs={stage: {"epilog": _EPILOG.format(stage=stage)}},
            # Without a logger the file goes to the working directory: the next run replaces it.
            save_config_kwargs={"overwrite": True},
        )
    finally:
        sys.argv = before
    return 0


def _by_class(arguments: Sequence[str]) -> list[str]:
    """Name the strategy by its class: under its short name jsonargparse takes no options of it."""
    words = list(arguments)
    for i, word in enumerate(words):
        if word == f"{_FLAG}={_NAME}":
            words[i] = f"{_FLAG}={_STRATEGY}"
        elif word == _NAME and i and words[i - 1] == _FLAG:
            words[i] = _STRATEGY
    return words


def _refused(text: str) -> str:
    """Return what classes said, where jsonargparse found none that takes the arguments."""
    if not text.startswith("Does not validate against any of the Union subtypes"):
        return ""
    said = re.findall(r"^\s*- (.*)$", text, re.MULTILINE)
    return " ".join(line for line in said if not line.startswith("Expected a "))
