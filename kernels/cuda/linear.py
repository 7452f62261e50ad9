"""Launches of matmuls. Activations are arranged once for all matmuls that read them, then multiplied.

Exact matmuls have float32 activations. In other matmuls, rows with decode numerics are quantised to int8 per 32
columns, and rows with prefill numerics and the weights that they are multiplied by are rounded to bfloat16.
"""

from __future__ import annotations

from typing import Any

from ..ir import Per, Projection
from .decode import add_decode
from .launches import COUNTED, Counts, Launch, bind
from .lowering_context import CudaLowering
from .memory import DeviceRows
from .sources import CudaKernel
from .weights import STRIDE, DeviceMatrix

# Possible numbers of rows that a kernel multiplies by each weight that it reads; the smallest sufficient number is
# launched.
ROWS_AT_ONCE = (1, 2, 4, 8)
# Number of adjacent outputs of a warp, by the number of rows multiplied together.
_EXACT_OUTPUTS = {1: 2, 2: 2, 4: 2, 8: 1}
_DENSE_OUTPUTS = {1: 4, 2: 4, 4: 2, 8: 2}
# Number of columns that a lane processes together with float32 activations: a chunk, or 16 bytes of floats.
COLUMNS_AT_ONCE = {"": 32, "float": 4, "half_bits": 8, "bfloat_bits": 8}
_WARPS, _THREADS, _ARRANGE_THREADS = 4, 128, 256
# Numbers of tiles of 16 rows and of tiles of 8 outputs per warp, and of warps along rows and along outputs. Blocks of
# 128 rows by 128 outputs need the fewest bytes per product. Blocks of 32 by 64 are used if there would be too few large
# blocks to occupy half of a large GPU. The results are bit-identical.
_LARGE, _SMALL, _ENOUGH_BLOCKS = (4, 4, 2, 4), (2, 2, 1, 4), 66
# Shapes for Hopper: the number of tokens of a block, of warpgroups of 64 outputs each, and of blocks that must fit on a
# multiprocessor. Then, relative to the first shape, the time of a block that is alone on a multiprocessor, and the time
# that each block adds if there are several blocks. The results are bit-identical.
HOPPER, MULTIPROCESSORS = 90, 132
WARPGROUP_SHAPES = ((256, 2, 1, 1.0, 1.0), (128, 2, 1, 0.6, 0.6), (64, 1, 3, 0.3, 0.17))
# Number of columns of a part, of bytes of a token in a part, of stages of parts in shared memory, and of bytes of
# shared memory in addition to the stages.
_PART, _PART_BYTES, _STAGES, _BESIDE_STAGES = 64, 128, 4, 1024 + 64
_WARPGROUP_OUTPUTS, _WARPGROUP_THREADS = 64, 128


def linear(at: CudaLowering, x: str, projection: Projection, out: DeviceRows, *, exact: bool) -> None:
    """Add the launches of out = projection(x).

    Raises:
        UnsupportedOp: if no kernel can read the weight.
    """
    matrix = at.weights.matrix(projection.weight, at.constants)
    given = _results(at, projection, matrix, out)
    has_prefill = not exact and out.per is Per.TOKEN
    if matrix.reader and not exact:
        add_decode(at, x, matrix, out, given)
    else:
        _gemv(at, x, matrix, given, "decode_rows" if has_prefill else COUNTED[out.per])
    if has_prefill:
        _gemm(at, x, matrix, given)
    if projection.delta is not None:
        at.deltas.add(at, projection.delta, out)


def prefill_linear(at: CudaLowering, x: str, projection: Projection, out: DeviceRows) -> None:
    """Add only the launches for the rows with prefill numerics."""
    matrix = at.weights.matrix(projection.weight, at.constants)
    _gemm(at, x, matrix, _results(at, projection, matrix, out))


def _results(at: CudaLowering, projection: Projection, matrix: DeviceMatrix, out: DeviceRows) -> dict[str, Any]:
    """Return the fields that all kinds of kernels have: the matrix, and the operations on the sums."""
    addend = at.values[projection.addend] if projection.addend else None
    return {
        "matrix": matrix.fields, "bias": at.vector(projection.bias), "addend": addend.address if addend else 0,
        "out": out.address, "addend_stride": addend.stride if addend else 0, "out_stride": out.stride,
        "outputs": matrix.rows,
    }  # fmt: skip


