"""Where a file stops being UTF-8."""

from __future__ import annotations

import codecs
from pathlib import Path

from mt_lightning.errors import ConfigError

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def undecodable(file: Path) -> ConfigError:
    """Return the error for a file that is not UTF-8, with the first line that is not."""
    with file.open("rb") as lines:
        if lines.read(2) in _UTF16_MARKS:
            return ConfigError(
                f"{file} is not UTF-8 text: it begins as UTF-16 does. {_way_out(file, 'utf-16')}"
            )
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return ConfigError(
                    f"{file}:{number} is not UTF-8 text: byte {error.start + 1} of the line is "
                    f"0x{line[error.start]:02x} ({error.reason}). {_way_out(file, 'latin1')}"
                )
    return ConfigError(f"{file} changed while it was read. Start again when it is complete.")


def _way_out(file: Path, encoding: str) -> str:
    return (
        "Set data.path to UTF-8 text; if its encoding is "
        f"{encoding}, `iconv -f {encoding} -t utf-8 {file}` writes it as UTF-8."
    )
