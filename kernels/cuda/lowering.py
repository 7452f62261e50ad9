"""Which launches a record becomes, and which records there are no kernels for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

from .. import ir
from ..cache_layout import PagedLayer
from ..device import UnsupportedRecord
from ..ir import Constants, Ids, Per
from .attention import add_attention
from .decode import add_gated, can_gate
from .driver import Driver, Grid
from .launches import COUNTED, Counts, Launch, Start, bind
from .linear import prefill_product, product
from .lora import Deltas, shrink
from .memory import DeviceRows, Values
from .moe import mixture
from .norms import add_norm
from .sources import CudaKernel
from .step import Capacity, StepTable
from .weight_formats import CHUNK, BlockForm
from .weights import DeviceWeights

_IDS = {Ids.TOKENS: "tokens", Ids.POSITIONS: "positions"}
_ELEMENTS, _ELEMENT_THREADS, _LOOKUP_THREADS = 1024, 256, 128
NO_FIELDS: Mapping[str, str] = {}
# The most parameters of a function.
_PARAMETERS = 3
UNARY = (
    "abs", "clip", "copy", "cube", "elu", "erf", "exp", "gelu", "gelu_tanh", "hard_sigmoid", "hard_swish", "leaky_relu",
    "log", "neg", "quick_gelu", "reciprocal", "relu", "round_to_float16", "sigmoid", "silu", "softcap", "softplus",
    "sqrt", "square", "tanh",
)  # fmt: skip
BINARY = ("add", "divide", "maximum", "minimum", "multiply", "power", "subtract")


@dataclass
class CudaLowering:
    """Collects the launches of records, in order.

    Attributes:
        layers: per cache layer its pages, in device memory.
        grouped: names of the values that are read as bytes; see grouped.py.
        left_norms: of those that products norm themselves; normed: their fields of `NormedRows`. See norms.py.
        starts: the launches. held: memory besides that of values. deltas: what adapters are still to add.
    """

    driver: Driver
    values: Values
    constants: Constants
    weights: DeviceWeights
    layers: Sequence[PagedLayer | None]
    table: StepTable
    capacity: Capacity
    grouped: Collection[str]
    left_norms: Collection[str] = ()
    normed: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    deltas: Deltas = field(default_factory=Deltas)
    _workspace: Any = None

    def launch(
        self, kernel: CudaKernel, per: Per, grid: Any, *, first: str = "", more: Mapping[str, str] = NO_FIELDS,
        **given: Any,
    ) -> None:  # fmt: skip
        """Add a start of a kernel over the rows of a step.

        Args:
            grid: from the number of rows. first: what counts the rows before the first one, for kernels that can begin
                there. more: fields that steps write besides.
        """
        counted = COUNTED[per]
        fields = {"rows": counted, **more}
        if "first_row" in kernel.is_pointer:
            given["first_row"] = 0
            fields |= {"first_row": first} if first else {}

        def of(counts: Counts) -> Grid:
            found: Grid = grid(counts[counted] - counts.get(first, 0))
            return found

        arguments = bind(kernel, **dict.fromkeys(fields, 0) | given)
        self.starts.append(Launch(kernel, arguments, fields, of))

    def workspace(self, nbytes: int) -> Any:
        """Memory that every launch may use for as long as it runs, one after another."""
        if self._workspace is None or self._workspace.nbytes < nbytes:
            self._workspace = self.driver.zeros(nbytes)
            self.held.append(self._workspace)
        return self._workspace

    def vector(self, name: str) -> int:
        """Where a constant begins as float32; 0 for ""."""
        return self.weights.address(self.constants, name)


@singledispatch
def lower(record: ir.Record, at: CudaLowering) -> None:
    """Add a record's launches; its inputs are in memory already.

    Raises:
        UnsupportedRecord: there are no kernels for it.
    """
    raise UnsupportedRecord(f"CUDA does not know records of the kind {type(record).__name__}")


def knows(record: ir.Record) -> bool:
    """Whether this device lowers such records."""
    return type(record) in lower.registry


# --- kernels ---------------------------------------------------------------------------------------------------------


def lookup_kernel(form: BlockForm | None, scalar: str) -> CudaKernel:
    """The kernel that looks rows up in small integers of a form, or (None) in floats of a C++ type."""
    if form:
        return CudaKernel("lookup.cu", f"lookup_blocks<{form.reader}>", "BlockLookupArguments", _LOOKUP_THREADS)
    return CudaKernel("lookup.cu", f"lookup_dense<{scalar}>", "DenseLookupArguments", _LOOKUP_THREADS)


def apply_kernel(function: str) -> CudaKernel:
    """The kernel of a function of one number, and of its gate."""
    return CudaKernel("elementwise.cu", f"apply<unary::{function}>", "UnaryArguments", _ELEMENT_THREADS)


def combine_kernel(function: str) -> CudaKernel:
    """The kernel of a function of two numbers."""
    return CudaKernel("elementwise.cu", f"combine<binary::{function}>", "BinaryArguments", _ELEMENT_THREADS)


REORDER = CudaKernel("lookup.cu", "reorder", "ReorderArguments", _ELEMENT_THREADS)


# --- rows as they are ------------------------------------------------------------------------------------------------


@lower.register
def _columns(record: ir.Columns, at: CudaLowering) -> None:
    at.values.alias(record.out, record.x, at.values[record.x].columns(record.first, at.values.types[record.out].width))


@lower.register
def _reordered(record: ir.Reordered, at: CudaLowering) -> None:
    x, out = at.values[record.x], at.values.make(record.out)
    order = at.driver.address(at.weights.indices(at.constants, record.order))
    at.launch(
        REORDER, out.per, _by_elements(out.width), x=x.address, order=order, out=out.address, x_stride=x.stride,
        out_stride=out.stride, width=out.width,
    )  # fmt: skip


@lower.register
def _logits_rows(record: ir.LogitsRows, at: CudaLowering) -> None:
    x, out = at.values[record.x], at.values.make(record.out)
    _gather(at, "float", x.address, x.stride, "logits_rows", out)


@lower.register
def _lookup(record: ir.Lookup, at: CudaLowering) -> None:
    matrix, out, ids = at.weights.matrix(record.table, at.constants), at.values.make(record.out), _IDS[record.ids]
    if not matrix.form:
        _gather(at, matrix.scalar, matrix.fields["data"], matrix.fields["chunks"] * CHUNK, ids, out)
        return
    at.launch(
        lookup_kernel(matrix.form, ""),
        out.per,
        lambda rows: (rows, 1, 1),
        table=matrix.fields,
        ids=at.table.address(ids),
        out=out.address,
        out_stride=out.stride,
        width=out.width,
    )


def _gather(at: CudaLowering, scalar: str, table: int, stride: int, ids: str, out: DeviceRows) -> None:
    at.launch(
        lookup_kernel(None, scalar),
        out.per,
        lambda rows: (rows, 1, 1),
        table=table,
        ids=at.table.address(ids),
        out=out.address,
        table_stride=stride,
        out_stride=out.stride,
        width=out.width,
    )


# --- element by element ----------------------------------------------------------------------------------------------


@lower.register
def _unary(record: ir.Unary, at: CudaLowering) -> None:
    _apply(at, record.function, at.values[record.x], None, at.values.make(record.out), record.parameters)


@lower.register
def _gate(record: ir.Gate, at: CudaLowering) -> None:
    _apply(at, record.activation, at.values[record.gate], at.values[record.up], at.values.make(record.out))


def _apply(
    at: CudaLowering,
    function: str,
    x: DeviceRows,
    up: DeviceRows | None,
    out: DeviceRows,
    parameters: tuple[float, ...] = (),
    first: str = "",
) -> None:
    """Args: first: what counts the rows before the first one; "" = there are none."""
    if function not in UNARY:
        raise UnsupportedRecord(f"CUDA does not know the function {function}")
    numbers = [*parameters, *[0.0] * (_PARAMETERS - len(parameters))]
    at.launch(
        apply_kernel(function),
        out.per,
        _by_elements(out.width),
        first=first,
        x=x.address,
        up=up.address if up else 0,
        out=out.address,
        x_stride=x.stride,
        up_stride=up.stride if up else 0,
        out_stride=out.stride,
        width=out.width,
        p=numbers,
    )


@lower.register
def _binary(record: ir.Binary, at: CudaLowering) -> None:
    if record.function not in BINARY:
        raise UnsupportedRecord(f"CUDA does not know the function {record.function}")
    out = at.values.make(record.out)
    given: dict[str, Any] = {}
    for side, name, constant in (("a", record.a, record.a_constant), ("b", record.b, record.b_constant)):
        if name:
            rows = at.values[name]
            given |= {side: rows.address, f"{side}_stride": rows.stride, f"{side}_period": rows.width}
        else:
            size = at.constants.array(constant).size
            given |= {side: at.vector(constant), f"{side}_stride": 0, f"{side}_period": size}
    at.launch(
        combine_kernel(record.function), out.per, _by_elements(out.width), out=out.address, out_stride=out.stride,
        width=out.width, **given,
    )  # fmt: skip


def _by_elements(width: int) -> Any:
    return lambda rows: (-(-width // _ELEMENTS), rows, 1)


@lower.register
def _norm(record: ir.Norm, at: CudaLowering) -> None:
    add_norm(record, at)


# --- products --------------------------------------------------------------------------------------------------------


@lower.register
def _low_rank(record: ir.LowRank, at: CudaLowering) -> None:
    shrink(at, record)


@lower.register
def _product(record: ir.Product, at: CudaLowering) -> None:
    product(at, record.x, record.branch, at.values.make(record.out), exact=record.exact)


@lower.register
def _gated_product(record: ir.GatedProduct, at: CudaLowering) -> None:
    out, branches = at.values.make(record.out), (record.gate, record.up)
    gate_matrix, up_matrix = (at.weights.matrix(branch.weight, at.constants) for branch in branches)
    at_once = (
        not record.exact and can_gate(gate_matrix, up_matrix) and not any(one.delta or one.addend for one in branches)
    )
    if at_once:
        add_gated(at, record, gate_matrix, up_matrix, out)
        if out.per is not Per.TOKEN:
            return
    gate, key = at.values.temporary(out.width, out.per)
    for branch, rows in zip(branches, (gate, out), strict=True):
        if at_once:
            prefill_product(at, record.x, branch, rows)
        else:
            product(at, record.x, branch, rows, exact=record.exact)
    at.deltas.settle(at)
    _apply(at, record.activation, gate, out, out, first="decode_rows" if at_once else "")
    at.values.release(key)


@lower.register
def _experts(record: ir.Experts, at: CudaLowering) -> None:
    mixture(at, record)


# --- attention -------------------------------------------------------------------------------------------------------


@lower.register
def _attention(record: ir.Attention, at: CudaLowering) -> None:
    query, layer = at.values[record.query], at.layers[record.layer]
    assert layer is not None
    if record.key:
        key, value = at.values[record.key], at.values[record.value]
    else:
        widths = [record.heads * record.head_size, record.kv_heads * record.head_size]
        value = query.columns(sum(widths), record.kv_heads * record.v_head_size)
        query, key = query.columns(0, widths[0]), query.columns(widths[0], widths[1])
    rotated, released = at.values.temporary(record.heads * record.head_size, query.per)
    rope, names = record.rope, ("cos", "sin", "long_cos", "long_sin")
    fresh: dict[str, Any] = {name: at.vector(getattr(rope, name)) if rope else 0 for name in names}
    pairs = at.constants.array(rope.cos).shape[1] if rope else 0
    fresh |= {
        "query": query.address, "key": key.address, "value": value.address, "query_stride": query.stride,
        "key_stride": key.stride, "value_stride": value.stride, "q_norm": at.vector(record.q_norm),
        "k_norm": at.vector(record.k_norm), "long_rows": at.table.address("long_rows"), "pairs": pairs,
        "interleaved": int(rope is not None and rope.interleaved), "epsilon": record.epsilon, "unused": 0,
    }  # fmt: skip
    add_attention(record, layer, at, rotated, at.values.make(record.out), fresh)
    at.values.release(released)
