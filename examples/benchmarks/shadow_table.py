"""Show how far the update of coded Adam state is from that of float32 state, on the same gradients.

Run: python examples/benchmarks/shadow_table.py [--model smollm2] [--beta2 0.95] [--json]

[Note: shadow test]
One model trains with torch's AdamW. At every step each contender is handed the very same gradients,
but its updates go nowhere. So what differs is the state alone, and it is compared where it matters:
in the update. `cosine` is the angle between a contender's update and AdamW's over all elements of
all matrices; `projection` is how much of AdamW's update is in it, the effective learning rate. Both
are means over early steps (the first tenth) and late ones (the last third); `worst` is the late
cosine of the tensor that fares worst.

The model smollm2 needs: pip install 'mt-lightning[examples]'
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from char_gpt import CharGPT, Size, Text, rate_factor
from contenders import BLOCKWISE, bits_per_value, make_optimizer, packed_names
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

MIN_NUMEL = 4096
"""Smaller tensors, and those with one dimension, are never packed by "dynamic"."""

SMOLLM2_TENSORS = ("embed_tokens", "layers.0.", "layers.10.", "layers.20.", "layers.29.")
"""Parts of the names of SmolLM2's matrices that are looked at: one in seven."""


class Shadow:
    """An optimizer that sees the gradients and whose updates are read, then thrown away.

    Args:
        name: Of the contender.
        shapes: Shape of each tensor.
        betas: Decay of the two moments.
    """

    def __init__(self, name: str, shapes: list[torch.Size], betas: tuple[float, float]) -> None:
        self.name = name
        self._params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        # At rate one, without decay, what a parameter of zeros becomes is the update.
        self._optimizer = make_optimizer(name, self._params, lr=1.0, betas=betas, weight_decay=0.0)

    @torch.no_grad()
    def updates(self, grads: list[Tensor]) -> list[Tensor]:
        """Step on `grads` and return the update of each tensor."""
        for param, grad in zip(self._params, grads, strict=True):
            param.zero_()
            param.grad = grad
        self._optimizer.step()
        return [param.detach() for param in self._params]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        name: Of the contender.
        bits_per_value: Bits of each moment of an element, None where it varies.
        early: Cosine and projection, mean over early steps.
        late: The same over late steps.
        worst: The lowest late cosine of any tensor, and that tensor's name.
    """

    name: str
    bits_per_value: float | None
    early: tuple[float, float]
    late: tuple[float, float]
    worst: tuple[float, str]


class Score:
    """Sums up one contender's updates against AdamW's.

    Args:
        num_steps: Length of the run.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._products: dict[bool, list[Tensor]] = {False: [], True: []}

    def add(self, step: int, reference: list[Tensor], updates: list[Tensor]) -> None:
        """Take in one step (from 0)."""
        late = step >= self._num_steps - max(1, self._num_steps // 3)
        if late or step < max(1, self._num_steps // 10):
            pairs = zip(reference, updates, strict=True)
            products = [
                torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum()]) for a, b in pairs
            ]
            self._products[late].append(torch.stack(products, 1).double())

    def row(self, name: str, tensors: list[str]) -> Row:
        """Return the line of the table."""
        late = torch.stack(self._products[True])
        cosines = (late[:, 0] / (late[:, 1] * late[:, 2]).sqrt()).mean(0)
        worst = int(cosines.argmin())
        return Row(
            name=name,
            bits_per_value=bits_per_value(name),
            early=self._means(False),
            late=self._means(True),
            worst=(float(cosines[worst]), tensors[worst]),
        )

    def _means(self, late: bool) -> tuple[float, float]:
        ab, aa, bb = torch.stack(self._products[late] or self._products[True]).sum(2).unbind(1)
        return float((ab / (aa * bb).sqrt()).mean()), float((ab / aa).mean())


