"""Bring a model and its optimizers into pages, before a loop of the user's own begins."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.machine import fresh_directory, open_machine
from mt_lightning.engine.options import Durability, Nonfinite, OnExisting, Options
from mt_lightning.errors import ConfigError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.paging.checks import check_model, check_optimizers, device_of
from mt_lightning.paging.handle import Paged
from mt_lightning.tiers.link import Link
from mt_lightning.tiers.patience import DISK_FULL_TIMEOUT_S
from mt_lightning.tiers.store import Store

log = logging.getLogger(__name__)


def page(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    offload_dir: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
    on_existing: OnExisting = "error",
    device: str | torch.device | None = None,
    max_vram_gb: float | None = None,
    max_ram_gb: float | None = None,
    max_disk_gb: float | None = None,
    optimizer_compression: bool | str = False,
    layer_major: bool | Literal["auto"] = "auto",
    recompute: bool | Literal["auto"] = "auto",
    durability: Durability = "auto",
    nonfinite: Nonfinite = "raise",
    gradient_dtype: Literal["fp32", "bf16"] = "fp32",
    units: str | Sequence[str] | None = None,
    resident: str | Sequence[str] | None = None,
    disk_full_timeout_s: float = DISK_FULL_TIMEOUT_S,
    direct_storage: bool | Literal["auto"] = False,
    _link: Link | None = None,
    _wrap_store: Callable[[Store], Store] | None = None,
    _slice_bytes: int = BLOCK_BYTES,
) -> Paged:
    """Put weights, gradients and optimizer state on disk, under a loop that stays as it is.

    The loop goes on with the same `model` and `optimizer`. Updates are deferred: `step()` says how,
    and a page is updated just before its next use.

    Args:
        model: The model, on the CPU, on meta, or on the device it trains on. Its parameters stay
            the same objects, but those on meta, which `optimizer` gets the successors of.
        optimizer: The optimizer, a list of them, or None to run the model without training it.
        offload_dir: One directory, or a list with one per drive. None: a fresh one under the
            current directory, removed when the handle is closed.
        on_existing: What to do with a directory that holds a committed run: "error", "resume" (take
            weights and optimizer state from its last commit) or "overwrite".
        device: Where the model computes; None: where its parameters are. The loop brings batches.
        max_vram_gb: Device budget in GiB; see `MegaTrainStrategy`. On a CPU it says one line and is
            ignored.
        max_ram_gb: Host budget in GiB; None: 80 % of what cgroup and host leave free.
        max_disk_gb: Disk ceiling in GiB; None: what is free, less a margin.
        optimizer_compression: How optimizer state is kept; see `MegaTrainStrategy`.
        layer_major: Not True: the order of batches is that of the loop.
        recompute: Recompute activations in backward; see `MegaTrainStrategy`.
        durability: Commit each "step", or every 5 minutes, at `commit()` and at the end
            ("checkpoint"); or "auto".
        nonfinite: What a NaN or infinite gradient does: "raise", "skip" or "propagate". A loop
            cannot tell a NaN of the training from one that was read off a page that is away.
        gradient_dtype: What gradients are when they wait; see `MegaTrainStrategy`.
        units: Class names of modules that run as one piece; None: found by rule.
        resident: Names of modules whose weights stay in memory, such as "lm_head" for a loss that
            multiplies with its weight itself.
        disk_full_timeout_s: How long a run waits for space on a full disk; 0 fails at once.
        direct_storage: Read pages by kvikio; see `MegaTrainStrategy`.

    Returns:
        The handle. Close it, or use it in a `with` statement: what was trained since the last
        commit is committed then.

    Raises:
        ConfigError: An option is wrong, or the model or an optimizer cannot be paged.
        BudgetError: Memory or disk is too small.
    """
    options = Options(
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
    if options.layer_major is True:
        raise ConfigError(
            "layer_major=True: under mt.page the order of batches is that of your loop. Leave it "
            "out, or train with Trainer(strategy='megatrain')."
        )
    optimizers = check_optimizers(optimizer)
    check_model(model, optimizers)
    where = device_of(model, device)
    if options.max_vram_gb is not None and where.type == "cpu":
        log.info("max_vram_gb is ignored: the model runs on the CPU.")
    directories = options.directories
    own = directories is None
    machine = open_machine(
        [fresh_directory(os.getcwd())] if directories is None else directories,
        on_existing,
        device=where,
        link=_link,
        wrap_store=_wrap_store,
        **options.storage,
    )
    # The handle looks at gradients itself where they must be finite: it knows more to say.
    seen = "propagate" if nonfinite == "raise" else nonfinite
    engine = Engine(
        model, machine, dataclasses.replace(options, nonfinite=seen), slice_bytes=_slice_bytes
    )
    closing = weakref.finalize(engine, machine.close, remove=own)
    try:
        with _optimizers_follow(model, optimizers):
            engine.prepare()
        engine.attach(optimizers)
        if engine.run_state is not None:
            # That of another loop, which will not be where the steps of this one are.
            engine.live.run.steps.commits.replace(None)
        return Paged(engine, optimizers, nonfinite, closing)
    except BaseException:
        if engine.attached:
            engine.detach(failed=True)
        closing()
        raise


@contextmanager
def _optimizers_follow(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let optimizers train what parameters on meta are replaced by meanwhile."""
    before = [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None and param.is_meta
    ]
    yield
    now: dict[int, Any] = {id(old): module._parameters[name] for module, name, old in before}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [now.get(id(param), param) for param in group["params"]]
