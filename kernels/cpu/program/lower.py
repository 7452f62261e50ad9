"""Functions that lower ops to calls, one function for each type of op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import ir
from ...cache_layout import PagedLayer, StateLayer
from ...device import UnsupportedOp
from ...weight_layout import TILE_ROWS, BlockMatrix
from ..attention.phases import attention_phases
from ..linear import calls as products
from ..linear.activations import Inputs, input_bytes, input_call, inputs_at
from ..linear.bfloat_tiles import PARTS, RowTiles, row_tiles_call, row_tiles_in, row_tiles_size
from ..linear.calls import can_split, can_split_results, decode_call, has_prefill, prefill_call
from ..linear.decode import SwigluArguments
from ..linear.dense import Matrix
from ..linear.embedding import gather_blocks
from ..linear.lora import NO_TARGET, shrink_call
from ..moe.mixture import ExpertLayer, Mixture, mixture_phases, mixture_size
from ..rowwise.elementwise import binary, gate, unary
from ..rowwise.gather import embedding, logits_rows, reordered
from ..rowwise.norm import norm
from ..rowwise.recurrence import causal_conv, linear_attention, linear_recurrence
from .calls import Call, Rows
from .packed_weights import PackedWeights, table, vector
from .step_table import StepField
from .value_memory import Lowering

_IDS = {
    ir.Ids.TOKENS: StepField.TOKEN_IDS,
    ir.Ids.POSITIONS: StepField.POSITIONS,
    ir.Ids.TYPES: StepField.TOKEN_TYPES,
}


@singledispatch
def lower(op: ir.Op, at: Lowering) -> None:
    """Add an op's calls. The op's inputs are already in memory."""
    raise UnsupportedOp(f"the CPU has no kernel for ops of type {type(op).__name__}")


def knows(op: ir.Op) -> bool:
    """Return True if this device lowers ops of this type."""
    return type(op) in lower.registry


# --- selection of rows and columns -----------------------------------------------------------------------------------


@lower.register
def _columns(op: ir.SliceColumns, at: Lowering) -> None:
    width = at.types[op.out].width
    at.alias(op.out, op.x, at.rows(op.x).columns(op.first, width))


@lower.register
def _reordered(op: ir.SelectColumns, at: Lowering) -> None:
    call = reordered(at.rows(op.x), at.constants.array(op.order), at.make(op.out))
    at.run([[call]], [op.x], [op.out])


@lower.register
def _joined(op: ir.JoinColumns, at: Lowering) -> None:
    out, first, calls = at.make(op.out), 0, []
    for part in map(at.rows, op.parts):
        calls.append(unary("copy", part, out.columns(first, part.width)))
        first += part.width
    at.run([calls], list(op.inputs), [op.out])


@lower.register
def _logits_rows(op: ir.LogitsRows, at: Lowering) -> None:
    x = at.rows(op.x)
    at.run([[logits_rows(x, at.make(op.out))]], [op.x], [op.out])


@lower.register
def _embedding(op: ir.Embedding, at: Lowering) -> None:
    out, ids = at.make(op.out), _IDS[op.ids]
    if isinstance(op.table, ir.DenseWeight):  # read from the memory-mapped file, because only a few rows are used
        call = embedding(at.constants.array(op.table.data), out, ids)
    else:
        matrix = at.weights.matrix(op.table, at.constants)
        assert isinstance(matrix, BlockMatrix)
        call = gather_blocks(matrix, out, ids)
    at.run([[call]], [], [op.out])


# --- element by element ----------------------------------------------------------------------------------------------


@lower.register
def _unary(op: ir.Unary, at: Lowering) -> None:
    x, out = at.rows(op.x), at.make(op.out)
    at.run([[unary(op.function, x, out, *op.parameters)]], [op.x], [op.out])


@lower.register
def _binary(op: ir.Binary, at: Lowering) -> None:
    out = at.make(op.out)
    a, b = (
        at.rows(name) if name else _per_row(constant, out.width, at)
        for name, constant in ((op.a, op.a_constant), (op.b, op.b_constant))
    )
    at.run([[binary(op.function, a, b, out)]], list(op.inputs), [op.out])


def _per_row(constant: str, width: int, at: Lowering) -> NDArray[np.float32]:
    """Return a constant as a single number, or repeated to the width of a row."""
    numbers = vector(at.constants, constant)
    assert numbers is not None
    return numbers if numbers.size == 1 else np.tile(numbers, width // numbers.size)


@lower.register
def _gate(op: ir.Gate, at: Lowering) -> None:
    left, right, out = at.rows(op.gate), at.rows(op.up), at.make(op.out)
    at.run([[gate(op.activation, left, right, out)]], list(op.inputs), [op.out])


@lower.register
def _norm(op: ir.Norm, at: Lowering) -> None:
    x, weight = at.rows(op.x), vector(at.constants, op.weight)
    assert weight is not None
    out = at.make(op.out) if op.out else None
    call = norm(
        x, weight, op.epsilon, out, centred=op.centred,
        bias=vector(at.constants, op.bias) if op.centred else None, groups=x.width // weight.size,
        skip=at.rows(op.skip) if op.skip else None, input_bias=vector(at.constants, op.input_bias),
        total=at.make(op.total) if op.total else None,
    )  # fmt: skip
    at.run([[call]], list(op.inputs), list(op.outputs))


# --- recurrent layers ------------------------------------------------------------------------------------------------


@lower.register
def _linear_recurrence(op: ir.LinearRecurrence, at: Lowering) -> None:
    call = linear_recurrence(at.rows(op.x), at.rows(op.decay), at.make(op.out), _states(op.layer, at))
    at.run([[call]], list(op.inputs), [op.out])


@lower.register
def _causal_conv(op: ir.CausalConv, at: Lowering) -> None:
    weight = np.asarray(at.constants.array(op.weight), np.float32)
    call = causal_conv(op, at.rows(op.x), at.make(op.out), weight, vector(at.constants, op.bias), _states(op.layer, at))
    at.run([[call]], list(op.inputs), [op.out])


@lower.register
def _linear_attention(op: ir.LinearAttention, at: Lowering) -> None:
    rows = {name: at.rows(name) for name in op.inputs}
    call = linear_attention(op, rows, at.make(op.out), _states(op.layer, at))
    at.run([[call]], list(op.inputs), [op.out])


def _states(layer: int, at: Lowering) -> StateLayer:
    states = at.layers[layer]
    assert isinstance(states, StateLayer)
    return states


# --- attention -------------------------------------------------------------------------------------------------------


@lower.register
def _attention(op: ir.Attention, at: Lowering) -> None:
    query, layer = at.rows(op.query), at.layers[op.layer]
    assert isinstance(layer, PagedLayer)
    rows = [query]
    if op.key:
        rows += [at.rows(op.key), at.rows(op.value)]
    elif op.is_packed:
        widths = [op.heads * op.head_size, op.kv_heads * op.head_size]
        value = query.columns(sum(widths), op.kv_heads * op.v_head_size)
        rows = [query.columns(0, widths[0]), query.columns(widths[0], widths[1]), value]
    phases = attention_phases(op, rows, at.make(op.out), layer, lambda name: table(at.constants, name))
    at.run(phases, list(op.inputs), [op.out])


# --- linear layers ---------------------------------------------------------------------------------------------------


@lower.register
def _multiply(op: ir.Linear | ir.GatedLinear, at: Lowering) -> None:
    """Add a call for the decode rows and, on a machine with separate prefill numerics, a call for the prefill rows.

    If all rows are prefill rows, float32 matmuls are also computed in tiles.
    """
    projections = ir.projections(op)
    first, *gated = (_affine(projection, at) for projection in projections)
    options: dict[str, Any] = {}
    if isinstance(op, ir.GatedLinear):
        options = {"gate": op.activation, "gated": gated[0]}
    x = at.rows(op.x)
    if isinstance(op, ir.Linear) and op.gate:
        halves = products.halves_of(first)
        first, options["gated"] = halves if op.gate == "first" else halves[::-1]
        options["gate"] = op.activation
    matrices = [one.matrix for one in (first, *gated)]
    if at.whole_sequences and x.counted == StepField.TOKENS and splits(op, matrices):
        tiles, key = _row_tiles(at, op.x, x, first.matrix.padded_columns, PARTS)
        addends = [projection.addend for projection in projections if projection.addend]
        activation = op.activation if isinstance(op, ir.Linear) and not op.gate else ""
        out: Rows | RowTiles
        if op.out in at.split and can_split_results(first, activation):
            columns = first.matrix.rows
            size = row_tiles_size(columns, at.capacity[x.counted], PARTS)
            form = _tiles_format(columns, PARTS)
            out = at.replaced(op.out, form, size, lambda memory: row_tiles_in(memory, columns, PARTS))
        else:
            out = at.make(op.out)
        call = prefill_call(tiles, first, out, activation=activation, **options)
        at.run([[call]], [key, *addends], [op.out])
        return
    apart = has_prefill_linear(op, first.matrix) and x.counted == StepField.TOKENS
    activations, source = _activations(op, at, first.matrix, StepField.DECODE_ROWS if apart else x.counted)
    sources: list[Any] = [source, *(projection.addend for projection in projections if projection.addend)]
    sources += [projection.delta.hidden for projection in projections if projection.delta]
    if apart:
        tiles, tiles_source = _row_tiles(at, op.x, x, first.matrix.padded_columns)
        sources.append(tiles_source)
    out = at.make(op.out)
    calls = [decode_call(activations, first, out, **options)]
    if apart:  # it writes different rows from the first call, so no barrier is needed
        calls.append(prefill_call(tiles, first, out, **options))
    at.run([calls], sources, [op.out])


@lower.register
def _lora_shrink(op: ir.LoraShrink, at: Lowering) -> None:
    at.elsewhere(op.out)
    at.run([[shrink_call(at.rows(op.x), op.target)]], [op.x], [op.out])


def has_prefill_linear(op: ir.Linear | ir.GatedLinear, matrix: Matrix) -> bool:
    """Return True if the rows of long prompts are multiplied by a matrix in tiles of bfloat16."""
    return not op.exact and has_prefill(matrix)


def can_halve(op: ir.Linear) -> bool:
    """Return True if the halves of a linear layer's columns are whole tiles, and it adds nothing but a bias."""
    return op.projection.weight.rows % (2 * TILE_ROWS) == 0 and not op.projection.addend


