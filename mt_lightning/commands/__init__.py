"""What the subcommands of `megatrain` do; the command line itself is `mt_lightning.cli`."""

from __future__ import annotations
