"""Products with and look-ups in quantised weights of any form: our own operators, and MatMulBnb4.

Inputs of ours are x (or codes and ids), then codes, grid, scales, multipliers, offset scales and offsets, as
`kernels.weight_formats` has them; `graph.own_functions` says in standard operators what they compute. A single number
stands in for multipliers (1) and offsets (0) that there are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.functions import block_rows
from genai.kernels.cpu.linear.formats import pack_form
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.ir import Branch, FormWeight, Ids, Lookup, Product, RowsType
from genai.kernels.weight_layout import BlockMatrix
from genai.kernels.weights import BLOCKS, ROW, WeightArrays, WeightFormat, stored_weight
from genai.quant.formats import GRIDS

from ..lowering import rules
from ..lowering.rows import Kind, NotFlattenable, RowDim, State
from ..onnx.node import MS, OURS
from ..onnx.own_functions import QUANTIZED_LOOKUP, QUANTIZED_PRODUCT
from ..onnx.types import DataType, TensorType, Type
from .products import of_blocks
from .registry import Kernel, KernelError, NodeSpec, operator, register

BNB4_PRODUCT = "MatMulBnb4"
# Inputs behind the codes: of products, and of look-ups.
_PRODUCT_INPUTS, _LOOKUP_INPUTS = (1, 2, 3, 4, 5, 6), (0, 2, 3, 4, 5, 6)
BIAS, ADDEND = 7, 8
_BNB4_GRIDS = ("fp4", "nf4")


def form_weight(spec: NodeSpec, places: Sequence[int]) -> FormWeight:
    """The weight of one of our operators, whose arrays are the inputs `places`.

    Raises:
        KernelError: an attribute and the arrays' shapes contradict each other.
    """
    attributes = spec.attributes
    rows, columns, bits = (int(attributes[name]) for name in ("N", "K", "bits"))
    block_size = int(attributes["block_size"])
    codes, _, scales, multipliers, _, offsets = (spec.constant(place) for place in places)
    if codes.ndim != 2 or scales.ndim != 2 or min(rows, columns, block_size) < 1 or not scales.shape[1]:
        raise KernelError(
            f"{spec.op_type}: codes {list(codes.shape)}, scales {list(scales.shape)}, N {rows}, K {columns}, "
            f"block_size {block_size}: matrices of at least one row and column are expected"
        )
    width, groups = codes.shape[1] * 8 // max(bits, 1), scales.shape[1]
    if block_size not in BLOCKS and block_size == width:
        block_size = ROW
    whole_blocks = -(-columns // block_size) * block_size if block_size else width
    group_size = ROW if groups == 1 and width == whole_blocks and block_size != width else width // groups
    if block_size == ROW:
        group_size = ROW
    has_multipliers, has_offsets = not _stands_in(multipliers, 1), not _stands_in(offsets, 0)
    multiplier_bits = int(attributes["multiplier_bits"]) if has_multipliers else 0
    zero = int(attributes["multiplier_zero"])
    form = WeightFormat(
        bits, block_size, group_size, multiplier_bits, has_multipliers and zero != 0,
        int(attributes["offset_bits"]) if has_offsets else 0,
    )  # fmt: skip
    if zero != form.multiplier_zero:
        raise KernelError(f"{spec.op_type}: multiplier_zero is {zero}, expected {form.multiplier_zero} or 0")
    data, grid, scale, multiplier, offset_scale, offset = (spec.constant_name(place) for place in places)
    weight = FormWeight(
        data, grid, scale, multiplier if has_multipliers else "", offset_scale if has_offsets else "",
        offset if has_offsets else "", rows, columns, form,
    )  # fmt: skip
    _arrays(spec, weight)
    return weight


def _stands_in(array: Any, number: int) -> bool:
    """Whether a single number says that there are no factors."""
    return bool(array.shape == (1, 1) and array[0, 0] == number)


def _arrays(spec: NodeSpec, weight: FormWeight) -> WeightArrays:
    """Its arrays, checked."""
    return stored_weight(weight, lambda name: spec.constant(spec.inputs.index(name)))


def _matrix(spec: NodeSpec, weight: FormWeight, places: Sequence[int]) -> BlockMatrix:
    """The weight in packed form, shared by every node that reads the same arrays."""
    return spec.pack(
        tuple(places),
        f"form[{weight.rows},{weight.columns}]:{weight.form}",
        lambda: pack_form(
            _arrays(spec, weight), threads=spec.options.get("threads"), arena=spec.options.get("arena")
        ),
    )  # fmt: skip


@register(QUANTIZED_PRODUCT, domain=OURS)
def quantized_matmul(spec: NodeSpec) -> Kernel:
    """x @ W^T + bias + addend."""
    matrix = _matrix(spec, form_weight(spec, _PRODUCT_INPUTS), _PRODUCT_INPUTS)
    bias = np.ascontiguousarray(spec.constant(BIAS), np.float32) if spec.has(BIAS) else None
    return of_blocks(spec, matrix, bias, addend=ADDEND if spec.has(ADDEND) else 0)


def bnb4_weight(spec: NodeSpec) -> FormWeight:
    """The weight of a MatMulBnb4: codes [N, K], the first of two in the high bits, and a scale per block of a row.

    Raises:
        KernelError: a form of it that no kernel reads.
    """
    attributes = spec.attributes
    rows, columns, block_size = (int(attributes[name]) for name in ("N", "K", "block_size"))
    kind = int(attributes["quant_type"])
    if kind not in range(len(_BNB4_GRIDS)) or not int(attributes.get("transB", 1)):
        raise KernelError(
            f"{BNB4_PRODUCT} with quant_type {kind}, or a matrix that is not transposed, is not supported"
        )
    if min(rows, columns) < 1 or block_size not in BLOCKS or columns % block_size:
        raise KernelError(
            f"{BNB4_PRODUCT}: blocks of {block_size} in rows of {columns}: expected {', '.join(map(str, BLOCKS))}, "
            "and whole blocks in a row"
        )
    form = WeightFormat(4, block_size, block_size)
    values = tuple(GRIDS[_BNB4_GRIDS[kind]].tolist())
    weight = FormWeight(
        spec.constant_name(1), "", spec.constant_name(2), "", "", "", rows, columns, form, values, high_first=True
    )
    _arrays(spec, weight)
    return weight


@register(BNB4_PRODUCT, domain=MS)
def matmul_bnb4(spec: NodeSpec) -> Kernel:
    """x @ W^T."""
    return of_blocks(spec, _matrix(spec, bnb4_weight(spec), (1, 2)))


def _table(spec: NodeSpec) -> BlockMatrix:
    return _matrix(spec, form_weight(spec, _LOOKUP_INPUTS), _LOOKUP_INPUTS)


@operator(QUANTIZED_LOOKUP, domain=OURS, table=_table)
def quantized_gather(codes: Any, ids: Any, *, table: BlockMatrix, threads: Threads | None) -> Any:
    """Rows of a table, dequantised; negative ids count from the end. Raises IndexError when out of range."""
    flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
    rows = block_rows(np.where(flat < 0, flat + table.rows, flat), table, threads=threads)
    return rows.reshape(*ids.shape, table.columns)


@rules.shape_rule(QUANTIZED_PRODUCT, domain=OURS)
@rules.shape_rule(BNB4_PRODUCT)
def product_types(types: rules.NodeTypes) -> list[Type | None]:
    """[..., K] times a weight [N, K]: [..., N]."""
    source = types.source
    shape = None if not source.shape else (*source.shape[:-1], types.attribute("N", 0))
    return [TensorType(source.dtype, shape)]


@rules.shape_rule(QUANTIZED_LOOKUP, domain=OURS)
def lookup_types(types: rules.NodeTypes) -> list[Type | None]:
    """float32 [*ids, K]."""
    ids = types.shape(1)
    return [TensorType(DataType.FLOAT, None if ids is None else (*ids, types.attribute("K", 0)))]


@rules.row_rule(QUANTIZED_PRODUCT, domain=OURS)
@rules.row_rule(BNB4_PRODUCT, domain=MS)
def product_rows(at: rules.NodeRows) -> rules.States:
    state = at.rows
    at.keep_off(state, -1, "the contraction")
    return [state.resized(state.rank - 1, RowDim(int(at.node.attribute("N", 0))))]


@rules.row_rule(QUANTIZED_LOOKUP, domain=OURS)
def lookup_rows(at: rules.NodeRows) -> rules.States:
    ids = at.states[1]
    others = [state for index, state in enumerate(at.states) if index != 1]
    if ids is None or ids.kind is not Kind.ROWS or any(s is None or s.kind is not Kind.UNIFORM for s in others):
        raise NotFlattenable("a table that is not the same for all tokens, or ids that are")
    return [State(Kind.ROWS, (*ids.known_shape, RowDim(int(at.node.attribute("K", 0)))), ids.axis)]


@rules.record_rule(QUANTIZED_PRODUCT, domain=OURS)
def product_record(spec: rules.RowSpec) -> rules.Made | None:
    """x @ W^T + bias + addend."""
    return _product_record(spec, form_weight(spec, _PRODUCT_INPUTS), BIAS, ADDEND)


@rules.record_rule(BNB4_PRODUCT, domain=MS)
def bnb4_record(spec: rules.RowSpec) -> rules.Made | None:
    """x @ W^T."""
    return _product_record(spec, bnb4_weight(spec))


def _product_record(spec: rules.RowSpec, weight: FormWeight, bias: int = -1, addend: int = -1) -> rules.Made | None:
    x, out = spec.rows(0), spec.outputs[0]
    if x is None or x.width != weight.columns:
        return None
    has_addend = addend > 0 and spec.has(addend)
    if has_addend and spec.rows(addend) != x.with_width(weight.rows):
        return None
    constant = spec.constant_name(bias) if bias > 0 else ""
    branch = Branch(weight, constant, spec.inputs[addend] if has_addend else "")
    product = Product(spec.inputs[0], branch, out, spec.exact, op_type=spec.op_type)
    return rules.Made([product], {out: x.with_width(weight.rows)})


@rules.record_rule(QUANTIZED_LOOKUP, domain=OURS)
def lookup_record(spec: rules.RowSpec) -> rules.Made | None:
    """Rows of a table, in the packed form that a tied head has."""
    ids, out = spec.types[1], spec.outputs[0]
    if not isinstance(ids, Ids):
        return None
    weight = form_weight(spec, _LOOKUP_INPUTS)
    lookup = Lookup(weight, ids, out, op_type=spec.op_type)
    return rules.Made([lookup], {out: RowsType((1, -1, weight.columns), weight.columns)})


rules.stored_weights(
    QUANTIZED_PRODUCT, {1: rules.Packed("bits", scales=3, points=6, sizes=("N", "K"), as_stored=True)}, (2, 4, 5)
)
rules.stored_weights(
    QUANTIZED_LOOKUP, {0: rules.Packed("bits", scales=3, points=6, sizes=("N", "K"), as_stored=True)}, (2, 4, 5)
)
rules.stored_weights(BNB4_PRODUCT, {1: rules.Packed("bits", scales=2, points=3, sizes=("N", "K"), as_stored=True)})
