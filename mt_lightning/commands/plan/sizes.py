"""Models by size: configs of the shapes that models of that size usually have."""

from __future__ import annotations

import re
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from mt_lightning.errors import ConfigError

_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)([MBT])(?:-A(\d+(?:\.\d+)?)B)?", re.IGNORECASE)
_MIXTURE = re.compile(r"\d+x\d+(?:\.\d+)?[MBT]", re.IGNORECASE)
_UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
_KNOWN: dict[str, dict[str, int]] = {
    "8B": {"hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "vocab": 128256},
    "14B": {"hidden": 5120, "inner": 17408, "layers": 40, "heads": 40, "vocab": 151936},
    "32B": {"hidden": 5120, "inner": 25600, "layers": 64, "heads": 64, "vocab": 151936},
    "70B": {"hidden": 8192, "inner": 28672, "layers": 80, "heads": 64, "vocab": 128256},
    "100B": {"hidden": 10240, "inner": 28672, "layers": 88, "heads": 80, "vocab": 128256},
}
"""Shapes of Llama 3 8B and 70B, of Qwen3 14B and 32B, and one of 100B."""
_NAMES = ("hidden", "inner", "layers", "heads", "experts", "top")
_EXPERTS: dict[str, dict[str, int]] = {
    "30B-A3B": dict(zip(_NAMES, (2048, 768, 48, 32, 128, 8), strict=True)),
    "120B-A5B": dict(zip(_NAMES, (2880, 2880, 36, 64, 128, 4), strict=True)),
    "1T-A32B": dict(zip(_NAMES, (7168, 2048, 61, 64, 384, 8), strict=True)),
}
"""Shapes of Qwen3-30B-A3B, and of two more with as many experts as gpt-oss-120b and Kimi K2."""
SHAPES = (*_KNOWN, *_EXPERTS)
"""Sizes whose shapes are those of known models."""
_SMOLLM2 = {"hidden": 576, "inner": 1536, "layers": 30, "heads": 9, "vocab": 49152}
"""SmolLM2-135M, whose package holds weights and no config; its head is its embedding."""
_HEAD_WIDTH = 128
_KV_HEADS = 8
_LEAST, _MOST = 1e6, 5e12


def size_config(text: str) -> PreTrainedConfig | None:
    """Return the config of a model of a size such as "100B", None where the text names none.

    Raises:
        ConfigError: There is no shape of that size.
    """
    if text == "smollm2":
        config = _dense(**_SMOLLM2)
        config.tie_word_embeddings = True
        config.num_key_value_heads = 3
        return config
    match = _SIZE.fullmatch(text)
    if match is None and _MIXTURE.fullmatch(text) is None:
        return None
    key = text.upper()
    if key in _EXPERTS:
        return _experts(**_EXPERTS[key])
    if match is None or match[3] is not None:
        raise ConfigError(
            f"model={text!r}: of models with experts, shapes are known of "
            f"{', '.join(_EXPERTS)}. Give one of these, or a config.json."
        )
    if key in _KNOWN:
        return _dense(**_KNOWN[key])
    wanted = float(match[1]) * _UNITS[match[2].upper()]
    if not _LEAST <= wanted <= _MOST:
        raise ConfigError(f"model={text!r}: give a size between 1M and 5T parameters.")
    return _dense(**_shape(wanted))


def _shape(wanted: float) -> dict[str, int]:
    """Return the shape nearest to a size, about as deep as models of its width usually are."""
    vocab = 128256 if wanted >= 1e9 else 32000 if wanted >= 5e7 else 4096
    best: tuple[float, dict[str, int]] | None = None
    for heads in range(1, 256):
        hidden = heads * (_HEAD_WIDTH if wanted >= 5e8 else 64)
        inner = -(-7 * hidden // 2 // 256) * 256
        layer = hidden * (2 * hidden + 2 * hidden // max(1, heads // 8) + 3 * inner)
        left = wanted - 2 * vocab * hidden
        layers = max(1, round(left / layer))
        miss = abs(2 * vocab * hidden + layers * layer - wanted) / wanted
        odd = abs(hidden / layers / 110 - 1)
        score = miss + 0.1 * odd
        if best is None or score < best[0]:
            shape = {
                "hidden": hidden, "inner": inner, "layers": layers, "heads": heads, "vocab": vocab
            }  # fmt: skip
            best = (score, shape)
    assert best is not None
    return best[1]


def _dense(*, hidden: int, inner: int, layers: int, heads: int, vocab: int) -> LlamaConfig:
    kv_heads = next(n for n in (_KV_HEADS, 4, 2, 1) if heads % n == 0)
    settings: dict[str, Any] = {"head_dim": _HEAD_WIDTH} if hidden >= 4096 else {}
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=False,
        **settings,
    )


def _experts(
    *, hidden: int, inner: int, layers: int, heads: int, experts: int, top: int
) -> Qwen3MoeConfig:
    settings: dict[str, Any] = {"head_dim": 128 if heads * 128 <= 4 * hidden else 64}
    return Qwen3MoeConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4 if heads < 64 else _KV_HEADS,
        num_experts=experts,
        num_experts_per_tok=top,
        vocab_size=151936,
        tie_word_embeddings=False,
        **settings,
    )
