"""Kernels of products of one or two rows as bytes, which norm the rows themselves where a norm made them: see
decode_lanes.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .launches import Counts
from .sources import CudaKernel
from .weight_layout import CHUNK
from .weights import STRIDE, DeviceMatrix

ROWS = (1, 2)
"""Rows that one block multiplies; the fewest that suffice are taken."""
NOT_NORMED = {"x": 0, "weight": 0, "x_stride": 0, "width": 0, "epsilon": 0.0}
"""The fields of `NormedRows` of rows that others have made."""
# Chunks that a row has room for, and what they take with their scales.
CAPACITIES, _CHUNK_BYTES = (128, 512, 1024), 40
_THREADS, _WARPS, _ARRAYS = 512, 16, 4
# Chunks of a lane that are under way, of so many bits at most, or of more.
_BITS_OF_MORE_AHEAD, _MORE_AHEAD, _AHEAD = 4, 8, 4
# What a block can have of any GPU from Ampere on, and of those for servers, by their compute capability; kernels are
# compiled for multiples of the next number.
_MOST_SHARED, _MOST_OF_SERVERS, _SERVERS = 96 << 10, 160 << 10, (80, 87, 90, 100, 103)
_SHARED_STEP, _COPIED, _ALIGNED = 2 << 10, 16, 128
# Outputs of a block, and bytes of their numbers, at most; of a gated pair so many where there is room for them, and
# enough for half of the multiprocessors.
_MOST_EACH, _MOST_NUMBERS, _GATED = 128, 32 << 10, (64, 32)
# Two blocks may share the registers of a multiprocessor: those of a kernel and of the next one.
_BLOCKS = 2


@dataclass(frozen=True)
class Room:
    """What a GPU has for blocks.

    Attributes:
        shared: bytes of shared memory of one. multiprocessors: how many it has.
    """

    shared: int
    multiprocessors: int

    @staticmethod
    def of(capability: int, multiprocessors: int) -> Room:
        """That of a GPU of a compute capability (times ten)."""
        return Room(_MOST_OF_SERVERS if capability in _SERVERS else _MOST_SHARED, multiprocessors)


@dataclass(frozen=True)
class Lanes:
    """How a matrix, or a gated pair of such, is multiplied with so many rows.

    Attributes:
        rows: of a block. blocks: how many; each: outputs of one, at most. streams: rows of matrices that a warp has.
        chunks: that a row has room for. shared: bytes of shared memory.
    """

    rows: int
    blocks: int
    each: int
    streams: int
    chunks: int
    shared: int


def lanes(matrix: DeviceMatrix, room: Room, *, gated: bool) -> tuple[Lanes, ...]:
    """The ways, that of the fewest rows first; none where no block has so much memory."""
    shapes = _gated_shapes(matrix, room) if gated else [_even_shape(matrix, room)]
    found = []
    for rows in ROWS:
        choices = (_lanes(matrix, rows, *shape, gated=gated) for shape in shapes)
        found += [one for one in choices if one and one.shared <= room.shared][:1]
    return tuple(found)


def _gated_shapes(matrix: DeviceMatrix, room: Room) -> list[tuple[int, int, int]]:
    """Blocks, outputs of one, and streams."""
    enough = [each for each in _GATED if matrix.rows * 2 >= each * room.multiprocessors] or [_GATED[-1]]
    return [(-(-matrix.rows // each), each, 2) for each in enough]


def _even_shape(matrix: DeviceMatrix, room: Room) -> tuple[int, int, int]:
    """The same, of as many blocks as there are multiprocessors, or twice as many and so on: all have the same work."""
    most = max(min(_MOST_EACH, _MOST_NUMBERS // max(matrix.number_bytes, 1)), 2)
    rounds = -(-matrix.rows // (room.multiprocessors * most))
    # Where warps would have no pair, they have a row each.
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
    """The kernel of one or two rows."""
    assert matrix.reader is not None
    shape = f"{way.streams}, {way.rows}, {way.chunks}, {int(normed)}, {way.shared}"
    function = f"decode_few<{matrix.reader.name}, {shape}>"
    return CudaKernel("decode.cu", function, "DecodeArguments", _THREADS, _BLOCKS, way.shared, early=True)


def gated_lanes_kernel(matrix: DeviceMatrix, activation: str, way: Lanes, *, normed: bool) -> CudaKernel:
    """The kernel of a gated pair of one or two rows."""
    assert matrix.reader is not None
    shape = f"{way.each}, {way.rows}, {way.chunks}, {int(normed)}, {way.shared}"
    function = f"decode_gated_few<{matrix.reader.name}, unary::{activation}, {shape}>"
    return CudaKernel("decode.cu", function, "GatedArguments", _THREADS, _BLOCKS, way.shared, early=True)


def lanes_grid(way: Lanes, ways: tuple[Lanes, ...], counted: str) -> Any:
    """The blocks that are started for one or two rows."""

    def grid(counts: Counts) -> tuple[int, int, int]:
        total = counts[counted]
        is_mine = 0 < total <= ROWS[-1] and way.rows == min(total, ways[-1].rows)
        return (way.blocks, -(-total // way.rows), 1) if is_mine else (0, 0, 0)

    return grid
