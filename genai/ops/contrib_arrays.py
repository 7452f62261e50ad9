"""Operators of com.microsoft on plain arrays: distances, hashes, sliding windows, alignment and n-grams."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..onnx.node import MS
from ..onnx.types import DataType, Dim, TensorType, Type, broadcast_dims
from .registry import KernelError, NodeSpec, Positive, operator
from .shape_rules import NodeTypes, shape_rule
from .support import checked_axis, checked_shape


@operator("CDist", domain=MS)
def cdist(a: Any, b: Any, *, metric: Literal["sqeuclidean", "euclidean"] = "sqeuclidean", spec: NodeSpec) -> Any:
    """Return the distance [M, K] between each row of a [M, N] and each row of b [K, N]; the sums are float64."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise KernelError(
            f"CDist: the inputs have shapes {list(a.shape)} and {list(b.shape)}, expected [M, N] and [K, N]"
        )
    checked_shape(spec, (len(a), len(b)), 3 * 8)
    left, right = a.astype(np.float64), b.astype(np.float64)
    squares = [np.einsum("mn,mn->m", x, x) for x in (left, right)]
    result = left @ right.T
    result *= -2
    result += squares[0][:, None]
    result += squares[1]
    np.maximum(result, 0, out=result)
    return (np.sqrt(result, out=result) if metric == "euclidean" else result).astype(a.dtype, copy=False)


@shape_rule("CDist")
def cdist_types(types: NodeTypes) -> list[Type | None]:
    """[rows of the first input, rows of the second input]."""
    rows = [shape[0] if (shape := types.shape(index, rank=2)) else None for index in (0, 1)]
    return [TensorType(types.source.dtype, tuple(rows))]


_MIX = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_WORD = 4


def _rotated(x: Any, bits: int) -> Any:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _mixed(words: Any) -> Any:
    return _rotated(words * _MIX[0], 15) * _MIX[1]


