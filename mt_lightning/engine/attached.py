"""What an attached engine does while the model runs: bind, collect, update, show."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from mt_lightning.engine.ahead import prepare
from mt_lightning.engine.exchange import give_state, state_chunks, take_state
from mt_lightning.engine.first_step import report_first_step
from mt_lightning.engine.grad_check import check_grad, check_open, check_unowned
from mt_lightning.engine.loss_check import check_loss
from mt_lightning.engine.machine import Machine
from mt_lightning.engine.masters.carried import codec_of
from mt_lightning.engine.masters.edits import MasterEdits
from mt_lightning.engine.outside import Outside
from mt_lightning.engine.parking import Parking
from mt_lightning.engine.runtime import Runtime
from mt_lightning.engine.state_chunks import StateChunks
from mt_lightning.engine.undo import refuse_lost, release_pages, undo_partial_step
from mt_lightning.engine.units import Unit
from mt_lightning.engine.usage import next_sequence_number
from mt_lightning.engine.window.forward import ForwardWindow
from mt_lightning.engine.window.sums import WindowSums
from mt_lightning.engine.window.window import Window
from mt_lightning.pager.predictor import BACKWARD, FORWARD, INFERENCE
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.table import Page
from mt_lightning.tiers import ledger, spans
from mt_lightning.tiers.io import hash_blocks

log = logging.getLogger(__name__)

_TOLD_MS = 20
"""A shorter wait had nothing to wait for."""


class Attached:
    """The host of executors, hooks and optimizer facades.

    Args:
        run: The parts.
        machine: The tiers.
        stats: Counters to keep.
        parking: Shows pages as mapped files.
    """

    def __init__(self, run: Runtime, machine: Machine, stats: Stats, parking: Parking) -> None:
        self.run = run
        self._machine = machine
        self._stats = stats
        self._parking = parking
        self._in_backward = False
        self._lingering: list[Unit] = []
        self._rebound: list[tuple[Unit, int]] = []
        self._whole: list[Page] = []
        self._running = spans.LongSpan("backward of")
        self.lets_go: Callable[[], bool] = lambda: False
        """Gives up what is held for comfort, and says whether that was anything."""
        self.num_lost = 0
        """Finished steps that a step which broke off took along."""
        self.masters = MasterEdits(run, self._state_chunks)
        self.outside = Outside(
            run, parking, self.masters, self.drain, self._undo_partial_step, self.on_grad
        )
        self.window: Window | ForwardWindow | None = None
        self.graphs, self.inputs = run.graphs, run.inputs
        self.device, self._on_host = machine.link.device, machine.link.unified
        self.graphs.beside = self._num_input_bytes
        self.inputs.drop_graph = partial(self.graphs.drop_oldest, empty=True)
        run.pool.relieve = self._relieve

    # -- forward and backward ---------------------------------------------------------------------
    def arrive(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Wait for a unit's turn; called by executors."""
        return (args, kwargs) if self.window is None else self.window.arrive(unit, args, kwargs)

    def plane(self, index: int) -> torch.Tensor | None:
        """Return the bytes that a page is bound to; called by graphs."""
        return self.run.binder.plane(self.run.build.table[index])

    def enter(self, unit: Unit, *, backward: bool, start: int = 0, again: bool = False) -> None:
        """Bring a unit's pages up to date and bind them; called by executors and graphs."""
        self.masters.settle()
        self._end_dead_backward()
        self._running.end()
        self.graphs.collect()
        if self.window is not None and self._holds(unit, backward=backward):
            self.window.enter_again(unit, backward=backward)
            return
        run, table = self.run, self.run.build.table
        pages = [table[index] for index in unit.pages]
        forward = FORWARD if torch.is_grad_enabled() else INFERENCE
        # Frames made under inference_mode could never be written to again.
        with (
            spans.Span("rebind" if backward else "bind", unit.name, ledger.PAGING),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            if backward:
                self._begin_backward()
                self._end_lingering()
                self._complete(self._whole)
                if self.window is not None:
                    self.window.passed(start)
                self.inputs.sweep()
                run.steps.submit_ready(pages)
            if not again:
                run.ahead.observe(unit.index, BACKWARD if backward else forward)
            for page in pages:
                run.steps.before_use(page)
            with ExitStack() as undo:
                entries = []
                for page in pages:
                    entries.append(run.pool.pin(page))
                    undo.callback(run.pool.release, entries[-1])
                away = [e for e in entries if not run.planes.holds(e.page)]
                for entry in entries:
                    run.planes.bring(entry.page, entry)
                    undo.callback(run.planes.release, entry.page)
                if backward and not again:
                    for page in pages:
                        (self._sums or run.gradients).expect(page)
                if any(entry.read is not None and not entry.read.done() for entry in away):
                    run.ahead.stalled()
                for entry in away:
                    entry.wait()
                for page in pages:
                    run.binder.bind(page, run.planes.plane(page))
                    undo.callback(run.binder.unbind, page)
                prepare(run)
                undo.pop_all()  # it is bound: `leave` undoes it
        if backward:
            self._rebound.append((unit, next_sequence_number()))
            self._running.begin(unit.name)

    def _num_input_bytes(self) -> int:
        expected = self.inputs.expected_bytes
        if self.window is not None and self._sums:
            expected = max(expected, self.window.num_input_bytes())
        return expected

    def _state_chunks(self, page: Page) -> StateChunks:
        return state_chunks(self.run, self._machine, codec_of(self.run.build, page))

    @property
    def _sums(self) -> WindowSums | None:
        return self.window.sums if self.window is not None else None

    def _holds(self, unit: Unit, *, backward: bool) -> bool:
        """Return whether a unit is bound already, for all micro-batches of a window."""
        if self.window is None or self.window.unit is unit:
            return self.window is not None
        lingers = backward and bool(self._lingering) and self._lingering[-1] is unit
        return lingers and self.window.sums is not None

    def executed(self, unit: Unit, start: int, stop: int, *, counted: bool) -> None:
        """Take note of the autograd nodes that an execution of a unit made."""
        self.run.usage.executed(unit, start, stop)
        if self.window is not None:
            self.window.executed(unit, start, counted=counted)

    def leave(self, unit: Unit, *, backward: bool) -> None:
        """Let go of a unit's pages.

        After a replay they stay bound until the next unit enters: a checkpoint inside the unit (as
        transformers' layers have) replays its part only after ours has returned.
        """
        if self._holds(unit, backward=backward):
            return
        if backward:
            self._lingering.append(unit)
        else:
            self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        run = self.run
        for index in unit.pages:
            page = run.build.table[index]
            run.binder.unbind(page)
            run.planes.release(page)
            entry = run.pool.entry(page)
            assert entry is not None
            run.pool.release(entry)

    def _end_lingering(self) -> None:
        # A backward that is differentiated itself makes nodes that read weights.
        for unit, start in self._rebound:
            self.run.usage.executed(unit, start, next_sequence_number())
        self._rebound.clear()
        self.graphs.num_released += 1
        while self._lingering:
            self._let_go(self._lingering.pop())

    def _relieve(self) -> bool:
        """Give memory back when the pool has none; False when nothing can be given."""
        if self.run.planes.relieve():
            return True
        if not self._lingering:
            given = self.run.worker.retire_oldest()
            given = given or (self._on_host and self.graphs.drop_oldest())
            given = given or self.run.steps.relieve()
            return given or (self._on_host and self.inputs.relieve()) or self.lets_go()
        # A gradient that came before its unit's replay: the unit before it is as good as done.
        with torch.inference_mode(False), torch.no_grad():
            self._end_lingering()
            self._complete(self._whole)
            self.run.steps.submit_ready()
        return True

    def _end_dead_backward(self) -> None:
        """Notice a backward that raised, whose end autograd never announces.

        What had arrived counts, as it would stand in `p.grad`.
        """
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._end_backward()

    def _begin_backward(self) -> None:
        # A window hands on gradients between two backwards, whose end nobody would announce.
        if not self._in_backward and torch._C._current_graph_task_id() != -1:
            self._in_backward = True
            # Autograd has a thread for each device; ours waits for it meanwhile.
            ledger.keep(self._machine.training)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self.graphs.begin_backward()
            self.run.steps.before_backward()

    def _end_backward(self) -> None:
        self._in_backward = False
        self._running.end()
        with spans.Span("end backward", account=ledger.PAGING):
            self.graphs.collect()
            self._end_lingering()
            self._complete(self.run.gradients.unfinished())
            self.run.steps.submit_ready()

    def on_grad(self, page: Page, param: int, parameter: nn.Parameter) -> None:
        """Take a gradient from autograd; called by hooks."""
        run, grad = self.run, parameter.grad
        parameter.grad = None
        if grad is None:  # frozen between forward and backward: autograd passed it over
            return
        self._begin_backward()
        check_grad(run, page, param, grad)
        # Bytes are kept: a view that says "negated" or "conjugated" beside them would lose it.
        grad = grad.resolve_conj().resolve_neg()
        if page.layout.optimizer is None:
            check_unowned(run, page, param, parameter)
            return
        check_open(run, page, param)
        if self._sums is not None:
            self._sums.add(page, param, grad)
            return
        needed = sum(p.requires_grad for p in run.build.members[page.index].params)
        if run.gradients.arrive(page, param, grad, needed):
            self._whole.append(page)

    def _complete(self, pages: list[Page]) -> None:
        """Take in the gradients of pages that have them all.

        Not in the hook: there autograd still holds the last one, and it would have to be copied.
        """
        for page in pages:
            if self.run.gradients.complete(page):
                self.run.steps.on_complete(page)
        self._whole.clear()

    # -- step -------------------------------------------------------------------------------------
    def check_loss(self, loss: torch.Tensor) -> None:
        """Raise StepError when the loss was computed from parameters that were not in memory."""
        check_loss(self.run, loss, stepped=self._stats.steps > 0)

    def arm(self, optimizer: int, clip_value: float | None = None) -> None:
        """Let the coming backward update pages of `optimizer` behind it.

        Args:
            optimizer: Its index.
            clip_value: Bound of value clipping, which needs no other gradient.
        """
        if self.run.plan.schedule == "eager" and not (self.window and self.window.comparing):
            self.run.steps.arm(optimizer, clip_value)

    def unscale(self, optimizer: int, factor: float) -> bool:
        """Undo the scaling of the loss when the optimizer steps; False: it must not."""
        self._end_dead_backward()
        return self.run.steps.unscale(optimizer, factor)

    def step(self, optimizer: int, *, skip: bool = False) -> bool:
        """Apply the gradients of one optimizer, or skip it; False when the step was skipped."""
        self._end_dead_backward()
        self._parking.forget_dead()
        run = self.run
        report_first_step(self.run, drained=False)
        self.masters.settle()
        self.outside.take_replaced()
        self.masters.before_step()
        if skip:
            run.steps.zero_grad(optimizer)
            self._stats.skipped_steps += 1
        applied = not skip and run.steps.step(optimizer)
        self.masters.after_step()
        run.binder.used.difference_update(p.index for p in run.steps.trained[optimizer].pages)
        run.binder.used.update(run.build.resident)
        run.ahead.predictor.end_of_step()
        run.usage.clear()
        self.inputs.end_of_step()
        return applied

    def zero_grad(self, optimizer: int) -> None:
        """Drop the gradients of one optimizer."""
        self._end_dead_backward()
        self.run.steps.zero_grad(optimizer)

    def clip_norm(self, optimizer: int, max_norm: float) -> torch.Tensor:
        """Clip by total norm when the optimizer steps; return the norm before clipping."""
        return self.run.steps.clip_norm(optimizer, max_norm)

    def clip_value(self, optimizer: int, value: float) -> None:
        """Clip by value when the optimizer steps."""
        self.run.steps.clip_value(optimizer, value)

    def let_go(self) -> None:
        """Release what units held when training broke off; none of them runs any more."""
        self._lingering.clear()
        self._rebound.clear()
        release_pages(self.run)

    @spans.spanned("drain", ledger.PAGING)
    def drain(self) -> None:
        """Apply, write and commit everything, and wait for it."""
        begin = time.perf_counter()
        self._parking.forget_dead()
        self.masters.settle()
        self.run.steps.drain()
        self.find_edits()
        if self.run.writer.dirty:
            self.run.writer.flush()
            self.run.steps.commit_now(weights=True)
        if (took_ms := (time.perf_counter() - begin) * 1e3) >= _TOLD_MS:
            log.info("drained in %.0f ms: what was due of the last step is written.", took_ms)
        report_first_step(self.run, drained=True)

    def find_edits(self) -> None:
        """See whether weights were written to outside a step; all updates are done."""
        self.outside.take_replaced()
        self.masters.find_writes()
        for entry in self.run.resident:
            self.run.planes.changes(entry.page)
            # User code and load_state_dict may write to these at any time, and nothing tells us.
            if hash_blocks(entry.frame.memory) != entry.page.weight.sums[0]:
                entry.dirty = self.run.writer.dirty = True

    # -- what user code sees ----------------------------------------------------------------------
    def _undo_partial_step(self) -> None:
        """Go back to the last commit when a step was interrupted: nobody may see half of it.

        Callbacks that save on an exception run before the strategy hears of it.
        """
        if self.run.steps.partial and torch._C._current_graph_task_id() == -1:
            self._end_dead_backward()
            self.num_lost = undo_partial_step(self.run, self._machine.io)
            self.masters.watch_again()
        refuse_lost(self.num_lost, self.run.steps.count)

    def optimizer_state(self, optimizer: int) -> dict[int, dict[str, Any]]:
        """Return an optimizer's state by position of the parameter, as views of mapped files."""
        self._undo_partial_step()
        self.drain()
        return give_state(self.run, self._machine, optimizer)

    def load_optimizer_state(self, optimizer: int, state: dict[int, dict[str, Any]]) -> None:
        """Take an optimizer's state in, page by page, and commit it.

        An empty one, as a checkpoint before the first step has it, begins anew.
        """
        self.drain()
        pages = self.run.steps.trained[optimizer].pages
        if state or any(small.values or small.present for page in pages for small in page.small):
            take_state(self.run, self._machine, optimizer, state)
            self.run.steps.commit_now()
