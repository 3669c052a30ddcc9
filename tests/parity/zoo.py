"""The zoo: nine tiny networks of nine kinds, with random weights from a fixed seed, and their data.

Each layer holds at least 200 KB of parameters, so that a small budget makes the pages move.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from .networks import GPT, ConvNet

VOCAB_SIZE = 512
NUM_TOKENS = 16
WIDTH = 64
NUM_LAYERS = 3

MODELS = ("gpt", "llama", "gpt2", "qwen3_moe", "mixtral", "t5", "bert", "vit", "convnet")
USER_WRITTEN = frozenset({"gpt", "convnet"})
VISION = frozenset({"vit", "convnet"})
MIXTURES = frozenset({"qwen3_moe", "mixtral"})
GENERATIVE = frozenset({"llama", "gpt2", "qwen3_moe", "mixtral", "t5"})

_LAYER_LISTS = {
    "gpt": "blocks",
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "qwen3_moe": "model.layers",
    "mixtral": "model.layers",
    "t5": "decoder.block",
    "bert": "bert.encoder.layer",
    "vit": "vit.layers",
    "convnet": "stages",
}


def build(name: str, *, dropout: float, tied: bool) -> nn.Module:
    """Build one network; equal arguments give equal bits.

    Args:
        name: One of ``MODELS``.
        dropout: Probability in every dropout of the network.
        tied: Let head and token embedding share one parameter. (GPT-2, BERT and T5 always do.)
    """
    torch.manual_seed(1234)
    return _BUILDERS[name](dropout, tied)


def layers_of(name: str, network: nn.Module) -> nn.ModuleList:
    """Return the list of layers of a network (of a T5: of its decoder)."""
    layers = network.get_submodule(_LAYER_LISTS[name])
    assert isinstance(layers, nn.ModuleList)
    return layers


def batches(name: str, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Make ``count`` random batches for a network."""
    generator = torch.Generator().manual_seed(seed)
    return [_batch(name, generator) for _ in range(count)]


def _batch(name: str, generator: torch.Generator) -> dict[str, Tensor]:
    if name in VISION:
        return {
            "pixel_values": torch.randn(4, 3, 8, 8, generator=generator),
            "labels": torch.randint(10, (4,), generator=generator),
        }
    tokens = torch.randint(5, VOCAB_SIZE, (2, NUM_TOKENS), generator=generator)
    if name == "bert":
        hidden = torch.rand(tokens.shape, generator=generator) < 0.3
        hidden[:, 0] = True
        return {
            "input_ids": tokens.masked_fill(hidden, 4),
            "labels": tokens.masked_fill(~hidden, -100),
        }
    if name == "t5":
        labels = torch.randint(5, VOCAB_SIZE, (2, NUM_TOKENS // 2), generator=generator)
        return {"input_ids": tokens, "labels": labels}
    return {"input_ids": tokens, "labels": tokens}


def _gpt(dropout: float, tied: bool) -> nn.Module:
    return GPT(VOCAB_SIZE, WIDTH + 16, NUM_LAYERS, dropout, tied)


def _convnet(dropout: float, tied: bool) -> nn.Module:
    del tied
    return ConvNet(64, 4, 10, dropout)


def _llama(dropout: float, tied: bool) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _gpt2(dropout: float, tied: bool) -> nn.Module:
    del tied
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=64,
        n_embd=WIDTH + 16,
        n_layer=NUM_LAYERS,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _qwen3_moe(dropout: float, tied: bool) -> nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        output_router_logits=True,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config)


def _mixtral(dropout: float, tied: bool) -> nn.Module:
    config = MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        output_router_logits=True,
        router_jitter_noise=dropout,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def _t5(dropout: float, tied: bool) -> nn.Module:
    del tied
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=WIDTH,
        d_kv=16,
        d_ff=512,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _bert(dropout: float, tied: bool) -> nn.Module:
    del tied
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        intermediate_size=320,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForMaskedLM(config)


def _vit(dropout: float, tied: bool) -> nn.Module:
    del tied
    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        intermediate_size=320,
        image_size=8,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return ViTForImageClassification(config)


_BUILDERS = {
    "gpt": _gpt,
    "llama": _llama,
    "gpt2": _gpt2,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "t5": _t5,
    "bert": _bert,
    "vit": _vit,
    "convnet": _convnet,
}
