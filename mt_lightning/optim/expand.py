"""Map the page files of a linked checkpoint; coded ones are expanded into a file without a name."""

from __future__ import annotations

import os
import tempfile

import torch

from mt_lightning.errors import ConfigError, CorruptPageError, StorageError
from mt_lightning.optim.codec import LosslessCodec, StateCodec
from mt_lightning.optim.compressed_adamw import LOSSLESS
from mt_lightning.pages.sizes import align_up
from mt_lightning.tiers.coding import Coding
from mt_lightning.tiers.filesystem import preallocate
from mt_lightning.tiers.header import HEADER_BYTES
from mt_lightning.tiers.manifest import Manifest
from mt_lightning.tiers.mapping import PrivateMapping
from mt_lightning.tiers.pagefile import storage_error
from mt_lightning.tiers.verify import fill, open_page_file

_CODECS: dict[str, type[StateCodec]] = {LOSSLESS: LosslessCodec}


def map_file(manifest: Manifest, name: str) -> PrivateMapping:
    """Map what the tensors in a page file of a checkpoint are laid out in; it has been verified.

    Raises:
        StorageError: The file is missing, or there is no room to expand it.
        CorruptPageError: It does not expand to what it should.
        ConfigError: It is coded in a way that this release does not know.
    """
    file, path = manifest.files[name], str(manifest.path_of(name))
    fd = open_page_file(manifest, name)
    try:
        if file.coding is None:
            return PrivateMapping.of_file(fd, HEADER_BYTES, file.nbytes)
        if file.coding.codec not in _CODECS:
            raise ConfigError(
                f"{path} is coded as {file.coding.codec!r}; this release reads "
                f"{', '.join(_CODECS)}. Use the release that wrote it."
            )
        with tempfile.TemporaryFile(dir=manifest.path_of(name).parent) as plain:
            preallocate(plain.fileno(), align_up(file.coding.plain_bytes))
            try:
                _expand(fd, plain.fileno(), file.coding, path)
            except (ValueError, RuntimeError, IndexError) as error:
                raise CorruptPageError(None, f"cannot be expanded: {error}", path) from error
            return PrivateMapping.of_file(plain.fileno(), 0, file.coding.plain_bytes)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, "cannot map", path) from error
    finally:
        os.close(fd)


def _expand(source: int, target: int, coding: Coding, path: str) -> None:
    codec = _CODECS[coding.codec]()
    for chunk in coding.chunks:
        if not chunk.length:
            continue
        # The codec reads some bytes beyond the end of a stream.
        stream = torch.zeros(align_up(chunk.length + 1), dtype=torch.uint8)
        fill(source, HEADER_BYTES + chunk.offset, stream.numpy().data[: chunk.length], path)
        plain = torch.empty(chunk.plain_bytes, dtype=torch.uint8)
        codec.decode(stream[: chunk.length], plain)
        at, data = 0, plain.numpy().data
        for offset, length in chunk.pieces:
            done = 0
            while done < length:
                done += os.pwrite(target, data[at + done : at + length], offset + done)
            at += length
