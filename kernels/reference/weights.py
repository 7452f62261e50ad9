"""Weights in their stored form, dequantised for each use; matmuls with these weights; mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..ir import GATES, BlockWeight, Constants, MoE, Op, Projection, Weight, constant_names
from ..weights import unpack_bits
from .functions import UNARY, Array, Float64

# The number of weights that are dequantised together (a slab), and the number of slabs that are cached for the next
# step (256 MiB).
_SLAB, _KEPT = 1 << 19, 64


def dequantize_weight(
    data: Array, scales: Array, points: Array | None = None, *, n: int, k: int, bits: int, block_size: int
) -> Float64:
    """Dequantise rows of a matrix [n, k] in blocks along k; see `ir.BlockWeight`."""
    blocks = -(-k // block_size)
    zeros = np.full((n, 1), 2 ** (bits - 1)) if points is None else points.reshape(n, -1)
    if points is not None and points.dtype == np.uint8:
        zeros = unpack_bits(zeros, bits, blocks)
    zeros, factors = (
        np.repeat(np.broadcast_to(numbers, (n, blocks)).astype(np.float64), block_size, axis=1)[:, :k]
        for numbers in (zeros, scales.reshape(n, -1))  # per block, or per row
    )
    return (unpack_bits(data.reshape(n, -1), bits, k) - zeros) * factors


class ReferenceWeights:
    """The constants that ops name. They are stored here because the program may drop its own copies."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._arrays: dict[str, Array] = {}
        self._slab = lru_cache(_KEPT)(lambda weight, first, last: self.rows(weight, slice(first, last)))

    def hold(self, ops: Iterable[Op]) -> ReferenceWeights:
        """Store the constants that ops name."""
        for name in {name for op in ops for name in constant_names(op)} - self._arrays.keys():
            self._arrays[name] = self._constants.array(name)
        return self

    def array(self, name: str) -> Array | None:
        """Return a constant in its stored form, or None for ""."""
        return self._arrays[name] if name else None

    def rows(self, weight: Weight, which: slice | Array) -> Float64:
        """Return some rows [n, columns] of a matrix; the rows of all experts are numbered consecutively."""
        if isinstance(weight, BlockWeight) and not weight.is_uniform:
            return weight.load(self._arrays.__getitem__).dequantize_rows(which, np.float64)
        count = max(weight.experts, 1) * weight.rows
        if not isinstance(weight, BlockWeight):
            data = self._arrays[weight.data]
            return (data.reshape(count, -1) if weight.transposed else data.T)[which].astype(np.float64)
        stored = [self._arrays[name] for name in (weight.data, weight.scales, weight.offsets) if name]
        parts = [array.reshape(count, -1)[which] for array in stored]
        n, k = len(parts[0]), weight.columns
        return dequantize_weight(*parts, n=n, k=k, bits=weight.bits, block_size=weight.block_size)

    def product(self, x: Float64, projection: Projection, expert: int = 0) -> Float64:
        """Return x @ weight.T + bias of an expert, [T, columns] to [T, rows], computed in slabs of rows."""
        weight, height = projection.weight, max(1, _SLAB // projection.weight.columns)
        begin, end = expert * weight.rows, (expert + 1) * weight.rows
        slabs = [self._slab(weight, first, min(first + height, end)) for first in range(begin, end, height)]
        out = np.concatenate([x @ slab.T for slab in slabs], axis=1)
        return out + self._arrays[projection.bias].reshape(-1, weight.rows)[expert] if projection.bias else out


def routing_weights(scores: Array, k: int, *, normalized: bool) -> tuple[NDArray[np.int64], Float64]:
    """Return the k best experts of each token and their shares, both [T, k]; see `ir.MoE`."""
    scores = scores.astype(np.float64)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, chosen, axis=1)
    over = best if normalized else scores
    return chosen, np.exp(best - best[:, :1]) / np.exp(over - best[:, :1]).sum(axis=1, keepdims=True)


def mixture(op: MoE, x: Array, scores: Array, product: Callable[[Float64, Projection, int], Float64]) -> Float64:
    """Compute the mixture of rows [T, H] with scores [T, experts]. Experts without tokens do not affect the result."""
    chosen, shares = routing_weights(scores, op.per_token, normalized=op.normalized)
    out = np.zeros((len(x), op.second.weight.rows))
    for expert in np.unique(chosen).tolist():
        tokens, ranks = np.nonzero(chosen == expert)
        hidden = product(x[tokens].astype(np.float64), op.first, expert)
        if op.activation == "swiglu":
            alpha, beta, limit = op.parameters or (1.0, 0.0, np.inf)
            gate, up = np.minimum(hidden[:, 0::2], limit), np.clip(hidden[:, 1::2], -limit, limit)
            hidden = UNARY[GATES["swiglu"]](gate, alpha) * (up + beta)
        elif op.activation in GATES:
            hidden = UNARY[GATES[op.activation]](hidden[:, 0::2]) * hidden[:, 1::2]
        else:
            hidden = UNARY[op.activation](hidden, *op.parameters)
        out[tokens] += shares[tokens, ranks, None] * product(hidden, op.second, expert)
    return out
