"""Launches of mixtures of experts.

The experts of each token are computed on the device, so the host does not have them. The device sorts pairs of a token
and one of its experts into groups of one expert each. The grids of matmuls are sized for the maximum number of groups.

Rows with decode numerics form groups of eight pairs, which the matmuls for few rows multiply. Rows with prefill
numerics form groups of 64 pairs, which tensor cores multiply. The values between the two matmuls, and the results, have
one row per pair, in the order of tokens: `per_token` adjacent rows belong to one token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device import UnsupportedOp
from ..ir import GATES, MoE, Per, Projection
from .driver import MOST_IN_GRID, Driver, Grid
from .launches import COUNTED, Counts, Functions, Launch, bind
from .linear import COLUMNS_AT_ONCE, ROWS_AT_ONCE, arrange_kernel, arranged
from .lowering_context import CudaLowering
from .memory import DeviceRows
from .sources import CudaKernel
from .weights import STRIDE, DeviceMatrix

# Maximum number of experts for which one block counts pairs in shared memory.
MOST_EXPERTS = 1024
# Maximum number of pairs that are multiplied by each weight that is read: by lanes of warps, and by tensor cores.
_DECODE_GROUP, _PREFILL_GROUP = ROWS_AT_ONCE[-1], 64
# Number of adjacent outputs of a warp, by the maximum number of pairs of a group; always an even number.
_OUTPUTS = {1: 4, 2: 4, 4: 2, 8: 2}
# The shape of tensor core blocks, see gemm.cuh: 64 rows by 128 outputs.
_SHAPE, _GEMM_OUTPUTS, _GEMM_THREADS = "GemmShape<2, 4, 2, 4, true>", 128, 256
# Maximum number of rows that one block routes and sorts.
_ROWS_OF_ONE_BLOCK = 8
_ROUTE_THREADS, _ORDER_THREADS, _PRODUCT_THREADS, _MIX_THREADS = 128, 256, 128, 256
_WARPS, _MIX_COLUMNS = 4, 512
# A number of rows that exceeds any step.
_ANY = 1 << 31
# 4-byte numbers per pair: its expert, its share, its position, and the four numbers of a group.
_NUMBERS_PER_PAIR = 7
SWIGLU = "swiglu"


def check_experts(op: MoE, functions: tuple[str, ...]) -> None:
    """Raise UnsupportedOp, with the reason in the message, if there is no kernel for an op.

    Args:
        op: the op.
        functions: names of the unary functions that have kernels.
    """
    experts = op.first.weight.experts
    if experts > MOST_EXPERTS:
        raise UnsupportedOp(f"CUDA has no kernels for {experts} experts: at most {MOST_EXPERTS}")
    if op.activation not in (*GATES, *functions):
        raise UnsupportedOp(f"CUDA has no kernel for the function {op.activation}")
    if any(projection.addend or projection.delta for projection in (op.first, op.second)):
        raise UnsupportedOp("CUDA has no kernels for experts with addends or adapters")


# --- kernels ---------------------------------------------------------------------------------------------------------


def route_kernels() -> tuple[CudaKernel, CudaKernel, CudaKernel]:
    """Return three kernels: one chooses experts, one sorts pairs, and one does both for a few rows."""
    threads = {"route": _ROUTE_THREADS, "order_pairs": _ORDER_THREADS, "route_and_order": _ORDER_THREADS}
    one, two, both = (CudaKernel("experts_route.cu", name, "RouteArguments", threads[name]) for name in threads)
    return one, two, both


def mix_kernel() -> CudaKernel:
    """Return the kernel that adds up the results of a token's experts."""
    return CudaKernel("experts_route.cu", "mix", "MixArguments", _MIX_THREADS)


def pairs_gemv_kernel(matrix: DeviceMatrix, activation: str, most: int, *, exact: bool) -> CudaKernel:
    """Return the kernel that multiplies groups of up to `most` pairs."""
    if matrix.reader is None:
        sums = f"dense_sums<{matrix.scalar}>"
    else:
        sums = f"{'exact' if exact else 'byte'}_sums<{matrix.reader.name}>"
    function = f"expert_product<{sums}, {_functor(activation)}, {most}, {_OUTPUTS[most]}>"
    return CudaKernel("experts_gemv.cu", function, "ExpertArguments", _PRODUCT_THREADS)


def pairs_gemm_kernel(matrix: DeviceMatrix, activation: str) -> CudaKernel:
    """Return the kernel that multiplies groups of up to 64 pairs."""
    source = f"BlockSource<{matrix.reader.name}>" if matrix.reader else f"DenseSource<{matrix.scalar}>"
    function = f"expert_gemm<{source}, {_SHAPE}, {_functor(activation)}>"
    return CudaKernel("experts_gemm.cu", function, "ExpertArguments", _GEMM_THREADS)


