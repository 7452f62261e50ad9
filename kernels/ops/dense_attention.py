"""Attention of encoders over dense tensors as one operator (ours): scores of a few rows at a time, never all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cpu.team import run
from ..registry import Kernel, KernelError, NodeSpec, register
from .support import optional

# Scores of so many bytes stay in a core's own cache from one step to the next.
_BLOCK_BYTES = 1 << 18
_FLOPS_PER_NANOSECOND = 20.0


@register("DenseAttention", domain="genai")
def dense_attention(spec: NodeSpec) -> Kernel:
    """softmax(scale * query @ keys + bias) @ values.

    query: [B, H, T, size]. keys: [B, H, size, S], as the product wants them. values: [B, H, S, width]. bias: anything
    that broadcasts with [B, H, T, S]; -inf hides. All are float32; batch axes broadcast. With `nan_is_zero`, NaN among
    the weights count as 0, as in rows that are hidden whole.
    """
    scale, nan_is_zero = np.float32(spec.attributes.get("scale", 1.0)), bool(spec.attributes.get("nan_is_zero", 0))
    team, compiled = spec.options.get("team"), _compiled(spec, scale, nan_is_zero)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        query, keys, values = inputs[:3]
        bias = optional(inputs, 3)
        shape = _score_shape(query, keys, values, bias)
        ends = (shape[2], query.shape[3]), (keys.shape[2], shape[3]), values.shape[2:]
        operands = [np.broadcast_to(x, (*shape[:2], *end)) for x, end in zip((query, keys, values), ends, strict=True)]
        addend = None if bias is None else np.broadcast_to(bias, shape)
        is_float = all(x.dtype == np.float32 for x in inputs if x is not None)
        if compiled is not None and shape[3] and query.shape[3] and is_float:
            return (compiled(*operands, addend),)
        out = np.empty((*shape[:3], values.shape[3]), np.float32)
        heads = shape[0] * shape[1]
        flops = 2.0 * out.size * shape[3] + 2.0 * query.shape[3] * heads * shape[2] * shape[3]
        arguments: list[Any] = [*operands, addend, out, scale, nan_is_zero]
        run(team, _attend_heads, arguments, heads, work=flops / _FLOPS_PER_NANOSECOND)
        return (out,)

    return kernel


def _compiled(spec: NodeSpec, scale: Any, nan_is_zero: bool) -> Any:
    """Attention in compiled code, where there are threads for it."""
    crew = spec.options.get("crew")
    if crew is None:
        return None
    from ..cpu.gemm.attention import DenseAttention

    return DenseAttention(crew, float(scale), nan_is_zero=nan_is_zero)


def _score_shape(query: Any, keys: Any, values: Any, bias: Any) -> tuple[int, ...]:
    """[B, H, T, S] of the scores, to which a bias may widen them."""
    batch = np.broadcast_shapes(query.shape[:2], keys.shape[:2], values.shape[:2])
    shape = (*batch, query.shape[2], keys.shape[3])
    shape = shape if bias is None else np.broadcast_shapes(shape, bias.shape)
    if query.shape[3] != keys.shape[2] or shape[3] != values.shape[2]:
        shapes = [list(x.shape) for x in (query, keys, values)]
        raise KernelError(f"DenseAttention: queries, keys and values {shapes} do not fit scores {list(shape)}")
    return shape


def _attend_heads(
    query: Any, keys: Any, values: Any, bias: Any, out: Any, scale: Any, nan_is_zero: bool, begin: int, end: int
) -> None:
    """Heads begin to end of all batches; a block of rows at a time."""
    heads, rows, columns = query.shape[1], query.shape[2], keys.shape[3]
    block = max(1, min(rows, _BLOCK_BYTES // (4 * max(columns, 1))))
    buffer = np.empty((block, columns), np.float32)
    for index in range(begin, end):
        place = divmod(index, heads)
        for first in range(0, rows, block):
            span = slice(first, first + block)
            some = query[place][span]
            scores = np.matmul(some * scale, keys[place], out=buffer[: len(some)])
            if bias is not None:
                scores += bias[place][span]
            total = _exponentials(scores, nan_is_zero)
            mixed = np.matmul(scores, values[place], out=out[place][span])
            mixed /= total


def _exponentials(scores: Any, nan_is_zero: bool) -> Any:
    """exp(score - the row's largest), in place; returns the sums of rows [rows, 1]."""
    with np.errstate(all="ignore"):
        scores -= scores.max(axis=1, keepdims=True, initial=-np.inf)
        np.exp(scores, out=scores)
        total = scores.sum(axis=1, keepdims=True)
    if nan_is_zero:
        # A row without any weight sums to NaN, and only such a row.
        lost = np.isnan(total[:, 0])
        if lost.any():
            scores[lost], total[lost] = 0, 1
    return total
