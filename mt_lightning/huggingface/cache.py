"""Where converted models and token files are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "MT_LIGHTNING_CACHE"


def cache_directory(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache directory, which may not exist yet.

    Args:
        cache_dir: the directory to use; None means `$MT_LIGHTNING_CACHE`, else
            `~/.cache/mt_lightning`.
    """
    chosen = cache_dir or os.environ.get(CACHE_VARIABLE) or "~/.cache/mt_lightning"
    return Path(chosen).expanduser().absolute()