def _gemv(at: CudaLowering, x: str, matrix: DeviceMatrix, given: dict[str, Any], counted: str) -> None:
    """Add the launches for few rows with float32 activations."""
    layout = f"floats<{COLUMNS_AT_ONCE[matrix.scalar]}>"
    source, scales = arranged(at, x, matrix, layout, counted)
    own = given | {"x": source, "scales": scales, "strides": matrix.strides}
    for tokens in ROWS_AT_ONCE:
        kernel, grid = gemv_kernel(matrix, tokens), _gemv_grid(matrix, tokens, counted)
        at.starts.append(Launch(kernel, bind(kernel, rows=0, **own), {"rows": counted}, grid))


def _gemm(at: CudaLowering, x: str, matrix: DeviceMatrix, given: dict[str, Any]) -> None:
    """Add the launches for the rows with prefill numerics, which follow the rows with decode numerics."""
    is_hopper = at.driver.capability == HOPPER
    source, _ = arranged(at, x, matrix, "tiles" if is_hopper else "bfloats", "tokens", first="decode_rows")
    stride = at.values.capacity[Per.TOKEN] * _PART if is_hopper else matrix.strides * STRIDE
    for which in range(len(WARPGROUP_SHAPES)) if is_hopper else range(2):
        if is_hopper:
            kernel, grid = warpgroup_kernel(matrix, which), _warpgroup_grid(matrix, which)
        else:
            kernel, grid = gemm_kernel(matrix, large=which == 0), _gemm_grid(matrix.rows, large=which == 0)
        arguments = bind(kernel, x=source, x_stride=stride, first_row=0, rows=0, **given)
        at.starts.append(Launch(kernel, arguments, {"first_row": "decode_rows", "rows": "tokens"}, grid))


