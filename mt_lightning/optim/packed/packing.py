"""Codes between bytes and bits, as vectors of LLVM: one load, a few shifts, one store.

A record's codes are split so that each part of a byte belongs to another stretch of the block
(see formats). So whole vectors of bytes are shifted and joined, whatever their width in hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from mt_lightning.optim.packed.machine import intrinsic, ir


class _Lanes:
    """Emits operations on vectors of unsigned integers, byte pointers `source` and `target`."""

    def __init__(self, builder: Any, source: Any, target: Any) -> None:
        self.builder, self.source, self.target = builder, source, target

    def load(self, offset: int, lanes: int, bits: int = 8) -> Any:
        """Read bytes behind `source`, widened to `bits`."""
        value = self.builder.load(self._at(self.source, offset, lanes), align=1)
        return value if bits == 8 else self.builder.zext(value, _vector(lanes, bits))

    def store(self, value: Any, offset: int, add: bool = False) -> None:
        """Write the low bytes of `value` behind `target`; `add` keeps the bits that are there."""
        lanes = value.type.count
        if value.type != _vector(lanes, 8):
            value = self.builder.trunc(value, _vector(lanes, 8))
        pointer = self._at(self.target, offset, lanes)
        if add:
            value = self.builder.or_(value, self.builder.load(pointer, align=1))
        self.builder.store(value, pointer, align=1)

    def do(self, name: str, value: Any, operand: Any) -> Any:
        """Apply an operation; a plain int operand goes to every lane."""
        if isinstance(operand, int):
            operand = ir.Constant(value.type, [operand] * value.type.count)
        return getattr(self.builder, name)(value, operand)

    def each(self, values: list[int]) -> Any:
        """Return a vector of constant bytes."""
        return ir.Constant(_vector(len(values), 8), values)

    def pick(self, value: Any, lanes: list[int]) -> Any:
        """Return a vector of these lanes of `value`."""
        order = ir.Constant(_vector(len(lanes), 32), lanes)
        return self.builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)

    def where(self, test: str, value: Any, operand: int, then: Any) -> Any:
        """Return `then` in lanes where the signed comparison with `operand` holds, 0 elsewhere."""
        other = ir.Constant(value.type, [operand] * value.type.count)
        holds = self.builder.icmp_signed(test, value, other)
        return self.builder.and_(self.builder.sext(holds, value.type), then)

    def _at(self, pointer: Any, offset: int, lanes: int) -> Any:
        behind = self.builder.gep(pointer, [ir.Constant(ir.IntType(64), offset)])
        return self.builder.bitcast(behind, _vector(lanes, 8).as_pointer())


def _vector(lanes: int, bits: int) -> Any:
    return ir.VectorType(ir.IntType(bits), lanes)


def _operation(emit: Callable[[_Lanes], None]) -> Any:
    """Return the numba function of two byte pointers, source and target, that `emit` writes."""

    @intrinsic
    def operation(typingctx: Any, source: Any, target: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(_Lanes(builder, *args))
            return context.get_dummy_value()

        return types.none(source, target), codegen

    return operation


@_operation
def split_nibbles(v: _Lanes) -> None:
    """Spread 64 bytes into 128 codes of 4 bits."""
    x = v.load(0, 64)
    v.store(v.do("and_", x, 15), 0)
    v.store(v.do("lshr", x, 4), 64)


@_operation
def join_nibbles(v: _Lanes) -> None:
    """Undo `split_nibbles`."""
    v.store(v.do("or_", v.load(0, 64), v.do("shl", v.load(64, 64), 4)), 0)


_STRETCHES = ((0, 32), (27, 16))
"""43 bytes as two vectors that overlap, without a remainder."""


@_operation
def split_sixes(v: _Lanes) -> None:
    """Spread 43 bytes into 129 codes of six levels."""
    for offset, lanes in _STRETCHES:
        x = v.load(offset, lanes, bits=16)
        sixth = v.do("lshr", v.do("mul", x, 171), 10)
        digit = v.do("lshr", v.do("mul", sixth, 43), 8)
        v.store(v.do("sub", x, v.do("mul", sixth, 6)), offset)
        v.store(v.do("sub", sixth, v.do("mul", digit, 6)), 43 + offset)
        v.store(digit, 86 + offset)


@_operation
def join_sixes(v: _Lanes) -> None:
    """Undo `split_sixes`."""
    for offset, lanes in _STRETCHES:
        digits = [v.load(43 * part + offset, lanes, bits=16) for part in range(3)]
        value = v.do("add", digits[1], v.do("mul", digits[2], 6))
        v.store(v.do("add", digits[0], v.do("mul", value, 6)), offset)


@_operation
def split_pairs(v: _Lanes) -> None:
    """Spread 32 bytes into 128 codes of 2 bits."""
    x = v.load(0, 32)
    for part in range(4):
        v.store(v.do("and_", v.do("lshr", x, 2 * part), 3), 32 * part)


@_operation
def join_pairs(v: _Lanes) -> None:
    """Undo `split_pairs`; higher bits of the codes are left out."""
    value = v.do("and_", v.load(0, 32), 3)
    for part in range(1, 4):
        code = v.do("and_", v.load(32 * part, 32), 3)
        value = v.do("or_", value, v.do("shl", code, 2 * part))
    v.store(value, 0)


@_operation
def split_third_bits(v: _Lanes) -> None:
    """Add to 128 codes of 2 bits the third, from 16 bytes."""
    x = v.load(0, 16)
    for part in range(8):
        bit = v.do("and_", v.do("lshr", x, part), 1)
        v.store(v.do("shl", bit, 2), 16 * part, add=True)


@_operation
def join_third_bits(v: _Lanes) -> None:
    """Undo `split_third_bits`."""
    value = v.do("lshr", v.load(0, 16), 2)
    for part in range(1, 8):
        bit = v.do("lshr", v.load(16 * part, 16), 2)
        value = v.do("or_", value, v.do("shl", bit, part))
    v.store(value, 0)


_SIGN_BITS = [[1 << (half + i // 16) for i in range(64)] for half in (0, 4)]
"""For each half of a block, which bit of byte i modulo 16 is the sign of element i."""


@_operation
def split_signed(v: _Lanes) -> None:
    """Spread 64 bytes, and 16 of signs behind, into 128 signed codes of 5 bits."""
    x = v.load(0, 64)
    signs = v.pick(v.load(64, 16), [i % 16 for i in range(64)])
    for half in (0, 1):
        low = v.do("lshr", x, 4) if half else v.do("and_", x, 15)
        sign = v.do("and_", signs, v.each(_SIGN_BITS[half]))
        above = v.where("!=", sign, 0, v.each([0xF0] * 64))
        v.store(v.do("or_", low, above), 64 * half)


@_operation
def join_signed(v: _Lanes) -> None:
    """Undo `split_signed`."""
    halves = [v.load(64 * half, 64) for half in (0, 1)]
    v.store(v.do("or_", v.do("and_", halves[0], 15), v.do("shl", halves[1], 4)), 0)
    signs = [v.where("<", halves[half], 0, v.each(_SIGN_BITS[half])) for half in (0, 1)]
    bits = v.do("or_", *signs)
    for lanes in (32, 16):
        ends = [v.pick(bits, list(range(start, start + lanes))) for start in (0, lanes)]
        bits = v.do("or_", *ends)
    v.store(bits, 64)