def char_gpt_steps(options: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Train the character GPT and yield the gradients of its matrices, step by step."""
    torch.manual_seed(options.seed)
    size = Size(width=options.width, num_layers=options.layers)
    text = Text(size)
    model = CharGPT(size, text.vocabulary)
    generator = torch.Generator().manual_seed(options.seed)
    matrices = {
        name: param
        for name, param in model.named_parameters()
        if param.dim() >= 2 and param.numel() >= MIN_NUMEL
    }
    optimizer = _adamw(model, options)
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = options.lr * rate_factor(step, options.steps, 50)
        model.loss(text.batch(generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield {name: param.grad for name, param in matrices.items() if param.grad is not None}
        optimizer.step()
        optimizer.zero_grad()


def smollm2_steps(options: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Fine-tune SmolLM2 and yield the gradients of some matrices, the first rows of each."""
    from smollm2 import load, training_batches

    model = load()
    matrices = {
        name: param
        for name, param in model.named_parameters()
        if param.dim() >= 2 and any(part in name for part in SMOLLM2_TENSORS)
    }
    optimizer = _adamw(model, options)
    batches = training_batches(options.seed)
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = options.lr * rate_factor(step, options.steps, 10)
        batch = next(batches)
        model(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield {
            name: param.grad[: options.max_rows].contiguous()
            for name, param in matrices.items()
            if param.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()


def _adamw(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    betas = (0.9, options.beta2)
    return torch.optim.AdamW(model.parameters(), lr=options.lr, betas=betas, fused=True)


def measure(options: argparse.Namespace, console: Console) -> list[Row]:
    """Run the shadow test and return a line per contender."""
    steps = smollm2_steps(options) if options.model == "smollm2" else char_gpt_steps(options)
    betas = (0.9, options.beta2)
    reference: Shadow | None = None
    shadows: list[Shadow] = []
    scores = [Score(options.steps) for _ in options.formats]
    tensors: list[str] = []
    shown = track(enumerate(steps), description="Training", total=options.steps, console=console)
    for step, grads in shown:
        if reference is None:
            tensors, shapes = list(grads), [grad.shape for grad in grads.values()]
            reference = Shadow("adamw", shapes, betas)
            shadows = [Shadow(name, shapes, betas) for name in options.formats]
        expected = reference.updates(list(grads.values()))
        for shadow, score in zip(shadows, scores, strict=True):
            score.add(step, expected, shadow.updates(list(grads.values())))
    return [score.row(shadow.name, tensors) for shadow, score in zip(shadows, scores, strict=True)]


def table_of(rows: list[Row], title: str) -> Table:
    """Return the rows as a table for the terminal."""
    table = Table(title=title, box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("format", "bits", "early cos", "proj", "late cos", "proj"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("worst")
    for row in rows:
        bits = "varies" if row.bits_per_value is None else f"{row.bits_per_value:.3f}"
        values = [f"{value:.3f}" for value in (*row.early, *row.late)]
        table.add_row(row.name, bits, *values, f"{row.worst[0]:.3f} {row.worst[1]}")
    return table


def main() -> None:
    """Measure and print."""
    known = [*BLOCKWISE, *packed_names()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("char", "smollm2"), default="char")
    parser.add_argument("--formats", nargs="+", default=known, metavar="NAME")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--steps", type=int, default=None, help="default: 600 (smollm2: 100)")
    parser.add_argument("--lr", type=float, default=None, help="default: 1e-3 (smollm2: 5e-5)")
    parser.add_argument("--width", type=int, default=128, help="of the character GPT")
    parser.add_argument("--layers", type=int, default=4, help="of the character GPT")
    parser.add_argument("--max-rows", type=int, default=512, help="of each SmolLM2 matrix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="of torch")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    small = options.model == "char"
    options.steps = options.steps or (600 if small else 100)
    options.lr = options.lr or (1e-3 if small else 5e-5)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = measure(options, Console(stderr=True))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        title = f"{options.model}, {options.steps} steps, beta2 {options.beta2:g}"
        Console().print(table_of(rows, title))


if __name__ == "__main__":
    main()