def _functor(activation: str) -> str:
    if activation == SWIGLU:
        return SWIGLU
    return f"gated<unary::{GATES[activation]}>" if activation in GATES else f"plain<unary::{activation}>"


# --- launches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Rows of a step with one kind of numerics.

    Attributes:
        first: name of the count of rows before the part; "" = 0.
        end: name of the count at which the part ends.
        group: maximum number of pairs that are multiplied together.
        exact: True if activations are float32.
    """

    first: str
    end: str
    group: int
    exact: bool = False

    def rows(self, counts: Counts) -> int:
        """Return the number of these rows in a step."""
        return counts[self.end] - counts.get(self.first, 0)

    def layout(self, matrix: DeviceMatrix) -> str:
        """Return the layout of activations that matmuls with this matrix read; see linear.py."""
        if self.group == _PREFILL_GROUP:
            return "bfloats"
        return "bytes" if matrix.reader and not self.exact else f"floats<{COLUMNS_AT_ONCE[matrix.scalar]}>"

    @property
    def counted(self) -> dict[str, str]:
        """The fields of kernels that select these rows, with the names of their counts."""
        return {"rows": self.end} | ({"first_row": self.first} if self.first else {})


@dataclass(frozen=True)
class _Routing:
    """Addresses of a step's routing: the expert, share and position of each pair, and the groups of pairs."""

    experts: int
    per_token: int
    groups: int
    chosen: int
    shares: int
    ordered: int

    def most_groups(self, rows: int, group: int) -> int:
        """Return the maximum number of groups that `rows` rows can form."""
        pairs = rows * self.per_token
        return (pairs + (group - 1) * min(self.experts, pairs)) // group


@dataclass(frozen=True)
class _Source:
    """The rows that a matmul reads, in the layout of the matmul.

    Attributes:
        address: address of the rows.
        scales: address of their scales.
        sharing: number of consecutive pairs that read the same row.
    """

    address: int
    scales: int
    sharing: int


