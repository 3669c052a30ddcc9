"""Kernels that write records; see `records.py` for what they are and how the code is written."""

from __future__ import annotations

import numpy as np

from mt_lightning.optim.jit import jit
from mt_lightning.optim.lossless.records import (
    ESCAPE,
    FAR,
    NUM_ABOVE,
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
_EXPONENT, _SIGN = _u(0x7F800000), _u(0x80000000)


@jit
def encode_blocks(words, kinds, bases, records, halves):
    """Code every block of `words`.

    Args:
        words: uint32 [128 * n], the bit patterns.
        kinds: uint8 [n], written.
        bases: uint8 [n], written.
        records: uint8, written one record after the other.
        halves: uint16, the same memory as `records`.

    Returns:
        How many bytes of `records` are used, -1 if they do not suffice.
    """
    exponents, masks = np.empty(128, np.uint8), np.empty(2, np.uint64)
    flags = masks.view(np.uint8)
    used = _n(0)
    for block in range(_n(kinds.size)):
        at = block * _n(128)
        signs, total, num_normal, num_set, highest = _measure(words, at, exponents)
        kinds[block], bases[block] = ZERO, 0
        if num_set == 0:
            continue
        base = _choose_base(exponents, total, num_normal, highest)
        num_outside, num_far = _find_outside(exponents, base, flags)
        tail = (((num_outside + _n(1)) >> _n(1)) + num_far + _n(1)) >> _n(1)
        kind = _n(SIGNED if signs else UNSIGNED) + tail
        size = _n(SIGNED_BYTES if signs else UNSIGNED_BYTES) + _n(2) * tail
        if size >= _n(512):
            kind, size = _n(RAW), _n(512)
        if _n(16) + _n(4) * num_set < size:
            kind, size = _n(SPARSE), _n(16) + _n(4) * num_set
        if used + size > _n(records.size):
            return -1
        kinds[block] = kind
        if kind == RAW:
            _write_raw(words, at, records, used)
        elif kind == SPARSE:
            _write_sparse(words, at, records, used)
        else:
            bases[block] = base
            _write_codes(exponents, base, records, used)
            _write_low(words, at, halves, (used + _n(48)) >> _n(1))
            if signs:
                _write_top_signed(words, at, records, used + _n(304))
            else:
                _write_top_unsigned(words, at, records, used + _n(304))
            if tail != 0:
                end = used + size
                records[end - _n(1)] = 0  # what fills up to even length
                _write_tail(exponents, base, masks, num_outside, records, end - _n(2) * tail)
        used += size
    return np.int64(used)


@jit
def _measure(words, at, exponents):
    signs, total, highest = _u(0), _u(0), _u(0)
    num_normal, num_set = _u(0), _u(0)
    for j in range(_n(128)):
        word = words[at + j]
        exponent = _u(_u(word & _EXPONENT) >> _u(23))
        exponents[j] = exponent
        signs = _u(signs | word)
        total = _u(total + exponent)
        num_normal = _u(num_normal + _u(exponent != _u(0)))
        num_set = _u(num_set + _u(word != _u(0)))
        highest = max(highest, exponent)
    return signs >= _SIGN, total, num_normal, _n(num_set), highest


@jit
def _choose_base(exponents, total, num_normal, highest):
    """Return the lowest of seven exponents: of three windows the one that leaves fewest outside."""
    if num_normal == 0:
        return _b(0)
    mean = np.int64((_n(2) * total + num_normal) // (_n(2) * num_normal))
    high = _b(max(min(mean - 2, np.int64(highest) - 6), 0))
    middle = _b(max(np.int64(high) - 1, 0))
    low = _b(max(np.int64(high) - 2, 0))
    of_low, of_middle, of_high = _b(0), _b(0), _b(0)
    for j in range(_n(128)):
        exponent = exponents[j]
        of_low = _b(of_low + _b(_b(exponent - low) >= _b(ESCAPE)))
        of_middle = _b(of_middle + _b(_b(exponent - middle) >= _b(ESCAPE)))
        of_high = _b(of_high + _b(_b(exponent - high) >= _b(ESCAPE)))
    if of_middle <= of_low and of_middle <= of_high:
        return middle
    return low if of_low < of_high else high


@jit
def _find_outside(exponents, base, flags):
    """Set bit i of `flags[j]` where value 16 * i + j lies outside; count these and the far ones."""
    num_outside, num_far = _b(0), _b(0)
    for j in range(_n(16)):
        mask = _b(0)
        for i in range(_n(8)):
            place = _b(exponents[_n(16) * i + j] - base)
            is_outside = _b(place >= _b(ESCAPE))
            is_far = _b(_b(place + _b(NUM_BELOW)) >= _b(NUM_BELOW + ESCAPE + NUM_ABOVE))
            mask = _b(mask | _b(is_outside << _b(i)))
            num_outside = _b(num_outside + is_outside)
            num_far = _b(num_far + is_far)
        flags[j] = mask
    return _n(num_outside), _n(num_far)


@jit
def _write_codes(exponents, base, records, to):
    for j in range(_n(16)):
        codes = _u(0)
        for i in range(_n(8)):
            code = min(_b(exponents[_n(16) * i + j] - base), _b(ESCAPE))
            codes = _u(codes | _u(_u(code) << _u(_n(3) * i)))
        records[to + j] = codes
        records[to + _n(16) + j] = _u(codes >> _u(8))
        records[to + _n(32) + j] = _u(codes >> _u(16))


@jit
def _write_low(words, at, halves, to):
    for j in range(_n(128)):
        halves[to + j] = words[at + j]


@jit
def _write_top_signed(words, at, records, to):
    for j in range(_n(128)):
        word = words[at + j]
        mantissa = _u(_u(word >> _u(16)) & _u(0x7F))
        records[to + j] = _u(mantissa | _u(_u(word >> _u(24)) & _u(0x80)))


@jit
def _write_top_unsigned(words, at, records, to):
    for j in range(_n(16)):
        last = _u(words[at + _n(112) + j] >> _u(16))
        for i in range(_n(7)):
            mantissa = _u(_u(words[at + _n(16) * i + j] >> _u(16)) & _u(0x7F))
            bit = _u(_u(_u(last >> _u(i)) & _u(1)) << _u(7))
            records[to + _n(16) * i + j] = _u(mantissa | bit)


@jit
def _write_tail(exponents, base, masks, num_outside, records, to):
    far = to + ((num_outside + _n(1)) >> _n(1))
    pending, shift = _n(0), _n(0)
    for half in range(_n(2)):
        mask = masks[half]
        while mask != _n(0):
            exponent = exponents[position_of(lowest_bit(mask), half)]
            mask &= mask - _n(1)
            below = _b(base - _b(1) - exponent)
            above = _b(exponent - base - _b(ESCAPE))
            code = min(above, _b(NUM_ABOVE)) + _b(NUM_BELOW)
            code = _n(below) if below < _b(NUM_BELOW) else _n(code)
            if code == _n(FAR):
                records[far] = exponent
                far += _n(1)
            pending |= code << shift
            records[to] = pending
            to += shift >> _n(2)
            pending = pending if shift == _n(0) else _n(0)
            shift ^= _n(4)


@jit
def _write_raw(words, at, records, to):
    for j in range(_n(128)):
        _write_word(words[at + j], records, to + _n(4) * j)


@jit
def _write_sparse(words, at, records, to):
    for j in range(_n(16)):
        records[to + j] = 0
    free = to + _n(16)
    for j in range(_n(128)):
        if words[at + j] != 0:
            records[to + (j >> _n(3))] |= np.uint8(_n(1) << (j & _n(7)))
            _write_word(words[at + j], records, free)
            free += _n(4)


@jit
def _write_word(word, records, to):
    for byte in range(_n(4)):
        records[to + byte] = _u(word >> _u(_n(8) * byte))
