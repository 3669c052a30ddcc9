"""The stream is what its documentation says, stays so, and is safe to read when damaged."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from mt_lightning.errors import CorruptPageError
from mt_lightning.optim.lossless import decode, encode, max_encoded

from ..forked.process import run


def example() -> np.ndarray:
    """Make 40 blocks and 37 bytes, by integer arithmetic: every kind of record, chunks of two."""
    noise = np.arange(40 * 128, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    words = (noise & np.uint64(0x7FFFFF)).astype(np.uint32).reshape(40, 128)
    spread = noise.astype(np.uint32).reshape(40, 128) >> np.uint32(7)
    words[:12] |= (100 + spread[:12] % 9) << 23 | (spread[:12] & 16) << 27
    words[12:24] |= (3 + spread[12:24] % 30) << 23
    words[24:28] = 0
    words[28:32] |= (100 + spread[28:32] % 5) << 23
    words[28:32][spread[28:32] % 5 > 0] = 0
    words[32:36] |= (spread[32:36] % 256) << 23
    words[36:] |= (120 + spread[36:] % 7) << 23 | 1 << 31
    rest = np.arange(37, dtype=np.uint8)
    return np.concatenate([words.reshape(-1).view(np.uint8), rest])


def coded(raw: np.ndarray) -> bytes:
    out = torch.zeros(max_encoded(raw.size), dtype=torch.uint8)
    return out[: encode(torch.from_numpy(raw), out)].numpy().tobytes()


class Reader:
    """Read a stream value by value, as the documentation describes it."""

    def __init__(self, stream: bytes) -> None:
        self.stream, self.at = stream, 0
        self.kinds_seen: set[str] = set()

    def take(self, count: int) -> bytes:
        self.at += count
        assert self.at <= len(self.stream)
        return self.stream[self.at - count : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def read(self) -> bytes:
        assert self.take(4) == b"MTLS"
        assert self.number(4) == 1
        nbytes = self.number(8)
        sizes = [min(2**20, nbytes - start) for start in range(0, nbytes, 2**20)]
        lengths = [self.number(4) for _ in sizes]
        data = b"".join(
            self.chunk(size, length) for size, length in zip(sizes, lengths, strict=True)
        )
        assert self.at == len(self.stream)
        return data

    def chunk(self, size: int, length: int) -> bytes:
        if length == 0:
            return bytes(size)
        if length == size:
            return self.take(size)
        end = self.at + length
        kinds, bases = self.take(size // 512), self.take(size // 512)
        data = b"".join(self.block(kind, base) for kind, base in zip(kinds, bases, strict=True))
        data += self.take(size % 512)
        assert self.at == end
        return data

    def block(self, kind: int, base: int) -> bytes:
        if kind == 0:
            self.kinds_seen.add("zero")
            return bytes(512)
        if kind == 1:
            self.kinds_seen.add("raw")
            return self.take(512)
        if kind == 2:
            self.kinds_seen.add("sparse")
            mask = self.number(16)
            return b"".join(self.take(4) if mask >> k & 1 else bytes(4) for k in range(128))
        signed, half_tail = (True, kind - 3) if kind < 43 else (False, kind - 43)
        self.kinds_seen.add("signed" if signed else "unsigned")
        code_bytes, low = self.take(48), [self.number(2) for _ in range(128)]
        top, tail = list(self.take(128 if signed else 112)), self.take(2 * half_tail)
        if not signed:
            for j in range(16):
                top.append(sum((top[16 * i + j] >> 7) << i for i in range(7)))
            top = [byte & 127 for byte in top]
        codes = {}
        for j in range(16):
            word = code_bytes[j] | code_bytes[16 + j] << 8 | code_bytes[32 + j] << 16
            codes.update({16 * i + j: word >> 3 * i & 7 for i in range(8)})
        outside = [16 * i + j for j in range(16) for i in range(8) if codes[16 * i + j] == 7]
        nibbles = [tail[n // 2] >> 4 * (n % 2) & 15 for n in range(len(outside))]
        far = list(tail[(len(outside) + 1) // 2 :])
        exponents = {k: base + code for k, code in codes.items()}
        for k, nibble in zip(outside, nibbles, strict=True):
            if nibble == 15:
                self.kinds_seen.add("far")
                exponents[k] = far.pop(0)
            else:
                exponents[k] = base - 1 - nibble if nibble < 10 else base - 3 + nibble
        assert far in ([], [0])
        words = [
            low[k] | (top[k] & 127) << 16 | exponents[k] << 23 | (top[k] >> 7) << 31
            for k in range(128)
        ]
        return np.array(words, np.uint32).tobytes()


def test_a_reader_written_from_the_documentation_restores_every_kind_of_record():
    raw = example()
    reader = Reader(coded(raw))
    assert reader.read() == raw.tobytes()
    assert reader.kinds_seen == {"zero", "raw", "sparse", "signed", "unsigned", "far"}


def test_streams_written_by_version_1_do_not_change():
    digest = hashlib.sha256(coded(example())).hexdigest()
    assert digest == "9f1f54592ffb4bd9163aaa1553cfeef6a00635687750f7d09fc403d2219a0c8c"


def damaged(change: str) -> torch.Tensor:
    stream = bytearray(coded(example()))
    if change == "empty":
        stream = bytearray()
    elif change == "magic":
        stream[0] ^= 1
    elif change == "version":
        stream[4] ^= 2
    elif change == "raw bytes":
        stream[8] ^= 1
    elif change == "chunk length":
        stream[16] ^= 1
    elif change == "long chunk":
        stream[19] = 255
    elif change == "kind unknown":
        assert stream[20 + 32] == 1  # the 512 bytes that kind 91 would have
        stream[20 + 32] = 91
    elif change == "record left over":
        stream[20 + 39] = 0
    elif change == "kind too long":
        stream[20] += 1
    elif change == "kind too short":
        stream[20] = 3
    elif change == "bases missing":  # blocks of zeros need nothing else
        stream[16:] = (40 + 37).to_bytes(4, "little") + bytes(40 + 37)
    elif change == "cut short":
        del stream[-1]
    return torch.frombuffer(stream, dtype=torch.uint8) if stream else torch.empty(0).byte()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("empty", "has 0 bytes"),
        ("magic", "starts with b'LTLS'"),
        ("version", "version 3"),
        ("raw bytes", "holds 20516 bytes of state and 20517 are asked for"),
        ("chunk length", "chunk 0"),
        ("long chunk", "chunk 0 ends at byte"),
        ("kind unknown", "chunk 0"),
        ("record left over", "chunk 0"),
        ("kind too long", "chunk 0"),
        ("kind too short", "chunk 0"),
        ("bases missing", "the 77 bytes of chunk 0"),
        ("cut short", "chunk 0 ends at byte"),
    ],
)
def test_damage_is_reported_with_what_is_wrong(change, message):
    with pytest.raises(CorruptPageError, match=message):
        decode(damaged(change), torch.empty(example().size, dtype=torch.uint8))


ATTACK = """
import ctypes
import mmap

