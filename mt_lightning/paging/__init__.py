"""`mt.page`: the engine under a training loop that is the user's own."""

from mt_lightning.paging.handle import Paged
from mt_lightning.paging.start import page

__all__ = ["Paged", "page"]
