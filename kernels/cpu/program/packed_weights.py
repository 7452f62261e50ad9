"""Weights packed for matmuls. Each weight is packed once, even if several ops use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import Arena

from ...ir import Constants, DenseWeight, Weight
from ..jit.native import LIBRARY
from ..linear.calls import alike
from ..linear.dense import Matrix, pack_dense
from ..linear.formats import pack_weight
from ..linear.packing import find_difference, pack_matrix, pack_op
from ..moe.products import ExpertMatrices, pack_dense_experts, pack_experts
from .driver import run_program, serve
from .thread_pool import Threads


class PackedWeights:
    """The packed weights of an executor's programs, cached per set of constants.

    Args:
        threads: threads that share the packing.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads, self._arena = threads, Arena()
        self._packed: WeakKeyDictionary[Constants, dict[Weight, Any]] = WeakKeyDictionary()

    def matrix(self, weight: Weight, constants: Constants) -> Matrix:
        """Return a packed weight. It is packed on first use."""
        matrix: Matrix = self._once(self._pack, weight, constants)
        return matrix

    def experts(self, weight: Weight, constants: Constants) -> ExpertMatrices:
        """Return the packed weights of all experts. They are packed on first use."""
        matrices: ExpertMatrices = self._once(self._pack_experts, weight, constants)
        return matrices

    def _once(self, pack: Callable[[Weight, Constants], Any], weight: Weight, constants: Constants) -> Any:
        packed = self._packed.setdefault(constants, {})
        if weight not in packed:
            packed[weight] = pack(weight, constants)
            constants.packed(weight)
        return packed[weight]

    def _pack_experts(self, weight: Weight, constants: Constants) -> ExpertMatrices:
        if isinstance(weight, DenseWeight):
            return pack_dense_experts(constants.array(weight.data), gated=weight.interleaved, arena=self._arena)
        assert weight.is_uniform
        scales, blocks = constants.array(weight.scales), -(-weight.columns // weight.block_size)
        if scales.size == weight.experts * weight.rows < scales.size * blocks:
            scales = np.repeat(scales.reshape(weight.experts, weight.rows, 1), blocks, axis=2)
        return pack_experts(
            constants.array(weight.data), scales, constants.array(weight.offsets) if weight.offsets else None,
            columns=weight.columns, bits=weight.bits, block_size=weight.block_size, gated=weight.interleaved,
            threads=self._threads, arena=self._arena,
        )  # fmt: skip

    def nbytes(self, weight: Weight, constants: Constants) -> int:
        """Return the bytes of a packed weight, including all of its experts."""
        packed = self.experts(weight, constants) if weight.experts else self.matrix(weight, constants)
        return packed.nbytes

    def alike(self, first: Weight, second: Weight, constants: Constants) -> bool:
        """Return True if two weights have the same format and size, so that one call can multiply by both."""
        return alike(self.matrix(first, constants), self.matrix(second, constants))

    def _pack(self, weight: Weight, constants: Constants) -> Matrix:
        if isinstance(weight, DenseWeight):
            return pack_dense(constants.array(weight.data), transposed=weight.transposed)
        if not weight.is_uniform:
            return pack_weight(weight.load(constants.array), threads=self._threads, arena=self._arena)
        sub_block = 32 if weight.block_size % 32 == 0 else 16
        # Compile these in parallel, not one after the other.
        LIBRARY.prepare([find_difference, pack_op(weight.bits, sub_block), run_program, serve])
        return pack_matrix(
            constants.array(weight.data), constants.array(weight.scales),
            constants.array(weight.offsets) if weight.offsets else None, n=weight.rows, k=weight.columns,
            bits=weight.bits, block_size=weight.block_size, threads=self._threads, arena=self._arena,
        )  # fmt: skip


def vector(constants: Constants, name: str) -> NDArray[np.float32] | None:
    """Return a constant as float32 [n], or None for ""."""
    return np.ascontiguousarray(constants.array(name), np.float32).reshape(-1) if name else None


def table(constants: Constants, name: str) -> Any:
    """Return a constant as contiguous float32, or None for ""."""
    return np.ascontiguousarray(constants.array(name), np.float32) if name else None
