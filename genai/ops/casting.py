"""Conversion between element types: Cast by NumPy's or onnx's rules, and linear quantisation."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.bytes import dequantized_bytes, quantized_bytes, quantized_to_range
from genai.kernels.cpu.arrays.elements import converted
from genai.kernels.cpu.arrays.halves import from_halves, to_halves
from genai.kernels.cpu.program.thread_pool import Threads, recorder_of_thread

from ..onnx.node import MS
from ..onnx.types import DataType
from .registry import KernelError, operator
from .support import checked_axis, widened

_SMALL_INTEGERS = frozenset({"int2", "int4", "uint2", "uint4"})
_SATURATED = {DataType.FLOAT8E4M3FN, DataType.FLOAT8E4M3FNUZ, DataType.FLOAT8E5M2, DataType.FLOAT8E5M2FNUZ}
_MOST_DIGITS = 20  # digits of the largest 64-bit number
_DATA_TYPES = frozenset(DataType) - {DataType.UNDEFINED}


@cache
def dtype_of(number: int) -> np.dtype[Any]:
    """Return the NumPy dtype of an ONNX element type; object for strings."""
    if number not in _DATA_TYPES:
        raise KernelError(f"{number} is not the number of an ONNX element type")
    return DataType(number).numpy_dtype


def cast_array(x: Any, to: int, *, saturate: bool = True, round_mode: str = "up") -> Any:
    """Return x as another element type, by the rules of Cast.

    Args:
        saturate: True to clip values outside a float8 type's range to its largest value, not to NaN or infinity.
        round_mode: "up", "down" or "nearest", for float8e8m0 only.
    """
    dtype = dtype_of(to)
    if x.dtype == dtype:
        return x
    if x.dtype.kind in "OUS":
        return _from_strings(x, dtype)
    if to == DataType.STRING:
        return _to_strings(x)
    if to == DataType.FLOAT8E8M0:
        from onnx.numpy_helper import to_float8e8m0

        return to_float8e8m0(x.astype(np.float32), saturate, round_mode).astype(dtype)
    if to in _SATURATED and saturate:
        from onnx.numpy_helper import saturate_cast

        return saturate_cast(x, dtype)
    if x.dtype == np.float32 and dtype == np.float16:
        return to_halves(x)
    if x.dtype == np.float16 and dtype == np.float32:
        return from_halves(x)
    if recorder_of_thread() is not None and (recorded := converted(x, dtype)) is not None:
        return recorded
    if dtype.kind == "b":
        return x.astype(np.float32).astype(bool) if x.dtype.kind == "V" else x != 0
    return x.astype(dtype)


def _from_strings(x: Any, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "O":
        return x.astype(object)
    texts = [value.decode() if isinstance(value, bytes) else str(value) for value in x.reshape(-1).tolist()]
    if dtype.kind in "iub":
        values = np.array(
            [_whole_number(text, dtype.kind) for text in texts], np.int64 if dtype.kind == "i" else np.uint64
        )
        return values.astype(dtype).reshape(x.shape)
    return np.array([_number(text) for text in texts], np.float64).astype(dtype).reshape(x.shape)


# The syntax of C's strtod and strtoull: blanks, a sign and the longest prefix that is a number. Like onnxruntime, Cast
# ignores the rest of the text.
_BLANK_AND_SIGN = r"[ \t\n\v\f\r]*([+-]?)"
_WHOLE = re.compile(_BLANK_AND_SIGN + r"([0-9]+)")
_FLOAT = re.compile(
    _BLANK_AND_SIGN + r"(?:(0x(?:[0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?)"
    r"|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?|nan))",
    re.ASCII | re.IGNORECASE,
)


def _number(text: str) -> float:
    match = _FLOAT.match(text)
    if match is None:
        raise KernelError(f"Cast: the string {text!r:.80} does not begin with a number")
    sign, hexadecimal, plain = match.groups()
    try:
        return float.fromhex(sign + hexadecimal) if hexadecimal else float(sign + plain)
    except OverflowError:  # only hexadecimal numbers overflow; decimal numbers become infinite
        return -math.inf if sign == "-" else math.inf


def _whole_number(text: str, kind: str) -> int:
    """Parse up to 64 bits, of which `astype` keeps the low bits; unsigned types wrap negative numbers, as in C."""
    match = _WHOLE.match(text)
    if match is None:
        raise KernelError(f"Cast: the string {text!r:.80} does not begin with a whole number")
    value = int(match[2]) if len(match[2].lstrip("0")) <= _MOST_DIGITS else 1 << 64
    least, most = (-(1 << 63), (1 << 63) - 1) if kind == "i" else (1 - (1 << 64), (1 << 64) - 1)
    value = -value if match[1] == "-" else value
    if not least <= value <= most:
        raise KernelError(f"Cast: the number {match[0].strip():.40} has more than 64 bits")
    return value if kind == "i" else value % (1 << 64)


def _to_strings(x: Any) -> Any:
    """Format as onnxruntime does: floats with 8 digits, booleans as 1 and 0, and INF, -INF and NaN."""
    result = np.empty(x.shape, object)
    is_float = x.dtype.kind in "fV" and x.dtype.name not in _SMALL_INTEGERS
    write = _float_text if is_float else str if x.dtype.kind == "c" else lambda value: str(int(value))
    plain = x.astype(np.float32) if x.dtype.kind == "V" else x
    result.reshape(-1)[:] = [write(value) for value in plain.reshape(-1).tolist()]
    return result


def _float_text(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.8g}"
    return "NaN" if math.isnan(value) else "INF" if value > 0 else "-INF"


@operator("Cast", since_version=6)
def cast(x: Any, *, to: int, saturate: bool = True, round_mode: str = "up") -> Any:
    """Cast to the element type `to`."""
    return cast_array(np.asarray(x), to, saturate=saturate, round_mode=round_mode)


@operator("CastLike", since_version=15)
def cast_like(x: Any, like: Any, *, saturate: bool = True, round_mode: str = "up") -> Any:
    """Cast to the element type of the second input."""
    return cast_array(np.asarray(x), DataType.from_numpy(like.dtype), saturate=saturate, round_mode=round_mode)


@operator("BitCast", since_version=26)
def bit_cast(x: Any, *, to: int) -> Any:
    """Reinterpret the bits as another type of the same size."""
    dtype, whole = dtype_of(to), np.ascontiguousarray(x)
    if dtype.kind == "O" or whole.dtype.kind == "O" or whole.dtype.itemsize != dtype.itemsize:
        raise KernelError(
            f"BitCast: {whole.dtype} cannot be cast to {dtype}; the types must have the same size, and neither "
            "can be a string"
        )
    return whole.view(dtype).reshape(np.shape(x))


_BYTES = (np.int8, np.uint8)
# NumPy handles arrays smaller than this.
_MIN_COMPILED = 2048


def along(parameter: Any, x: Any, axis: int, block_size: int) -> Any:
    """Reshape one scale or zero point, one per position of an axis, or one per block, to broadcast to x."""
    if parameter.ndim == 0 or (parameter.size == 1 and parameter.ndim == 1 and not block_size):
        return parameter.reshape(())
    axis = checked_axis(axis, x.ndim)
    if block_size:
        repeated = np.repeat(parameter, min(block_size, max(x.shape[axis], 1)), axis=axis)
        return repeated[tuple(slice(size) for size in x.shape)]
    if parameter.ndim != 1 or parameter.shape[0] != x.shape[axis]:
        raise KernelError(
            f"scales of shape {list(parameter.shape)} do not match axis {axis} of an array of shape {list(x.shape)}"
        )
    return parameter.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


@operator("QuantizeLinear", since_version=10)
@operator("QuantizeLinear", domain=MS)
def quantize_linear(
    x: Any, scale: Any, points: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    precision: int = 0, saturate: bool = True, threads: Threads | None,
) -> Any:  # fmt: skip
    """round(x / scale) + zero point, saturated; ties round to even."""
    dtype = points.dtype if points is not None else dtype_of(output_dtype or 2)
    if threads is not None and not precision and dtype in _BYTES and _compiled(x, scale, points):
        return quantized_bytes(threads, x, scale.item(), 0 if points is None else points.item(), dtype)
    if precision:
        scaled = x.astype(dtype_of(precision)) / along(scale.astype(dtype_of(precision)), x, axis, block_size)
    else:
        scaled = x / along(scale.astype(x.dtype, copy=False) if x.dtype.kind != "i" else scale, x, axis, block_size)
    offset = None if points is None else along(points, x, axis, block_size)
    return quantized(scaled, offset, dtype, saturate=saturate)


def _compiled(x: Any, scale: Any, points: Any) -> bool:
    """Return True if the compiled kernels support the inputs: one float32 scale, one zero point, and x unless None."""
    fits = scale.dtype == np.float32 and scale.size == 1 and (points is None or points.size == 1)
    return fits and (x is None or (x.dtype == np.float32 and x.size >= _MIN_COMPILED))


def quantized(scaled: Any, zero_point: Any, dtype: Any, *, saturate: bool = True) -> Any:
    """Convert scaled values to integers (rounded, shifted, saturated) or to narrow floats (cast)."""
    limits = integer_limits(dtype)
    if limits is None:
        wide = widened(scaled)
        return cast_array(
            wide if zero_point is None else wide + widened(zero_point), DataType.from_numpy(dtype), saturate=saturate
        )
    rounded = np.rint(widened(scaled))
    if zero_point is not None:
        rounded = rounded + zero_point.astype(rounded.dtype)
    return np.clip(rounded, *limits).astype(np.int32 if dtype.isbuiltin != 1 else dtype).astype(dtype, copy=False)


def integer_limits(dtype: Any) -> tuple[int, int] | None:
    """Return the min and max of an integer type, including 2-bit and 4-bit types; None for floats."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return int(info.min), int(info.max)
    return {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}.get(dtype.name)


