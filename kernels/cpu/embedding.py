"""Rows of an embedding table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import BlockQuantizedMatrix
from .checks import NO_CUBE, Float32, check, output
from .jit import kernel
from .team import Team, run
from .vector import LANES

_INT64 = np.dtype(np.int64)
_NANOSECONDS_PER_ELEMENT = 1.5


@kernel(
    "void(int64[::1], uint8[:,:,:,::1], float32[:,:,::1], float32[:,:,::1], float32, int64, float32[:,::1], "
    "int64, int64)"
)
def gather_quantized(
    tokens: Any, data: Any, scales: Any, zero_points: Any, default_zero_point: float, bits: int, out: Any,
    begin: int, end: int,
) -> None:  # fmt: skip
    """Dequantise the rows of tokens [begin, end). Layout: see formats.BlockQuantizedMatrix."""
    columns = out.shape[1]
    block_bytes = data.shape[2]
    block_size = block_bytes * 8 // bits
    mask = (1 << bits) - 1
    for index in range(begin, end):
        tile, lane = divmod(tokens[index], LANES)
        for block in range(data.shape[1]):
            scale = scales[tile, block, lane]
            zero_point = default_zero_point if zero_points.shape[0] == 0 else zero_points[tile, block, lane]
            first = block * block_size
            for i in range(min(block_size, columns - first)):
                byte = data[tile, block, i % block_bytes, lane]
                element = (byte >> (4 * (i // block_bytes))) & mask
                out[index, first + i] = (np.float32(element) - zero_point) * scale


def embedding_gather(
    tokens: NDArray[np.int64],
    table: NDArray[Any] | BlockQuantizedMatrix,
    out: Float32 | None = None,
    *,
    team: Team | None = None,
) -> Float32:
    """table[tokens] as float32.

    Args:
        tokens: int64 [T].
        table: float32 or float16 [vocabulary, F], or a block-quantised matrix (shared with a tied head).
        out: float32 [T, F] or None.

    Raises:
        ValueError: a shape or type does not fit.
        IndexError: a token is outside the table.
    """
    check("tokens", tokens, (None,), _INT64)
    rows, columns = (table.rows, table.columns) if isinstance(table, BlockQuantizedMatrix) else _dense_shape(table)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= rows):
        bad = tokens[(tokens < 0) | (tokens >= rows)][0]
        raise IndexError(f"token {bad} is outside the embedding table of {rows} rows")
    out = output("out", out, (tokens.size, columns))
    if not isinstance(table, BlockQuantizedMatrix):
        out[...] = table[tokens]
        return out
    zero_points = NO_CUBE if table.zero_points is None else table.zero_points
    default_zero_point = float(1 << (table.bits - 1))
    arguments = (tokens, table.data, table.scales, zero_points, default_zero_point, table.bits, out)
    run(team, gather_quantized, arguments, tokens.size, work=out.size * _NANOSECONDS_PER_ELEMENT)
    return out


def _dense_shape(table: NDArray[Any]) -> tuple[int, int]:
    if table.ndim != 2 or table.dtype not in (np.float32, np.float16):
        raise ValueError(f"table is {table.dtype} {list(table.shape)}, expected float32 or float16 [any, any]")
    return table.shape[0], table.shape[1]
