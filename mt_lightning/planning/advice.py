"""The settings that make a step fastest, and the batch from which on computing sets the time."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from mt_lightning.engine.build import Build
from mt_lightning.errors import MegaTrainError
from mt_lightning.planning.machines import GIB, Machine
from mt_lightning.planning.planner import Answer, Worker, answer
from mt_lightning.planning.tiers import Model, lay_out
from mt_lightning.planning.training import Training

BUSY_SHARE = 0.9
"""A step is bound by computing when the device computes for this share of it."""
_MOST_MICRO_BATCHES = 1 << 14
_PACKABLE = ("adam", "adamw")


@dataclass(frozen=True)
class Best:
    """The fastest settings.

    Attributes:
        exact: Of those that train to the same bits as plain Lightning.
        lossy: Of all, where state in 2-8 bits per value is faster than the best exact one.
        break_even: With the settings of `exact`, or of `lossy` where given, and batches run unit by
            unit: the fewest micro-batches of a step with which computing sets the time. None where
            no number does.
        least_ram: With twice the tokens of `break_even`: the smallest `max_ram_gb` with which
            computing still sets the time.
    """

    exact: Answer | None
    lossy: Answer | None
    break_even: Answer | None
    least_ram: Answer | None = None


class Adviser:
    """Tries settings for one model on one machine.

    Args:
        model: The model.
        machine: The machine.
        worker: Counts what the model computes.
        found: An answer whose pages need not be laid out again.
    """

    def __init__(
        self, model: Model, machine: Machine, worker: Worker, found: Answer | None = None
    ) -> None:
        self._model, self._machine, self._worker = model, machine, worker
        self._builds: dict[tuple[str, bool | str, bool], Build] = {}
        if found is not None and found.build is not None:
            self._builds[self._key(found.training)] = found.build

    @staticmethod
    def _key(training: Training) -> tuple[str, bool | str, bool]:
        form = training.options.optimizer_compression
        return training.optimizer, form, training.keeps_masters

    def answer(self, training: Training) -> Answer | None:
        """Return the answer for settings, None where they do not go with model or machine."""
        key = self._key(training)
        try:
            if key not in self._builds:
                self._builds[key] = lay_out(self._model, training)
            found = answer(
                self._model,
                training,
                self._machine,
                self._worker,
                build=self._builds[key],
                advises=False,
            )
        except MegaTrainError:
            return None
        return found if found.fits else None

    def best(self, training: Training) -> Best:
        """Try the settings that a user may choose, around those given.

        Args:
            training: The settings; batch, precision and optimizer stay.
        """
        found: dict[bool, Answer] = {}
        forms: tuple[bool | str, ...] = (False, "lossless")
        if training.optimizer in _PACKABLE:
            forms = (*forms, True)
        orders = (False, True) if training.accumulate_grad_batches > 1 else (False,)
        for form, order, recompute in itertools.product(forms, orders, ("auto", True)):
            options = dataclasses.replace(
                training.options,
                optimizer_compression=form,
                layer_major=order,
                recompute=recompute,
            )
            one = self.answer(dataclasses.replace(training, options=options))
            lossy = form is True
            if one is None or one.time is None:
                continue
            before = found.get(lossy)
            if before is None or _seconds(one) < 0.99 * _seconds(before):
                found[lossy] = one
        exact, lossy = found.get(False), found.get(True)
        if exact is not None and lossy is not None and _seconds(lossy) > 0.95 * _seconds(exact):
            lossy = None
        one = lossy or exact
        even = None if one is None else self.break_even(one.training)
        return Best(exact, lossy, even, None if even is None else self._least_ram_of_twice(even))

    def _least_ram_of_twice(self, even: Answer) -> Answer | None:
        micros = 2 * even.training.accumulate_grad_batches
        options = dataclasses.replace(even.training.options, layer_major=True)
        twice = dataclasses.replace(even.training, accumulate_grad_batches=micros, options=options)
        one = self.answer(twice)
        return None if one is None else self.least_ram(one)

    def break_even(self, training: Training, share: float = BUSY_SHARE) -> Answer | None:
        """Return the answer for the fewest micro-batches with which computing sets the time.

        Args:
            training: The settings; batches run unit by unit.
            share: Of the step in which the device computes.
        """

        def tried(micros: int) -> Answer | None:
            options = dataclasses.replace(
                training.options, layer_major=micros > 1, recompute=_recompute(training)
            )
            return self.answer(
                dataclasses.replace(training, accumulate_grad_batches=micros, options=options)
            )

        below, above, found = 0, 1, None
        while above <= _MOST_MICRO_BATCHES:
            one = tried(above)
            if one is not None and one.time is not None and one.time.compute_share >= share:
                found = one
                break
            below, above = above, 2 * above
        if found is None:
            return None
        while above - below > max(1, below // 16):
            middle = (below + above) // 2
            one = tried(middle)
            if one is not None and one.time is not None and one.time.compute_share >= share:
                above, found = middle, one
            else:
                below = middle
        return found

    def least_ram(self, one: Answer, share: float = BUSY_SHARE) -> Answer:
        """Return the answer with the least RAM with which computing still sets the time.

        Args:
            one: An answer of which that is true.
            share: Of the step in which the device computes.
        """
        assert one.plan is not None
        low, high, found = one.plan.min_ram_bytes, one.plan.ram_limit_bytes, one
        while high > 1.05 * low:
            middle = (low + high) // 2
            options = dataclasses.replace(one.training.options, max_ram_gb=round_gb(middle))
            tried = self.answer(dataclasses.replace(one.training, options=options))
            if tried is not None and tried.time is not None and tried.time.compute_share >= share:
                high, found = middle, tried
            else:
                low = middle
        if found is one:
            options = dataclasses.replace(one.training.options, max_ram_gb=round_gb(high))
            found = dataclasses.replace(
                one, training=dataclasses.replace(one.training, options=options)
            )
        return found


def round_gb(nbytes: int) -> float:
    """Return bytes as a number of GiB that a person would type, not less."""
    step = 0.01 if nbytes < GIB else 0.1 if nbytes < 100 * GIB else 1.0
    return round(-(-nbytes // (step * GIB)) * step, 2)


def _recompute(training: Training) -> object:
    return "auto" if training.options.recompute is False else training.options.recompute


def _seconds(one: Answer) -> float:
    assert one.time is not None
    return one.time.seconds
