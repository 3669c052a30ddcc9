"""Compare the blocks of page files with their checksums, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from mt_lightning.errors import StorageError
from mt_lightning.tiers.run_files import Payload

_NUM_THREADS = 4
"""Two to four saturate a drive; each holds one block of 4 MiB."""


@dataclass(frozen=True)
class Block:
    """A block of a payload and the checksum that a commit has of it.

    Attributes:
        offset: First byte in the payload.
        nbytes: Its length.
        expected: Its xxh3_64.
    """

    offset: int
    nbytes: int
    expected: int


def check_blocks(
    opened: AbstractContextManager[Payload],
    blocks: Iterable[Block],
    advance: Callable[[int], None],
) -> list[StorageError]:
    """Read the blocks of one file and return what is wrong, in order; nothing is changed.

    Args:
        opened: Opens the page file.
        blocks: What is known of it.
        advance: Called with the number of bytes of each block, from any thread.

    Returns:
        One error for the file as a whole, or one for each block that differs or cannot be read.
    """
    try:
        with (
            opened as payload,
            ThreadPoolExecutor(_NUM_THREADS, "megatrain-verify") as threads,
        ):

            def check(block: Block) -> StorageError | None:
                try:
                    payload.read_block(block.offset, block.nbytes, block.expected)
                except StorageError as error:
                    return error
                finally:
                    advance(block.nbytes)
                return None

            return [error for error in threads.map(check, blocks) if error is not None]
    except StorageError as error:
        return [error]
