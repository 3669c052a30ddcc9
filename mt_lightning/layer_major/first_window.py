"""Runs the first window again, unit by unit, and says whether it gave the same.

[Note: the check of layer_major="auto"]
The first window runs in the usual order and is watched: the batches, what steps find when they
begin, their losses. When the last backward has ended, and before the optimizer steps, the weights
are still those of before. So modules, buffers and generators are taken back to the start of the
window, the same batches run unit by unit, and losses and gradients are compared. Gradients are
dropped page by page as they complete. Then everything is set to what it was before the replay.
Where the inputs of all batches do not fit, as many as do are run again, after the last of them.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.window.comparison import Comparison, Findings
from mt_lightning.engine.window.learned import Inputs
from mt_lightning.engine.window.micro import Micro
from mt_lightning.engine.window.process_state import ProcessState
from mt_lightning.engine.window.rewind import Snapshot
from mt_lightning.engine.window.window import Window
from mt_lightning.errors import BudgetError, StorageError
from mt_lightning.layer_major.batch import copy_batch
from mt_lightning.layer_major.muted import muted
from mt_lightning.layer_major.verdict import Verdict, model_key
from mt_lightning.layer_major.view import BatchView
from mt_lightning.pager.budget import Reservation

log = logging.getLogger(__name__)

Step = Callable[[OrderedDict[str, Any]], ClosureResult]
OTHER_DRAWS = (
    "steps with inputs of equal shapes draw different numbers of random numbers, so that dropout "
    "masks would be others than in the usual order"
)
_ABSENT = object()
_INTERNAL = ("_parameters", "_buffers", "_modules")


class _Seen:
    """What a step found when it began, and the loss it gave."""

    def __init__(self, trainer: pl.Trainer, kwargs: OrderedDict[str, Any]) -> None:
        # The step may change its batch, and takes it before it is run again.
        self.kwargs = copy_batch(kwargs)
        self.process = ProcessState(trainer.strategy.root_device)
        self.view = BatchView(trainer)
        self.view.replace_batch(next(iter(self.kwargs.values())))
        self.changes: list[tuple[dict[str, Any], str, Any]] = []
        self.loss: torch.Tensor | None = None
        self.again: torch.Tensor | None = None
        self.visited: set[int] = set()


class FirstWindow:
    """Watches one window and runs it again; made before its first batch.

    Args:
        trainer: The trainer.
        engine: The attached engine.
        window: Runs micro-batches unit by unit.
        step: Runs one step.
        group: Returns of how many batches a group is best made, given the bytes that beside them
            are held in RAM.

    Attributes:
        verdict: What was found, None while nothing is.
        ended: Whether the window needs no more watching.
        silent: Pages whose gradients were all zero in every window so far.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        engine: Engine,
        window: Window,
        step: Step,
        group: Callable[[int], int],
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._window = window
        self._step = step
        self._group = group
        self.verdict: Verdict | None = None
        self.ended = False
        self.silent: set[str] = set()
        self._steps: list[_Seen] = []
        self._held: list[Reservation] = []
        self._spilled = set(engine.live.run.steps.spilled)
        self._module_dicts = [vars(each) for each in trainer.lightning_module.modules()]
        self._left: list[dict[str, Any]] | None = None
        self._start: Snapshot | None = None
        self._runs_again = False
        self._live = engine.live
        self._live.lets_go = self._let_go
        self._start = self._snapshot()
        if self._start is not None:
            self._reserve(self._start.num_bytes)
        window.comparing = not self.ended

    def before_step(self, kwargs: OrderedDict[str, Any]) -> None:
        """A step is about to run in the usual order."""
        if self.ended:
            return
        try:
            seen = _Seen(self._trainer, kwargs)
        except Exception as error:
            # A batch may be anything; that it cannot be copied is no reason to fail.
            self._settle(False, f"a batch cannot be copied: {_words(error)}")
            return
        counter = Inputs()
        counter.add((), dict(seen.kwargs))
        self._reserve(counter.num_bytes)
        for now, left in zip(self._module_dicts, self._left or [], strict=False):
            for name in {**left, **now}:
                value = now.get(name, _ABSENT)
                if name not in _INTERNAL and value is not left.get(name, _ABSENT):
                    seen.changes.append((now, name, value))
        self._steps.append(seen)

    def after_step(self, result: ClosureResult) -> None:
        """It has run."""
        if self.ended:
            return
        loss = result.closure_loss
        self._steps[-1].loss = None if loss is None else loss.detach().clone()
        self._left = [attributes.copy() for attributes in self._module_dicts]

    def after_backward(self, *, ends: bool) -> None:
        """Its backward has ended; run everything again if this was the last one to be compared.

        Args:
            ends: Whether the window ends with it.
        """
        if self.ended:
            return
        size = self._group(sum(reservation.nbytes for reservation in self._held))
        if size < 2:
            self._settle(False, "groups of batches would move more bytes", stays=False)
            return
        if len(self._steps) < size and not ends:
            return
        losses = [seen.loss for seen in self._steps if seen.loss is not None]
        if len(losses) >= 2 and all(bool(loss.isfinite().all()) for loss in losses):
            self._runs_again = True
            self._run_again()
        self.end()

    def end_step(self) -> None:
        """Its optimizer has stepped."""
        run = self._engine.live.run
        if run.plan.schedule == "eager":
            # Later windows are updated behind backward, and have no room for gradients that wait.
            run.steps.flush()
        # Gradients that made room for what was kept beside them need not go to disk again.
        run.steps.spilled.intersection_update(self._spilled)

    def end(self) -> None:
        """Watch no longer, and let go of everything."""
        self.ended = True
        self._live.lets_go = lambda: False
        self._window.comparing = False
        self._steps.clear()
        self._left = None
        self._module_dicts = []
        self._start = None
        while self._held:
            self._held.pop().free()

    def _let_go(self) -> bool:
        """End where training needs the memory; False where nothing can be given."""
        if self._runs_again or not self._held:
            return False
        words = "training needs the memory in which the first window would be kept to run it again"
        self._settle(False, words, stays=False)
        return True

    # -- again ------------------------------------------------------------------------------------

    def _run_again(self) -> None:
        start = self._start
        assert start is not None
        reason = start.changed()
        if reason:
            self._settle(False, f"a step changes {reason}, which is too large to be kept twice")
            return
        engine, window = self._engine, self._window
        run = engine.live.run
        predictor = copy.deepcopy(run.ahead.predictor)
        num_other_draws = window.num_other_draws
        now = self._snapshot()
        if now is None:
            return
        process = ProcessState(engine.machine.link.device)
        sent = self._make_room()
        comparison = Comparison(run, engine.machine.link, window.learned, len(self._steps))
        wrong, difference = "", ""
        with muted(self._trainer):
            try:
                start.restore()
                self._replay(comparison)
                comparison.close()
                changed = process.changed_settings()
                wrong = f"steps under way at once leave {changed[0]} changed" if changed else ""
                difference = now.difference()
            except StorageError:
                raise
            except Exception as error:
                wrong = f"it fails: {_words(error)}"
                if isinstance(error, BudgetError):
                    self._settle(False, f"its batches do not fit: {error}", stays=False)
            finally:
                comparison.drop()
                now.restore()
                process.restore()
                run.ahead.predictor = predictor
        others, window.num_other_draws = window.num_other_draws - num_other_draws, num_other_draws
        self._bring_back(sent)
        if self.verdict is None:
            wrong = wrong or self._other_loss() or comparison.findings.wrong
            if not wrong and difference:
                wrong = f"{difference} is left with another value"
            self._judge(comparison.findings, wrong, others)

    def _replay(self, comparison: Comparison) -> None:
        micros: dict[Micro, _Seen] = {}
        for seen in self._steps:
            for attributes, name, value in seen.changes:
                if value is _ABSENT:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value
            seen.process.restore()
            micros[self._window.start(partial(self._step, seen.kwargs), seen.view)] = seen

        def on_loss(micro: Micro) -> torch.Tensor | None:
            loss, micro.result.closure_loss = micro.result.closure_loss, None
            if loss is not None:
                micros[micro].again = loss.detach().clone()
            micros[micro].visited = set(micro.visited)
            return loss

        self._window.run(None, on_loss, comparison)

    def _make_room(self) -> list[int]:
        """Send gradients to disk while inputs of units have no room; return their pages.

        A unit that runs again holds its gradient twice. So those that come first, when most inputs
        are held, go first.
        """
        run, plan, learned = self._engine.live.run, self._engine.plan, self._window.learned
        assert plan is not None
        resident, sent = set(run.build.resident), []
        pages = [page for page in run.gradients.in_ram() if page.index not in resident]
        room = plan.window_bytes - sum(reservation.nbytes for reservation in self._held)
        if plan.on_device is not None:
            room += plan.on_device.inputs_bytes
        room -= len(self._steps) * (learned.most_bytes + 2 * learned.widest_bytes)
        if plan.schedule == "eager":
            # Windows that are updated behind backward hold no gradients; this one does.
            room -= sum(page.layout.waiting_bytes for page in pages)
        while room < 0 and pages:
            page = pages.pop(0)
            part = run.gradients.take_ram(page)
            assert part is not None
            spill = partial(run.spiller.spill, page, part, measure=True)
            run.worker.submit(spill, page.index, part.free)
            sent.append(page.index)
            room += page.layout.waiting_bytes
        return sent

    def _bring_back(self, sent: list[int]) -> None:
        """Have in RAM again what was sent to disk: more gradients may be added to it."""
        run = self._engine.live.run
        for index in sent:
            page = run.build.table[index]
            run.worker.retire_page(index)
            fetch = partial(run.spiller.fetch, page, run.gradients.open(page))
            run.worker.submit(fetch, index, lambda: None)
            run.worker.retire_page(index)

    # -- what was found ---------------------------------------------------------------------------

    def _other_loss(self) -> str:
        for number, seen in enumerate(self._steps):
            loss, again = seen.loss, seen.again
            if loss is None or again is None:
                if loss is not again:
                    return f"batch {number} has a loss in one order only"
            elif not torch.equal(loss, again):
                gap = float((loss.double() - again.double()).abs().max())
                return f"the loss of batch {number} differs by {gap:.3g}"
        return ""

    def _resting(self) -> str:
        """Return the name of a unit that some step has not run; else nothing."""
        for unit in self._engine.live.run.build.units:
            if any(seen.visited and unit.index not in seen.visited for seen in self._steps):
                return unit.name
        return ""

    def _judge(self, findings: Findings, wrong: str, num_other_draws: int) -> None:
        if wrong:
            self._settle(False, f"unit by unit, {wrong}")
            return
        self.silent = findings.silent
        same = f"losses and {findings.num_compared} gradients of {len(self._steps)} batches"
        words = f"{same} are the same, bit for bit"
        if findings.rounding:
            cases = "; ".join(f"{case}: {each}" for case, each in findings.rounding.items())
            words = f"{same} are the same but for rounding, in {cases}"
        if num_other_draws:
            self._settle(False, OTHER_DRAWS)
            return
        if self._window.learned.random and (rests := self._resting()):
            self._settle(
                False,
                f"steps draw random numbers, and {rests} does not run in all of them: dropout "
                "masks might become others than in the usual order",
            )
            return
        self._settle(True, words)

    def _settle(self, layer_major: bool, reason: str, *, stays: bool = True) -> None:
        """Come to a verdict; one that depends on memory does not go with the run."""
        model = model_key(self._trainer.lightning_module, self._engine) if stays else None
        self.verdict = Verdict(layer_major=layer_major, reason=reason, model=model)
        if not layer_major:
            self.end()

    def _snapshot(self) -> Snapshot | None:
        """Keep the state of everything; None where it could not be taken back."""
        try:
            taken = Snapshot(self._roots(), self._resident(), also=self._start)
            blocker = taken.blocker
        except Exception as error:
            # Objects may be anything; that one cannot be looked at is no reason to fail.
            taken, blocker = None, _words(error)
        if blocker:
            self._settle(False, f"what a step changes cannot be taken back: {blocker}")
        return None if blocker else taken

    def _roots(self) -> dict[str, Any]:
        trainer = self._trainer
        roots: dict[str, Any] = {"": trainer.lightning_module}
        for number, optimizer in enumerate(trainer.optimizers):
            roots[f"optimizer {number}"] = optimizer.param_groups
        for number, config in enumerate(trainer.lr_scheduler_configs):
            roots[f"scheduler {number}"] = vars(config.scheduler)
        return roots

    def _resident(self) -> list[torch.nn.Parameter]:
        build = self._engine.live.run.build
        return [param for index in build.resident for param in build.members[index].params]

    def _reserve(self, num_bytes: int) -> None:
        if self.ended or not num_bytes:
            return
        pool, what = self._engine.live.run.pool, "what is kept to run the first window again"
        try:
            self._held.append(pool.reserve(num_bytes, "first window", what))
        except BudgetError as error:
            self._settle(False, str(error), stays=False)
        if self.ended:  # what it took may have been its own
            self.end()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
