"""Verify a linked checkpoint: its manifest, and every byte of the files that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mt_lightning.commands.verify.report import Report, count, size, told
from mt_lightning.commands.verify.run_directory import Begin
from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.plugins.linked import open_linked
from mt_lightning.tiers.block_check import Block, check_blocks
from mt_lightning.tiers.manifest import Manifest
from mt_lightning.tiers.manifest_reader import read_manifest
from mt_lightning.tiers.verify import page_file, verify_rest

_AGAIN = "Take another checkpoint, or a copy of this one. Check the drive before it is used again."


def verify_linked(report: Report, path: Path, begin: Begin) -> dict[str, Any] | None:
    """Read all files of a linked checkpoint against its manifest.

    Args:
        report: Told what is found.
        path: The manifest.
        begin: Shows progress.

    Returns:
        The checkpoint; None where it is not whole, or cannot be opened.
    """
    try:
        manifest = read_manifest(path)
    except ConfigError as error:
        report.blame("manifest", str(error), _AGAIN)
        return None
    except StorageError as error:
        report.blame("files", told(error), "Give the manifest at its place beside the folder.")
        return None
    nbytes = sum(length for file in manifest.files.values() for _, length in file.pieces)
    report.facts |= {
        "id": manifest.checkpoint_id,
        "folders": [str(folder) for folder in manifest.folders],
        "page_files": len(manifest.files),
        "verified_bytes": nbytes + manifest.rest[1],
    }
    report.say("manifest", f"{manifest.checkpoint_id}, its checksum is right")
    if not _check_files(report, manifest, begin("checksums", nbytes), nbytes):
        return None
    try:
        return open_linked(path, manifest, weights_only=True)
    except ConfigError as error:
        report.blame("rest", str(error).splitlines()[0], _AGAIN)
    except StorageError as error:
        report.blame("rest", told(error), _AGAIN)
    return None


def _check_files(report: Report, manifest: Manifest, advance: Any, nbytes: int) -> bool:
    num_damaged = 0
    for name, file in manifest.files.items():
        blocks = [Block(*block) for block in file.blocks()]
        errors = check_blocks(page_file(manifest, name, fresh=True), blocks, advance)
        if errors:
            num_damaged += 1
            more = f" (and {count(len(errors) - 1, 'more block')})" if len(errors) > 1 else ""
            report.blame("pages", f"{told(errors[0])}{more}", _AGAIN)
    try:
        verify_rest(manifest)
    except StorageError as error:
        num_damaged += 1
        report.blame("rest", told(error), _AGAIN)
    if num_damaged:
        return False
    sums = sum(file.num_blocks for file in manifest.files.values()) + 1
    held = f"{count(len(manifest.files), 'page file')}, {size(nbytes)}"
    report.say("checksums", f"{held}, {count(sums, 'checksum')} right")
    return True
