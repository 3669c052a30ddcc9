"""Errors of the kit: each is also the builtin that a caller would expect to catch.

Every message has three parts: what failed, with numbers; which limit; which setting changes it.
"""

from __future__ import annotations


class MegaTrainError(Exception):
    """Base of every error that the kit raises on purpose."""


class BudgetError(MegaTrainError, MemoryError):
    """A memory or disk budget is too small; the message names the smallest that works.

    Attributes:
        smallest_gb: The smallest budget that works, in GiB, where it is known.
    """

    smallest_gb: float | None = None


class StorageError(MegaTrainError, OSError):
    """A read, write or sync failed; the message names path, offset and errno."""

    final = False
    """Whether it must not be tried again, nor what it is a part of: a failed sync, or one that was
    given its time already."""


class CorruptPageError(StorageError):
    """Bytes read back do not match their checksum, or a file has the wrong format."""


class ConfigError(MegaTrainError, ValueError):
    """A setting is wrong or not supported; the message names the setting."""


class StepError(MegaTrainError, RuntimeError):
    """A training step did something that paging cannot follow; nothing of it was applied."""
