"""Small files of a run, written once and named by what they hold."""

from __future__ import annotations

import hashlib

from mt_lightning.engine.machine import KEPT_PREFIX
from mt_lightning.errors import CorruptPageError
from mt_lightning.tiers.store import Store


def keep(store: Store, data: bytes) -> str:
    """Keep bytes in the directory of the run; return the name to ask for them by."""
    name = _name_of(data)
    if store.read_small(name) is None:
        store.write_small(name, data)
    return name


def kept(store: Store, name: str) -> bytes:
    """Return what was kept under `name`.

    Raises:
        CorruptPageError: It is not there, or not what it was.
    """
    data = store.read_small(name)
    if data is None or not is_kept(name, data):
        raise CorruptPageError(None, "a commit names this file; it is gone or damaged", name)
    return data


def is_kept(name: str, data: bytes) -> bool:
    """Tell whether these are the bytes that were kept under a name."""
    return name == _name_of(data)


def _name_of(data: bytes) -> str:
    return f"{KEPT_PREFIX}{hashlib.sha256(data).hexdigest()[:16]}"
