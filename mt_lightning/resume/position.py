"""Where a run is in its training data, and how another run gets there.

[Note: the order of the data]
A loader draws its order from the global generator when its iterator is made. So the generators are
recorded just before that; a run that goes on makes its iterator under them, skips the batches that
were consumed, and then sets the generators to what they were when the step ended. Workers and
samplers draw the same numbers as before. A loader with `state_dict` is asked for its state instead.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher

from mt_lightning.errors import ConfigError
from mt_lightning.resume.rng import give_rng, take_rng

log = logging.getLogger(__name__)

_MANY_BATCHES = 1000


class DataPosition:
    """Follows the training data of one fit."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._iterator_rng: dict[str, Any] | None = None

    def before_iterator(self) -> None:
        """Record the generators: the training loader is about to make an iterator."""
        self._iterator_rng = take_rng()

    def take(self) -> dict[str, Any]:
        """Return where the run is."""
        loop = self._trainer.fit_loop
        loader = loop._combined_loader
        assert loader is not None
        loaders = loader.flattened
        # Loaders are skipped through together: states count only where all of them have one.
        all_stateful = all(isinstance(each, _Stateful) for each in loaders)
        states = [each.state_dict() for each in loaders] if all_stateful else []
        return {
            "iterator_rng": self._iterator_rng,
            "num_batches": loop.epoch_loop.batch_progress.current.ready,
            "num_loaders": len(loader.flattened),
            "loader_states": states,
        }

    def give(self, taken: dict[str, Any], fetcher: _DataFetcher) -> None:
        """Bring the training data of this run to where another one was.

        Args:
            taken: What `take` returned.
            fetcher: The data fetcher of the epoch loop.

        Raises:
            ConfigError: The data ended before it got there: it is not what it was.
        """
        loop, count = self._trainer.fit_loop, taken["num_batches"]
        loader = loop._combined_loader
        assert loader is not None
        if taken["num_loaders"] != len(loader.flattened):
            raise ConfigError(
                f"the run was committed with {taken['num_loaders']} training dataloader(s), and "
                f"there are {len(loader.flattened)} now. Give the same data, or set "
                "on_existing='overwrite'."
            )
        for each in loader.flattened:
            _set_sampler_epoch(each, self._trainer.current_epoch)
        states = taken["loader_states"]
        for each, state in zip(loader.flattened, states, strict=bool(states)):
            each.load_state_dict(state)
        if taken["iterator_rng"] is not None:
            give_rng(taken["iterator_rng"])
            self._iterator_rng = taken["iterator_rng"]
        iter(fetcher)
        if states:
            fetcher.fetched = count
            return
        if count >= _MANY_BATCHES:
            log.info("skipping %d batches that were trained on already.", count)
        for done in range(count):
            try:
                next(fetcher)
            except StopIteration:
                raise ConfigError(
                    f"the training data ended after {done} batches, but the run was committed "
                    f"after batch {count} of its epoch. Give the same data and batch size, or set "
                    "on_existing='overwrite'."
                ) from None


def check_resumable(fetcher: object) -> None:
    """Raise ConfigError where nobody can say how many batches were consumed."""
    if isinstance(fetcher, _DataLoaderIterDataFetcher):
        raise ConfigError(
            "training_step(self, dataloader_iter) takes batches itself, so that nobody can say how "
            "many were consumed when a run goes on. Take `batch` instead, or set "
            "on_existing='overwrite'."
        )
