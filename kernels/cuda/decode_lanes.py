"""Kernels of products of one or two rows as bytes, which norm the rows themselves where a norm made them: see
decode_lanes.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .block_forms import CHUNK
from .launches import Counts
from .sources import CudaKernel
from .weights import STRIDE, DeviceMatrix

ROWS = (1, 2)
"""Rows that one block multiplies; the fewest that suffice are taken."""
NOT_NORMED = {"x": 0, "weight": 0, "x_stride": 0, "width": 0, "epsilon": 0.0}
"""The fields of `NormedRows` of rows that others have made."""
# Chunks that a row has room for, and what they take with their scales.
CAPACITIES, _CHUNK_BYTES = (128, 512, 1024), 40
_THREADS, _STREAMS, _ARRAYS = 512, 2, 4
# Turns that are under way, of so many bits at most, or of more.
_BITS_OF_MORE_AHEAD, _MORE_AHEAD, _AHEAD = 4, 4, 2
# What a block can have of any GPU from Ampere on, and of those for servers, by their compute capability; kernels are
# compiled for multiples of the next number.
_MOST_SHARED, _MOST_OF_SERVERS, _SERVERS = 96 << 10, 160 << 10, (80, 87, 90, 100, 103)
_SHARED_STEP, _COPIED = 2 << 10, 16
# Outputs of a block: so many that multiprocessors have the same work, of large matrices the most.
_MULTIPROCESSORS, _LEAST_EACH, _MOST_EACH, _MOST_NUMBERS = 132, 16, 128, 32 << 10
# Of a gated pair, those of a block where there is room and enough of them.
_GATED = (64, 32)


def most_shared(capability: int) -> int:
    """Bytes of shared memory that a block may have."""
    return _MOST_OF_SERVERS if capability in _SERVERS else _MOST_SHARED


@dataclass(frozen=True)
class Lanes:
    """How a matrix, or a gated pair of such, is multiplied with so many rows.

    Attributes:
        rows: of a block, which has `each` outputs. chunks: that a row has room for. shared: bytes of shared memory.
    """

    rows: int
    each: int
    chunks: int
    shared: int


def lanes(matrix: DeviceMatrix, *, gated: bool, capability: int) -> tuple[Lanes, ...]:
    """The ways, that of the fewest rows first; none where no block has so much memory."""
    found = []
    for rows in ROWS:
        choices = (_lanes(matrix, rows, each, gated=gated) for each in _outputs(matrix, gated=gated))
        found += [one for one in choices if one and one.shared <= most_shared(capability)][:1]
    return tuple(found)


def _outputs(matrix: DeviceMatrix, *, gated: bool) -> list[int]:
    """Outputs of a block, the best first."""
    if gated:
        return [each for each in _GATED if matrix.rows >= each * _MULTIPROCESSORS // 2] or [_GATED[-1]]
    choices = range(_LEAST_EACH, _MOST_EACH + 1, _LEAST_EACH)
    fitting = [each for each in choices if each * matrix.number_bytes <= _MOST_NUMBERS] or [_LEAST_EACH]
    if matrix.rows >= 2 * _MULTIPROCESSORS * _MOST_EACH:
        return [fitting[-1]]

    def longest(each: int) -> int:
        blocks = -(-matrix.rows // each)
        return -(-blocks // _MULTIPROCESSORS) * each

    return [min(reversed(fitting), key=longest)]


def _lanes(matrix: DeviceMatrix, rows: int, each: int, *, gated: bool) -> Lanes | None:
    chunks = next((most for most in CAPACITIES if matrix.strides * (STRIDE // CHUNK) <= most), None)
    if matrix.form is None or chunks is None:
        return None
    ahead = _MORE_AHEAD if matrix.bits <= _BITS_OF_MORE_AHEAD else _AHEAD
    ring = ahead * _STREAMS * _THREADS * matrix.bits * 4
    numbers = (2 if gated else 1) * (each * matrix.number_bytes + _ARRAYS * _COPIED)
    results = rows * (each + 1) * 4 + _COPIED if gated else 0
    needed = ring + rows * chunks * _CHUNK_BYTES + results + numbers
    return Lanes(rows, each, chunks, -(-needed // _SHARED_STEP) * _SHARED_STEP)


def lanes_kernel(matrix: DeviceMatrix, way: Lanes, *, normed: bool) -> CudaKernel:
    """The kernel of one or two rows."""
    assert matrix.form is not None
    function = f"decode_few<{matrix.form.reader}, {way.rows}, {way.chunks}, {int(normed)}, {way.shared}>"
    return CudaKernel("decode.cu", function, "DecodeArguments", _THREADS, shared=way.shared, early=True)


def gated_lanes_kernel(matrix: DeviceMatrix, activation: str, way: Lanes, *, normed: bool) -> CudaKernel:
    """The kernel of a gated pair of one or two rows."""
    assert matrix.form is not None
    shape = f"{way.each}, {way.rows}, {way.chunks}, {int(normed)}, {way.shared}"
    function = f"decode_gated_few<{matrix.form.reader}, unary::{activation}, {shape}>"
    return CudaKernel("decode.cu", function, "GatedArguments", _THREADS, shared=way.shared, early=True)


def lanes_grid(matrix: DeviceMatrix, way: Lanes, ways: tuple[Lanes, ...], counted: str) -> Any:
    """The blocks that are started for one or two rows."""
    blocks = -(-matrix.rows // way.each)

    def grid(counts: Counts) -> tuple[int, int, int]:
        total = counts[counted]
        is_mine = 0 < total <= ROWS[-1] and way.rows == min(total, ways[-1].rows)
        return (blocks, -(-total // way.rows), 1) if is_mine else (0, 0, 0)

    return grid
