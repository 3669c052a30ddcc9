"""Where rows come from: JSON lines, and data sets of Hugging Face, of torch, or in a list."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.data.utf8 import undecodable

ROW_SUFFIXES = (".jsonl", ".ndjson")
"""Names of files with one JSON object per line."""

_TABLES = {".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".7z")


def check_is_text(file: Path) -> None:
    """Refuse a file whose name says that it is no text, before it is trained letter by letter.

    Raises:
        ConfigError: It is a table, or packed.
    """
    suffix = file.suffix.lower()
    if suffix in _PACKED:
        raise ConfigError(
            f"data.path={str(file)!r} is a packed file. Unpack it, and set data.path to the text "
            "or the JSON lines in it."
        )
    if suffix in _TABLES:
        raise ConfigError(
            f"data.path={str(file)!r} is no text, and no JSON lines by its name. If each line "
            f"holds one JSON object, rename it to {file.stem}.jsonl; else read it with "
            f"data=dataset data.dataset.path={_TABLES[suffix]} data.dataset.data_files={file} "
            "(in Python: dataset=datasets.load_dataset(...))."
        )


class Rows:
    """Rows of a data set, with a name for each and a key for all of them.

    Args:
        source: JSONL files, or a data set: a sequence, an iterable, one of Hugging Face.
        name: What it is called in messages.

    Raises:
        ConfigError: It is none of those.
    """

    def __init__(self, source: Any, name: str) -> None:
        is_table = hasattr(source, "iloc")  # of pandas: its items are columns
        if (
            is_table
            or isinstance(source, (str, bytes, Mapping))
            or not (hasattr(source, "__getitem__") or hasattr(source, "__iter__"))
        ):
            hint = (
                " Its rows are such a list: table.to_dict('records')."
                if is_table
                else f" Its splits are {', '.join(map(str, source))}: give one, as in "
                f"dataset[{next(iter(source), 'train')!r}]."
                if isinstance(source, Mapping)
                else ""
            )
            raise ConfigError(
                f"{name} is a {type(source).__name__}; give a data set: Hugging Face's or "
                f"torch's, or a list of dicts.{hint}"
            )
        self.source = source
        self.name = name

    @property
    def is_files(self) -> bool:
        """Whether the rows are lines of files."""
        return isinstance(self.source, list) and all(isinstance(e, Path) for e in self.source)

    @property
    def has_length(self) -> bool:
        """Whether the rows can be counted, and hence be split and kept."""
        if self.is_files:
            return True
        try:
            len(self.source)
        except (TypeError, NotImplementedError, AttributeError):
            return False
        return hasattr(self.source, "__getitem__")

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the first row.

        Raises:
            ConfigError: There is no row.
        """
        names = getattr(self.source, "column_names", None)
        if isinstance(names, Sequence) and names:
            return list(names)
        for _, row in self:
            if isinstance(row, Mapping):
                return [str(each) for each in row]
            break
        else:
            raise ConfigError(f"{self.name} is empty: it has 0 rows. Give one with rows in it.")
        raise ConfigError(
            f'{self.name}: row 0 is no mapping from columns to values, such as {{"text": "..."}}.'
        )

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield each row behind the words that say which it is."""
        if self.is_files:
            for file in self.source:
                yield from _json_lines(file)
        elif self.has_length:
            for i in range(len(self.source)):
                yield f"{self.name}, row {i}", self.source[i]
        else:
            for i, row in enumerate(self.source):
                yield f"{self.name}, row {i}", row

    def num_lines(self) -> int:
        """Return the number of rows of a data set with a length; of files, that of their lines."""
        if not self.is_files:
            return len(self.source)
        count = 0
        for file in self.source:
            with file.open("rb") as lines:
                count += sum(1 for _ in lines)
        return count

    def key(self) -> str:
        """Return what changes when the rows do.

        Raises:
            ConfigError: Rows hold something that is not JSON.
        """
        digest = xxhash.xxh3_128()
        known = getattr(self.source, "_fingerprint", None)
        if self.is_files:
            for file in self.source:
                status = file.stat()
                digest.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
        elif isinstance(known, str):
            digest.update(f"fingerprint {known}".encode())
        else:
            for where, row in self:
                try:
                    digest.update(json.dumps(row, sort_keys=True).encode())
                except (TypeError, ValueError) as error:
                    raise ConfigError(
                        f"{where} holds what is not JSON ({error}); samples are text, or lists "
                        "and mappings of text."
                    ) from error
        return digest.hexdigest()


def load_dataset(path: str | os.PathLike[str], *args: Any, **settings: Any) -> Any:
    """Load a data set with Hugging Face's `datasets`, for `data.dataset` of the command line.

    Args:
        path: A name on the hub, "parquet" or "csv" with `data_files` (columns of `.tsv` files
            are between tabs), or a folder that `save_to_disk` wrote.
        *args: Passed on.
        **settings: Passed on, such as `split="train"`.

    Raises:
        ConfigError: `datasets` is not installed, or it cannot load that.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"data set {str(path)!r} needs the package datasets. Run: "
            "pip install 'mt-lightning[data]' (JSON lines and texts need none: data.path=...)."
        )
    import datasets  # pyright: ignore[reportMissingImports]

    if str(path) == "csv" and not settings.keys() & {"sep", "delimiter"}:
        files: Any = settings.get("data_files")
        names = [files] if isinstance(files, (str, os.PathLike)) else files
        if isinstance(names, Sequence) and all(str(n).lower().endswith(".tsv") for n in names):
            settings["sep"] = "\t"
    try:
        if any((Path(path) / name).exists() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(path))
            split = settings.get("split")
            return found[split] if split is not None and isinstance(found, Mapping) else found
        return datasets.load_dataset(str(path), *args, **settings)
    # Its errors are of many classes, some of other packages.
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"cannot load the data set {str(path)!r}: {reason[0] if reason else error!r}. Give "
            "data.dataset.path a name on the Hugging Face hub, or a folder."
        ) from error


def tables_in(folder: Path) -> list[Path]:
    """Return the files of a folder that hold rows in another form than JSON lines."""
    return [file for file in sorted(folder.glob("*")) if file.suffix.lower() in _TABLES]


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                # Windows may mark the beginning.
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise undecodable(file) from error
            # Lists in lists without end, and numbers of thousands of digits, are not read.
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{where} is not JSON that can be read ({error}): each line holds one "
                    'object, such as {"text": "..."}. Correct the line.'
                ) from error
            yield where, row
