"""The handle of a model that is on pages under a loop of the user's own."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer
from typing_extensions import Self

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.first_step import keeping, listed
from mt_lightning.engine.held import nonfinite_names
from mt_lightning.engine.lazy_state import LazyState
from mt_lightning.engine.plan import Plan
from mt_lightning.errors import StepError
from mt_lightning.pager.stats import Stats
from mt_lightning.paging import open_handles
from mt_lightning.paging.clipping import Clipper
from mt_lightning.paging.routes import Routes
from mt_lightning.paging.scaling import ScalerGuard
from mt_lightning.plugins.guard import ClipGuard

log = logging.getLogger(__name__)


class Paged:
    """What `mt.page` returns.

    In a `with` statement it is closed at the end. After an error there, what the last finished step
    made is kept, and what an unfinished one made is not.

    Args:
        engine: The engine, attached.
        optimizers: The optimizers.
        nonfinite: What a gradient that is not finite does.
        closing: Closes the tiers of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[Optimizer],
        nonfinite: str,
        closing: weakref.finalize,
    ) -> None:
        self._engine = engine
        self._optimizers = list(optimizers)
        self._raises = nonfinite == "raise"
        self._closing = closing
        build = engine.live.run.build
        self.places = {
            id(param): (page.index, i)
            for page in build.table
            for i, param in enumerate(build.members[page.index].params)
        }
        """Page and position of each parameter by its `id`."""
        self._clipper = Clipper(engine.live.run, self.places)
        self._guard = ClipGuard(self._clipper.answer)
        self._guard.attach(engine.root)
        self._scalers = ScalerGuard(self._optimizers, self._unscale)
        self._scalers.attach()
        self._routes = Routes(engine.root, self._optimizers, self)
        self._routes.attach()
        open_handles.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(failed=kind is not None)

    @property
    def closed(self) -> bool:
        """Whether the model has left the pages."""
        return not self._engine.attached

    @property
    def plan(self) -> Plan:
        """What goes where."""
        assert self._engine.plan is not None
        return self._engine.plan

    @property
    def stats(self) -> Stats:
        """Counters of what paging did, brought up to date."""
        return self._engine.stats

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, those of a run that goes on included."""
        self._check_open("num_steps")
        return self._engine.num_steps

    @property
    def last_norm(self) -> float | None:
        """Gradient norm before clipping of the last gradients clipped by norm, None without any."""
        return self._engine.last_norm

    def clip_grad_norm_(
        self,
        max_norm: float,
        parameters: Iterable[torch.Tensor] | None = None,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Do what `torch.nn.utils.clip_grad_norm_` does, which may be called as well.

        Args:
            max_norm: The most that the norm of all gradients may be.
            parameters: What is clipped together; None: all that the optimizers train.
            error_if_nonfinite: Whether a NaN or infinite norm raises.

        Returns:
            The norm before clipping (0-D).

        Raises:
            StepError: Only part of what an optimizer trains is given, or it is clipped already.
        """
        self._check_open("clip_grad_norm_")
        given = self._trained() if parameters is None else parameters
        return self._clipper.by_norm(given, max_norm, error_if_nonfinite=error_if_nonfinite)

    def clip_grad_value_(
        self, clip_value: float, parameters: Iterable[torch.Tensor] | None = None
    ) -> None:
        """Do what `torch.nn.utils.clip_grad_value_` does, which may be called as well.

        Args:
            clip_value: The bound of each element.
            parameters: What is clipped; None: all that the optimizers train.

        Raises:
            StepError: Only part of what an optimizer trains is given, or it is clipped already.
        """
        self._check_open("clip_grad_value_")
        self._clipper.by_value(self._trained() if parameters is None else parameters, clip_value)

    def commit(self) -> None:
        """Write and commit what was trained, and wait for it.

        Raises:
            StorageError: It cannot be written.
        """
        self._check_open("commit()")
        self._engine.live.drain()

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Save the model, one tensor in RAM at a time, for `from_pretrained` of transformers.

        A model of another kind is saved as `model.safetensors`, under the names of its state dict.

        Args:
            directory: Where to; made if it is not there.

        Raises:
            ConfigError: Only transformers itself can save such a model.
            StorageError: Something cannot be written.
        """
        from mt_lightning.huggingface.trainer.saving import save_weights_of

        save_weights_of(self._engine.root, None, Path(directory))

    def close(self, *, failed: bool = False) -> None:
        """Commit what is finished and let the model leave the pages; again, do nothing.

        Its parameters, and the optimizers' state, then are views of the page files, which take no
        RAM until they are read.

        Args:
            failed: Whether an error ended the loop; then nothing is waited for.

        Raises:
            StorageError: The last step cannot be written; the parameters are those of the last
                commit.
        """
        if self.closed:
            return
        self._guard.detach()
        self._scalers.detach()
        self._routes.detach()
        open_handles.discard(self)
        try:
            self._engine.detach(failed=failed)
        finally:
            lazy = [o.state for o in self._optimizers if isinstance(o.state, LazyState)]
            for state in lazy:
                # It is read from the files when somebody asks for it.
                vars(state)["engine"] = self._engine
            if not lazy:
                self._closing()

    def check_step(self, optimizer: int) -> None:
        """Refuse a step that would not be that of the plain loop; called before each.

        Raises:
            StepError: What is wrong; nothing was changed.
        """
        params = list(self._engine.root.named_parameters())
        unknown = [name for name, param in params if id(param) not in self.places]
        if unknown or len(params) != len(self.places):
            what = listed(set(unknown)) if unknown else "some are gone"
            raise StepError(
                f"the parameters of the model are not those that went to pages: {what}. Nothing "
                "was changed. close() the handle before the model is changed, then page "
                "it again."
            )
        by_hand = {name for name, param in params if param.grad is not None}
        if by_hand:
            raise StepError(
                f"{listed(by_hand)}: p.grad was set by hand, and gradients that pages hold would "
                "be applied instead. Nothing was changed. Let backward() make gradients."
            )
        if self._raises and (names := self._nonfinite_names(optimizer)):
            run = self._engine.live.run
            idle = [page for page in run.build.table if page.index not in run.binder.used]
            never = {spec.name for page in idle for spec in page.layout.params}
            self._engine.live.zero_grad(optimizer)
            raise StepError(
                f"step {self.num_steps + 1}: gradients are NaN or infinite, and nonfinite='raise': "
                f"{listed(names)}. No parameter was changed. If the loop has no NaN without "
                "mt.page, it reads weights outside the forward of their modules (a penalty over "
                "all parameters does), where they are not in memory: use weight_decay, or let "
                f"them stay there: {keeping(never)}. Else lower the learning rate, clip, or set "
                "nonfinite='skip' or 'propagate'."
            )

    def tell_unclosed(self) -> None:
        """Warn that the process ends and what is not committed is lost."""
        commits = self._engine.live.run.steps.commits
        lost = self._engine.num_steps - commits.committed_step
        if self._optimizers and lost:
            log.warning(
                "a model is still on pages as the process ends: its last commit is step %d, and "
                "%d step(s) after it are lost. Call close(), or use mt.page in a with statement.",
                commits.committed_step,
                lost,
            )

    def _nonfinite_names(self, optimizer: int) -> set[str]:
        run = self._engine.live.run
        run.worker.drain()
        return nonfinite_names(run.steps.trained[optimizer], run.gradients)

    def _unscale(self, optimizer: int, factor: float) -> bool | None:
        """Undo the scale of a loss; see `scaling`."""
        live = self._engine.live
        finite = live.unscale(optimizer, factor)
        pages = live.run.gradients.holding()
        return finite if any(page.layout.optimizer == optimizer for page in pages) else None

    def _trained(self) -> list[torch.Tensor]:
        trained: set[int] = {
            id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]
        }
        return [param for param in self._engine.root.parameters() if id(param) in trained]

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise StepError(f"{what}: the handle is closed, and the model has left the pages.")
