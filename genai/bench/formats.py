"""The speed of matrix products in all weight formats, measured on random matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.ir import BlockWeight, Linear, OpProgram, Projection, RowsType, SliceColumns, Weight
from genai.kernels.weights import ROW, WeightFormat, packed_bytes, uniform_format, uniform_grid
from genai.quant import formats
from genai.quant.formats import GRIDS, row_scaled_format

from ..devices import open_executor
from .ceilings import BUFFER_BYTES, bandwidth
from .kernels import BenchRow, step_seconds

# Rows and columns of a matrix, and the total bytes of all matrices, which the bandwidth measurement also reads.
_SIZE, _BYTES = (4096, 4096), BUFFER_BYTES
_TWO_BITS = (-31.0, -13.0, 1.0, 17.0)
_THREE_BITS = (-63.0, -40.0, -23.0, -10.0, 1.0, 13.0, 28.0, 47.0)

Grid = NDArray[np.float32]
_KINDS = ("data", "grid", "scales", "multipliers", "offset_scales", "offsets")
# The measured formats: the usual formats of each family, and the grids of formats whose values are not integers.
FORMATS: Mapping[str, tuple[WeightFormat, Grid | None]] = {
    **{f"uniform {bits} by 32": (uniform_format(bits, 32), None) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"uniform {bits} by 128": (uniform_format(bits, 128), None) for bits in (2, 3, 4)},
    "uniform 3 by 32, zero points": (uniform_format(3, 32, zero_points=True), None),
    "uniform 4 by row": (uniform_format(4, ROW), None),
    "Q2_K": (formats.Q2_K, None),
    "Q3_K": (formats.Q3_K, None),
    "Q4_K": (formats.Q4_K, None),
    "Q5_K": (formats.Q5_K, None),
    "Q6_K": (formats.Q6_K, None),
    "IQ4_XS": (formats.IQ4_XS, GRIDS["iq4"]),
    "IQ4_NL": (formats.IQ4_NL, GRIDS["iq4"]),
    "MXFP4": (formats.MXFP4, GRIDS["mxfp4"]),
    "NF4 by 64": (uniform_format(4, 64), GRIDS["nf4"]),
    "grid of 4 bits, scale per row": (row_scaled_format(4, 32), GRIDS["iq4"]),
    "grid of 3 bits, scale per row": (row_scaled_format(3, 32), np.array(_THREE_BITS, np.float32)),
    "grid of 2 bits, scale per row": (row_scaled_format(2, 32), np.array(_TWO_BITS, np.float32)),
}


class _RandomConstants:
    """Constants by name that all matrices of a format share. The number after the last space of a name is ignored."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = arrays

    def array(self, name: str) -> NDArray[Any]:
        return self._arrays[name.rpartition(" ")[0] or name]

    def packed(self, weight: Weight) -> None:
        """Keep the arrays, because all matrices share them."""


def bench_formats(
    *, rows: Sequence[int], threads: int | None = None, repeat: int = 5, names: Sequence[str] = (), exact: bool = False
) -> Iterator[BenchRow]:
    """Yield one row per format and number of rows: a product's time, its bytes/s, and its share of the bandwidth.

    Args:
        rows: numbers of rows to measure.
        threads: CPU threads; None = the physical cores.
        repeat: measured runs per product.
        names: keys of FORMATS; empty = all.
        exact: True to keep activations in float32.
    """
    for name in names or FORMATS:
        weight_format, grid = FORMATS[name]
        arrays = _arrays(
            weight_format,
            uniform_grid(weight_format.bits, centred=not weight_format.offset_bits) if grid is None else grid,
        )
        executor = open_executor(threads=threads)
        program = _program(weight_format, arrays, exact)
        function = executor.compile(program)
        first = next(part.projection.weight for part in program.ops if isinstance(part, Linear))
        nbytes = executor.packed_bytes(first, program.constants)
        count = sum(isinstance(part, Linear) for part in program.parts)
        for tokens in rows:
            inputs = {"x": np.ones((tokens, _SIZE[1]), np.float32)}
            seconds = step_seconds(function, tokens, inputs, repeat) / count
            read = bandwidth(threads)()
            yield {
                "format": name,
                "bits": 8 * nbytes / (_SIZE[0] * _SIZE[1]),
                "rows": tokens,
                "ms": 1e3 * seconds,
                "GB/s": nbytes / seconds / 1e9,
                "of bandwidth": nbytes / seconds / read,
                "TOP/s": 2.0 * _SIZE[0] * _SIZE[1] * tokens / seconds / 1e12,
            }
        executor.close()


def _arrays(weight_format: WeightFormat, grid: Grid) -> dict[str, NDArray[Any]]:
    """Return the random constants of one matrix."""
    rng = np.random.default_rng(0)
    rows, columns = _SIZE
    blocks, groups = weight_format.blocks(columns), weight_format.groups(columns)
    arrays: dict[str, NDArray[Any]] = {
        "data": rng.integers(0, 256, (rows, weight_format.padded(columns) * weight_format.bits // 8), dtype=np.uint8),
        "grid": grid,
        "scales": np.exp2(-rng.integers(4, 8, (rows, groups)).astype(np.float32)),
    }
    if grid is not GRIDS["mxfp4"]:
        arrays["scales"] *= np.float32(0.75)  # not powers of two
    if weight_format.multiplier_bits:
        arrays["multipliers"] = rng.integers(
            0, 256, (rows, packed_bytes(blocks, weight_format.multiplier_bits)), dtype=np.uint8
        )
    if weight_format.offset_bits:
        arrays["offset_scales"] = arrays["scales"]
        arrays["offsets"] = rng.integers(
            0, 256, (rows, packed_bytes(blocks, weight_format.offset_bits)), dtype=np.uint8
        )
    return arrays


def _program(weight_format: WeightFormat, arrays: Mapping[str, NDArray[Any]], exact: bool) -> OpProgram:
    """Return a program that multiplies x by enough matrices that their weights together exceed any cache."""
    rows, columns = _SIZE
    count = max(2, round(_BYTES / (weight_format.bits_per_weight(columns) / 8 * rows * columns)))
    ops = []
    for number in range(count):
        data, grid, scales, multipliers, offset_scales, offsets = (
            f"{kind} {number}" if kind in arrays else "" for kind in _KINDS
        )
        weight = BlockWeight(
            data,
            scales,
            offsets,
            rows,
            columns,
            weight_format,
            grid=grid,
            multipliers=multipliers,
            offset_scales=offset_scales,
        )
        ops.append(Linear("copy", Projection(weight), f"y {number}", exact))
    types = {name: RowsType((1, -1, columns), columns) for name in ("x", "copy")}
    types |= {op.out: RowsType((1, -1, rows), rows) for op in ops}
    parts = (SliceColumns("x", 0, "copy"), *ops)
    return OpProgram(parts=parts, types=types, constants=_RandomConstants(arrays), outputs=(), given=("x",))