import numpy as np
import torch

from mt_lightning.errors import CorruptPageError
from mt_lightning.optim.lossless import decode
from tests.optim.test_lossless_format import coded, example

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
keep = []


def guarded(size):
    '''Return memory whose last byte is followed by a page that must not be touched.'''
    pages = -(-size // PAGE)
    region = mmap.mmap(-1, (pages + 1) * PAGE)
    memory = np.frombuffer(region, np.uint8)
    keep.append(region)
    assert libc.mprotect(memory.ctypes.data + pages * PAGE, PAGE, 0) == 0
    return torch.from_numpy(memory[pages * PAGE - size : pages * PAGE])


ends_in_zeros = example()[: 40 * 512]
ends_in_zeros[-512:] = 0
ends_in_a_tail = np.concatenate([ends_in_zeros[512:], ends_in_zeros[:512]])
rng = np.random.default_rng(0)
refused = 0
for raw in (ends_in_zeros, ends_in_a_tail):
    stream = np.frombuffer(coded(raw), np.uint8)
    stored, target = guarded(stream.size), guarded(raw.size)
    if {overrun}:
        ctypes.string_at(stored.data_ptr(), stream.size + 1)
    for attempt in range(2000):
        bad = stream.copy()
        if attempt % 7:
            start = 20 if attempt % 2 else 16
            stop = (100, 24, bad.size)[attempt % 3]
            for place in rng.integers(start, stop, rng.integers(1, 6)):
                bad[place] = rng.integers(0, 256)
        elif raw is ends_in_zeros:  # no record becomes one behind the last byte
            bad[20 + 39] = 1 + attempt // 7 % 91
        else:  # more exponents are said to follow than there are bytes
            bad[-2:] = 255
        stored.copy_(torch.from_numpy(bad))
        try:
            decode(stored, target)
        except CorruptPageError:
            refused += 1
print("REFUSED", refused)
"""


@pytest.mark.parametrize("overrun", [False, True])
def test_no_damage_makes_it_touch_memory_outside(overrun, tmp_path):
    """With `overrun` the guard itself is tried: reading one byte too far must end the process."""
    script = tmp_path / "attack.py"
    script.write_text(ATTACK.format(overrun=overrun))
    done = run([str(script)], output=tmp_path / "output")
    if overrun:
        assert done.returncode < 0
        return
    assert done.returncode == 0, done.output
    refused = int(done.output.split("REFUSED")[1])
    assert 1000 < refused < 4000
