"""Tokenise text files once, in bounded memory, into a flat file of token ids."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mt_lightning.huggingface.data.utf8 import undecodable
from mt_lightning.huggingface.tokenising import tokenising

_CHUNK_CHARACTERS = 1 << 16
_FORMAT_VERSION = 2


def token_file_path(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> Path:
    """Name the token file of these texts under this tokenizer.

    The name changes when a file changes (path, size, time of change) or the tokenizer does.
    """
    digest = xxhash.xxh3_128()
    digest.update(f"{_FORMAT_VERSION} {tokenizer_key(tokenizer)}\n".encode())
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return folder / f"{digest.hexdigest()}.tokens"


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what changes when a tokenizer gives other ids for some text."""
    digest = xxhash.xxh3_128()
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    digest.update(f"{type(tokenizer).__name__} {token_dtype(tokenizer)} {special}\n".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # merges, normaliser and all, but how the last call padded
        known = json.loads(backend.to_str())
        known.update(truncation=None, padding=None)
        digest.update(json.dumps(known, sort_keys=True).encode())
    else:
        for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            digest.update(f"{index} {token}\n".encode())
    return digest.hexdigest()


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """Return the dtype of the ids in a token file: 2 bytes where the vocabulary allows it."""
    return np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)


def write_token_file(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, destination: Path
) -> None:
    """Tokenise the files in order, an end-of-text token after each, if the tokenizer has one.

    The text goes through in pieces of 64 Ki characters that end between words, so memory does not
    grow with the text. The file appears whole or not at all.

    Raises:
        ConfigError: if a file is not UTF-8 text.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_suffix(f".{os.getpid()}.partial")
    dtype = token_dtype(tokenizer)
    total = sum(file.stat().st_size for file in files)
    name = str(files[0]) if len(files) == 1 else f"{len(files)} files of {files[0].parent}"
    try:
        with partial.open("wb") as out, tokenising(name, total) as advance:
            for file in files:
                size_before = out.tell()
                for piece in _pieces(file):
                    ids = tokenizer(
                        piece,
                        add_special_tokens=False,
                        return_attention_mask=False,
                        verbose=False,
                    )["input_ids"]
                    out.write(np.asarray(ids, dtype=dtype).tobytes())
                    advance(len(piece.encode()))
                if out.tell() > size_before and tokenizer.eos_token_id is not None:
                    out.write(np.asarray([tokenizer.eos_token_id], dtype=dtype).tobytes())
        partial.replace(destination)
    finally:
        partial.unlink(missing_ok=True)


def open_token_file(path: Path, dtype: np.dtype) -> NDArray[np.integer]:
    """Map a token file; the array is read-only and takes no anonymous memory."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _pieces(file: Path) -> Iterator[str]:
    rest = ""
    try:
        with file.open(encoding="utf-8") as text:
            while chunk := text.read(_CHUNK_CHARACTERS):
                rest += chunk
                # Cut before a blank, which tokenizers join to the word that follows it.
                cut = max(rest.rfind(" "), rest.rfind("\n"))
                if cut <= 0:
                    cut = len(rest)
                yield rest[:cut]
                rest = rest[cut:]
    except UnicodeDecodeError as error:
        raise undecodable(file) from error
    if rest:
        yield rest