def _warpgroup_grid(matrix: DeviceMatrix, which: int) -> Any:
    """Return a function that returns the grid if this shape finishes first, and an empty grid otherwise."""

    def blocks(rows: int, tokens: int, warpgroups: int) -> tuple[int, int, int]:
        return -(-rows // tokens), -(-matrix.rows // (_WARPGROUP_OUTPUTS * warpgroups)), 1

    def grid(counts: Counts) -> tuple[int, int, int]:
        rows = counts["tokens"] - counts["decode_rows"]
        found = [blocks(rows, tokens, warpgroups) for tokens, warpgroups, *_ in WARPGROUP_SHAPES]
        times = [
            max(alone, -(-one[0] * one[1] // MULTIPROCESSORS) * more)
            for one, (*_, alone, more) in zip(found, WARPGROUP_SHAPES, strict=True)
        ]
        return found[which] if times.index(min(times)) == which else (0, 0, 0)

    return grid


def _gemm_grid(outputs: int, *, large: bool) -> Any:
    def blocks(rows: int, shape: tuple[int, int, int, int]) -> tuple[int, int, int]:
        row_tiles, output_tiles, row_warps, output_warps = shape
        return -(-outputs // (8 * output_tiles * output_warps)), -(-rows // (16 * row_tiles * row_warps)), 1

    def grid(counts: Counts) -> tuple[int, int, int]:
        rows = counts["tokens"] - counts["decode_rows"]
        most = blocks(rows, _LARGE)
        is_large = most[0] * most[1] >= _ENOUGH_BLOCKS
        return (0, 0, 0) if large != is_large else most if large else blocks(rows, _SMALL)

    return grid


def arrange_kernel(layout: str) -> CudaKernel:
    """Return the kernel that converts activations to a layout.

    Args:
        layout: "bytes", "bfloats", "tiles", "floats<32>", "floats<8>" or "floats<4>".
    """
    return CudaKernel("activations.cu", f"arrange_{layout}", "ActivationArguments", _ARRANGE_THREADS)


def gemv_kernel(matrix: DeviceMatrix, tokens: int) -> CudaKernel:
    """Return the kernel that multiplies `tokens` float32 rows together."""
    shape = f"{tokens}, {_outputs(matrix, tokens)}"
    reader = f"dense<{matrix.scalar}" if matrix.reader is None else f"exact<{matrix.reader.name}"
    return CudaKernel("gemv.cu", f"product_{reader}, {shape}>", "ProductArguments", _THREADS)


def _outputs(matrix: DeviceMatrix, tokens: int) -> int:
    """Return a warp's number of adjacent outputs: enough to keep weights in flight, few enough for the registers."""
    return (_DENSE_OUTPUTS if matrix.reader is None else _EXACT_OUTPUTS)[tokens]


def gemm_kernel(matrix: DeviceMatrix, *, large: bool) -> CudaKernel:
    """Return the kernel that multiplies many rows, in blocks of one of two sizes."""
    source = f"BlockSource<{matrix.reader.name}>" if matrix.reader else f"DenseSource<{matrix.scalar}>"
    shape = _LARGE if large else _SMALL
    function = f"gemm<{source}, GemmShape<{', '.join(map(str, shape))}>>"
    return CudaKernel("gemm.cu", function, "GemmArguments", 32 * shape[2] * shape[3])


def warpgroup_kernel(matrix: DeviceMatrix, which: int) -> CudaKernel:
    """Return the kernel for Hopper that multiplies many rows, in blocks of one of three sizes."""
    tokens, warpgroups, blocks, *_ = WARPGROUP_SHAPES[which]
    source = f"BlockSource<{matrix.reader.name}>" if matrix.reader else f"DenseHalf<{matrix.scalar}>"
    function = f"warpgroup_gemm<{source}, WarpgroupShape<{tokens}, {warpgroups}>>"
    shared = _STAGES * tokens * _PART_BYTES + _BESIDE_STAGES
    threads = _WARPGROUP_THREADS * warpgroups
    return CudaKernel(
        "gemm_warpgroups.cu", function, "WarpgroupGemmArguments", threads, blocks, shared, capability=HOPPER
    )


def _gemv_grid(matrix: DeviceMatrix, tokens: int, counted: str) -> Any:
    fewer, most = tokens // 2, ROWS_AT_ONCE[-1]
    blocks = -(-matrix.rows // (_WARPS * _outputs(matrix, tokens)))

    def grid(counts: Counts) -> tuple[int, int, int]:
        rows = counts[counted]
        mine = fewer < rows <= tokens or (tokens == most and rows > most)
        return (blocks, -(-rows // tokens), 1) if mine else (0, 0, 0)

    return grid


def arranged(
    at: CudaLowering, x: str, matrix: DeviceMatrix, layout: str, counted: str, *, first: str = ""
) -> tuple[int, int]:
    """Return the addresses of a value and of its scales in the layout that matmuls read; see activations.cu.

    Args:
        at: the lowering.
        x: name of the value.
        matrix: the weights that the value is multiplied by.
        layout: name of the layout, as for `arrange_kernel`.
        counted: name of the count of the rows to convert.
        first: name of the count that is the index of the first of these rows; "" = 0.
    """
    rows, strides = at.values[x], matrix.strides
    numbers = at.values.capacity[rows.per] * strides * STRIDE
    # int8 values are followed by their scales, eight bytes per 32 values.
    nbytes = numbers * 5 // 4 if layout == "bytes" else numbers * (2 if layout in ("bfloats", "tiles") else 4)

    def fill(memory: Any) -> None:
        kernel = arrange_kernel(layout)
        address = at.driver.address(memory)
        arguments = bind(
            kernel, x=rows.address, out=address, scales=address + numbers if layout == "bytes" else 0,
            x_stride=rows.stride, width=rows.width, strides=strides, first_row=0, rows=0,
            capacity=at.values.capacity[rows.per],
        )  # fmt: skip
        fields = {"rows": counted} | ({"first_row": first} if first else {})
        at.starts.append(
            Launch(kernel, arguments, fields, lambda counts: (strides, counts[counted] - counts.get(first, 0), 1))
        )

    address = at.driver.address(at.values.derived(x, (layout, counted, strides), nbytes, fill))
    return address, address + numbers if layout == "bytes" else 0
