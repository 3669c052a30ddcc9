"""Whether a model keeps the samples of a packed row apart.

[Note: proof of packing]
Packed samples are told apart by positions that begin anew; whether a model looks at them is its
own affair. So before the first step it is run on three short samples, one by one and in a row. The
logits have to be the same up to rounding: nearer to each other, by far, than to those of the same
row with positions that run on, where samples do see each other.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from mt_lightning.errors import ConfigError

log = logging.getLogger(__name__)

_LENGTHS = (7, 5, 9)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_LOW_PRECISION = 0.1


def is_packed(trainer: Trainer) -> bool:
    """Return whether a Trainer trains on packed rows."""
    loader: Any = trainer.train_dataloader
    return bool(getattr(getattr(loader, "dataset", None), "packed", False))


def prove_packing(model: nn.Module) -> None:
    """Check that samples of a packed row do not see each other; see [Note: proof of packing].

    Nothing is changed: neither random numbers, nor the mode of the model.

    Args:
        model: Takes `input_ids` and `position_ids`, returns `.logits`.

    Raises:
        ConfigError: They do, or it cannot be told.
    """
    was_training = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            apart, together, mixed = _logits(model)
    except (TypeError, ValueError) as error:
        raise ConfigError(_refusal(model, f"it does not take position_ids ({error})")) from error
    finally:
        for name, module in model.named_modules():
            module.training = was_training[name]
    skipped = _LENGTHS[0]  # nothing comes before the first sample
    error = float((together - apart)[skipped:].abs().max())
    effect = float((mixed - apart)[skipped:].abs().max())
    tolerance = _TOLERANCE.get(apart.dtype, _TOLERANCE_LOW_PRECISION)
    if not error <= tolerance * effect:
        raise ConfigError(
            _refusal(
                model,
                f"logits of packed samples differ by {error:.2g} from those of single ones, where "
                f"samples that see each other differ by {effect:.2g}",
            )
        )
    if effect == 0:
        raise ConfigError(
            _refusal(model, "its logits do not depend on other tokens, so nothing can be proved")
        )
    log.info(
        "Packing is exact: packed samples have the logits of single ones to %.1g (samples that "
        "see each other differ by %.1g).",
        error,
        effect,
    )


def check_packed_data(trainer: Trainer, model: nn.Module) -> None:
    """Prove packing at the start of a fit, if its rows are packed."""
    if is_packed(trainer):
        prove_packing(model)


def _logits(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    num_tokens = int(getattr(embedding, "num_embeddings", 256))
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(num_tokens, (1, n), generator=generator) for n in _LENGTHS]
    row = torch.cat(samples, 1).to(device)
    positions = torch.cat([torch.arange(n) for n in _LENGTHS]).unsqueeze(0).to(device)

    def run(ids: Tensor, **extra: Tensor) -> Tensor:
        return model(input_ids=ids.to(device), use_cache=False, **extra).logits[0].detach().clone()

    apart = torch.cat([run(sample) for sample in samples])
    return apart, run(row, position_ids=positions), run(row)


def _refusal(model: nn.Module, why: str) -> str:
    return (
        f"data.packing=True, but {type(model).__name__} does not keep packed samples apart: {why}. "
        "Set data.packing=False, or load the model with attn_implementation='sdpa' or 'eager'."
    )
