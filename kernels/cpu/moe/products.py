"""Packed weights of all experts, and the products of every selected expert's rows and weights.

The weights of an expert are one range of memory, and all experts are the same stride apart. `linear.decode` computes
the products: each expert's share of the items is one call to its operator. The arguments are those of expert 0, with
the addresses moved to the expert's weights and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import Arena, new_array

from ...checks import FormatError
from ...weight_layout import BlockMatrix, RecordLayout, check_block_format, num_records, num_tiles
from ..jit.arguments import Address, Arguments, Binding, offset_of, size
from ..jit.dsl import inline
from ..jit.memory import copy_arguments, read_int64, write_int64
from ..jit.native import native_op
from ..linear.decode import ProductArguments
from ..linear.dense import DenseMatrix, Matrix, dense_bits, dense_shape, fill_dense
from ..linear.packing import (
    NANOSECONDS_PER_WEIGHT,
    StoredBlocks,
    fits_half_on,
    layout_of,
    pack_call,
    stored_blocks,
)
from ..program.calls import Call, Items, program_of
from ..program.driver import call_operator
from ..program.step_table import StepField
from ..program.thread_pool import Threads
from .routing import SLOT_BYTES

_LINE = 64


@dataclass(frozen=True)
class ExpertMatrices:
    """One weight matrix per expert, or two of the same size: a gate's matrix, and the matrix that it gates.

    Attributes:
        parts: matrices of expert 0, which are views of `data`.
        data: [experts, parts, ...], each entry like a matrix's data.
    """

    parts: tuple[Matrix, ...]
    data: NDArray[Any]

    @property
    def experts(self) -> int:
        """Number of experts."""
        return int(self.data.shape[0])

    @property
    def rows(self) -> int:
        """Rows (outputs) of each matrix."""
        return self.parts[0].rows

    @property
    def columns(self) -> int:
        """Columns (inputs) of each matrix."""
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return self.data.nbytes

    @property
    def expert_bytes(self) -> int:
        """Bytes between consecutive experts, which are the bytes that one expert's matmul reads."""
        return int(self.data.strides[0])


def pack_experts(
    weight: NDArray[np.uint8], scales: NDArray[Any], zero_points: NDArray[Any] | None = None, *, columns: int,
    bits: int, block_size: int, gated: bool = False, threads: Threads | None = None, arena: Arena | None = None,
) -> ExpertMatrices:  # fmt: skip
    """Pack the block-quantised matrices of all experts.

    Args:
        weight: uint8 [experts, rows, ...], each expert's weight as `pack_matrix` accepts it. The padding of a row's
            last block may be absent.
        scales, zero_points: [experts, ...], likewise.
        columns: inputs.
        bits: 2, 3, 4, 5, 6 or 8.
        block_size: a multiple of 16 from 16 to 256.
        gated: True if rows alternate between the gate and the layer it gates, which become two matrices.
        threads: threads that share the work; None = the calling thread.
        arena: memory to allocate the matrices from; None = a separate allocation.

    Raises:
        FormatError: an array has a wrong dtype or size, or there is no layout for these bits and this block size.
    """
    threads = threads or Threads(1)
    stored = StoredExperts(weight, scales, zero_points, columns=columns, bits=bits, block_size=block_size, gated=gated)
    layout = layout_of(stored, bits, block_size, partial(fits_half_on, threads))
    data = new_array(arena, stored.shape(layout), np.uint8)
    for expert, one in enumerate(stored):
        calls = [
            pack_call(one, layout, data[expert, part], first=part, step=stored.parts) for part in range(stored.parts)
        ]
        threads.run(program_of([calls]), nanoseconds=stored.rows * columns * NANOSECONDS_PER_WEIGHT)
    return stored.matrices(layout, data)