def splits(op: ir.Linear | ir.GatedLinear, matrices: Sequence[Matrix]) -> bool:
    """Return True if the rows of whole sequences are multiplied by dense matrices in bfloat16 parts."""
    adapted = any(projection.delta is not None for projection in ir.projections(op))
    return not adapted and all(map(can_split, matrices))


def _affine(projection: ir.Projection, at: Lowering) -> products.Affine:
    addend = at.rows(projection.addend) if projection.addend else None
    target = NO_TARGET if projection.delta is None else projection.delta.target
    matrix = at.weights.matrix(projection.weight, at.constants)
    return products.Affine(matrix, vector(at.constants, projection.bias), addend, target)


def _activations(op: Any, at: Lowering, matrix: Matrix, counted: StepField) -> tuple[Inputs, Any]:
    """Return the activations that a matmul with decode numerics reads, computed from x if needed, and their key."""
    x = at.rows(op.x)
    format: tuple[int, ...] = counted, matrix.padded_columns
    if not op.exact and isinstance(matrix, BlockMatrix):
        layout = matrix.layout
        format += (layout.block_size, layout.zero_points, layout.bits)
    elif x.width == matrix.padded_columns:
        return Rows(x.address, x.stride, x.width, counted, x.held), op.x

    def make(memory: NDArray[np.uint8]) -> tuple[Inputs, Call]:
        made = inputs_at(memory.ctypes.data, matrix, counted, memory, exact=op.exact)
        return made, input_call(x, made)

    return at.derived(op.x, format, input_bytes(matrix, at.capacity[x.counted], exact=op.exact), make)


