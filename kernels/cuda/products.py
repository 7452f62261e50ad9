"""Launches of products: activations are arranged once for all products that read them, then few rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..executor import UnsupportedRecord
from ..records import Branch, Per
from .launches import Counts, Launch, bind
from .memory import Rows
from .sources import Kernel
from .weights import STRIDE, DeviceMatrix

if TYPE_CHECKING:
    from .lowering import Lowering

# Rows that one kernel multiplies with a weight that it has read; the kernel with the fewest that suffice is started.
ROWS_AT_ONCE = (1, 2, 4, 8)
# Neighbouring outputs of a warp, by rows at once.
_OUTPUTS = {1: 2, 2: 2, 4: 2, 8: 1}
_WARPS, _THREADS, _ARRANGE_THREADS = 4, 128, 32
_COUNTED = {Per.TOKEN: "tokens", Per.LOGITS: "logits_rows"}


def product(at: Lowering, x: str, branch: Branch, out: Rows, *, exact: bool) -> None:
    """out = branch(x).

    Raises:
        UnsupportedRecord: no kernel reads the weight.
    """
    if branch.delta is not None:
        raise UnsupportedRecord("CUDA has no kernels for adapters")
    matrix, rows = at.weights.matrix(branch.weight, at.constants), at.values[x]
    source = (rows.address, 0) if not matrix.bits else _arranged(at, x, matrix, exact)
    addend = at.values[branch.addend] if branch.addend else None
    given: dict[str, Any] = {
        "matrix": matrix.fields, "x": source[0], "scales": source[1], "bias": at.vector(branch.bias),
        "addend": addend.address if addend else 0, "out": out.address, "x_stride": rows.stride,
        "addend_stride": addend.stride if addend else 0, "out_stride": out.stride, "strides": matrix.strides,
        "columns": matrix.columns, "outputs": matrix.rows,
    }  # fmt: skip
    counted = _COUNTED[out.per]
    for tokens in ROWS_AT_ONCE:
        kernel = few_rows_kernel(matrix, tokens, exact=exact)
        at.starts.append(
            Launch(kernel, bind(kernel, rows=0, **given), {"rows": counted}, _grid(matrix.rows, tokens, counted))
        )


def few_rows_kernel(matrix: DeviceMatrix, tokens: int, *, exact: bool) -> Kernel:
    """The kernel that multiplies so many rows at once."""
    shape = f"{tokens}, {_OUTPUTS[tokens]}"
    if not matrix.bits:
        function = f"product_dense<{matrix.scalar}, {shape}>"
    else:
        function = f"product_{'exact' if exact else 'bytes'}<{matrix.bits}, {matrix.scalar}, {shape}>"
    return Kernel("product_few.cu", function, "ProductArguments", _THREADS)


def _grid(outputs: int, tokens: int, counted: str) -> Any:
    fewer, most = tokens // 2, ROWS_AT_ONCE[-1]
    blocks = -(-outputs // (_WARPS * _OUTPUTS[tokens]))

    def grid(counts: Counts) -> tuple[int, int, int]:
        rows = counts[counted]
        mine = fewer < rows <= tokens or (tokens == most and rows > most)
        return (blocks, -(-rows // tokens), 1) if mine else (0, 0, 0)

    return grid


def _arranged(at: Lowering, x: str, matrix: DeviceMatrix, exact: bool) -> tuple[int, int]:
    """Where a value lies as products read it, and its scales; see activations.cu."""
    rows, strides = at.values[x], matrix.strides
    # Bytes and behind them two floats per chunk; or floats.
    numbers = at.values.capacity[rows.per] * strides * STRIDE
    function, nbytes = ("arrange_floats", 4 * numbers) if exact else (f"arrange_bytes<{matrix.bits}>", numbers * 5 // 4)

    def fill(memory: Any) -> None:
        kernel = Kernel("activations.cu", function, "ActivationArguments", _ARRANGE_THREADS)
        address = at.driver.address(memory)
        at.launch(
            kernel, rows.per, lambda count: (strides, count, 1), x=rows.address, out=address,
            scales=0 if exact else address + numbers, x_stride=rows.stride, width=rows.width, strides=strides,
        )  # fmt: skip

    address = at.driver.address(at.values.derived(x, (function, strides), nbytes, fill))
    return address, 0 if exact else address + numbers
