"""Words of machine code that numba has no Python for; LLVM turns loops over them into vectors."""

from __future__ import annotations

from typing import Any

from numba import extending, njit, types
from numba.core import cgutils

# llvmlite, which numba brings:
ir: Any = cgutils.ir  # pyright: ignore[reportPrivateImportUsage]
intrinsic: Any = extending.intrinsic  # its type has the arguments of what it decorates

inlined: Any = njit(forceinline=True, error_model="numpy")
"""Compiles a small function, which LLVM puts into each kernel that calls it."""

spliced: Any = njit(inline="always", error_model="numpy")
"""Compiles nothing: numba itself puts the code of the function in place of each call."""


@intrinsic
def wide(typingctx: Any) -> Any:
    """Let LLVM use the widest vectors there are; by itself it stops at 256 bits on AVX-512.

    Only speed depends on it: elementwise arithmetic has no width.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # llvmlite's own `add` knows no attributes with values.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic(prefer_literal=True)
def stack(typingctx: Any, dtype: Any, numel: Any) -> Any:
    """Reserve `numel` elements (a literal) of `dtype` on the stack, cache-aligned.

    Unlike an array it costs nothing, and LLVM knows that nothing else points to it. Its contents
    are not initialised.
    """
    if not isinstance(numel, types.IntegerLiteral):
        return None
    element = dtype.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_data_type(element)
        slot = cgutils.alloca_once(builder, kind, size=numel.literal_value)
        slot.align = 64
        return slot

    return types.CPointer(element)(dtype, numel), codegen


@intrinsic
def behind(typingctx: Any, start: Any, index: Any) -> Any:
    """Return the pointer to element `index` behind a pointer or the start of a 1-D array.

    A slice would do, but would count references, and its bounds would stay unknown to LLVM.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, index = args
        if isinstance(start, types.Array):
            data = context.make_array(start)(context, builder, data).data
        return builder.gep(data, [index])

    return types.CPointer(start.dtype)(start, types.int64), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Any:
    """Return the bits of a float32 as int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx: Any, x: Any) -> Any:
    """Return the float32 that has the bits of an int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


def _operation(name: str) -> Any:
    """Return an operation of int32 on int32 that wraps; numba's own widen to 64 bits."""

    @intrinsic
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return types.int32(types.int32, types.int32), codegen

    return operation


add32 = _operation("add")
mul32 = _operation("mul")
and32 = _operation("and_")
or32 = _operation("or_")
xor32 = _operation("xor")
shl32 = _operation("shl")
shr32 = _operation("lshr")
sar32 = _operation("ashr")


@intrinsic
def prefetch(typingctx: Any, pointer: Any) -> Any:
    """Ask for the cache line at `pointer`, which need not be mapped."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        hints = [ir.Constant(word, hint) for hint in (0, 3, 1)]
        builder.call(function, [builder.bitcast(args[0], byte), *hints])
        return context.get_dummy_value()

    return types.none(pointer), codegen


@intrinsic
def call_root(typingctx: Any, function: Any, numel: Any, start: Any, mode: Any) -> Any:
    """Call `function(numel, start, start, mode)`, a C function at this address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function, numel, start, mode = args
        kind = ir.FunctionType(ir.VoidType(), [numel.type, start.type, start.type, mode.type])
        target = builder.inttoptr(function, kind.as_pointer())
        builder.call(target, [numel, start, start, mode])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, start, types.int64), codegen


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy between two pointers of any type, which need not be aligned."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.raw_memcpy(builder, args[0], args[1], args[2], 1, align=1)
        return context.get_dummy_value()

    return types.none(target, source, types.int64), codegen


@intrinsic
def lane_sum(typingctx: Any, start: Any) -> Any:
    """Return the sum of 128 float32: 16 lanes, each in order, then half by half."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        single, index = ir.FloatType(), ir.IntType(32)

        def vector(part: int) -> Any:
            pointer = builder.gep(args[0], [ir.Constant(index, 16 * part)])
            pointer = builder.bitcast(pointer, ir.VectorType(single, 16).as_pointer())
            return builder.load(pointer, align=4)

        total = vector(0)
        for part in range(1, 8):
            total = builder.fadd(total, vector(part))
        lanes = 16
        while lanes > 1:
            lanes //= 2
            halves = [
                builder.shuffle_vector(
                    total,
                    ir.Constant(total.type, ir.Undefined),
                    ir.Constant(ir.VectorType(index, lanes), [begin + i for i in range(lanes)]),
                )
                for begin in (0, lanes)
            ]
            total = builder.fadd(*halves)
        return builder.extract_element(total, ir.Constant(index, 0))

    return types.float32(start), codegen
