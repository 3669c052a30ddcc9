"""What is trained and how: everything about a row that also holds for its plain reference."""

from __future__ import annotations

from dataclasses import dataclass

NUM_EPOCHS = 2
NUM_VAL_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run. The default of every field is its plainest value."""

    model: str
    """A network of the zoo."""
    optimizer: str = "adamw"
    """A name of ``optimizers.OPTIMIZERS``."""
    groups: str = "one"
    """one | no_decay (two parameter groups) | frozen_base (the first layers do not train) |
    frozen_between (every second parameter does not: gradients pass through frozen ones)."""
    clip: str = "none"
    """none | norm | value."""
    accumulate: str = "1"
    """1 | 3 | 3_leftover (the last window of an epoch is short)."""
    precision: str = "32-true"
    """A precision of Lightning's."""
    schedule: str = "constant"
    """constant | cosine | one_cycle (moves betas or momentum too)."""
    dropout: str = "off"
    """off | on."""
    structure: str = "usual"
    """usual, or a change to the network or its use: see ``subject.Subject``."""
    control: str = "automatic"
    """automatic | none_sometimes | manual | two_optimizers | gan."""
    flow: str = "fit"
    """What happens to the module, and in which order: see ``flows.FLOWS``."""
    num_threads: int = 1
    """Threads of torch inside one operation."""

    @property
    def num_accumulated(self) -> int:
        """Micro-batches in one optimizer step."""
        return 1 if self.accumulate == "1" else 3

    @property
    def num_batches(self) -> int:
        """Micro-batches in one epoch: three optimizer steps."""
        if self.control == "manual":
            return 5  # windows of two, the last one short
        return {"1": 3, "3": 9, "3_leftover": 8}[self.accumulate]

    @property
    def is_eager(self) -> bool | None:
        """Whether updates may run behind the backward pass; None where either is right."""
        if self.control == "none_sometimes":
            return None
        return self.control == "automatic" and self.clip != "norm"
