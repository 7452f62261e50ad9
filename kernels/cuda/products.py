"""Launches of products: activations are arranged once for all products that read them, then few rows at a time are
multiplied by the lanes of warps, or many by tensor cores.

Exact products have float32 activations. Of others, rows with decode numerics are rounded to bytes per 32 columns, and
rows with prefill numerics to bfloat16, as are their weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..records import Branch, Per
from .launches import Counts, Launch, bind
from .memory import DeviceRows
from .sources import CudaKernel
from .weights import STRIDE, DeviceMatrix

if TYPE_CHECKING:
    from .lowering import CudaLowering

# Rows that one kernel multiplies with a weight that it has read; the kernel with the fewest that suffice is started.
ROWS_AT_ONCE = (1, 2, 4, 8)
# Neighbouring outputs of a warp, by rows at once.
_OUTPUTS = {1: 2, 2: 2, 4: 2, 8: 1}
_WARPS, _THREADS, _ARRANGE_THREADS, _GEMM_THREADS, _TILE = 4, 128, 32, 128, 64
_COUNTED = {Per.TOKEN: "tokens", Per.LOGITS: "logits_rows"}


def product(at: CudaLowering, x: str, branch: Branch, out: DeviceRows, *, exact: bool) -> None:
    """out = branch(x).

    Raises:
        UnsupportedRecord: no kernel reads the weight.
    """
    matrix, rows = at.weights.matrix(branch.weight, at.constants), at.values[x]
    addend = at.values[branch.addend] if branch.addend else None
    given: dict[str, Any] = {
        "matrix": matrix.fields, "bias": at.vector(branch.bias), "addend": addend.address if addend else 0,
        "out": out.address, "addend_stride": addend.stride if addend else 0, "out_stride": out.stride,
        "columns": matrix.columns, "outputs": matrix.rows,
    }  # fmt: skip
    has_prefill = not exact and out.per is Per.TOKEN
    counted = "decode_rows" if has_prefill else _COUNTED[out.per]
    if has_prefill:
        _gemm(at, x, matrix, given)
    form = "floats" if exact else f"bytes<{matrix.bits}>"
    source, scales = _arranged(at, x, matrix, form, counted) if matrix.bits else (rows.address, 0)
    given |= {"x": source, "scales": scales, "x_stride": rows.stride, "strides": matrix.strides}
    for tokens in ROWS_AT_ONCE:
        kernel, grid = gemv_kernel(matrix, tokens, exact=exact), _gemv_grid(matrix.rows, tokens, counted)
        at.starts.append(Launch(kernel, bind(kernel, rows=0, **given), {"rows": counted}, grid))
    if branch.delta is not None:
        at.deltas.add(at, branch.delta, out)


def _gemm(at: CudaLowering, x: str, matrix: DeviceMatrix, given: dict[str, Any]) -> None:
    """The rows with prefill numerics, which stand behind the others."""
    kernel, outputs = gemm_kernel(matrix), -(-matrix.rows // _TILE)
    source, _ = _arranged(at, x, matrix, "bfloats", "tokens", first="decode_rows")

    def grid(counts: Counts) -> tuple[int, int, int]:
        return outputs, -(-(counts["tokens"] - counts["decode_rows"]) // _TILE), 1

    arguments = bind(kernel, x=source, x_stride=matrix.strides * STRIDE, first_row=0, rows=0, **given)
    at.starts.append(Launch(kernel, arguments, {"first_row": "decode_rows", "rows": "tokens"}, grid))


def arrange_kernel(form: str) -> CudaKernel:
    """The kernel that puts activations into a form: "floats", "bfloats", "bytes<4>" or "bytes<8>"."""
    return CudaKernel("activations.cu", f"arrange_{form}", "ActivationArguments", _ARRANGE_THREADS)


def gemv_kernel(matrix: DeviceMatrix, tokens: int, *, exact: bool) -> CudaKernel:
    """The kernel that multiplies so many rows at once."""
    shape = f"{tokens}, {_OUTPUTS[tokens]}"
    if not matrix.bits:
        function = f"product_dense<{matrix.scalar}, {shape}>"
    else:
        function = f"product_{'exact' if exact else 'bytes'}<{matrix.bits}, {matrix.scalar}, {shape}>"
    return CudaKernel("gemv.cu", function, "ProductArguments", _THREADS)


def gemm_kernel(matrix: DeviceMatrix) -> CudaKernel:
    """The kernel that multiplies many rows."""
    source = f"BlockSource<{matrix.bits}, {matrix.scalar}>" if matrix.bits else f"DenseSource<{matrix.scalar}>"
    return CudaKernel("gemm.cu", f"gemm<{source}>", "GemmArguments", _GEMM_THREADS)


def _gemv_grid(outputs: int, tokens: int, counted: str) -> Any:
    fewer, most = tokens // 2, ROWS_AT_ONCE[-1]
    blocks = -(-outputs // (_WARPS * _OUTPUTS[tokens]))

    def grid(counts: Counts) -> tuple[int, int, int]:
        rows = counts[counted]
        mine = fewer < rows <= tokens or (tokens == most and rows > most)
        return (blocks, -(-rows // tokens), 1) if mine else (0, 0, 0)

    return grid


# Bytes per number, the scales of bytes (two floats per 32) not counted.
_BYTES = {"floats": 4, "bfloats": 2}


def _arranged(
    at: CudaLowering, x: str, matrix: DeviceMatrix, form: str, counted: str, *, first: str = ""
) -> tuple[int, int]:
    """Where a value lies as products read it, and its scales; see activations.cu.

    Args:
        counted: what counts the rows that are arranged. first: what says which of them is the first; "" = 0.
    """
    rows, strides = at.values[x], matrix.strides
    numbers = at.values.capacity[rows.per] * strides * STRIDE
    # Bytes, and behind them their scales.
    nbytes = _BYTES[form] * numbers if form in _BYTES else numbers * 5 // 4

    def fill(memory: Any) -> None:
        kernel = arrange_kernel(form)
        address = at.driver.address(memory)
        arguments = bind(
            kernel, x=rows.address, out=address, scales=address + numbers if form not in _BYTES else 0,
            x_stride=rows.stride, width=rows.width, strides=strides, first_row=0, rows=0,
        )  # fmt: skip
        fields = {"rows": counted} | ({"first_row": first} if first else {})
        at.starts.append(
            Launch(kernel, arguments, fields, lambda counts: (strides, counts[counted] - counts.get(first, 0), 1))
        )

    address = at.driver.address(at.values.derived(x, (form, counted, strides), nbytes, fill))
    return address, address + numbers if form not in _BYTES else 0
