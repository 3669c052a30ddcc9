"""Whatever lies in the files of a run, it is found to be whole or refused by name."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mt_lightning as mt
from mt_lightning.errors import ConfigError, CorruptPageError, MegaTrainError
from mt_lightning.tiers.commit import CommitLog
from mt_lightning.tiers.header import HEADER_BYTES, check_header, encode_header
from mt_lightning.tiers.lock import DirectoryLock

from .nets import Net, after, assert_same, fit, parameters_of

NAME = "p00000.weight.0"
DEEP = b"[" * 4000
QUICK = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def reseal(header: bytes) -> bytes:
    body = header[: HEADER_BYTES - 8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@QUICK
@given(st.binary(max_size=64), st.integers(0, HEADER_BYTES), st.booleans())
def test_page_headers(piece: bytes, at: int, sealed: bool) -> None:
    good = encode_header(NAME, 8192, {"layout": "abc"})
    changed = (good[:at] + piece + good[at + len(piece) :])[:HEADER_BYTES]
    changed = reseal(changed.ljust(HEADER_BYTES, b"\0")) if sealed else changed
    if changed == good:
        return
    with contextlib.suppress(CorruptPageError):
        # Only what says the same may pass: white space, or bytes behind the JSON.
        assert check_header(changed, NAME, {"layout": "abc"}, "path") == 8192
        assert sealed


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@QUICK
@given(ANY_JSON | st.fixed_dictionaries({"payload_bytes": ANY_JSON}) | st.just(DEEP))
def test_page_headers_of_any_json(value: Any) -> None:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()[:4000]
    prefix = struct.pack("<8sII", b"MTPAGE\r\n", 1, len(text))
    with pytest.raises(CorruptPageError):
        check_header(reseal((prefix + text).ljust(HEADER_BYTES, b"\0")), NAME, {}, "path")


@QUICK
@given(st.binary(max_size=400))
def test_lock_files(tmp_path: Path, content: bytes) -> None:
    """A lock is held by a process, not by what the file says: a dead owner's is free."""
    (tmp_path / "lock").write_bytes(content)
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    with pytest.raises(ConfigError, match="in use by"):
        DirectoryLock(tmp_path).acquire()
    lock.release()
    again = DirectoryLock(tmp_path)
    again.acquire()
    again.release()


@QUICK
@given(st.binary(max_size=300), st.binary(max_size=300), st.booleans())
def test_files_of_records(tmp_path: Path, first: bytes, second: bytes, magic: bool) -> None:
    prefix = b"MTCOMMIT" if magic else b""
    (tmp_path / "commit.0").write_bytes(prefix + first)
    (tmp_path / "commit.1").write_bytes(prefix + second)
    assert CommitLog([tmp_path]).latest() is None


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory that was committed at step 2, and what step 4 is in plain training."""
    root = tmp_path_factory.mktemp("run")
    strategy = mt.MegaTrainStrategy(root / "pages")
    fit(Net(), root, strategy, max_steps=2)
    strategy._close()
    return root / "pages", after(4, root)


def resume(directory: Path, root: Path) -> Net:
    module = Net()
    strategy = mt.MegaTrainStrategy(directory, on_existing="resume")
    try:
        fit(module, root, strategy, max_steps=4)
    finally:
        strategy._close()
    return module


def overwrite(data: bytes, at: float, piece: bytes) -> bytes:
    start = int(at * len(data))
    return data[:start] + piece + data[start + len(piece) :]


DAMAGE: dict[str, Callable[[bytes, float, bytes], bytes]] = {
    "overwritten": overwrite,
    "cut": lambda data, at, piece: data[: int(at * len(data))],
    "other": lambda data, at, piece: piece,
    "longer": lambda data, at, piece: data + piece,
}


@pytest.mark.parametrize("pattern", ["layout-*.json", "kept-*", "commit.?", "pages/*"])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    derandomize=True,
)
@given(
    how=st.sampled_from(sorted(DAMAGE)),
    which=st.integers(0, 1000),
    at=st.floats(0, 1, exclude_max=True),
    piece=st.binary(min_size=1, max_size=200),
)
def test_damaged_files_of_a_run(
    committed: tuple[Path, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    pattern: str,
    how: str,
    which: int,
    at: float,
    piece: bytes,
) -> None:
    """A damaged file is refused by name, or did not matter: then the bits are those of the run."""
    source, expected = committed
    root = tmp_path_factory.mktemp("damaged")
    directory = root / "pages"
    shutil.copytree(source, directory)
    files = sorted(directory.glob(pattern))
    file = files[which % len(files)]
    file.write_bytes(DAMAGE[how](file.read_bytes(), at, piece))
    error = None
    try:
        module = resume(directory, root)
    except MegaTrainError as raised:
        error = raised
    if error is None:
        assert_same(parameters_of(module), expected)
    else:
        assert isinstance(error, (ConfigError, mt.StorageError))
        assert len(str(error)) > 20
    shutil.rmtree(root, ignore_errors=True)
