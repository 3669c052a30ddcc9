"""Kernels that read records; see `records.py` for what they are and how the code is written."""

from __future__ import annotations

import numpy as np

from mt_lightning.optim.jit import jit
from mt_lightning.optim.lossless.records import (
    ESCAPE,
    FAR,
    KINDS_END,
    NUM_BELOW,
    RAW,
    SIGNED,
    SIGNED_BYTES,
    SPARSE,
    UNSIGNED,
    UNSIGNED_BYTES,
    ZERO,
    lowest_bit,
    position_of,
)

_n, _u, _b = np.uint64, np.uint32, np.uint8


@jit
def decode_blocks(kinds, bases, records, halves, words):
    """Write the patterns of every block; no bytes make it leave its arrays.

    Args:
        kinds: uint8 [n].
        bases: uint8 [n].
        records: uint8, exactly the records.
        halves: uint16, the same memory as `records`, less a last odd byte.
        words: uint32 [128 * n], written.

    Returns:
        Whether kinds and records fit each other to the last byte.
    """
    exponents, masks = np.empty(128, np.uint8), np.empty(2, np.uint64)
    flags = masks.view(np.uint8)
    used = _n(0)
    for block in range(_n(kinds.size)):
        kind, tail = _n(kinds[block]), _n(0)
        if kind >= _n(KINDS_END):
            return False
        if kind >= _n(UNSIGNED):
            tail = _n(2) * (kind - _n(UNSIGNED))
            size = _n(UNSIGNED_BYTES) + tail
        elif kind >= _n(SIGNED):
            tail = _n(2) * (kind - _n(SIGNED))
            size = _n(SIGNED_BYTES) + tail
        elif kind == SPARSE:
            size = _n(16)
            if used + size <= _n(records.size):
                size += _n(4) * _count_bits(records, used)
        else:
            size = _n(512) if kind == RAW else _n(0)
        if used + size > _n(records.size):
            return False
        at = block * _n(128)
        if kind == ZERO:
            for j in range(_n(128)):
                words[at + j] = 0
        elif kind == RAW:
            _read_raw(records, used, words, at)
        elif kind == SPARSE:
            _read_sparse(records, used, words, at)
        else:
            base, end = bases[block], used + size
            num_outside = _read_codes(base, records, used, exponents, flags)
            if not _read_tail(base, masks, num_outside, records, end - tail, end, exponents):
                return False
            if kind < _n(UNSIGNED):
                _read_signed(exponents, records, halves, used, words, at)
            else:
                _read_unsigned(exponents, records, halves, used, words, at)
        used += size
    return used == _n(records.size)


@jit
def _read_codes(base, records, at, exponents, flags):
    """Write the exponents; set bit i of `flags[j]` where that of value 16 * i + j is in the tail.

    Returns:
        How many are.
    """
    count = _b(0)
    for j in range(_n(16)):
        codes = _u(
            _u(records[at + j])
            | _u(_u(records[at + _n(16) + j]) << _u(8))
            | _u(_u(records[at + _n(32) + j]) << _u(16))
        )
        mask = _b(0)
        for i in range(_n(8)):
            code = _b(_u(codes >> _u(_n(3) * i)) & _u(7))
            exponents[_n(16) * i + j] = _b(base + code)
            is_outside = _b(code == _b(ESCAPE))
            mask = _b(mask | _b(is_outside << _b(i)))
            count = _b(count + is_outside)
        flags[j] = mask
    return _n(count)


@jit
def _read_tail(base, masks, num_outside, records, at, end, exponents):
    """Write the exponents outside the window; return whether the tail holds all of them."""
    far = at + ((num_outside + _n(1)) >> _n(1))
    if far > end:
        return False
    shift = _n(0)
    for half in range(_n(2)):
        mask = masks[half]
        while mask != _n(0):
            position = position_of(lowest_bit(mask), half)
            mask &= mask - _n(1)
            code = _b((_n(records[at]) >> shift) & _n(15))
            at += shift >> _n(2)
            shift ^= _n(4)
            below, above = _b(base - _b(1) - code), _b(base - _b(NUM_BELOW - ESCAPE) + code)
            exponent = below if code < _b(NUM_BELOW) else above
            if code == _b(FAR):
                if far >= end:
                    return False
                exponent = records[far]
                far += _n(1)
            exponents[position] = exponent
    return True


@jit
def _read_signed(exponents, records, halves, at, words, to):
    low, top = (at + _n(48)) >> _n(1), at + _n(304)
    for j in range(_n(128)):
        byte = _u(records[top + j])
        high = _u(_u(_u(byte & _u(0x7F)) << _u(16)) | _u(_u(byte & _u(0x80)) << _u(24)))
        exponent = _u(_u(exponents[j]) << _u(23))
        words[to + j] = _u(_u(high | _u(halves[low + j])) | exponent)


@jit
def _read_unsigned(exponents, records, halves, at, words, to):
    low, top = (at + _n(48)) >> _n(1), at + _n(304)
    for j in range(_n(16)):
        last = _u(0)
        for i in range(_n(7)):
            k = _n(16) * i + j
            byte = _u(records[top + k])
            last = _u(last | _u(_u(byte >> _u(7)) << _u(i)))
            high = _u(_u(_u(byte & _u(0x7F)) << _u(16)) | _u(_u(exponents[k]) << _u(23)))
            words[to + k] = _u(high | _u(halves[low + k]))
        k = _n(112) + j
        high = _u(_u(last << _u(16)) | _u(_u(exponents[k]) << _u(23)))
        words[to + k] = _u(high | _u(halves[low + k]))


@jit
def _read_raw(records, at, words, to):
    for j in range(_n(128)):
        words[to + j] = _read_word(records, at + _n(4) * j)


@jit
def _read_sparse(records, at, words, to):
    value = at + _n(16)
    for j in range(_n(128)):
        if (records[at + (j >> _n(3))] >> np.uint8(j & _n(7))) & 1:
            words[to + j] = _read_word(records, value)
            value += _n(4)
        else:
            words[to + j] = 0


@jit
def _read_word(records, at):
    word = _u(0)
    for byte in range(_n(4)):
        word = _u(word | _u(_u(records[at + byte]) << _u(_n(8) * byte)))
    return word


@jit
def _count_bits(records, at):
    count = _n(0)
    for j in range(_n(16)):
        for bit in range(_n(8)):
            count += _n((records[at + j] >> np.uint8(bit)) & 1)
    return count
