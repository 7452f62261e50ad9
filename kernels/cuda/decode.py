"""Launches of matmuls of few int8 rows: see decode.cu. A gated pair of matmuls is one launch."""

from __future__ import annotations

from typing import Any

from ..ir import GatedLinear
from .decode_lanes import NOT_NORMED, ROWS, Lanes, Room, gated_lanes_kernel, lanes, lanes_grid, lanes_kernel
from .driver import Driver
from .grouped import COUNTED, GROUP, NOBODY, grouped, made_with
from .launches import Launch, bind
from .lowering_context import CudaLowering
from .memory import DeviceRows
from .sources import CudaKernel
from .weight_layout import BlockReader
from .weights import DeviceMatrix

# Possible numbers of groups of eight rows that tensor cores multiply; the smallest sufficient number is used.
GROUPS, GATED_GROUPS = (1, 2, 4, 8), (1, 2, 4)
_TILE, _THREADS, _STAGE_CHUNKS, _SHARED_WORDS, _CODE_WORDS = 16, 256, 16, 11 << 10, 8 << 10
_BITS_OF_TWO_TILES, _CHUNK = 4, 32
# With at least this number of groups, rows are loaded one stage ahead. With fewer groups there are more blocks instead,
# and the rows stay in registers.
_RINGED_GROUPS = 4
# Bytes of shared memory for a group of rows that is loaded one stage ahead.
_RING_GROUP = 2 * _STAGE_CHUNKS * GROUP * (32 + 8)


def groups_of(room: Room) -> tuple[int, ...]:
    """Return the numbers of groups for which a block has enough shared memory in addition to codes and scales."""
    return tuple(groups for groups in GROUPS if 4 * _SHARED_WORDS + _ring_bytes(groups) <= room.shared)


def _ring_bytes(groups: int) -> int:
    return _RING_GROUP * groups if groups >= _RINGED_GROUPS else 0


def decode_kernel(matrix: DeviceMatrix, groups: int) -> CudaKernel:
    """Return the kernel for `groups` groups of rows."""
    assert matrix.reader is not None
    function = f"decode<{matrix.reader.name}, {_tiles(matrix, groups)}, {groups}>"
    shared = _ring_bytes(groups)
    return CudaKernel("decode.cu", function, "DecodeArguments", _THREADS, _blocks(groups), shared, early=True)


def gated_kernel(matrix: DeviceMatrix, activation: str, groups: int) -> CudaKernel:
    """Return the kernel for a gated pair."""
    assert matrix.reader is not None
    function = f"decode_gated<{matrix.reader.name}, unary::{activation}, {_gated_tiles(matrix)}, {groups}>"
    shared = _ring_bytes(groups)
    return CudaKernel("decode.cu", function, "GatedArguments", _THREADS, _blocks(2 * groups), shared, early=True)


def _blocks(groups: int) -> int:
    """Return 1 if a block of many groups (a gated pair's count twice) may use all registers of a multiprocessor."""
    return int(groups >= _RINGED_GROUPS)


def _tiles(matrix: DeviceMatrix, groups: int) -> int:
    """Return the number of tiles per block. With the most groups, two tiles with minima need too many registers."""
    has_room = groups == _RINGED_GROUPS or (
        groups == GROUPS[-1] and matrix.reader is not None and not matrix.reader.has_minimum
    )
    return 1 + int(has_room and _is_small(matrix))


def _gated_tiles(matrix: DeviceMatrix) -> int:
    return 2 if matrix.reader is not None and _fits(matrix.reader, 4) and _is_small(matrix) else 1


def _fits(reader: BlockReader, tiles: int) -> bool:
    """Return True if two stages of `tiles` tiles and their scales fit into shared memory, by the count of `Stages`."""
    numbers = 2 * tiles * reader.halves * (1 + int(reader.offset != "Constant")) * _TILE * (_STAGE_CHUNKS + 1)
    return 2 * tiles * _TILE * _STAGE_CHUNKS * reader.bits <= min(_SHARED_WORDS - numbers, _CODE_WORDS)


