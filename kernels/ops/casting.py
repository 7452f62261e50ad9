"""Cast, CastLike and BitCast: between NumPy's number types here, anything rarer by onnx.reference's rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register

STRING = 8
_FLOAT8E8M0 = 24
# onnx.TensorProto's numbers.
DTYPES: dict[int, Any] = {
    1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 8: object,
    9: np.bool_, 10: np.float16, 11: np.float64, 12: np.uint32, 13: np.uint64, 14: np.complex64, 15: np.complex128,
    16: ml_dtypes.bfloat16, 17: ml_dtypes.float8_e4m3fn, 18: ml_dtypes.float8_e4m3fnuz, 19: ml_dtypes.float8_e5m2,
    20: ml_dtypes.float8_e5m2fnuz, 21: ml_dtypes.uint4, 22: ml_dtypes.int4, 23: ml_dtypes.float4_e2m1fn,
    24: ml_dtypes.float8_e8m0fnu, 25: ml_dtypes.uint2, 26: ml_dtypes.int2, 27: ml_dtypes.float6_e2m3fn,
    28: ml_dtypes.float6_e3m2fn,
}  # fmt: skip
_SATURATED = frozenset({17, 18, 19, 20})


@cache
def dtype_of(number: int) -> np.dtype[Any]:
    """The NumPy dtype of an ONNX element type; object for strings.

    Raises:
        KernelError: there is no such type.
    """
    if number not in DTYPES:
        raise KernelError(f"there is no ONNX element type {number}")
    dtype: np.dtype[Any] = np.dtype(DTYPES[number])
    return dtype


@cache
def number_of(dtype: np.dtype[Any]) -> int:
    """ONNX's number of a NumPy dtype.

    Raises:
        KernelError: ONNX has no such type.
    """
    if dtype.kind in "OUST":
        return STRING
    for number, candidate in DTYPES.items():
        if dtype == np.dtype(candidate):
            return number
    raise KernelError(f"{dtype} is not an ONNX element type")


def cast_array(x: Any, to: int, *, saturate: bool = True, round_mode: str = "up") -> Any:
    """x as another element type, by the rules of Cast.

    Args:
        saturate: values beyond a float8 type become its largest, not NaN or infinity.
        round_mode: up, down or nearest, for float8e8m0 only.
    """
    dtype = dtype_of(to)
    if x.dtype == dtype:
        return x
    if x.dtype.kind in "OUS":
        return _from_strings(x, dtype)
    if to == STRING:
        return _to_strings(x)
    if to == _FLOAT8E8M0:
        from onnx.numpy_helper import to_float8e8m0

        return to_float8e8m0(x.astype(np.float32), saturate, round_mode).astype(dtype)
    if to in _SATURATED and saturate:
        from onnx.numpy_helper import saturate_cast

        return saturate_cast(x, dtype)
    if dtype.kind == "b":
        return x.astype(np.float32).astype(bool) if x.dtype.kind == "V" else x != 0
    return x.astype(dtype)


def _from_strings(x: Any, dtype: np.dtype[Any]) -> Any:
    texts = [_text(value).strip() for value in x.reshape(-1).tolist()]
    if dtype.kind == "O":
        values: list[Any] = texts
    elif dtype.kind in "iu":
        values = [int(float(text)) if any(mark in text for mark in ".eE") else int(text) for text in texts]
    else:
        values = [float(text) for text in texts]
    return np.array(values, dtype=np.float64 if dtype.kind == "V" else dtype).astype(dtype).reshape(x.shape)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _to_strings(x: Any) -> Any:
    """The shortest text that reads back as the same number; integers plainly; inf and nan as INF and NaN."""
    result = np.empty(x.shape, object)
    plain = x.astype(np.float32) if x.dtype.kind == "V" else x
    result.reshape(-1)[:] = [str(value) for value in plain.reshape(-1).astype(np.str_)]
    return result


def _caster(spec: NodeSpec) -> Callable[[Any, int], Any]:
    saturate, mode = bool(spec.attributes.get("saturate", 1)), str(spec.attributes.get("round_mode", "up"))
    return lambda x, to: cast_array(x, to, saturate=saturate, round_mode=mode)


@register("Cast", since_version=6)
def cast(spec: NodeSpec) -> Kernel:
    """To the element type `to`."""
    to, convert = int(spec.attributes["to"]), _caster(spec)
    dtype = dtype_of(to)
    simple = dtype.isbuiltin == 1 and dtype.kind in "iufc"

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        if simple and x.dtype.isbuiltin == 1 and x.dtype.kind in "biuf":
            return (x.astype(dtype, copy=False),)
        return (convert(np.asarray(x), to),)

    return kernel


@register("CastLike", since_version=15)
def cast_like(spec: NodeSpec) -> Kernel:
    """To the element type of the second input."""
    convert = _caster(spec)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (convert(np.asarray(inputs[0]), number_of(inputs[1].dtype)),)

    return kernel


@register("BitCast", since_version=26)
def bit_cast(spec: NodeSpec) -> Kernel:
    """The same bits as another type of the same size."""
    dtype = dtype_of(int(spec.attributes["to"]))
    if dtype.kind == "O":
        raise KernelError("BitCast: strings have no bits")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = np.ascontiguousarray(inputs[0])
        if x.dtype.kind == "O" or x.dtype.itemsize != dtype.itemsize:
            raise KernelError(f"BitCast from {x.dtype} to {dtype}: elements of different sizes")
        return (x.view(dtype).reshape(np.shape(inputs[0])),)

    return kernel
