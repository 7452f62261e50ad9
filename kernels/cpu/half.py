"""Conversion between float16 and float32 in LLVM IR, for one number or a vector of them.

A float16 travels as its 16 bits, because Numba has no float16 on a CPU. Machines with conversion instructions (x86
with F16C, all of AArch64) use them. Elsewhere LLVM would call a library routine that Numba does not link, so the same
is done in integer arithmetic: round to nearest even, denormals, infinities and NaNs included.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

_INT16, _INT32, _HALF, _FLOAT = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
# Exponent biases differ by 112: shifted into place, a half's exponent is too small by this factor.
_BIAS_FACTOR = float(2**112)
_INFINITY_BITS = 0x7F800000
_SMALLEST_NORMAL_HALF = 0x38800000  # 2 ** -14 as float32 bits
_FIRST_OVERFLOW = 0x477FF000  # 65520.0, which rounds to infinity
_HALF_ULP_AT_HALF = 0x3F000000  # 0.5: beside it a float32 has the resolution of a denormal half


def has_half_instructions(context: Any) -> bool:
    """Whether the machine that code is generated for converts float16 in hardware."""
    triple, _, features = context.codegen().magic_tuple()
    return "aarch64" in triple or "arm64" in triple or "+f16c" in features.split(",")


def float_from_half(builder: Any, bits: Any, native: bool) -> Any:
    """float32 from float16 bits (i16, or a vector of i16)."""
    number = _like(bits.type, _FLOAT)
    if native:
        return builder.fpext(builder.bitcast(bits, _like(bits.type, _HALF)), number)
    wide = _like(bits.type, _INT32)
    bits = builder.zext(bits, wide)
    shifted = builder.shl(builder.and_(bits, _constant(wide, 0x7FFF)), _constant(wide, 13))
    scaled = builder.fmul(builder.bitcast(shifted, number), _constant(number, _BIAS_FACTOR))
    special = builder.icmp_unsigned(">=", shifted, _constant(wide, 0x7C00 << 13))
    magnitude = builder.select(
        special, builder.or_(shifted, _constant(wide, _INFINITY_BITS)), builder.bitcast(scaled, wide)
    )
    sign = builder.shl(builder.and_(bits, _constant(wide, 0x8000)), _constant(wide, 16))
    return builder.bitcast(builder.or_(magnitude, sign), number)


def half_from_float(builder: Any, value: Any, native: bool) -> Any:
    """float16 bits from float32 (a number or a vector), rounded to nearest even."""
    narrow = _like(value.type, _INT16)
    if native:
        return builder.bitcast(builder.fptrunc(value, _like(value.type, _HALF)), narrow)
    wide = _like(value.type, _INT32)
    bits = builder.bitcast(value, wide)
    magnitude = builder.and_(bits, _constant(wide, 0x7FFFFFFF))
    result = builder.select(
        builder.icmp_unsigned("<", magnitude, _constant(wide, _SMALLEST_NORMAL_HALF)),
        _denormal_half(builder, magnitude, value.type),
        _normal_half(builder, magnitude),
    )
    overflow = builder.icmp_unsigned(">=", magnitude, _constant(wide, _FIRST_OVERFLOW))
    result = builder.select(overflow, _constant(wide, 0x7C00), result)
    is_nan = builder.icmp_unsigned(">", magnitude, _constant(wide, _INFINITY_BITS))
    result = builder.select(is_nan, _constant(wide, 0x7E00), result)
    sign = builder.and_(builder.lshr(bits, _constant(wide, 16)), _constant(wide, 0x8000))
    return builder.trunc(builder.or_(result, sign), narrow)


def _normal_half(builder: Any, magnitude: Any) -> Any:
    """Drop 13 bits of the mantissa, ties to even, and move the exponent's bias."""
    wide = magnitude.type
    is_odd = builder.and_(builder.lshr(magnitude, _constant(wide, 13)), _constant(wide, 1))
    rounded = builder.add(builder.add(magnitude, _constant(wide, 0xFFF)), is_odd)
    return builder.lshr(builder.sub(rounded, _constant(wide, 112 << 23)), _constant(wide, 13))


def _denormal_half(builder: Any, magnitude: Any, number: Any) -> Any:
    """Adding 0.5 makes the floating-point unit round to a multiple of the smallest half."""
    half = _constant(magnitude.type, _HALF_ULP_AT_HALF)
    total = builder.fadd(builder.bitcast(magnitude, number), builder.bitcast(half, number))
    return builder.sub(builder.bitcast(total, magnitude.type), half)


def _like(shape: Any, element: Any) -> Any:
    """`element`, or a vector of it as long as `shape`."""
    return ir.VectorType(element, shape.count) if isinstance(shape, ir.VectorType) else element


def _constant(type_: Any, value: float) -> Any:
    return ir.Constant(type_, [value] * type_.count if isinstance(type_, ir.VectorType) else value)
