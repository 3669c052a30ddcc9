"""Verify checkpoints and safetensors as far as their formats allow."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mt_lightning.commands.verify.linked import verify_linked
from mt_lightning.commands.verify.report import Report, count, size
from mt_lightning.commands.verify.run_directory import Begin
from mt_lightning.errors import ConfigError
from mt_lightning.export.shards import INDEX_NAME
from mt_lightning.export.weights import TensorWeights
from mt_lightning.plugins.checkpoint_io import PagedCheckpointIO
from mt_lightning.plugins.linked import RUN_STATE
from mt_lightning.tiers.manifest_reader import is_manifest

_READ_BYTES = 4 << 20
_MOST_NAMES = 4
_AGAIN = "Take another checkpoint, or a copy of this one."
_NOT_FINITE = "It was saved like this: the training had diverged, or such values are meant."


def verify_checkpoint(path: Path, begin: Begin) -> Report:
    """Verify a checkpoint file: that it can be read whole, its CRCs, its values."""
    report = Report("checkpoint", [path], facts={"bytes": path.stat().st_size})
    whole = _read_linked if is_manifest(path) else _read_standard
    checkpoint = whole(report, path, begin)
    if checkpoint is None:
        return report
    tensors = dict(_walk(checkpoint))
    step = checkpoint.get("global_step") if isinstance(checkpoint, dict) else None
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    report.facts |= {"step": step, "tensors": len(tensors), "tensor_bytes": nbytes}
    at = f" at step {step}" if isinstance(step, int) else ""
    report.say("checkpoint", f"{count(len(tensors), 'tensor')}, {size(nbytes)}{at}")
    if not report.damaged:
        _check_finite(report, TensorWeights(tensors, private=True), begin)
    return report


def _read_standard(report: Report, path: Path, begin: Begin) -> Any:
    try:
        checkpoint = PagedCheckpointIO().load_checkpoint(path)
    except ConfigError as error:
        report.blame("checkpoint", str(error).splitlines()[0], _AGAIN)
        return None
    _check_crcs(report, path, begin)
    return checkpoint


def _read_linked(report: Report, path: Path, begin: Begin) -> Any:
    checkpoint = verify_linked(report, path, begin)
    if checkpoint is not None:
        checkpoint.pop(RUN_STATE, None)
    return checkpoint


def _walk(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_quantized:
            yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _walk(inner, f"{name}.{index}")


def _check_crcs(report: Report, path: Path, begin: Begin) -> bool:
    """Read every record of the file against its CRC; torch itself does not when it maps a file."""
    wrong: list[str] = []
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        advance = begin("checksums", sum(entry.file_size for entry in entries))
        for entry in entries:
            try:
                with archive.open(entry) as file:
                    while data := file.read(_READ_BYTES):
                        advance(len(data))
            except (zipfile.BadZipFile, EOFError, OSError) as error:
                wrong.append(f"{entry.filename} (byte {entry.header_offset}): {error}")
    if not wrong:
        report.say("checksums", f"{count(len(entries), 'CRC')} right")
    elif len(wrong) == len(entries):
        # torch.serialization.set_crc32_options(False) leaves them out.
        report.warn("checksums", "none right", "It was saved without CRCs, or all is damaged.")
    else:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        report.blame("checksums", f"{path}: {wrong[0]}{more}", _AGAIN)
    return not wrong


def _check_finite(report: Report, weights: TensorWeights, begin: Begin) -> None:
    facts = {n: f for n, f in weights.facts().items() if f.dtype.is_floating_point and f.nbytes}
    advance = begin("values", sum(each.nbytes for each in facts.values()))
    odd = []
    for name, each in facts.items():
        finite = True
        for piece in weights.pieces(name):
            finite = finite and _is_finite(torch.frombuffer(piece, dtype=each.dtype))
            advance(piece.nbytes)
        if not finite:
            odd.append(name)
    _tell_finite(report, odd, len(facts))


def _is_finite(values: torch.Tensor) -> bool:
    if values.dtype.itemsize == 1:  # torch cannot ask float8 itself
        values = values.float()
    return bool(torch.isfinite(values).all())


def _tell_finite(report: Report, odd: list[str], num_tensors: int) -> None:
    report.facts["tensors_not_finite"] = odd
    if odd:
        names = ", ".join(odd[:_MOST_NAMES]) + (", ..." if len(odd) > _MOST_NAMES else "")
        report.warn(
            "values", f"NaN or infinite in {count(len(odd), 'tensor')}: {names}", _NOT_FINITE
        )
    else:
        report.say("values", f"all finite in {count(num_tensors, 'floating-point tensor')}")


def verify_safetensors(path: Path, begin: Begin) -> Report:
    """Verify a safetensors file, or a directory of them with its index."""
    report = Report("safetensors", [path])
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    held: dict[str, str] = {}
    odd: list[str] = []
    num_floats = nbytes = 0
    advance = begin("values", sum(file.stat().st_size for file in files))
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = tensors.get_tensor(name)
                    if name in held:
                        report.blame("files", f"{file}: {name} is in {held[name]} too", _COPY)
                    held[name] = file.name
                    nbytes += tensor.nbytes
                    if tensor.dtype.is_floating_point:
                        num_floats += 1
                        if not _is_finite(tensor):
                            odd.append(name)
                    advance(tensor.nbytes)
        except (SafetensorError, OSError, ValueError) as error:
            report.blame("files", f"{file}: {error}", _COPY)
    report.facts |= {"tensors": len(held), "tensor_bytes": nbytes, "files": len(files)}
    if not report.damaged:
        held_text = f"{count(len(files), 'file')}, {count(len(held), 'tensor')}, {size(nbytes)}"
        report.say("files", f"{held_text}; the format has no checksums")
    if path.is_dir():
        _check_index(report, path, held, nbytes)
    _tell_finite(report, odd, num_floats)
    return report


_COPY = "Export it again, or take a copy."


def _check_index(report: Report, path: Path, held: dict[str, str], nbytes: int) -> None:
    file = path / INDEX_NAME
    if not file.exists():
        return
    try:
        index = json.loads(file.read_bytes())
        named = {str(name): str(where) for name, where in index["weight_map"].items()}
        total = index.get("metadata", {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        report.blame("index", f"{file}: cannot be read: {error!r}", _COPY)
        return
    gone = sorted({where for where in named.values() if not (path / where).is_file()})
    if gone:
        report.blame("index", f"{file}: names {', '.join(gone)}, which is not there", _COPY)
    elif named != held:
        name = min(set(named.items()) ^ set(held.items()))[0]
        report.blame("index", f"{file}: does not agree with the files on {name}", _COPY)
    elif total is not None and total != nbytes:
        report.blame("index", f"{file}: says {total} bytes, and there are {nbytes}", _COPY)
    else:
        report.say("index", f"{count(len(named), 'name')}, as in the files")
