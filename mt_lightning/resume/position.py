"""Where a run is in its training data, and how another run gets there.

[Note: the order of the data]
A loader draws its order from a generator: when its iterator is made, when the first batch is taken,
and, where several loaders of different length go together, whenever a short one begins again. The
generators are recorded just before each of these moments; a run that goes on sets them at the same
moments, skips the batches that were consumed, and then sets them to what they were when the step
ended. Workers and samplers draw the same numbers as before. Loaders with `state_dict` are asked for
their state instead.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
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
        self._generators: list[torch.Generator] = []
        self._begun = True
        """Whether a batch of the newest iterator has been taken."""
        self._iterator_rng: dict[str, Any] = {}
        self._draws: dict[int, dict[str, Any]] = {}
        """Generators before the batches at which a loader draws, by the batch's number."""
        self._last: tuple[int, dict[str, Any]] | None = None
        """Number of the last batch, and the generators before it was taken."""
        self._before: tuple[int, list[int], dict[str, Any]] | None = None
        """Number, iterators and generators before the last batch was taken."""

    def before_iterator(self, loader: object | None = None) -> None:
        """Record the generators: an iterator is about to be made.

        Args:
            loader: A training loader that is new; several may follow each other.
        """
        if loader is not None:
            if self._begun:
                self._generators = []
            self._generators += [g for g in _generators_of(loader) if g not in self._generators]
        self._begun = False
        self._iterator_rng = self._rng()
        self._draws, self._before = {}, None

    def before_batch(self) -> None:
        """Record the generators where a batch may draw from them."""
        self._note_restart()
        number, iterators, rng = self._number, self._iterators(), self._rng()
        # A loader without a length is read one batch ahead: under what is recorded here.
        self._last = (number, rng)
        if not self._begun:
            self._begun = True
            self._draws[number] = rng
        elif len(iterators) > 1:
            self._before = (number, iterators, rng)

    def _note_restart(self) -> None:
        """See whether the last batch made a loader begin again."""
        if self._before is not None:
            number, iterators, rng = self._before
            if iterators != self._iterators():
                self._draws[number] = rng
            self._before = None

    @property
    def _number(self) -> int:
        return self._trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def _iterators(self) -> list[int]:
        loader = self._trainer.fit_loop._combined_loader
        iterator = getattr(loader, "_iterator", None)
        return [id(each) for each in getattr(iterator, "iterators", [])]

    def _rng(self) -> dict[str, Any]:
        return {"global": take_rng(), "loaders": [g.get_state() for g in self._generators]}

    def _give_rng(self, state: dict[str, Any]) -> None:
        give_rng(state["global"])
        for generator, saved in zip(self._generators, state["loaders"], strict=True):
            generator.set_state(saved)

    def take(self) -> dict[str, Any]:
        """Return where the run is."""
        self._note_restart()
        loader = self._trainer.fit_loop._combined_loader
        assert loader is not None
        loaders = loader.flattened
        # Loaders are skipped through together: states count only where all of them have one, and
        # where no batch has been read ahead.
        fetcher = self._trainer.fit_loop._data_fetcher
        all_stateful = all(isinstance(each, _Stateful) for each in loaders)
        all_stateful &= fetcher is not None and fetcher.length is not None
        draws = dict(self._draws)
        if self._last is not None:
            draws[self._last[0]] = self._last[1]
        return {
            "iterator_rng": self._iterator_rng,
            "draws": draws,
            "num_batches": self._number,
            "num_loaders": len(loaders),
            "loader_states": [each.state_dict() for each in loaders] if all_stateful else [],
            "rng": self._rng(),
        }

    def give(self, taken: dict[str, Any], fetcher: _DataFetcher) -> None:
        """Bring the training data of this run to where another one was.

        Args:
            taken: What `take` returned.
            fetcher: The data fetcher of the epoch loop.

        Raises:
            ConfigError: The data are not what they were.
        """
        loader, count = self._trainer.fit_loop._combined_loader, taken["num_batches"]
        assert loader is not None
        for what, then, now in (
            ("training dataloader(s)", taken["num_loaders"], len(loader.flattened)),
            ("generator(s) of their own", len(taken["rng"]["loaders"]), len(self._generators)),
        ):
            if then != now:
                raise ConfigError(
                    f"the run was committed with {then} {what}, and there are {now} now. Give the "
                    "same data, or set on_existing='overwrite'."
                )
        for each in loader.flattened:
            _set_sampler_epoch(each, self._trainer.current_epoch)
            if not self._trainer.current_epoch:
                # Later on an iterator whose workers stay begins again, which draws less.
                _end_workers(each)
        states = taken["loader_states"]
        for each, state in zip(loader.flattened, states, strict=bool(states)):
            each.load_state_dict(state)
        if self._trainer.current_epoch and any(map(_keeps_workers, loader.flattened)):
            log.warning(
                "persistent_workers=True: random augmentation in workers that have lived through "
                "an epoch cannot be continued exactly."
            )
        self._give_rng(taken["iterator_rng"])
        iter(fetcher)
        if states:
            fetcher.fetched = count
        else:
            self._skip(fetcher, count, taken["draws"])
        self._iterator_rng, self._draws = taken["iterator_rng"], taken["draws"]
        self._begun, self._before, self._last = count > 0, None, None
        self._give_rng(taken["rng"])

    def _skip(self, fetcher: _DataFetcher, count: int, draws: dict[int, dict[str, Any]]) -> None:
        if count >= _MANY_BATCHES:
            log.info("skipping %d batches that were trained on already.", count)
        for number in range(count):
            if number in draws:
                self._give_rng(draws[number])
            try:
                next(fetcher)
            except StopIteration:
                raise ConfigError(
                    f"the training data ended after {number} batches, but the run was committed "
                    f"after batch {count} of its epoch. Give the same data and batch size, or set "
                    "on_existing='overwrite'."
                ) from None


def _generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found: list[torch.Generator] = []
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
    return found


def _keeps_workers(loader: object) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def _end_workers(loader: Any) -> None:
    """End workers that stay, so that the next iterator starts new ones under its generators."""
    iterator = getattr(loader, "_iterator", None)
    if _keeps_workers(loader) and iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None


def check_resumable(fetcher: object) -> None:
    """Raise ConfigError where nobody can say how many batches were consumed."""
    if isinstance(fetcher, _DataLoaderIterDataFetcher):
        raise ConfigError(
            "training_step(self, dataloader_iter) takes batches itself, so that nobody can say how "
            "many were consumed when a run goes on. Take `batch` instead, or set "
            "on_existing='overwrite'."
        )
