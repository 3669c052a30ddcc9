"""The Lightning strategy: the order of Lightning's calls, and nothing of the machine itself."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.single_device import SingleDeviceStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.machine import fresh_directory, open_machine
from mt_lightning.engine.options import Durability, Nonfinite, OnExisting, Options
from mt_lightning.engine.undo import refuse_lost
from mt_lightning.layer_major.choice import choose_order
from mt_lightning.layer_major.evaluation import Evaluation
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.planning.outlook import Outlook
from mt_lightning.plugins.announcement import announce
from mt_lightning.plugins.checkpoint_io import PagedCheckpointIO, as_stored
from mt_lightning.plugins.device import forget_device, refuse_devices, tell_device
from mt_lightning.plugins.ending import end_asked
from mt_lightning.plugins.guard import ClipGuard
from mt_lightning.plugins.masters import name_masters
from mt_lightning.plugins.precision import MegaTrainPrecision
from mt_lightning.plugins.refusals import eager_reason, micro_batches, refuse, tell_of_halves
from mt_lightning.plugins.routes import Routes
from mt_lightning.resume.checkpoints import SavedCheckpoints, serve
from mt_lightning.resume.keeper import RunKeeper
from mt_lightning.tiers.link import Link
from mt_lightning.tiers.patience import DISK_FULL_TIMEOUT_S
from mt_lightning.tiers.store import Store

log = logging.getLogger(__name__)


class MegaTrainStrategy(SingleDeviceStrategy):
    """Trains with weights, gradients and optimizer state on disk, under a memory budget.

    Args:
        offload_dir: One directory, or a list with one per drive. None: a fresh one under the
            trainer's `default_root_dir`, removed when the process exits.
        on_existing: A directory with a committed run is an "error", or to "resume" or "overwrite".
        max_vram_gb: Device budget in GiB for weights, gradients and kept graphs; other activations
            come on top. None: 70 % of what is free. On a CPU it says one line and is ignored.
        max_ram_gb: Host budget in GiB; None: 80 % of what cgroup and host leave free.
        max_disk_gb: Disk ceiling in GiB; None: what is free, less a margin.
        optimizer_compression: How optimizer state is kept. False: as it is. "lossless": every bit,
            with about 5/6 of the bytes read and written. True: 2-8 bits per value, lossy, for
            `torch.optim.AdamW` and `Adam`; the name of a format chooses that one.
        layer_major: Run accumulated batches unit by unit, so that weights are read twice per step.
            "auto": where that saves reads and the first window shows that it changes nothing.
        recompute: Recompute activations in backward: of every unit, of none (that they find no room
            is an error), or "auto": of those that find no room in `max_ram_gb`.
        durability: Commit each "step", or at each "checkpoint" and every 5 minutes; or "auto".
        nonfinite: What a NaN or inf gradient does: "propagate" (plain Lightning), "skip", "raise".
        gradient_dtype: "bf16" rounds fp32 gradients to bfloat16 as they arrive; "fp32" does not.
        units: Class names of modules that run as one piece; None: found by rule.
        resident: Names of modules whose weights stay in memory, for code that reads them itself.
        disk_full_timeout_s: Seconds that a run waits for space on a full disk; 0 fails at once.
        direct_storage: Read pages by kvikio; "auto": where it is and the run is on a CUDA device.
        accelerator: Given by Lightning.
        checkpoint_io: Given by Lightning or the user; None: `PagedCheckpointIO()`.
        precision_plugin: Given by Lightning; translated to `MegaTrainPrecision`.

    Raises:
        ConfigError: An option is wrong or not available.
    """

    strategy_name = "megatrain"
    parallel_devices: list[torch.device] | None = None
    num_nodes = 1
    """Lightning tells a strategy the number of nodes only where it finds this attribute."""

    def __init__(
        self,
        # A list comes first: jsonargparse takes the first that fits, and a path may be anything.
        offload_dir: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
        on_existing: OnExisting = "error",
        max_vram_gb: float | None = None,
        max_ram_gb: float | None = None,
        max_disk_gb: float | None = None,
        optimizer_compression: bool | str = False,
        layer_major: bool | Literal["auto"] = "auto",
        recompute: bool | Literal["auto"] = "auto",
        durability: Durability = "auto",
        nonfinite: Nonfinite = "propagate",
        gradient_dtype: Literal["fp32", "bf16"] = "fp32",
        units: str | Sequence[str] | None = None,
        resident: str | Sequence[str] | None = None,
        disk_full_timeout_s: float = DISK_FULL_TIMEOUT_S,
        direct_storage: bool | Literal["auto"] = False,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        _link: Link | None = None,
        _wrap_store: Callable[[Store], Store] | None = None,
        _slice_bytes: int = BLOCK_BYTES,
        _depth: int | None = None,
        _clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(
            device="cpu",
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.options = Options(
            offload_dir=offload_dir,
            on_existing=on_existing,
            max_vram_gb=max_vram_gb,
            max_ram_gb=max_ram_gb,
            max_disk_gb=max_disk_gb,
            optimizer_compression=optimizer_compression,
            layer_major=layer_major,
            recompute=recompute,
            durability=durability,
            nonfinite=nonfinite,
            gradient_dtype=gradient_dtype,
            units=units,
            resident=resident,
            disk_full_timeout_s=disk_full_timeout_s,
            direct_storage=direct_storage,
        )
        self._seams: dict[str, Any] = {"link": _link, "wrap_store": _wrap_store, "clock": _clock}
        self._seams |= self.options.storage
        self._sizes = {"slice_bytes": _slice_bytes, "read_ahead": _depth}
        self._engine: Engine | None = None
        self._guard = ClipGuard()
        self._routes = Routes()
        self._eager = False
        self._arming = False
        """Whether the next backward completes a window, so that pages may be updated behind it."""
        self._failed = False
        self._keeper: RunKeeper | None = None
        self._evaluation: Evaluation | None = None
        self._saved: SavedCheckpoints | None = None
        self.outlook: Outlook | None = None
        """What the planner expects of a fit, known once it has been set up."""

    # -- plugins ----------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> MegaTrainPrecision:
        """The precision plugin; Lightning's own ones are translated."""
        if self._precision_plugin is None:
            self._precision_plugin = MegaTrainPrecision()
        assert isinstance(self._precision_plugin, MegaTrainPrecision)
        return self._precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # None stays None: the connector takes a plugin found here for one the user chose.
        chosen = precision_plugin is not None
        self._precision_plugin = (
            MegaTrainPrecision.from_plugin(precision_plugin) if chosen else None
        )

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The CheckpointIO plugin; made on first use so that `Trainer(plugins=...)` can set one."""
        if self._checkpoint_io is None:
            self._checkpoint_io = PagedCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def engine(self) -> Engine | None:
        """The engine, None before `setup`."""
        return self._engine

    @property
    @override
    def root_device(self) -> torch.device:
        """Where the model computes, known as soon as Lightning has told."""
        return (self.parallel_devices or [torch.device("cpu")])[0]

    # -- setup and teardown -----------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Check the device before user hooks run."""
        refuse_devices(self.parallel_devices)
        super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Bring the model into pages; called by Lightning after `configure_model`."""
        model = self.lightning_module
        assert self.accelerator is not None
        assert model is not None
        self.accelerator.setup(trainer)
        refuse(trainer, self.checkpoint_io, self._engine)
        tell_device(model, self.root_device, self.options)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._failed = False
        engine = self._open(model, trainer)
        engine.machine.patience.stopping = end_asked(trainer)
        try:
            engine.prepare()
            if fitting:
                tell_of_halves(model, self.precision_plugin.precision)
                self.setup_optimizers(trainer)
            reason = eager_reason(model, trainer, self.options.nonfinite, len(self.optimizers))
            engine.attach(
                self.optimizers if fitting else [],
                schedule="eager" if reason is None else "deferred",
                micro_batches=micro_batches(trainer) if fitting else 1,
                layer_major=fitting and choose_order(trainer, self.options),
            )
            self._eager = engine.plan.schedule == "eager"  # type: ignore[union-attr]
        except BaseException:
            if engine.plan is None:
                self._close()
            raise
        self.precision_plugin.attach(engine)
        self.setup_precision_plugin()
        self._evaluation = Evaluation(trainer, engine)
        self._evaluation.attach()
        if fitting:
            self._guard.attach(model)
            self._routes.attach(model, self.optimizers, self._lightning_optimizers)
            try:
                self._keeper = RunKeeper(trainer, engine)
                self._saved = self._keeper.checkpoints
                self._keeper.begin()
            except BaseException:
                self.teardown()
                self._close()
                raise
            self.outlook = announce(trainer, engine, reason)

    def _open(self, model: pl.LightningModule, trainer: pl.Trainer) -> Engine:
        if self._engine is not None and self._engine.root is model:
            return self._engine
        self._close()
        given = self.options.directories
        directories = [fresh_directory(trainer.default_root_dir)] if given is None else given
        machine = open_machine(
            directories, self.options.on_existing, device=self.root_device, **self._seams
        )
        masters = self.precision_plugin.keeps_masters
        engine = Engine(model, machine, self.options, masters=masters, **self._sizes)
        self._closing = weakref.finalize(engine, machine.close, remove=given is None)
        self._engine = engine
        return engine

    def _close(self) -> None:
        if self._engine is not None:
            self._engine = None
            self._closing()

    @override
    def model_to_device(self) -> None:
        """Do nothing: parameters go to the device unit by unit."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader; its iterator is made next, and draws from the generators."""
        if self._keeper is not None and self.lightning_module.trainer.training:  # type: ignore[union-attr]
            self._keeper.before_iterator(dataloader)
        return dataloader

    @override
    def on_train_start(self) -> None:
        """Follow the loops from here on."""
        self._keeper.attach()  # type: ignore[union-attr]

    @override
    def on_train_end(self) -> None:
        """Commit that nothing is due any more."""
        self._keeper.finish()  # type: ignore[union-attr]

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Remember that the run failed; `teardown` then restores what is needed."""
        self._failed = True

    @override
    def teardown(self) -> None:
        """Commit, park the parameters on their files and give all memory back."""
        self._guard.detach()
        if self._evaluation is not None:
            self._evaluation.detach()
        if self._keeper is not None:
            self._keeper.detach()
            self._keeper = None
        self._routes.detach()
        try:
            if self._engine is not None and self._engine.attached:
                self._engine.detach(failed=self._failed)
        finally:
            self.precision_plugin.attach(None)
            forget_device(self.lightning_module)
            self.precision_plugin.teardown()
            if self.accelerator is not None:
                self.accelerator.teardown()
            self.checkpoint_io.teardown()

    # -- training ---------------------------------------------------------------------------------

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Look at the first loss: NaN may mean that weights were read outside their unit."""
        live = self._engine.live  # type: ignore[union-attr]
        live.check_loss(closure_loss)
        if self._arming:
            value = self.lightning_module.trainer.gradient_clip_val  # type: ignore[union-attr]
            live.arm(0, float(value) if value else None)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure and step; with eager updates, pages are updated behind its backward."""
        assert self._engine is not None
        self._arming = self._eager
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._arming = False

    # -- checkpoints ------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Restore into pages, which exist after `setup`."""
        return True

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights page by page and commit them."""
        if self._keeper is not None:
            self._keeper.forget()
        super().load_model_state_dict(checkpoint, strict)
        assert self._engine is not None
        self._engine.live.drain()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state page by page; nothing is moved to a device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        self._keeper.adopt(checkpoint)  # type: ignore[union-attr]

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save, unless a fit that failed has left the weights steps behind the loops.

        A full disk is waited for: what was begun has been taken back, and is begun anew.
        """
        lost = self._engine.num_lost if self._engine is not None else 0
        refuse_lost(lost, checkpoint["global_step"] - lost)
        serve(self.checkpoint_io, self._saved)  # a plugin may serve several trainers
        if self.precision_plugin.keeps_masters:
            name_masters(checkpoint, self.lightning_module, self.optimizers)  # type: ignore[arg-type]
        save = partial(super().save_checkpoint, checkpoint, *args, **kwargs)
        if self._engine is None or not self._engine.attached:
            save()
        else:
            self._engine.machine.patience.run("saving a checkpoint", 0, save)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict; its tensors are views of mapped files."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with as_stored(self.checkpoint_io):
            return inner.state_dict()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Return `obj`: there is one process."""
        return obj
