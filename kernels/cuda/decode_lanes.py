"""Kernels for matmuls of one or two int8 rows, which can also normalise the rows: see decode_lanes.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .launches import Counts
from .sources import CudaKernel
from .weight_layout import CHUNK
from .weights import STRIDE, DeviceMatrix

ROWS = (1, 2)
"""Possible numbers of rows that one block multiplies; the smallest sufficient number is used."""
NOT_NORMED = {"x": 0, "weight": 0, "x_stride": 0, "width": 0, "epsilon": 0.0}
"""The fields of `NormedRows` for rows that another kernel has already normalised."""
# Possible capacities of a row, in chunks, and the number of bytes of a chunk with its scales.
CAPACITIES, _CHUNK_BYTES = (128, 512, 1024), 40
_THREADS, _WARPS, _ARRAYS = 512, 16, 4
# Number of chunks that a lane loads ahead: _MORE_AHEAD for codes of at most _BITS_OF_MORE_AHEAD bits, otherwise _AHEAD.
_BITS_OF_MORE_AHEAD, _MORE_AHEAD, _AHEAD = 4, 8, 4
# Bytes of shared memory of a block on any GPU since Ampere and on server GPUs, and the compute capabilities of server
# GPUs. Kernels are compiled for multiples of _SHARED_STEP bytes.
_MOST_SHARED, _MOST_OF_SERVERS, _SERVERS = 96 << 10, 160 << 10, (80, 87, 90, 100, 103)
_SHARED_STEP, _COPIED, _ALIGNED = 2 << 10, 16, 128
# Maximum number of outputs of a block, and maximum bytes of their scales. For a gated pair, the number of outputs of a
# block is the first of _GATED that fits into shared memory and keeps at least half of the multiprocessors busy.
_MOST_EACH, _MOST_NUMBERS, _GATED = 128, 32 << 10, (64, 32)
# Two blocks can share the registers of a multiprocessor: one of this kernel, and one of the next kernel.
_BLOCKS = 2


@dataclass(frozen=True)
class Room:
    """The resources of a GPU for blocks.

    Attributes:
        shared: bytes of shared memory of a block.
        multiprocessors: number of multiprocessors.
    """

    shared: int
    multiprocessors: int

    @staticmethod
    def of(capability: int, multiprocessors: int) -> Room:
        """Return the resources of a GPU with a compute capability (times ten)."""
        return Room(_MOST_OF_SERVERS if capability in _SERVERS else _MOST_SHARED, multiprocessors)


@dataclass(frozen=True)
class Lanes:
    """A way to multiply a matrix, or a gated pair of matrices, by one or two rows.

    Attributes:
        rows: number of rows of a block.
        blocks: number of blocks.
        each: maximum number of outputs of a block.
        streams: number of matrix rows that a warp reads at the same time.
        chunks: capacity of a row, in chunks.
        shared: bytes of shared memory of a block.
    """

    rows: int
    blocks: int
    each: int
    streams: int
    chunks: int
    shared: int


def lanes(matrix: DeviceMatrix, room: Room, *, gated: bool) -> tuple[Lanes, ...]:
    """Return the ways, in ascending order of rows; empty if blocks have too little shared memory."""
    shapes = _gated_shapes(matrix, room) if gated else [_even_shape(matrix, room)]
    found = []
    for rows in ROWS:
        choices = (_lanes(matrix, rows, *shape, gated=gated) for shape in shapes)
        found += [one for one in choices if one and one.shared <= room.shared][:1]
    return tuple(found)


def _gated_shapes(matrix: DeviceMatrix, room: Room) -> list[tuple[int, int, int]]:
    """Return possible shapes: the number of blocks, the outputs of a block, and the streams."""
    enough = [each for each in _GATED if matrix.rows * 2 >= each * room.multiprocessors] or [_GATED[-1]]
    return [(-(-matrix.rows // each), each, 2) for each in enough]


def _even_shape(matrix: DeviceMatrix, room: Room) -> tuple[int, int, int]:
    """Return a shape whose number of blocks is a multiple of the multiprocessors, so that all have equal work."""
    most = max(min(_MOST_EACH, _MOST_NUMBERS // max(matrix.number_bytes, 1)), 2)
    rounds = -(-matrix.rows // (room.multiprocessors * most))
    # If some warps would not get a pair of rows, each warp gets one row.
    streams = 2 if matrix.rows > rounds * room.multiprocessors * _WARPS else 1
    units = -(-matrix.rows // streams)
    blocks = min(rounds * room.multiprocessors, units)
    return blocks, -(-units // blocks) * streams, streams


def _lanes(matrix: DeviceMatrix, rows: int, blocks: int, each: int, streams: int, *, gated: bool) -> Lanes | None:
    chunks = next((most for most in CAPACITIES if matrix.strides * (STRIDE // CHUNK) <= most), None)
    if matrix.reader is None or chunks is None:
        return None
    ahead = _MORE_AHEAD if matrix.bits <= _BITS_OF_MORE_AHEAD else _AHEAD
    ring = ahead * _THREADS * matrix.bits * 4
    numbers = (2 if gated else 1) * (each * matrix.number_bytes + _ARRAYS * 2 * _COPIED)
    results = rows * (each + 1) * 4 + _COPIED if gated else 0
    needed = _ALIGNED + ring + rows * chunks * _CHUNK_BYTES + results + numbers
    return Lanes(rows, blocks, each, streams, chunks, -(-needed // _SHARED_STEP) * _SHARED_STEP)


def lanes_kernel(matrix: DeviceMatrix, way: Lanes, *, normed: bool) -> CudaKernel:
    """Return the kernel for one or two rows."""
    assert matrix.reader is not None
    shape = f"{way.streams}, {way.rows}, {way.chunks}, {int(normed)}, {way.shared}"
    function = f"decode_few<{matrix.reader.name}, {shape}>"
    return CudaKernel("decode.cu", function, "DecodeArguments", _THREADS, _BLOCKS, way.shared, early=True)


def gated_lanes_kernel(matrix: DeviceMatrix, activation: str, way: Lanes, *, normed: bool) -> CudaKernel:
    """Return the kernel for a gated pair with one or two rows."""
    assert matrix.reader is not None
    shape = f"{way.each}, {way.rows}, {way.chunks}, {int(normed)}, {way.shared}"
    function = f"decode_gated_few<{matrix.reader.name}, unary::{activation}, {shape}>"
    return CudaKernel("decode.cu", function, "GatedArguments", _THREADS, _BLOCKS, way.shared, early=True)


def lanes_grid(way: Lanes, ways: tuple[Lanes, ...], counted: str) -> Any:
    """Return a function that returns the grid for one or two rows, and an empty grid for more rows."""

    def grid(counts: Counts) -> tuple[int, int, int]:
        total = counts[counted]
        is_mine = 0 < total <= ROWS[-1] and way.rows == min(total, ways[-1].rows)
        return (way.blocks, -(-total // way.rows), 1) if is_mine else (0, 0, 0)

    return grid
