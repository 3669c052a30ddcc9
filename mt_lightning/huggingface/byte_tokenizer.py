"""A tokenizer without files: one token per byte, for tests and for the tiny model."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

NUM_BYTE_TOKENS = 257
_END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Build a tokenizer of 256 byte tokens and one end-of-text token (id 256)."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(_END_OF_TEXT, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_END_OF_TEXT, pad_token=_END_OF_TEXT
    )