def _murmur(words: Any, tails: Any, lengths: Any, seed: int) -> Any:
    """Compute MurmurHash3_x86_32 (Appleby) of values with equal numbers of words.

    Args:
        words: uint32 [values, words], little-endian.
        tails: the last bytes of each value, fewer than a word, as uint32.
        lengths: the number of bytes of each value.
    """
    state = np.full(len(words), seed & 0xFFFFFFFF, np.uint32)
    for word in words.T:
        state = _rotated(state ^ _mixed(word), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    state = state ^ _mixed(tails) ^ np.asarray(lengths, np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
    return state ^ (state >> np.uint32(16))


@operator("MurmurHash3", domain=MS)
def murmur_hash3(x: Any, *, positive: int = 1, seed: int = 0) -> Any:
    """Hash the bytes of each element (strings: UTF-8) to 32 bits: uint32 if `positive` is 1, else int32."""
    if x.dtype.kind == "O":
        values = [text.encode() if isinstance(text, str) else bytes(text) for text in x.reshape(-1).tolist()]
        hashes = np.array([_murmur_of_bytes(value, seed) for value in values], np.uint32)
    elif x.dtype.name in ("int32", "uint32", "int64", "uint64", "float32", "float64"):
        flat = np.ascontiguousarray(x).reshape(-1)
        words = flat.view("<u4").reshape(len(flat), x.itemsize // _WORD).astype(np.uint32)
        hashes = _murmur(words, np.zeros(len(flat), np.uint32), x.itemsize, seed)
    else:
        raise KernelError(f"MurmurHash3 of {x.dtype} is not defined; expected 32-bit or 64-bit numbers, or strings")
    return hashes.reshape(x.shape).view(np.uint32 if positive == 1 else np.int32)


def _murmur_of_bytes(value: bytes, seed: int) -> Any:
    count = len(value) // _WORD
    words = np.frombuffer(value, "<u4", count)[None].astype(np.uint32)
    tail = np.array([int.from_bytes(value[count * _WORD :], "little")], np.uint32)
    return _murmur(words, tail, len(value), seed)[0]


@shape_rule("MurmurHash3")
def murmur_hash3_types(types: NodeTypes) -> list[Type | None]:
    """The input's shape with 32-bit integers."""
    dtype = DataType.UINT32 if types.attribute("positive", 1) == 1 else DataType.INT32
    return [TensorType(dtype, types.source.shape)]


@operator("NGramRepeatBlock", domain=MS)
def ngram_repeat_block(ids: Any, scores: Any, *, ngram_size: Positive) -> Any:
    """Set the scores of tokens to -inf that would complete an n-gram that a sequence already contains."""
    if ids.ndim != 2 or scores.ndim != 2 or len(ids) != len(scores):
        raise KernelError(
            f"NGramRepeatBlock: ids {list(ids.shape)} and scores {list(scores.shape)}, expected [batch, sequence] and "
            "[batch, vocabulary]"
        )
    result = np.array(scores)
    if ids.shape[1] < ngram_size:
        return result
    grams = np.lib.stride_tricks.sliding_window_view(ids, ngram_size, axis=1)
    prefix = ids[:, None, ids.shape[1] - ngram_size + 1 :]
    rows, places = np.nonzero((grams[..., :-1] == prefix).all(axis=-1))
    banned = grams[rows, places, -1]
    if banned.size and (banned.min() < 0 or banned.max() >= scores.shape[1]):
        raise IndexError(
            f"NGramRepeatBlock: tokens from {banned.min()} to {banned.max()} are outside 0 to {scores.shape[1] - 1}"
        )
    result[rows, banned] = -np.inf
    return result


@shape_rule("NGramRepeatBlock")
def ngram_repeat_block_types(types: NodeTypes) -> list[Type | None]:
    """The type of the scores."""
    return [types.tensor(1)]


@operator("UnfoldTensor", domain=MS)
def unfold_tensor(x: Any, *, size: Positive, dim: int = -1, step: Positive = 1, spec: NodeSpec) -> Any:
    """Return the slices of `size` elements along an axis; a new last axis contains the elements of a slice."""
    if not x.ndim:
        raise KernelError("UnfoldTensor: the input has no axes")
    axis = checked_axis(dim, x.ndim)
    if size > x.shape[axis]:
        raise KernelError(f"UnfoldTensor: slices of {size} do not fit axis {axis} of {list(x.shape)}")
    slices = np.lib.stride_tricks.sliding_window_view(x, size, axis=axis)
    slices = slices[(slice(None),) * axis + (slice(None, None, step),)]
    checked_shape(spec, slices.shape, x.dtype.itemsize)
    return np.ascontiguousarray(slices)


@shape_rule("UnfoldTensor")
def unfold_tensor_types(types: NodeTypes) -> list[Type | None]:
    """The axis has the number of slices, and a last axis has their size."""
    source, shape = types.source, types.shape(0)
    axis, size, step = types.attribute("dim", -1), types.attribute("size", 0), types.attribute("step", 1)
    if not shape or not -len(shape) <= axis < len(shape):
        return [TensorType(source.dtype)]
    dims: list[Dim] = [*shape, size]
    extent = shape[axis]
    dims[axis % len(shape)] = (
        (extent - size) // step + 1 if isinstance(extent, int) and 0 < size <= extent and step > 0 else None
    )
    return [TensorType(source.dtype, tuple(dims))]


@operator("DynamicTimeWarping", domain=MS)
def dynamic_time_warping(costs: Any, *, spec: NodeSpec) -> Any:
    """Return [2, steps]: the rows and columns of the cheapest path through a matrix from its first to its last element.

    A step goes down, right, or both. Among equal costs, right is preferred.
    """
    if costs.ndim not in (2, 3) or (costs.ndim == 3 and len(costs) != 1):
        raise KernelError(f"DynamicTimeWarping: the costs have shape {list(costs.shape)}, expected [M, N] or [1, M, N]")
    matrix = costs.reshape(costs.shape[-2:])
    checked_shape(spec, [extent + 1 for extent in matrix.shape], 4 + 1)
    steps = _cheapest_steps(matrix)
    row, column = matrix.shape
    path = []
    while row and column:
        path.append((row - 1, column - 1))
        step = steps[row - 1, column - 1]
        row, column = row - (step != _RIGHT), column - (step != _DOWN)
    return np.ascontiguousarray(np.array(path[::-1], np.int32).reshape(-1, 2).T)


_BOTH, _DOWN, _RIGHT = 0, 1, 2


def _cheapest_steps(costs: Any) -> Any:
    """Return the last step of the cheapest path to each element; antidiagonals are computed one after another."""
    rows, columns = costs.shape
    totals = np.full((rows + 1, columns + 1), np.inf, costs.dtype)
    totals[0, 0] = 0
    steps = np.empty(costs.shape, np.int8)
    for diagonal in range(rows + columns - 1):
        row = np.arange(max(diagonal - columns + 1, 0), min(diagonal + 1, rows))
        column = diagonal - row
        both, down, right = totals[row, column], totals[row, column + 1], totals[row + 1, column]
        is_both, is_down = (both < down) & (both < right), (down < both) & (down < right)
        steps[row, column] = np.where(is_both, _BOTH, np.where(is_down, _DOWN, _RIGHT))
        best = np.where(is_both, both, np.where(is_down, down, right))
        totals[row + 1, column + 1] = best + costs[row, column]
    return steps


@shape_rule("DynamicTimeWarping")
def dynamic_time_warping_types(types: NodeTypes) -> list[Type | None]:
    """A row and a column per step."""
    return [TensorType(DataType.INT32, (2, None))]


@operator("MatMulInteger16", domain=MS)
def matmul_integer16(a: Any, b: Any) -> Any:
    """Multiply int16 matrices in int32."""
    return np.matmul(a.astype(np.int32), b.astype(np.int32))


@shape_rule("MatMulInteger16")
def matmul_integer16_types(types: NodeTypes) -> list[Type | None]:
    """The shape of a matrix product, with broadcast batch axes, in int32."""
    a, b = types.shape(0), types.shape(1)
    if a is None or b is None or min(len(a), len(b)) < 2:
        return [TensorType(DataType.INT32)]
    batch = broadcast_dims(a[:-2], b[:-2])
    return [TensorType(DataType.INT32, None if batch is None else (*batch, a[-2], b[-1]))]