@operator("DequantizeLinear", since_version=10)
@operator("DequantizeLinear", domain=MS)
def dequantize_linear(
    x: Any, scale: Any, points: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    threads: Threads | None,
) -> Any:  # fmt: skip
    """(x - zero point) * scale, in the scale's type or `output_dtype`."""
    dtype = dtype_of(output_dtype) if output_dtype else scale.dtype
    fits = x.dtype in _BYTES and x.size >= _MIN_COMPILED and dtype == np.float32 and _compiled(None, scale, points)
    if threads is not None and fits:
        return dequantized_bytes(threads, x, scale.item(), 0 if points is None else points.item())
    values = x.astype(np.float64 if x.dtype.itemsize == 4 and x.dtype.kind == "i" else np.float32)
    if points is not None:
        values = values - along(points, x, axis, block_size).astype(values.dtype)
    return (values * along(widened(scale), x, axis, block_size)).astype(dtype)


@operator("DynamicQuantizeLinear", since_version=11)
def dynamically_quantized(x: Any, *, threads: Threads | None = None) -> tuple[Any, Any, Any]:
    """Quantise to uint8 over x's range and 0; return values, scale (1 if all are 0, as in onnxruntime), zero point."""
    if threads is not None and x.dtype == np.float32 and x.size:
        return quantized_to_range(threads, x)
    low, high = np.float32(min(x.min(initial=0), 0)), np.float32(max(x.max(initial=0), 0))
    scale = (high - low) / np.float32(255) or np.float32(1)
    point = np.clip(np.rint(-low / scale), 0, 255)
    scaled = np.asarray(np.rint(x / scale))  # NumPy's functions return numbers, not arrays, for a scalar
    scaled += point
    return np.clip(scaled, 0, 255, out=scaled).astype(np.uint8), np.asarray(scale), np.asarray(point, np.uint8)


def requantized(total: Any, factor: Any, zero_point: Any, dtype: Any) -> Any:
    """Multiply int32 sums by a factor in float32, as the compiled kernels do, and quantise the result."""
    scaled = np.asarray(total).astype(np.float32) * np.asarray(factor, np.float32)
    return quantized(scaled, np.asarray(zero_point), dtype)
