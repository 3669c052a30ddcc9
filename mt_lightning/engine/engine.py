"""The engine: a torch module that lives on pages, under any training loop.

[Note: the life of an engine]
prepared:  units are found and meta parameters have placeholders; optimizers can be made.
attached:  parameters are placeholders, forwards are wrapped, every byte is in a tier.
parked:    parameters show the committed files and nothing of the engine is in RAM; it can be
           attached again, with other optimizers or with none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from mt_lightning.engine import birth, runtime
from mt_lightning.engine.arrival import Arrival
from mt_lightning.engine.attached import Attached
from mt_lightning.engine.build import Build, build_pages
from mt_lightning.engine.commit import Committer
from mt_lightning.engine.durability import wear_text
from mt_lightning.engine.executor import Executor
from mt_lightning.engine.facade import OptimizerFacade
from mt_lightning.engine.hooks import Removable, attach_hooks
from mt_lightning.engine.importing import create_files, file_sizes, take_planes
from mt_lightning.engine.machine import Machine, check_disk, max_disk_bytes
from mt_lightning.engine.masters.carried import Rests, carried_rests, named_rests
from mt_lightning.engine.memory import budget_bytes
from mt_lightning.engine.optimizer_state import export_state
from mt_lightning.engine.options import Options
from mt_lightning.engine.parking import Parking
from mt_lightning.engine.pieces import PIECES_KEY, keep_pieces
from mt_lightning.engine.plain import PlainState
from mt_lightning.engine.plan import Plan
from mt_lightning.engine.plan_choice import Order, choose_plan, decide
from mt_lightning.engine.refusals import refuse_model
from mt_lightning.engine.restore import keep_layout, take_over
from mt_lightning.engine.runtime import Runtime
from mt_lightning.engine.undo import tell_kept_back, tell_lost
from mt_lightning.engine.units import find_units
from mt_lightning.engine.workspace import Workspace
from mt_lightning.optim.codec import codec_for
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.sizes import ALIGN_BYTES, BLOCK_BYTES

log = logging.getLogger(__name__)


class Engine:
    """Runs `root` on pages.

    Args:
        root: The model; the same `Parameter` objects live from here to the end.
        machine: The tiers, opened.
        options: What the user set.
        slice_bytes: Length of an update slice in the weight plane.
        read_ahead: How many units are read ahead of the one that runs; None: as many as it takes.
        masters: Whether weights are bfloat16, and the upper halves of fp32 masters that optimizers
            step; else they are what the module has.
    """

    def __init__(
        self,
        root: nn.Module,
        machine: Machine,
        options: Options,
        *,
        slice_bytes: int = BLOCK_BYTES,
        read_ahead: int | None = None,
        masters: bool = False,
    ) -> None:
        assert slice_bytes % ALIGN_BYTES == 0
        self.root = root
        self.machine = machine
        self.options = options
        self.masters = masters
        self.plan: Plan | None = None
        self._slice_bytes = slice_bytes
        self._read_ahead = read_ahead
        self._stats = Stats()
        self._build: Build | None = None
        self._files: dict[str, int] = {}
        self._parking: Parking | None = None
        self._committer: Committer | None = None
        self._live: Attached | None = None
        self._executors: list[Executor] = []
        self._facades: list[OptimizerFacade] = []
        self._handles: list[Removable] = []
        self._unborn: dict[int, tuple[int, ...]] = {}
        self._last_norm: float | None = None
        self.num_lost = 0
        """Finished steps by which the loop that trained is ahead of the pages, after a failure."""

    @property
    def live(self) -> Attached:
        """The attached engine."""
        assert self._live is not None, "the engine is not attached"
        return self._live

    @property
    def attached(self) -> bool:
        """Whether the engine runs the model now."""
        return self._live is not None

    @property
    def stats(self) -> Stats:
        """Counters, brought up to date."""
        stats, store = self._stats, self.machine.store
        if self._live is not None:
            self._live.run.inputs.count()
            budget = self._live.run.budget
            stats.ram_used_bytes = budget.used_bytes
            stats.ram_peak_bytes = max(stats.ram_peak_bytes, budget.peak_bytes)
        stats.charge(self.machine.training, self.machine.working, self.machine.io.busy_s)
        stats.bytes_read = store.bytes_read - stats.inputs_read_bytes
        stats.bytes_written = store.bytes_written - stats.inputs_spilled_bytes
        return stats

    @property
    def last_norm(self) -> float | None:
        """Gradient norm before clipping of the last step clipped by norm, None without one."""
        live = self._live
        return self._last_norm if live is None else live.run.steps.clipping.last_norm

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken so far."""
        return self.live.run.steps.count

    @property
    def run_state(self) -> bytes | None:
        """The state of the loop that trains in the last commit, None where there is none."""
        return self._committer.run_state if self._committer is not None else None

    def follow(self) -> None:
        """Let commits wait for the loop that trains to say when a step has ended."""
        self.live.run.steps.commits.followed = True

    @property
    def gathers(self) -> bool:
        """Whether gradients are held that no step of this batch has used."""
        return self.live.run.steps.gathers

    def end_step(self, run_state: bytes | None) -> None:
        """Take the state of the loop, now that all of a step is done; None if it has none."""
        self.live.run.steps.end_step(run_state)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all page files, slots included."""
        return sum(self._files.values())

    def expected_bytes_per_step(self) -> tuple[int, int]:
        """Return the bytes that a step over all units reads and writes, by the plan."""
        assert self.plan is not None
        return self.plan.traffic

    def decide_order(self, reason: str, *, layer_major: bool) -> None:
        """Settle in which order batches run from now on, where the plan left it open.

        Args:
            reason: Why, as a sentence for people.
            layer_major: Whether they run unit by unit.
        """
        assert self.plan is not None
        before, self.plan = self.plan, decide(self.plan, reason, layer_major=layer_major)
        if before.written_bytes != self.plan.written_bytes:
            log.info("%s", self._wear())

    def _wear(self) -> str:
        assert (plan := self.plan) is not None
        return wear_text(plan.durability, plan.written_bytes, plan.commit_bytes)

    def prepare(self) -> None:
        """Refuse what cannot be paged and give meta parameters placeholders.

        Raises:
            ConfigError: A module or parameter cannot be paged.
        """
        refuse_model(self.root, self.machine.link.device)
        self._unborn.update(birth.replace_meta(self.root))
        birth.materialise_buffers(self.root)

    def attach(
        self,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        schedule: str = "deferred",
        micro_batches: int | None = None,
        layer_major: Order = False,
    ) -> None:
        """Take the parameters over.

        Args:
            optimizers: The user's optimizers; none for validation and prediction.
            schedule: "eager" or "deferred", for the plan; `Attached.arm` decides each step.
            micro_batches: How many backward passes make a step, None where that is not known.
            layer_major: Whether a `Window` will run them unit by unit; "auto": whether it may.

        Raises:
            BudgetError: Memory or disk is too small.
            ConfigError: The model or an optimizer cannot be paged.
        """
        assert self._live is None
        self.machine.patience.begin()
        codecs = [codec_for(o, self.options.optimizer_compression) for o in optimizers]
        old = self._build if self._build is not None and self._build.knows(self.root) else None
        rests = self._rests(old)
        if old is not None and not optimizers:
            build = old
        else:
            units = find_units(self.root, self.options.units, self.options.resident)
            build = build_pages(
                self.root,
                units,
                list(optimizers),
                self._unborn,
                self._slice_bytes,
                codecs,
                (lambda p: p.dtype == torch.float32 or id(p) in rests) if self.masters else None,
                rounds=self.options.gradient_dtype == "bf16",
                resident=self.options.resident,
            )
        plan = choose_plan(
            build,
            self.options.durability,
            ram_limit_bytes=budget_bytes(self.options, self.machine.link),
            directories=self.machine.directories,
            schedule=schedule,
            micro_batches=micro_batches,
            layer_major=layer_major if micro_batches != 1 else False,
            trains=bool(optimizers),
            in_memory=self.machine.in_memory,
            recompute=self.options.recompute,
            link=self.machine.link,
            max_vram_gb=self.options.max_vram_gb,
        )
        same = old is not None and old.table.fingerprint == build.table.fingerprint
        files = file_sizes(build.table, plan)
        record, self.machine.record = self.machine.record, None
        if record is not None:
            self._files = take_over(self.machine, build.table, record, trains=bool(optimizers))
        check_disk(self.machine, self._files, files, self.options.max_disk_gb)
        if same and old is not None and old is not build:
            take_planes(old.table, build.table)
        if old is not build or self._committer is None:
            before = self._committer
            step = before.step if before is not None and not optimizers else 0
            names = {
                "layout": keep_layout(self.machine.store, build.table),
                PIECES_KEY: keep_pieces(self.machine.store, build.table),
            }
            self._committer = Committer(
                build.table, self.machine.io, self.machine.log, self._stats, names
            )
            self._committer.step = step
            self._committer.begun = before is not None and (before.begun or before.step > 0)
            if record is not None:
                self._committer.go_on(record)
        run = runtime.start(
            self.root,
            build,
            plan,
            self.machine,
            list(optimizers),
            self._stats,
            self._committer,
            slice_bytes=self._slice_bytes,
            nonfinite=self.options.nonfinite,
            read_ahead=self._read_ahead,
            max_disk_bytes=max_disk_bytes(self.options.max_disk_gb),
        )
        parking = Parking(build, self.machine.store)
        live = Attached(run, self.machine, self._stats, parking)
        self._facades = [OptimizerFacade(live, i, o) for i, o in enumerate(optimizers)]
        arrival = Arrival(self.root, self.machine, live, parking, self._facades)
        try:
            # What a commit names is there already, and nothing else is.
            old_files = self._files if record is None else {}
            # Without optimizers the state stays that of the fit before, for one that is resumed.
            kept = ("weight", "state") if build is old else ("weight",) if same else ()
            create_files(self.machine.store, old_files, files, kept=kept)
            self._files = files
            parked = self._parking if same else None
            arrival.bring(self._unborn, parked, rests, resumed=record is not None)
        except BaseException:
            arrival.undo()
            runtime.stop(run, self.machine)
            raise
        self.plan, self._build, self._parking, self._live = plan, build, parking, live
        if optimizers:
            self.num_lost = 0
            log.info("%s", self._wear())
        self._install(run)

    def _rests(self, old: Build | None) -> Rests:
        """Return what parked parameters have beside their weights, from the fit before."""
        if old is None or self._parking is None or not self.masters:
            return {}
        workspace = Workspace(self.machine.arena)
        plain = PlainState(self.machine.store, self.machine.io, workspace)
        return carried_rests(old, self._parking, plain)

    def master_rests(self) -> dict[str, torch.Tensor]:
        """Return by name what fp32 masters have beside their weights, as views of mapped files."""
        if self._live is not None:
            self._live.drain()
        assert self._build is not None
        workspace = Workspace(self.machine.arena)
        plain = PlainState(self.machine.store, self.machine.io, workspace)
        return named_rests(self._build, plain)

    def _install(self, run: Runtime) -> None:
        for index in run.build.resident:
            entry = run.pool.pin(run.build.table[index])
            entry.wait()
            run.resident.append(entry)
            run.binder.settle(entry.page, run.planes.keep(entry.page, entry))
            self.live.masters.watch(entry.page)
        self._executors = [Executor(self.live, unit) for unit in run.build.units]
        for executor in self._executors:
            executor.attach()
        for facade in self._facades:
            facade.attach()
        self._handles = attach_hooks(self.live.outside, self.root, run.build)

    def detach(self, *, failed: bool = False) -> None:
        """Commit what is finished, let go of everything and park the parameters.

        After an error inside a step that had begun to change pages, the last commit is restored.

        Args:
            failed: Whether training ended in an error, which is then the one to be raised.
        """
        live, run = self.live, self.live.run
        if failed:
            self.machine.patience.end()
        self._last_norm = run.steps.clipping.last_norm
        for handle in self._handles:
            handle.remove()
        for part in (*self._executors, *self._facades):
            part.detach()
        try:
            self._settle(live, failed)
        finally:
            run.binder.reset()
            _ = self.stats
            self._live = None
            try:
                runtime.stop(run, self.machine)
            finally:
                self._park(run)

    def _settle(self, live: Attached, failed: bool) -> None:
        steps, self.num_lost = live.run.steps, live.num_lost
        if not steps.partial:
            try:
                live.run.gradients.reset()
                if failed:
                    live.let_go()
                live.drain()
                if failed:
                    tell_kept_back(steps.count, steps.commits.committed_step)
                return
            except BaseException as error:
                # Ctrl-C as well: what follows must find every page at a commit.
                if not failed or not isinstance(error, Exception):
                    self._rollback(live.run)
                    raise
                log.exception("an update failed while the run was ending.")
        self._rollback(live.run)

    def _rollback(self, run: Runtime) -> None:
        finished, partial = run.steps.count, run.steps.partial
        run.steps.reset()
        run.build.table.rollback()
        self.num_lost += finished - run.steps.count
        tell_lost(finished + partial, run.steps.count)

    def _park(self, run: Runtime) -> None:
        assert self._parking is not None
        with torch.inference_mode(False), torch.no_grad():
            for page in run.build.table:
                replaced = run.binder.replaced(page)
                self._parking.park(page)
                for param, value in replaced:  # the next run takes these in
                    param.data = value
            workspace = Workspace(self.machine.arena)
            for facade, trained in zip(self._facades, run.steps.trained, strict=True):
                plain = PlainState(self.machine.store, self.machine.io, workspace)
                give = partial(export_state, run.build, trained, plain)
                if trained.codec.coded:
                    facade.show_later(give)
                else:
                    facade.show(give())
        self._facades, self._executors, self._handles = [], [], []
