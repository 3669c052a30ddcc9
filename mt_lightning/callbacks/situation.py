"""What a run is like, as far as advice about its speed depends on it."""

from __future__ import annotations

from lightning.pytorch import Trainer

from mt_lightning.callbacks.bottleneck import Situation
from mt_lightning.engine.engine import Engine
from mt_lightning.engine.memory import ram_limit_bytes


def situation(trainer: Trainer, engine: Engine) -> Situation:
    """Describe a fit that ends."""
    assert engine.plan is not None
    stats = engine.stats
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return Situation(
        plan=engine.plan,
        free_bytes=max(0, ram_limit_bytes(None)),
        accumulate=trainer.accumulate_grad_batches,
        num_workers=getattr(trainer.train_dataloader, "num_workers", 0),
        compresses=bool(engine.options.optimizer_compression),
        has_fused=any("fused" in group and not group["fused"] for group in groups),
        units_kept=stats.units_kept,
        units_run=stats.units_run,
        graph_bytes=stats.graph_peak_bytes,
    )
