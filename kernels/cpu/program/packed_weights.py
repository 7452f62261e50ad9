"""Weights packed for matmuls. Each weight is packed once, even if several ops use it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import Arena

from ...ir import BlockWeight, Constants, DenseWeight, Weight, origin_of
from ...weight_layout import BlockMatrix, num_records, num_tiles
from ..jit.native import LIBRARY, Compiled
from ..linear.calls import alike
from ..linear.dense import DenseMatrix, Matrix, dense_bits, dense_shape, has_bfloats, pack_dense
from ..linear.formats import pack_weight, record_layout
from ..linear.packing import find_difference, fits_half, layout_of, pack_matrix, pack_op, stored_blocks
from ..moe.products import ExpertMatrices, StoredExperts, dense_experts, pack_dense_experts, pack_experts
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
        # The packed weights of all programs by their bytes in files: an MTP head uses tables of its model.
        self._stored: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()

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
            origin = origin_of(weight, constants)
            found = None if origin is None else self._stored.get((origin, pack.__name__))
            packed[weight] = pack(weight, constants) if found is None else found
            if origin is not None:
                self._stored[origin, pack.__name__] = packed[weight]
            constants.packed(weight)
        return packed[weight]

    def _pack_experts(self, weight: Weight, constants: Constants) -> ExpertMatrices:
        if isinstance(weight, DenseWeight):
            return pack_dense_experts(constants.array(weight.data), gated=weight.interleaved, arena=self._arena)
        return pack_experts(
            *_expert_arrays(weight, constants), threads=self._threads, arena=self._arena, **_form(weight)
        )

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
        # Compile these in parallel, not one after the other.
        LIBRARY.prepare(_packers(weight.bits, weight.block_size))
        return pack_matrix(
            *_block_arrays(weight, constants), n=weight.rows, k=weight.columns, bits=weight.bits,
            block_size=weight.block_size, threads=self._threads, arena=self._arena,
        )  # fmt: skip


class WeightLayouts(PackedWeights):
    """Weights in the layouts of packed weights, but without their numbers, so that no kernel is needed to pack them.

    Programs that are lowered with these weights show which operators the programs need.

    Attributes:
        packers: the operators that pack the weights.
    """

    def __init__(self, threads: Threads) -> None:
        super().__init__(threads)
        self.packers: set[Compiled] = set()
        self._zeros = np.zeros(0, np.uint8)

    def _once(self, pack: Callable[[Weight, Constants], Any], weight: Weight, constants: Constants) -> Any:
        found = self._packed.setdefault(constants, {})
        if weight not in found:
            found[weight] = pack(weight, constants)  # the constants are read again, so they are not released
        return found[weight]

    def _pack(self, weight: Weight, constants: Constants) -> Matrix:
        rows, columns = weight.rows, weight.columns
        if isinstance(weight, DenseWeight):
            array = constants.array(weight.data)
            type_, bits = dense_bits(array)
            dtype, narrowed = bits.dtype, has_bfloats(array)
            if narrowed:
                type_, dtype = "bfloat16", np.dtype(np.uint16)
            return DenseMatrix(rows, columns, type_, self._array(dense_shape(rows, columns), dtype), narrowed)
        if weight.is_uniform:
            size = weight.block_size
            data, scales, points = _block_arrays(weight, constants)
            blocks = -(-columns // size)
            stored = stored_blocks(data, scales, points, n=rows, blocks=blocks, bits=weight.bits, block_size=size)
            layout = layout_of([stored], bits=weight.bits, block_size=size, fits=fits_half)
        else:
            layout = record_layout(weight.load(constants.array))
        self.packers.update(_packers(layout.bits, layout.block_size))
        packed = self._array((num_tiles(rows), num_records(columns, layout), layout.nbytes), np.dtype(np.uint8))
        return BlockMatrix(rows, columns, layout, packed)

    def _pack_experts(self, weight: Weight, constants: Constants) -> ExpertMatrices:
        if isinstance(weight, DenseWeight):
            return dense_experts(constants.array(weight.data), weight.interleaved, self._array)
        stored = StoredExperts(*_expert_arrays(weight, constants), **_form(weight))
        layout = layout_of(stored, weight.bits, weight.block_size, fits_half)
        self.packers.update(_packers(layout.bits, layout.block_size))
        return stored.matrices(layout, self._array(stored.shape(layout), np.dtype(np.uint8)))

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return zeros. All matrices share their memory, which the system does not provide before it is written."""
        size = prod(shape) * dtype.itemsize
        if size > self._zeros.size:
            self._zeros = np.zeros(size, np.uint8)
        return self._zeros[:size].view(dtype).reshape(shape)


def _packers(bits: int, block_size: int) -> list[Compiled]:
    """Return the operators that pack a weight of this format."""
    return [find_difference, pack_op(bits, 32 if block_size % 32 == 0 else 16), run_program, serve]


def _block_arrays(weight: BlockWeight, constants: Constants) -> tuple[Any, Any, Any]:
    """Return the codes, the scales and the zero points of a uniform weight; None = no zero points."""
    offsets = constants.array(weight.offsets) if weight.offsets else None
    return constants.array(weight.data), constants.array(weight.scales), offsets


def _expert_arrays(weight: BlockWeight, constants: Constants) -> tuple[Any, Any, Any]:
    """Return the same for all experts. A scale per row is repeated for every block."""
    assert weight.is_uniform
    data, scales, offsets = _block_arrays(weight, constants)
    blocks = -(-weight.columns // weight.block_size)
    if scales.size == weight.experts * weight.rows < scales.size * blocks:
        scales = np.repeat(scales.reshape(weight.experts, weight.rows, 1), blocks, axis=2)
    return data, scales, offsets


def _form(weight: BlockWeight) -> dict[str, Any]:
    names = {"columns": weight.columns, "bits": weight.bits, "block_size": weight.block_size}
    return {**names, "gated": weight.interleaved}


def vector(constants: Constants, name: str) -> NDArray[np.float32] | None:
    """Return a constant as float32 [n], or None for ""."""
    return np.ascontiguousarray(constants.array(name), np.float32).reshape(-1) if name else None


def table(constants: Constants, name: str) -> Any:
    """Return a constant as contiguous float32, or None for ""."""
    return np.ascontiguousarray(constants.array(name), np.float32) if name else None