class StoredExperts:
    """Block-quantised matrices of all experts in the model's format; see `pack_experts` for the arguments and errors.

    Iteration yields one expert at a time, so that only one expert's floats are in memory.

    Attributes:
        experts: number of experts.
        rows: rows of each expert.
        parts: number of matrices that an expert's rows become.
    """

    def __init__(
        self, weight: NDArray[np.uint8], scales: NDArray[Any], zero_points: NDArray[Any] | None, *, columns: int,
        bits: int, block_size: int, gated: bool,
    ) -> None:  # fmt: skip
        check_block_format(bits, block_size)
        self.experts, self.rows, self.parts = _sizes(weight, gated)
        for name, array in (("scales", scales), ("zero_points", zero_points)):
            if array is not None and (array.ndim < 1 or len(array) != self.experts):
                raise FormatError(
                    f"{name} is {list(array.shape)}, expected [{self.experts} experts, ...] like the weights"
                )
        self._weight, self._scales, self._zero_points = weight, scales, zero_points
        self._columns, self._bits, self._block_size = columns, bits, block_size

    def __iter__(self) -> Iterator[StoredBlocks]:
        blocks = -(-self._columns // self._block_size)
        row_bytes = blocks * self._block_size * self._bits // 8
        for expert in range(self.experts):
            points = None if self._zero_points is None else self._zero_points[expert]
            data = self._weight[expert].reshape(self.rows, -1)
            if data.shape[1] == -(-self._columns * self._bits // 8) < row_bytes:
                data = np.pad(data, ((0, 0), (0, row_bytes - data.shape[1])))
            yield stored_blocks(
                data, self._scales[expert], points, n=self.rows, blocks=blocks, bits=self._bits,
                block_size=self._block_size,
            )  # fmt: skip

    def shape(self, layout: RecordLayout) -> tuple[int, ...]:
        """Return the shape of the packed data, uint8."""
        tiles, records = num_tiles(self.rows // self.parts), num_records(self._columns, layout)
        return self.experts, self.parts, tiles, records, layout.nbytes

    def matrices(self, layout: RecordLayout, data: NDArray[np.uint8]) -> ExpertMatrices:
        """Return the packed data as matrices."""
        rows = self.rows // self.parts
        return ExpertMatrices(tuple(BlockMatrix(rows, self._columns, layout, part) for part in data[0]), data)


def pack_dense_experts(weight: NDArray[Any], *, gated: bool = False, arena: Arena | None = None) -> ExpertMatrices:
    """Pack dense matrices: float32, float16 or bfloat16 [experts, rows, columns].

    Args:
        gated, arena: as for `pack_experts`.
    """
    matrices = dense_experts(weight, gated, partial(new_array, arena))
    _, bits = dense_bits(weight)
    for expert in range(matrices.experts):
        for part in range(len(matrices.parts)):
            fill_dense(matrices.data[expert, part], bits[expert, part :: len(matrices.parts)])
    return matrices


def dense_experts(
    weight: NDArray[Any], gated: bool, new: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
) -> ExpertMatrices:
    """Return the matrices that `pack_dense_experts` fills, in zeros from `new(shape, dtype)`."""
    if weight.ndim != 3:
        raise FormatError(f"weight is {weight.dtype} {list(weight.shape)}, expected [experts, rows, columns]")
    experts, rows, parts = _sizes(weight, gated)
    columns = weight.shape[2]
    type_, bits = dense_bits(weight)
    data = new((experts, parts, *dense_shape(rows // parts, columns)), bits.dtype)
    return ExpertMatrices(tuple(DenseMatrix(rows // parts, columns, type_, part) for part in data[0]), data)


def _sizes(weight: NDArray[Any], gated: bool) -> tuple[int, int, int]:
    """Return the number of experts, the number of rows of each, and the number of matrices made from these rows."""
    parts = 2 if gated else 1
    if weight.ndim < 2 or 0 in weight.shape[:2] or weight.shape[1] % parts:
        even = " (an even number)" if gated else ""
        raise FormatError(f"weight is {list(weight.shape)}, expected [experts, rows, ...] with rows{even}")
    return weight.shape[0], weight.shape[1], parts


class ExpertProductArguments(Arguments):
    """The product of expert 0 and the first row, and the bytes between experts. Each expert has `groups` items."""

    product: ProductArguments
    multiply: Address
    slots: Address
    groups: int
    weight_stride: int
    bias_stride: int


_COPY_BYTES = -(-8 * size(ProductArguments) // _LINE) * _LINE
_COUNTED, _X, _OUT = (
    offset_of(ProductArguments, *path) for path in (("x", "counted"), ("x", "address"), ("out", "address"))
)
_WEIGHTS, _GATED_WEIGHTS = (offset_of(ProductArguments, name) for name in ("weights", "gated_weights"))
_BIAS, _GATED_BIAS = (offset_of(ProductArguments, name, "bias") for name in ("terms", "gated_terms"))


def experts_call(first: Call, slots: int | Binding, *, weight_stride: int, bias_stride: int) -> Call:
    """Return a call that computes the products of all experts that have rows.

    Args:
        first: call from `decode_call` for expert 0. In x and out, the rows of all experts are side by side.
        slots: slots that `order_pairs` writes.
        weight_stride, bias_stride: bytes between the weights, and between the biases, of consecutive experts.
    """
    product = first.arguments
    assert isinstance(product, ProductArguments)
    groups = first.items.factor
    arguments = ExpertProductArguments(
        product=product, multiply=first.op, slots=slots, groups=groups, weight_stride=weight_stride,
        bias_stride=bias_stride,
    )  # fmt: skip
    items = Items(StepField.EXPERTS, groups)
    return Call(multiply_experts, arguments, items, _COPY_BYTES + first.scratch)


@inline
def _move(address: int, distance: int) -> None:
    """Add a distance to an address in memory, unless the address is 0, which means that there is no array."""
    found = read_int64(address)
    if found != 0:
        write_int64(address, found + distance)


@native_op(ExpertProductArguments)
def multiply_experts(arguments: ExpertProductArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Multiply experts. Items are the groups of the first expert that has rows, then those of the next, and so on.

    A slot starts with its number of rows, so the product can use it as a context that counts rows in field 0.
    """
    groups = arguments.groups
    for index in range(begin // groups, (end - 1) // groups + 1):
        slot = arguments.slots + SLOT_BYTES * index
        expert, row = read_int64(slot + 8), read_int64(slot + 16)
        weights, bias = expert * arguments.weight_stride, expert * arguments.bias_stride
        copy_arguments(arguments.product, scratch)
        write_int64(scratch + _COUNTED, 0)
        _move(scratch + _WEIGHTS, weights)
        _move(scratch + _GATED_WEIGHTS, weights)
        _move(scratch + _BIAS, bias)
        _move(scratch + _GATED_BIAS, bias)
        _move(scratch + _X, row * arguments.product.x.stride)
        _move(scratch + _OUT, row * arguments.product.out.stride)
        first, last = max(begin - index * groups, 0), min(end - index * groups, groups)
        status = call_operator(arguments.multiply, scratch, slot, first, last, scratch + _COPY_BYTES)
        if status != 0:
            return int(status)
    return 0