def _row_tiles(at: Lowering, name: str, x: Rows, columns: int, parts: int = 1) -> tuple[RowTiles, Any]:
    def make(memory: NDArray[np.uint8]) -> tuple[RowTiles, Call]:
        made = row_tiles_in(memory, columns, parts)
        return made, row_tiles_call(x, made)

    size = row_tiles_size(columns, at.capacity[x.counted], parts)
    return at.derived(name, _tiles_format(columns, parts), size, make)


def _tiles_format(columns: int, parts: int) -> tuple[str, int, int]:
    return "row tiles", columns, parts


# --- experts ---------------------------------------------------------------------------------------------------------


@lower.register
def _experts(op: ir.MoE, at: Lowering) -> None:
    mixture = mixture_of(op, at.weights, at.constants)
    x, scores = at.rows(op.x), at.rows(op.scores)
    out, capacity = at.make(op.out), at.capacity[x.counted]
    memory, key = at.memory(mixture_size(mixture, capacity))
    phases = mixture_phases(mixture, x, scores, out, memory.ctypes.data, capacity=capacity, held=memory)
    at.run(phases, list(op.inputs), [op.out, key])
    at.release(key)


def mixture_of(op: ir.MoE, weights: PackedWeights, constants: ir.Constants) -> Mixture:
    """Return a mixture with its packed weights."""
    first, second = (_expert_layer(projection, weights, constants) for projection in (op.first, op.second))
    swiglu = SwigluArguments(**dict(zip(("alpha", "beta", "limit"), op.parameters, strict=False)))
    return Mixture(first, second, op.per_token, op.normalized, op.activation, swiglu, op.exact)


def _expert_layer(projection: ir.Projection, weights: PackedWeights, constants: ir.Constants) -> ExpertLayer:
    matrices, bias = weights.experts(projection.weight, constants), table(constants, projection.bias)
    return ExpertLayer(matrices, None if bias is None else bias.reshape(matrices.experts, -1))
