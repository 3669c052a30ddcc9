"""What a run that starts now can expect, by the profile of this machine, and what it was planned.

[Note: what is known at the start] Bytes are known exactly, tokens are not: batches have not come
yet. So at the start it is said how long drives and updates take, and from which batch on computing
hides them. Computing is estimated from the number of parameters: nothing is run for it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mt_lightning.engine.build import Build
from mt_lightning.engine.options import Options
from mt_lightning.engine.plan import Plan
from mt_lightning.errors import MegaTrainError
from mt_lightning.planning.here import machine_here
from mt_lightning.planning.machines import Machine
from mt_lightning.planning.profile import MachineProfile
from mt_lightning.planning.tiers import ram_items, runs_layer_major, tiers_of
from mt_lightning.planning.timing import DRIVES, UPDATE, StepTime, time_of_step
from mt_lightning.planning.training import OPTIMIZERS, Training
from mt_lightning.planning.work import estimate_work

log = logging.getLogger(__name__)

_BUSY_SHARE = 0.9
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is expected of a run.

    Attributes:
        build: Its pages.
        plan: What stays in RAM.
        training: Its settings; the batch is one token.
        machine: This one, by its profile; None where it was not measured.
        measured_at: When it was measured.
    """

    build: Build
    plan: Plan
    training: Training
    machine: Machine | None
    measured_at: str = ""

    def ram_bytes(self, tokens: int = 0) -> int:
        """Return what `max_ram_gb` counts at the peak.

        Args:
            tokens: Of a micro-batch, for what units receive; 0 where that is not known.
        """
        micros = self.training.accumulate_grad_batches
        units = estimate_work(self.build.units, tokens, "").units if tokens else ()
        times = micros if runs_layer_major(self.plan) else 1
        held = [(times * w.input_bytes, 0) for w in units]
        holds = self.plan.schedule == "deferred" or micros > 1
        return sum(ram_items(self.build, self.plan, held, holds).values())

    def step(self, tokens: int) -> StepTime | None:
        """Return the time of a step, None where the machine was not measured.

        Args:
            tokens: Of a micro-batch.
        """
        if self.machine is None:
            return None
        training = dataclasses.replace(self.training, sequence_length=max(1, tokens))
        work = estimate_work(self.build.units, training.tokens, "as nothing is run for it")
        tiers = tiers_of(self.build, self.plan, work, training, self.machine)
        return time_of_step(self.build, self.plan, tiers, work, training, self.machine)

    def text(self) -> str:
        """Return a sentence for the start; empty where there is nothing to say."""
        least = self.step(1)
        if least is None:
            return ""
        drives_s, update_s = (
            sum(phase.times * phase.busy_s[part] for phase in least.phases)
            for part in (DRIVES, UPDATE)
        )
        said = f"by the profile of {self.measured_at[:10]} drives take {drives_s:.2g} s a step and "
        said += f"updates {update_s:.2g} s"
        tokens = self._break_even()
        if tokens is None:
            return f"{said}; no batch makes computing set the time."
        batches = self.training.accumulate_grad_batches
        of = f"of {batches} batches " * (batches > 1)
        said += f"; from about {batches * tokens:,} tokens a step {of}on, computing sets the time"
        return f"{said}."

    def _break_even(self) -> int | None:
        """Return the fewest tokens of a micro-batch with which computing takes most of a step."""
        tokens = 1
        while tokens <= _MOST_TOKENS:
            time = self.step(tokens)
            assert time is not None
            if time.compute_share >= _BUSY_SHARE:
                return tokens
            tokens = max(tokens + 1, int(tokens * 1.1))
        return None


def outlook(
    build: Build,
    plan: Plan,
    options: Options,
    *,
    optimizers: Sequence[object],
    micro_batches: int | None,
    precision: str,
) -> Outlook:
    """Look at a run that has been attached; nothing is opened but the profile.

    Args:
        build: Its pages.
        plan: What stays in RAM.
        options: What the user set.
        optimizers: Its optimizers.
        micro_batches: Of a step; None where that is not known, then one is taken.
        precision: One of `PRECISIONS`.
    """
    names = {type(optimizer).__name__.lower() for optimizer in optimizers} & OPTIMIZERS.keys()
    training = Training(
        batch_size=1,
        sequence_length=1,
        accumulate_grad_batches=micro_batches or 1,
        precision=precision,
        optimizer=names.pop() if len(names) == 1 else "sgd",  # its state is counted in bytes
        options=dataclasses.replace(options, layer_major="auto"),
    )
    machine, measured_at = None, ""
    try:
        profile = MachineProfile.load()
        machine, measured_at = machine_here(profile, plan.directories), profile.measured_at
    except MegaTrainError as error:
        log.debug("nothing is said of times: %s", error)
    return Outlook(
        build=build, plan=plan, training=training, machine=machine, measured_at=measured_at
    )