@dataclass(frozen=True)
class ArrangePairs:
    """A launch over rows of pairs, `per_token` for each token, repeated if one grid is not large enough.

    Attributes:
        kernel: the kernel.
        arguments: struct of `kernel`, see activations.cu.
        first: name of the count of tokens before the first token; "" = 0.
        end: name of the count of tokens at which the launch ends.
        per_token: number of experts of a token.
    """

    kernel: CudaKernel
    arguments: NDArray[np.void]
    first: str
    end: str
    per_token: int

    @property
    def kernels(self) -> tuple[CudaKernel, ...]:
        """The kernel, as a tuple."""
        return (self.kernel,)

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Launch the kernel over the pairs of a step."""
        first, end = (counts.get(name, 0) * self.per_token for name in (self.first, self.end))
        for begin in range(first, end, MOST_IN_GRID):
            last = min(begin + MOST_IN_GRID, end)
            self.arguments["first_row"], self.arguments["rows"] = begin, last
            grid = (int(self.arguments["strides"]), last - begin, 1)
            driver.launch(functions[self.kernel], self.kernel, grid, self.arguments)


def mixture(at: CudaLowering, op: MoE) -> None:
    """Add the launches of a mixture of experts."""
    out, per_token = at.values.make(op.out), op.per_token
    first, second = (at.weights.matrix(projection.weight, at.constants) for projection in (op.first, op.second))
    has_prefill = not op.exact and out.per is Per.TOKEN
    parts = [_Part("", "decode_rows" if has_prefill else COUNTED[out.per], _DECODE_GROUP, op.exact)]
    parts += [_Part("decode_rows", "tokens", _PREFILL_GROUP)] if has_prefill else []
    routing, key = _route(at, op, parts, out.per)
    widths = op.second.weight.columns, op.second.weight.rows
    hidden, results = (at.values.temporary(per_token * width, out.per) for width in widths)
    keys = [key, hidden[1], results[1]]
    for part in parts:
        source = _Source(*arranged(at, op.x, first, part.layout(first), part.end, first=part.first), per_token)
        target = hidden[0].address, widths[0]
        _multiply(at, first, op.first, source, target, routing, part, op.activation, op.parameters)
        source, key = _rows_of_pairs(at, hidden[0], second, part, per_token)
        _multiply(at, second, op.second, source, (results[0].address, widths[1]), routing, part, "copy")
        keys.append(key)
    at.launch(
        mix_kernel(), out.per, lambda rows: (-(-out.width // _MIX_COLUMNS), rows, 1), results=results[0].address,
        shares=routing.shares, out=out.address, out_stride=out.stride, per_token=per_token, width=out.width,
    )  # fmt: skip
    for key in keys:
        at.values.release(key)


def _route(at: CudaLowering, op: MoE, parts: list[_Part], per: Per) -> tuple[_Routing, Hashable]:
    """Add the launches that choose experts and sort the pairs of each part. Also return the key of their memory."""
    scores, per_token = at.values[op.scores], op.per_token
    numbers, key = at.values.temporary(_NUMBERS_PER_PAIR * per_token, per)
    pairs = at.values.capacity[per] * per_token
    before = {"groups": 0, "chosen": 4, "shares": 5, "ordered": 6}  # groups first, for 16-byte reads
    addresses = {name: numbers.address + 4 * number * pairs for name, number in before.items()}
    for part in parts:
        for kernel, blocks in _route_blocks(part):
            arguments = bind(
                kernel, scores=scores.address, scores_stride=scores.stride, first_row=0, rows=0, experts=scores.width,
                per_token=per_token, normalized=int(op.normalized), group=part.group, **addresses,
            )  # fmt: skip
            at.starts.append(Launch(kernel, arguments, part.counted, blocks))
    return _Routing(scores.width, per_token, **addresses), key


def _route_blocks(part: _Part) -> list[tuple[CudaKernel, Callable[[Counts], Grid]]]:
    """Return the routing kernels with their grids: one kernel routes and sorts a few rows; more rows need two."""

    def grid(both_in_one: int, warps_per_block: int) -> Callable[[Counts], Grid]:
        def of(counts: Counts) -> Grid:
            rows = part.rows(counts)
            fits = rows <= _ROWS_OF_ONE_BLOCK
            return (-(-rows // warps_per_block) if fits == bool(both_in_one) else 0, 1, 1)

        return of

    route, order, both = route_kernels()
    return [(both, grid(1, _ROWS_OF_ONE_BLOCK)), (route, grid(0, _WARPS)), (order, grid(0, 1 << 30))]


def _rows_of_pairs(
    at: CudaLowering, rows: DeviceRows, matrix: DeviceMatrix, part: _Part, per_token: int
) -> tuple[_Source, Hashable]:
    """Convert the values between the matmuls to the second matmul's layout. Also return the key of their memory."""
    layout, numbers = part.layout(matrix), per_token * matrix.strides * STRIDE
    bytes_of_token = numbers * 5 // 4 if layout == "bytes" else numbers * (2 if layout == "bfloats" else 4)
    memory, key = at.values.temporary(bytes_of_token // 4, rows.per)
    scales = memory.address + numbers * at.values.capacity[rows.per] if layout == "bytes" else 0
    kernel = arrange_kernel(layout)
    arguments = bind(
        kernel, x=rows.address, out=memory.address, scales=scales, x_stride=matrix.columns, width=matrix.columns,
        strides=matrix.strides, first_row=0, rows=0, capacity=0,
    )  # fmt: skip
    at.starts.append(ArrangePairs(kernel, arguments, part.first, part.end, per_token))
    return _Source(memory.address, scales, 1), key


def _multiply(
    at: CudaLowering, matrix: DeviceMatrix, projection: Projection, source: _Source, target: tuple[int, int],
    routing: _Routing, part: _Part, activation: str, parameters: tuple[float, ...] = (),
) -> None:  # fmt: skip
    """Add one matmul of the pairs of a part.

    Args:
        at: the lowering.
        matrix: weights of all experts.
        projection: the projection.
        source: the activations.
        target: address of the results, and distance from one pair's results to the next, in numbers.
        routing: the routing.
        part: the rows.
        activation: name of the activation function.
        parameters: parameters of the activation function.
    """
    usual = (1.0, 0.0, np.inf) if activation == SWIGLU else (0.0, 0.0, 0.0)
    outputs = projection.weight.rows
    given: dict[str, Any] = {
        "matrix": matrix.fields, "x": source.address, "scales": source.scales, "bias": at.vector(projection.bias),
        "out": target[0], "ordered": routing.ordered, "groups": routing.groups, "out_stride": target[1],
        "per_token": routing.per_token, "sharing": source.sharing, "strides": matrix.strides, "outputs": outputs,
        "p": (*parameters, *usual[len(parameters) :]),
    }  # fmt: skip

    def start(kernel: CudaKernel, of_block: int, fewest: int, most: int) -> None:
        def grid(counts: Counts) -> Grid:
            rows = part.rows(counts)
            groups = routing.most_groups(rows, part.group) if fewest < rows <= most else 0
            return -(-outputs // of_block), groups, 1

        first = {"first_row": part.first} if part.first else {}
        at.starts.append(Launch(kernel, bind(kernel, first_row=0, **given), first, grid))

    if part.group == _PREFILL_GROUP:
        start(pairs_gemm_kernel(matrix, activation), _GEMM_OUTPUTS, 0, _ANY)
        return
    for most in ROWS_AT_ONCE:  # a token is sent to an expert at most once, so a group has at most one pair per row
        kernel = pairs_gemv_kernel(matrix, activation, most, exact=part.exact)
        start(kernel, _WARPS * _OUTPUTS[most], most // 2, most if most < _DECODE_GROUP else _ANY)
