"""Routing of one's own: each sample takes the expert it fits, so the order depends on data.

Run: python examples/custom_routing.py [--fast]
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt


class Routed(LightningModule):
    """Layers of experts. An expert that nobody chose is not read, and its page stays clean."""

    def __init__(self, width: int, depth: int, num_experts: int) -> None:
        """Build a router and experts for each layer."""
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(width, num_experts) for _ in range(depth))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(depth * num_experts))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Send every row through the best expert of each layer, weighted by its probability."""
        x = batch
        for layer, router in enumerate(self.routers):
            weight, choice = router(x).softmax(-1).max(-1)
            parts = torch.zeros_like(x)
            for expert in choice.unique().tolist():  # plain Python: no graph is compiled
                rows = choice == expert
                one = self.experts[layer * router.out_features + expert]
                parts = parts.index_put((rows,), one(x[rows]))
            x = x + weight.unsqueeze(-1) * parts
        return (x - batch.roll(1, -1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return any optimizer of torch."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a model that trains in a second")
    fast = parser.parse_args().fast
    # Each expert is a unit of its own, found by name: only those at work are in memory.
    strategy = mt.MegaTrainStrategy(max_ram_gb=0.25, units=["Linear"])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    show = [mt.PagingMonitor()]
    steps = 3 if fast else 300
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", max_steps=steps, callbacks=show, **quiet
    )
    width = 16 if fast else 512
    data = DataLoader(torch.randn(256, width), batch_size=8, shuffle=True)
    trainer.fit(Routed(width, 2 if fast else 8, 4), data)
