"""Which calls a record becomes, and which records are put together because one call does the work of several."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import ir
from ...device import UnsupportedRecord
from ...weight_layout import BlockMatrix
from ..attention.phases import attention_phases
from ..linear import calls as products
from ..linear.activations import Inputs, input_bytes, input_call, inputs_at
from ..linear.bfloat_tiles import RowTiles, row_tiles_call, row_tiles_in, row_tiles_size
from ..linear.calls import decode_call, has_prefill, prefill_call
from ..linear.decode import SwigluArguments
from ..linear.dense import Matrix
from ..linear.embedding import gather_blocks
from ..linear.lora import NO_PLACE, shrink_call
from ..moe.mixture import ExpertLayer, Mixture, mixture_phases, mixture_size
from ..rowwise.elementwise import binary, gate, unary
from ..rowwise.gather import embedding, logits_rows, reordered
from ..rowwise.norm import norm
from .calls import Call, Rows
from .packed_weights import PackedWeights, table, vector
from .step_table import StepField
from .value_memory import Lowering

_IDS = {ir.Ids.TOKENS: StepField.TOKEN_IDS, ir.Ids.POSITIONS: StepField.POSITIONS}


@singledispatch
def lower(record: ir.Record, at: Lowering) -> None:
    """Add a record's calls; its inputs are in memory already."""
    raise UnsupportedRecord(f"the CPU does not know records of the kind {type(record).__name__}")


def knows(record: ir.Record) -> bool:
    """Whether this device lowers such records."""
    return type(record) in lower.registry


# --- rows as they are ------------------------------------------------------------------------------------------------


@lower.register
def _columns(record: ir.Columns, at: Lowering) -> None:
    width = at.types[record.out].width
    at.alias(record.out, record.x, at.rows(record.x).columns(record.first, width))


@lower.register
def _reordered(record: ir.Reordered, at: Lowering) -> None:
    call = reordered(at.rows(record.x), at.constants.array(record.order), at.make(record.out))
    at.run([[call]], [record.x], [record.out])


@lower.register
def _logits_rows(record: ir.LogitsRows, at: Lowering) -> None:
    x = at.rows(record.x)
    at.run([[logits_rows(x, at.make(record.out))]], [record.x], [record.out])


@lower.register
def _lookup(record: ir.Lookup, at: Lowering) -> None:
    out, ids = at.make(record.out), _IDS[record.ids]
    if isinstance(record.table, ir.DenseWeight):  # read from the mapped file, of which few rows are touched
        call = embedding(at.constants.array(record.table.data), out, ids)
    else:
        matrix = at.weights.matrix(record.table, at.constants)
        assert isinstance(matrix, BlockMatrix)
        call = gather_blocks(matrix, out, ids)
    at.run([[call]], [], [record.out])


# --- element by element ----------------------------------------------------------------------------------------------


@lower.register
def _unary(record: ir.Unary, at: Lowering) -> None:
    x, out = at.rows(record.x), at.make(record.out)
    at.run([[unary(record.function, x, out, *record.parameters)]], [record.x], [record.out])


@lower.register
def _binary(record: ir.Binary, at: Lowering) -> None:
    out = at.make(record.out)
    a, b = (
        at.rows(name) if name else _per_row(constant, out.width, at)
        for name, constant in ((record.a, record.a_constant), (record.b, record.b_constant))
    )
    at.run([[binary(record.function, a, b, out)]], list(record.inputs), [record.out])


