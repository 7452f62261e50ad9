"""Weights of all experts, laid out for the kernels, and products of every chosen expert's rows with its own.

An expert is one run of memory, at a constant stride. What is multiplied how, at which speed, is the affair of
`products.few`: each expert's share of the items is one call of its operator, whose arguments are those of expert 0
moved to where the expert's weights and rows lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import Arena, new_array

from ...checks import FormatError
from ...weight_layout import BlockMatrix, check_block_format, num_records, num_tiles
from ..jit.arguments import Address, Arguments, Binding, offset_of, size
from ..jit.dsl import inline
from ..jit.memory import copy_arguments, read_int64, write_int64
from ..jit.native import native_op
from ..linear.decode import ProductArguments
from ..linear.dense import DenseMatrix, Matrix, dense_bits, dense_shape, fill_dense
from ..linear.packing import NANOSECONDS_PER_WEIGHT, StoredBlocks, layout_of, pack_call, stored_blocks
from ..program.calls import Call, Items, program_of
from ..program.driver import call_operator
from ..program.step_table import StepField
from ..program.thread_pool import Threads
from .routing import SLOT_BYTES

_LINE = 64


@dataclass(frozen=True)
class ExpertMatrices:
    """One weight matrix per expert, or two of one size: a gate's and that of what it gates.

    Attributes:
        parts: the matrices of expert 0; they lie in `data`.
        data: [experts, parts, ...], each entry as a matrix's data.
    """

    parts: tuple[Matrix, ...]
    data: NDArray[Any]

    @property
    def experts(self) -> int:
        """How many there are."""
        return int(self.data.shape[0])

    @property
    def rows(self) -> int:
        """Outputs of each matrix."""
        return self.parts[0].rows

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return self.data.nbytes

    @property
    def expert_bytes(self) -> int:
        """Bytes from an expert to the next: what a product with one of them reads."""
        return int(self.data.strides[0])


def pack_experts(
    weight: NDArray[np.uint8], scales: NDArray[Any], zero_points: NDArray[Any] | None = None, *, columns: int,
    bits: int, block_size: int, gated: bool = False, threads: Threads | None = None, arena: Arena | None = None,
) -> ExpertMatrices:  # fmt: skip
    """Pack matrices of integers in blocks, one expert after the other.

    Args:
        weight: uint8 [experts, rows, ...], every expert's as `pack_matrix` takes it, or without what only fills up the
            last block of a row.
        scales, zero_points: [experts, ...] likewise.
        columns: inputs. bits: 2, 3, 4, 5, 6 or 8. block_size: a multiple of 16 from 16 to 256.
        gated: rows are in turn those of the gate and of what it gates, which become two matrices.
        threads: who shares the work; None = this thread.
        arena: where the matrices get their memory; None = on their own.
    """
    check_block_format(bits, block_size)
    experts, rows, parts = _sizes(weight, gated)
    for name, array in (("scales", scales), ("zero_points", zero_points)):
        if array is not None and (array.ndim < 1 or len(array) != experts):
            raise FormatError(f"{name} is {list(array.shape)}, expected [{experts} experts, ...] as the weights are")
    threads = threads or Threads(1)
    blocks = -(-columns // block_size)
    row_bytes = blocks * block_size * bits // 8

    def stored() -> Iterator[StoredBlocks]:
        """One expert at a time, so that the floats of one are all that is in memory besides."""
        for expert in range(experts):
            points, data = None if zero_points is None else zero_points[expert], weight[expert].reshape(rows, -1)
            if data.shape[1] == -(-columns * bits // 8) < row_bytes:
                data = np.pad(data, ((0, 0), (0, row_bytes - data.shape[1])))
            yield stored_blocks(data, scales[expert], points, n=rows, blocks=blocks, bits=bits, block_size=block_size)

    layout = layout_of(stored(), bits, block_size, threads)
    shape = (experts, parts, num_tiles(rows // parts), num_records(columns, layout), layout.nbytes)
    data = new_array(arena, shape, np.uint8)
    for expert, one in enumerate(stored()):
        calls = [pack_call(one, layout, data[expert, part], first=part, step=parts) for part in range(parts)]
        threads.run(program_of([calls]), nanoseconds=rows * columns * NANOSECONDS_PER_WEIGHT)
    return ExpertMatrices(tuple(BlockMatrix(rows // parts, columns, layout, part) for part in data[0]), data)


def pack_dense_experts(weight: NDArray[Any], *, gated: bool = False, arena: Arena | None = None) -> ExpertMatrices:
    """Lay matrices of floats out: float32, float16 or bfloat16 [experts, rows, columns].

    Args:
        gated, arena: as for `pack_experts`.
    """
    if weight.ndim != 3:
        raise FormatError(f"weight is {weight.dtype} {list(weight.shape)}, expected [experts, rows, columns]")
    experts, rows, parts = _sizes(weight, gated)
    columns = weight.shape[2]
    type_, bits = dense_bits(weight)
    data = new_array(arena, (experts, parts, *dense_shape(rows // parts, columns)), bits.dtype)
    for expert in range(experts):
        for part in range(parts):
            fill_dense(data[expert, part], bits[expert, part::parts])
    return ExpertMatrices(tuple(DenseMatrix(rows // parts, columns, type_, part) for part in data[0]), data)


def _sizes(weight: NDArray[Any], gated: bool) -> tuple[int, int, int]:
    """Experts, their rows, and the matrices that these become."""
    parts = 2 if gated else 1
    if weight.ndim < 2 or 0 in weight.shape[:2] or weight.shape[1] % parts:
        even = ", an even number of them" if gated else ""
        raise FormatError(f"weight is {list(weight.shape)}, expected [experts, rows, ...] with rows{even}")
    return weight.shape[0], weight.shape[1], parts


class ExpertProductArguments(Arguments):
    """The product of expert 0 with the first row, and what lies between experts, in bytes; `groups` items each."""

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
    """The product of every expert that has rows.

    Args:
        first: what `decode_call` makes for expert 0, the rows of all experts lying side by side in x and out.
        slots: what `order_call` wrote.
        weight_stride, bias_stride: bytes from an expert's weights or bias to the next one's.
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
    """Add to an address in memory, unless it is 0: nothing."""
    found = read_int64(address)
    if found != 0:
        write_int64(address, found + distance)


@native_op(ExpertProductArguments)
def multiply_experts(arguments: ExpertProductArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Items are the groups of the first expert with rows, then those of the next.

    A slot begins with its number of rows, so it serves the product as a context whose field 0 counts rows.
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