def _is_small(matrix: DeviceMatrix) -> bool:
    """Return True if twice the usual number of weights fits into the shared memory of a block."""
    return matrix.reader is not None and matrix.reader.halves == 1 and matrix.bits <= _BITS_OF_TWO_TILES


def add_decode(at: CudaLowering, x: str, matrix: DeviceMatrix, out: DeviceRows, given: dict[str, Any]) -> None:
    """Add the launches of out = x . weight.

    Args:
        at: the lowering.
        x: name of the activations.
        matrix: the weights.
        out: the result.
        given: bias, addend, out, and their strides, as in `DecodeArguments`.
    """
    counted, rows = COUNTED[out.per], grouped(at, x)
    room = room_of(at.driver)
    normed, ways = at.normed.get(x, NOT_NORMED), lanes(matrix, room, gated=False)
    choices = [(lanes_kernel(matrix, way, normed=normed != NOT_NORMED), lanes_grid(way, ways, counted)) for way in ways]
    for groups in groups_of(room):
        blocks = -(-matrix.rows // (_TILE * _tiles(matrix, groups)))
        choices.append((decode_kernel(matrix, groups), _grid(groups_of(room), groups, blocks, ways, counted)))
    own = given | {"x": rows, "normed": normed, "blocks": ways[0].blocks if ways else 0, "rows": 0}
    for kernel, grid in choices:
        at.starts.append(Launch(kernel, bind(kernel, **own), {"rows": counted}, grid))


def room_of(driver: Driver) -> Room:
    """Return the resources that the driver's GPU provides for blocks."""
    return Room.of(driver.capability, driver.multiprocessors)


def can_gate(gate: DeviceMatrix, up: DeviceMatrix) -> bool:
    """Return True if one kernel can read both matrices."""
    fits = gate.reader is not None and _fits(gate.reader, 2)
    return fits and gate.reader == up.reader and (gate.rows, gate.columns) == (up.rows, up.columns)


def add_gated(at: CudaLowering, op: GatedLinear, gate: DeviceMatrix, up: DeviceMatrix, out: DeviceRows) -> None:
    """Add the launches of out = activation(x . gate) * (x . up) for rows with decode numerics."""
    counted, rows, tiles = COUNTED[out.per], grouped(at, op.x), _gated_tiles(gate)
    normed, ways = at.normed.get(op.x, NOT_NORMED), lanes(gate, room_of(at.driver), gated=True)
    # Blocks that compute whole chunks of outputs also write the layout that the next matmul reads.
    following = made_with(at, op.out, out, whole_strides=True) if tiles * _TILE % _CHUNK == 0 else NOBODY
    given: dict[str, Any] = {
        "gate": gate.fields, "up": up.fields, "x": rows, "normed": normed,
        "grouped": following, "out": out.address,
        "gate_bias": at.vector(op.gate.bias), "up_bias": at.vector(op.up.bias), "out_stride": out.stride,
        "rows": 0, "outputs": gate.rows,
    }  # fmt: skip
    choices = [
        (gated_lanes_kernel(gate, op.activation, way, normed=normed != NOT_NORMED), lanes_grid(way, ways, counted))
        for way in ways
    ]
    for groups in GATED_GROUPS:
        kernel, blocks = gated_kernel(gate, op.activation, groups), -(-gate.rows // (_TILE * tiles))
        choices.append((kernel, _grid(GATED_GROUPS, groups, blocks, ways, counted)))
    for kernel, grid in choices:
        at.starts.append(Launch(kernel, bind(kernel, **given), {"rows": counted}, grid))


def _grid(choices: tuple[int, ...], groups: int, blocks: int, ways: tuple[Lanes, ...], counted: str) -> Any:
    by_lanes = ROWS[-1] if ways else 0
    fewer, most = groups // 2 * GROUP if groups > 1 else by_lanes, groups * GROUP
    is_last = groups == choices[-1]

    def grid(counts: Any) -> tuple[int, int, int]:
        rows = counts[counted]
        mine = fewer < rows and (rows <= most or is_last)
        return (blocks * -(-rows // most), 1, 1) if mine else (0, 0, 0)

    return grid
