"""Kernels of products of one or two rows as bytes, which norm the rows themselves where a norm made them: see
decode_lanes.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .block_forms import CHUNK, BlockForm
from .launches import Counts
from .sources import CudaKernel
from .weights import STRIDE, DeviceMatrix

ROWS = (1, 2)
"""Rows that one block multiplies; the fewest that suffice are taken."""
NOT_NORMED = {"x": 0, "weight": 0, "x_stride": 0, "width": 0, "epsilon": 0.0}
"""The fields of `NormedRows` of rows that others have made."""
# Chunks that a row has room for, and what they take with their scales.
CAPACITIES, _CHUNK_BYTES = (128, 512, 1024), 40
_THREADS, _WARPS, _STREAMS, _LINE_BYTES, _ARRAYS = 256, 8, 2, 4 * 33, 4
# Turns that are under way, of so many bits at most, or of more.
_BITS_OF_MORE_AHEAD, _MORE_AHEAD, _AHEAD = 4, 4, 2
# What a block of any GPU from Ampere on can have; kernels are compiled for multiples of the other.
_MOST_SHARED, _SHARED_STEP, _COPIED = 96 << 10, 2 << 10, 16
# A warp takes more outputs one after another where there are so many blocks even then, but no more than this.
_ENOUGH_BLOCKS, _MOST_ROUNDS = 1056, 4


def _ring_bytes(form: BlockForm) -> int:
    ahead = _MORE_AHEAD if form.bits <= _BITS_OF_MORE_AHEAD else _AHEAD
    return ahead * _STREAMS * _THREADS * form.bits * 4


def _shape(matrix: DeviceMatrix, rows: int, *, gated: bool) -> tuple[int, int] | None:
    """Chunks that a row has room for, and bytes of shared memory; None = no block has so many."""
    chunks = next((most for most in CAPACITIES if matrix.strides * (STRIDE // CHUNK) <= most), None)
    if matrix.form is None or chunks is None:
        return None
    matrices = 2 if gated else 1
    numbers = matrices * (_outputs(matrix, gated=gated) * matrix.number_bytes + _ARRAYS * _COPIED)
    results = rows * _LINE_BYTES + _COPIED if gated else 0
    needed = _ring_bytes(matrix.form) + rows * chunks * _CHUNK_BYTES + results + numbers
    shared = -(-needed // _SHARED_STEP) * _SHARED_STEP
    return (chunks, shared) if shared <= _MOST_SHARED else None


def most_by_lanes(matrix: DeviceMatrix, *, gated: bool) -> int:
    """The most rows that are multiplied so: tensor cores take more of them."""
    return ROWS[-1] if _shape(matrix, 1, gated=gated) else 0


def lanes_kernel(matrix: DeviceMatrix, rows: int, *, normed: bool) -> CudaKernel:
    """The kernel of one or two rows."""
    return _kernel(matrix, rows, "", normed=normed)


def gated_lanes_kernel(matrix: DeviceMatrix, activation: str, rows: int, *, normed: bool) -> CudaKernel:
    """The kernel of a gated pair of one or two rows."""
    return _kernel(matrix, rows, activation, normed=normed)


def _kernel(matrix: DeviceMatrix, rows: int, activation: str, *, normed: bool) -> CudaKernel:
    shape = _shape(matrix, rows, gated=bool(activation))
    assert matrix.form is not None and shape is not None
    name, arguments = ("decode_gated_few", "GatedArguments") if activation else ("decode_few", "DecodeArguments")
    given = [matrix.form.reader, *([f"unary::{activation}"] if activation else []), rows, shape[0], int(normed), shape[1]]
    function = f"{name}<{', '.join(map(str, given))}>"
    return CudaKernel("decode.cu", function, arguments, _THREADS, shared=shape[1], early=True)


def rounds_of(outputs: int) -> int:
    """How many times a warp takes two outputs."""
    return min(max(outputs // (_WARPS * _STREAMS * _ENOUGH_BLOCKS), 1), _MOST_ROUNDS)


def _outputs(matrix: DeviceMatrix, *, gated: bool) -> int:
    """Of a block."""
    return CHUNK if gated else rounds_of(matrix.rows) * _WARPS * _STREAMS


def lanes_choices(matrix: DeviceMatrix, counted: str, *, gated: bool) -> Iterator[tuple[int, Any]]:
    """The rows of a block with its grid, of which one is started for one or two rows; none where a row has no room."""
    blocks = -(-matrix.rows // _outputs(matrix, gated=gated))
    fitting = [rows for rows in ROWS if _shape(matrix, rows, gated=gated)]

    def grid_of(rows: int) -> Any:
        def grid(counts: Counts) -> tuple[int, int, int]:
            total = counts[counted]
            is_mine = 0 < total <= ROWS[-1] and rows == min(total, fitting[-1])
            return (blocks, -(-total // rows), 1) if is_mine else (0, 0, 0)

        return grid

    for rows in fitting:
        yield rows, grid_of(rows)
