"""Vectors of float32 for kernels that Numba compiles: the building blocks of CPU kernels.

A vector is a value of a fixed number of lanes, which LLVM spreads over as many registers as needed; nothing depends on
its autovectoriser. Addresses and sizes are int64. Numbers in memory have one of the dtypes in `CODES`: loading converts
them to float32, storing rounds to nearest, ties to even.

These functions are Numba intrinsics: the first argument is Numba's, the body emits LLVM instructions. The compiler
rounds and reorders nothing: a sum keeps its written order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16
FLOAT32, FLOAT16, BFLOAT16, INT8, FP8 = range(5)
CODES = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FP8,
}

_f16, _f32, _f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


class Vector(types.Type):
    """Numba's type of a vector of `lanes` float32."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"Vector({lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(_f32, vector.lanes))


def _place(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _each(kind, value):
    """Return a constant with `value` in every lane."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _float(kind, value):
    return _each(kind, float(np.float32(value)))


def _spread(builder, scalar, lanes):
    kind = ir.VectorType(scalar.type, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, _i32(0))
    return builder.shuffle_vector(one, undefined, _each(ir.VectorType(_i32, lanes), 0))


def _llvm(builder, name, kind, arguments, **flags):
    """Call LLVM's function of this name for vectors like the last argument."""
    like = arguments[-1].type
    function_type = ir.FunctionType(kind, [each.type for each in arguments])
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.{name}.v{like.count}f32")
    return builder.call(function, arguments, **flags)


def _fma(builder, a, b, c):
    return _llvm(builder, "fma", a.type, [a, b, c])


# ------------------------------------------------------------------------------------------------------------ memory


def _load(builder, address, lanes, code):
    wide, integers = ir.VectorType(_f32, lanes), ir.VectorType(_i32, lanes)
    stored = (_f32, _f16, _i16, _i8, _i8)[code]
    numbers = builder.load(_place(builder, address, ir.VectorType(stored, lanes)))
    numbers.align = (4, 2, 2, 1, 1)[code]
    if code == FLOAT32:
        return numbers
    if code == FLOAT16:
        return builder.fpext(numbers, wide)
    if code == INT8:
        return builder.sitofp(numbers, wide)
    bits = builder.zext(numbers, integers)
    if code == BFLOAT16:
        return builder.bitcast(builder.shl(bits, _each(integers, 16)), wide)
    # fp8 (e4m3fn): move exponent and mantissa to their float32 positions; 2^120 corrects the exponent bias.
    sign = builder.shl(builder.and_(bits, _each(integers, 0x80)), _each(integers, 24))
    size = builder.and_(bits, _each(integers, 0x7F))
    number = builder.bitcast(builder.shl(size, _each(integers, 20)), wide)
    number = builder.fmul(number, _each(wide, 2.0**120))
    is_nan = builder.icmp_unsigned("==", size, _each(integers, 0x7F))
    number = builder.select(is_nan, _each(wide, math.nan), number)
    return builder.bitcast(builder.or_(builder.bitcast(number, integers), sign), wide)


def _store(builder, value, address, code):
    """Store a vector. code: a float dtype."""
    lanes = value.type.count
    if code == FLOAT16:
        value = builder.fptrunc(value, ir.VectorType(_f16, lanes))
    elif code == BFLOAT16:
        integers = ir.VectorType(_i32, lanes)
        bits = builder.bitcast(value, integers)
        odd = builder.and_(builder.lshr(bits, _each(integers, 16)), _each(integers, 1))
        rounded = builder.add(builder.add(bits, _each(integers, 0x7FFF)), odd)
        rounded = builder.lshr(rounded, _each(integers, 16))
        is_nan = builder.fcmp_unordered("uno", value, value)  # rounding up could turn a NaN into an infinity
        rounded = builder.select(is_nan, _each(integers, 0x7FC0), rounded)
        value = builder.trunc(rounded, ir.VectorType(_i16, lanes))
    builder.store(value, _place(builder, address, value.type)).align = (4, 2, 2)[code]


def loading(lanes: int, code: int) -> Any:
    """Make the function load(address): `lanes` numbers of that dtype, as float32."""

    @intrinsic
    def load(_, address):
        def generate(_context, builder, _signature, arguments):
            return _load(builder, arguments[0], lanes, code)

        return Vector(lanes)(types.int64), generate

    return load


def storing(lanes: int, code: int) -> Any:
    """Make the procedure store(address, vector), which rounds to that float dtype."""

    @intrinsic
    def store(_, address, vector):
        def generate(context, builder, _signature, arguments):
            _store(builder, arguments[1], arguments[0], code)
            return context.get_dummy_value()

        return types.void(types.int64, Vector(lanes)), generate

    return store


def transposing(code: int) -> Any:
    """Make the procedure transpose(addresses, offset, target, stride).

    It loads 16 numbers from each of 16 int64 addresses, plus `offset` bytes, and stores them transposed: 16 vectors of
    float32, `stride` bytes apart. The first vector has the first number of each row.
    """

    @intrinsic
    def transpose(_, addresses, offset, target, stride):
        def generate(context, builder, _signature, arguments):
            addresses, offset, target, stride = arguments
            rows = []
            for row in range(LANES):
                place = builder.add(addresses, _i64(8 * row))
                address = builder.load(_place(builder, place, _i64))
                rows.append(_load(builder, builder.add(address, offset), LANES, code))
            half = LANES // 2
            picks = [
                ir.Constant(ir.VectorType(_i32, LANES), [n for k in range(first, first + half) for n in (k, LANES + k)])
                for first in (0, half)
            ]
            for _ in range(int(math.log2(LANES))):  # interleave row r and row r + 8
                pairs = [(rows[row], rows[row + half]) for row in range(half)]
                rows = [builder.shuffle_vector(*pair, pick) for pair in pairs for pick in picks]
            for row, vector in enumerate(rows):
                _store(builder, vector, builder.add(target, builder.mul(stride, _i64(row))), FLOAT32)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return transpose


def _reading(stored, found):
    @intrinsic
    def read(_, address):
        def generate(_context, builder, _signature, arguments):
            return builder.load(_place(builder, arguments[0], stored))

        return found(types.int64), generate

    return read


def _writing(stored, given):
    @intrinsic
    def write(_, address, number):
        def generate(context, builder, _signature, arguments):
            builder.store(arguments[1], _place(builder, arguments[0], stored))
            return context.get_dummy_value()

        return types.void(types.int64, given), generate

    return write


read_float, write_float = _reading(_f32, types.float32), _writing(_f32, types.float32)
read_integer, write_integer = _reading(_i64, types.int64), _writing(_i64, types.int64)
write_integer32, write_byte = _writing(_i32, types.int32), _writing(_i8, types.uint8)
read_double, read_integer32 = _reading(_f64, types.float64), _reading(_i32, types.int32)


def reading_integers(count: int) -> Any:
    """Make the function read(address): a tuple of `count` int64."""

    @intrinsic
    def read(_, address):
        kind = types.UniTuple(types.int64, count)

        def generate(context, builder, _signature, arguments):
            places = [builder.add(arguments[0], _i64(8 * index)) for index in range(count)]
            return context.make_tuple(builder, kind, [builder.load(_place(builder, place, _i64)) for place in places])

        return kind(types.int64), generate

    return read


@intrinsic
def fetch(_, address):
    """Prefetch the 64 bytes at an address into the caches; any address is allowed."""

    def generate(context, builder, _signature, arguments):
        place = _place(builder, arguments[0], _i8)
        function_type = ir.FunctionType(ir.VoidType(), [place.type, _i32, _i32, _i32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [place, _i32(0), _i32(2), _i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def next_ticket(_, address):
    """Return the int64 at an address and increment it atomically: each thread gets a distinct value."""

    def generate(_context, builder, _signature, arguments):
        return builder.atomic_rmw("add", _place(builder, arguments[0], _i64), _i64(1), "acq_rel")

    return types.int64(types.int64), generate


# -------------------------------------------------------------------------------------------------------- arithmetic


def spreading(lanes: int) -> Any:
    """Make the function spread(number): a vector with the number in every lane."""

    @intrinsic
    def spread(_, number):
        def generate(_context, builder, _signature, arguments):
            return _spread(builder, arguments[0], lanes)

        return Vector(lanes)(types.float32), generate

    return spread


def _combining(operation):
    @intrinsic
    def combine(_, a, b):
        def generate(_context, builder, _signature, arguments):
            return getattr(builder, operation)(*arguments)

        return a(a, a), generate

    return combine


add, subtract, multiply, divide = (_combining(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def fma(_, a, b, c):
    """Compute a b + c, rounded once."""

    def generate(_context, builder, _signature, arguments):
        return _fma(builder, *arguments)

    return a(a, a, a), generate


@intrinsic
def maximum(_, a, b):
    """Return the larger of each pair of lanes; if one is NaN, the other."""

    def generate(_context, builder, _signature, arguments):
        return _llvm(builder, "maxnum", arguments[0].type, arguments)

    return a(a, a), generate


@intrinsic
def first_lane(_, a):
    """Return lane 0."""

    def generate(_context, builder, _signature, arguments):
        return builder.extract_element(arguments[0], _i32(0))

    return types.float32(a), generate


@intrinsic
def total(_, a):
    """Return the sum of all lanes: halves are added until one number is left."""

    def generate(_context, builder, _signature, arguments):
        (vector,) = arguments
        while (lanes := vector.type.count) > 1:
            assert lanes % 2 == 0, "a power of two"
            undefined = ir.Constant(vector.type, ir.Undefined)
            halves = [
                ir.Constant(ir.VectorType(_i32, lanes // 2), list(range(first, first + lanes // 2)))
                for first in (0, lanes // 2)
            ]
            low, high = (builder.shuffle_vector(vector, undefined, half) for half in halves)
            vector = builder.fadd(low, high)
        return builder.extract_element(vector, _i32(0))

    return types.float32(a), generate


@intrinsic
def largest(_, a):
    """Return the largest lane; NaN only if all are NaN."""

    def generate(_context, builder, _signature, arguments):
        return _llvm(builder, "vector.reduce.fmax", _f32, arguments)

    return types.float32(a), generate


@intrinsic
def hadamard(_, a):
    """Multiply the lanes by the Hadamard matrix: sums and differences of lanes 1, 2, 4, ... apart."""

    def generate(_context, builder, _signature, arguments):
        (vector,) = arguments
        lanes, distance = vector.type.count, 1
        undefined = ir.Constant(vector.type, ir.Undefined)
        while distance < lanes:
            others = ir.Constant(ir.VectorType(_i32, lanes), [lane ^ distance for lane in range(lanes)])
            signs = ir.Constant(vector.type, [-1.0 if lane & distance else 1.0 for lane in range(lanes)])
            vector = _fma(builder, vector, signs, builder.shuffle_vector(vector, undefined, others))
            distance *= 2
        return vector

    return a(a), generate


@intrinsic
def store_bytes(_, address, a):
    """Store the lanes as bytes, truncated to integers. Each must be in [0, 256)."""

    def generate(context, builder, _signature, arguments):
        address, vector = arguments
        lanes = vector.type.count
        whole = builder.fptosi(vector, ir.VectorType(_i32, lanes))
        number = builder.trunc(whole, ir.VectorType(_i8, lanes))
        builder.store(number, _place(builder, address, number.type)).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, a), generate


@intrinsic
def keep(_, a, first, end, other):
    """Return `a` in the lanes from `first` up to `end`, and the float32 `other` in all other lanes."""

    def generate(_context, builder, _signature, arguments):
        vector, first, end, other = arguments
        lanes = vector.type.count
        lane = ir.Constant(ir.VectorType(_i32, lanes), list(range(lanes)))
        low, high = (_spread(builder, builder.trunc(bound, _i32), lanes) for bound in (first, end))
        kept = builder.and_(builder.icmp_signed(">=", lane, low), builder.icmp_signed("<", lane, high))
        return builder.select(kept, vector, _spread(builder, other, lanes))

    return a(a, types.int64, types.int64, types.float32), generate


# e^x = 2^n e^r with n = round(x / ln 2), and e^r = 1 + r + r^2 p(r) for |r| <= ln 2 / 2. ln 2 is in two parts, so that
# n ln 2 is exact (Cody and Waite, "Software Manual for the Elementary Functions", 1980); p as in Cephes' expf.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_MIN, _EXP_MAX = -87.3, 88.37  # below: 0 instead of a subnormal number; above: infinite
_ROUNDER = 1.5 * 2**23  # added to a small number, it leaves the nearest integer in the lowest bits


@intrinsic
def exp(_, a):
    """Compute e to the power of each lane, within 2 units in the last place. NaN stays NaN."""

    def generate(_context, builder, _signature, arguments):
        (x,) = arguments
        kind, integers = x.type, ir.VectorType(_i32, x.type.count)
        low = builder.fcmp_ordered("<", x, _float(kind, _EXP_MIN))
        high = builder.fcmp_ordered(">", x, _float(kind, _EXP_MAX))
        inside = builder.select(high, _float(kind, _EXP_MAX), x)
        inside = builder.select(low, _float(kind, _EXP_MIN), inside)
        shifted = _fma(builder, inside, _float(kind, 1 / math.log(2)), _float(kind, _ROUNDER))
        n = builder.fsub(shifted, _float(kind, _ROUNDER))
        r = _fma(builder, n, _float(kind, -_LN2_HIGH), inside)
        r = _fma(builder, n, _float(kind, -_LN2_LOW), r)
        p = _float(kind, _POLYNOMIAL[0])
        for coefficient in _POLYNOMIAL[1:]:
            p = _fma(builder, p, r, _float(kind, coefficient))
        p = builder.fadd(_fma(builder, p, builder.fmul(r, r), r), _float(kind, 1.0))
        exponent = builder.shl(builder.bitcast(shifted, integers), _each(integers, 23))
        power = builder.bitcast(builder.add(exponent, _each(integers, 127 << 23)), kind)
        found = builder.select(low, _float(kind, 0.0), builder.fmul(p, power))
        return builder.select(high, _each(kind, math.inf), found)

    return a(a), generate