def _per_row(constant: str, width: int, at: Lowering) -> NDArray[np.float32]:
    """A constant as one number, or as wide as a row, which may hold it several times."""
    numbers = vector(at.constants, constant)
    assert numbers is not None
    return numbers if numbers.size == 1 else np.tile(numbers, width // numbers.size)


@lower.register
def _gate(record: ir.Gate, at: Lowering) -> None:
    left, right, out = at.rows(record.gate), at.rows(record.up), at.make(record.out)
    at.run([[gate(record.activation, left, right, out)]], list(record.inputs), [record.out])


@lower.register
def _norm(record: ir.Norm, at: Lowering) -> None:
    x, weight = at.rows(record.x), vector(at.constants, record.weight)
    assert weight is not None
    out = at.make(record.out) if record.out else None
    call = norm(
        x, weight, record.epsilon, out, centred=record.centred,
        bias=vector(at.constants, record.bias) if record.centred else None, groups=x.width // weight.size,
        skip=at.rows(record.skip) if record.skip else None, input_bias=vector(at.constants, record.input_bias),
        total=at.make(record.total) if record.total else None,
    )  # fmt: skip
    at.run([[call]], list(record.inputs), list(record.outputs))


# --- attention -------------------------------------------------------------------------------------------------------


@lower.register
def _attention(record: ir.Attention, at: Lowering) -> None:
    query, layer = at.rows(record.query), at.layers[record.layer]
    assert layer is not None
    if record.key:
        key, value = at.rows(record.key), at.rows(record.value)
    else:
        widths = [record.heads * record.head_size, record.kv_heads * record.head_size]
        value = query.columns(sum(widths), record.kv_heads * record.v_head_size)
        query, key = query.columns(0, widths[0]), query.columns(widths[0], widths[1])
    phases = attention_phases(
        record, (query, key, value), at.make(record.out), layer, lambda name: table(at.constants, name)
    )
    at.run(phases, list(record.inputs), [record.out])


# --- products --------------------------------------------------------------------------------------------------------


@lower.register
def _multiply(record: ir.Product | ir.GatedProduct, at: Lowering) -> None:
    """The rows of decode numerics, and where the machine has prefill numerics of its own, those of it apart."""
    branches = ir.branches(record)
    first, *gated = (_branch(branch, at) for branch in branches)
    options: dict[str, Any] = {}
    if isinstance(record, ir.GatedProduct):
        options = {"gate": record.activation, "gated": gated[0]}
    x = at.rows(record.x)
    apart = has_prefill_product(record, first.matrix) and x.counted == StepField.TOKENS
    activations, source = _activations(record, at, first.matrix, StepField.DECODE_ROWS if apart else x.counted)
    sources: list[Any] = [source, *(branch.addend for branch in branches if branch.addend)]
    sources += [branch.delta.hidden for branch in branches if branch.delta]
    if apart:
        tiles, tiles_source = _row_tiles(at, record.x, x, first.matrix.padded_columns)
        sources.append(tiles_source)
    out = at.make(record.out)
    calls = [decode_call(activations, first, out, **options)]
    if apart:  # it writes other rows than the first call: no thread need wait between the two
        calls.append(prefill_call(tiles, first, out, **options))
    at.run([calls], sources, [record.out])


@lower.register
def _low_rank(record: ir.LowRank, at: Lowering) -> None:
    at.elsewhere(record.out)
    at.run([[shrink_call(at.rows(record.x), record.place)]], [record.x], [record.out])


def has_prefill_product(record: ir.Product | ir.GatedProduct, matrix: Matrix) -> bool:
    """Whether the rows of long prompts meet a matrix in tiles of bfloat16."""
    return not record.exact and has_prefill(matrix)


def _branch(branch: ir.Branch, at: Lowering) -> products.Affine:
    addend = at.rows(branch.addend) if branch.addend else None
    place = NO_PLACE if branch.delta is None else branch.delta.place
    matrix = at.weights.matrix(branch.weight, at.constants)
    return products.Affine(matrix, vector(at.constants, branch.bias), addend, place)


def _activations(record: Any, at: Lowering, matrix: Matrix, counted: StepField) -> tuple[Inputs, Any]:
    """What a product with decode numerics reads, made from x if it is not there yet, and its name among the values."""
    x = at.rows(record.x)
    form: tuple[int, ...] = counted, matrix.padded_columns
    if not record.exact and isinstance(matrix, BlockMatrix):
        layout = matrix.layout
        form += (layout.block_size, layout.zero_points, layout.bits)
    elif x.width == matrix.padded_columns:
        return Rows(x.address, x.stride, x.width, counted, x.held), record.x

    def make(memory: NDArray[np.uint8]) -> tuple[Inputs, Call]:
        made = inputs_at(memory.ctypes.data, matrix, counted, memory, exact=record.exact)
        return made, input_call(x, made)

    return at.derived(record.x, form, input_bytes(matrix, at.capacity[x.counted], exact=record.exact), make)


def _row_tiles(at: Lowering, name: str, x: Rows, columns: int) -> tuple[RowTiles, Any]:
    def make(memory: NDArray[np.uint8]) -> tuple[RowTiles, Call]:
        made = row_tiles_in(memory, columns)
        return made, row_tiles_call(x, made)

    return at.derived(name, ("row tiles", columns), row_tiles_size(columns, at.capacity[x.counted]), make)


# --- experts ---------------------------------------------------------------------------------------------------------


@lower.register
def _experts(record: ir.Experts, at: Lowering) -> None:
    mixture = mixture_of(record, at.weights, at.constants)
    x, scores = at.rows(record.x), at.rows(record.scores)
    out, capacity = at.make(record.out), at.capacity[x.counted]
    memory, key = at.memory(mixture_size(mixture, capacity))
    phases = mixture_phases(mixture, x, scores, out, memory.ctypes.data, capacity=capacity, held=memory)
    at.run(phases, list(record.inputs), [record.out, key])
    at.release(key)


def mixture_of(record: ir.Experts, weights: PackedWeights, constants: ir.Constants) -> Mixture:
    """A mixture with its packed weights."""
    first, second = (_expert_layer(branch, weights, constants) for branch in (record.first, record.second))
    swiglu = SwigluArguments(**dict(zip(("alpha", "beta", "limit"), record.parameters, strict=False)))
    return Mixture(first, second, record.per_token, record.normalized, record.activation, swiglu, record.exact)


def _expert_layer(branch: ir.Branch, weights: PackedWeights, constants: ir.Constants) -> ExpertLayer:
    matrices, bias = weights.experts(branch.weight, constants), table(constants, branch.bias)
    return ExpertLayer(matrices, None if bias is None else bias.reshape(matrices.experts, -1))
