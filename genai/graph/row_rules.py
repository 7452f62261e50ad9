"""Rules of the row analysis, one per family of operators: where does the token axis go?

A rule gets the states of a node's inputs and returns the states of its outputs, or raises NotFlattenable. The batch
counts as 1 when axes are compared, because that is what it is after flattening.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .rows import BATCH, ONE, Dim, Found, Kind, NotFlattenable, Shape, State, product, rows, uniform, with_shape

if TYPE_CHECKING:
    from .ir import Graph, Node

States = list[State]
Rule = Callable[["Graph", "Node", Sequence[State | None], Found], States]
RULES: dict[tuple[str, str], Rule] = {}
MS = "com.microsoft"


def rule(*ops: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def add(function: Rule) -> Rule:
        RULES.update({(domain, op): function for op in ops})
        return function

    return add


def apply_rule(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    """States of a node's outputs: constants and mask arithmetic pass generically, rows need a rule of their own."""
    if missing := [name for name, state in zip(node.inputs, states, strict=True) if name and state is None]:
        raise NotFlattenable(f"nothing is known of input {missing[0]!r}")
    given = [state for state in states if state is not None]
    kinds = {state.kind for state in given}
    function = RULES.get(node.key)
    if node.op_type == "Constant" and node.key[0] == "":
        return [_constant(graph, node)]
    if function is not None and (kinds - {Kind.UNIFORM, Kind.CONTEXT} or node.op_type in ("Shape", "If")):
        return function(graph, node, states, found)
    if kinds <= {Kind.UNIFORM, Kind.CONTEXT}:
        kind = Kind.CONTEXT if Kind.CONTEXT in kinds else Kind.UNIFORM
        return [_uniform_output(graph, name, kind) for name in node.outputs]
    if kinds <= {Kind.UNIFORM, Kind.CONTEXT, Kind.LENGTHS}:
        return [State(Kind.CONTEXT)] * len(node.outputs)
    raise NotFlattenable("this operator is not known to treat tokens independently")


def _constant(graph: Graph, node: Node) -> State:
    value = graph.constant(node.outputs[0])
    return uniform(value.shape) if value is not None else State(Kind.UNIFORM)


def _uniform_output(graph: Graph, name: str, kind: Kind) -> State:
    """Uniform values computed from constants: take the shape that shape inference found, when it is static."""
    value = graph.values.get(name)
    shape = getattr(value.type, "shape", None) if value is not None else None
    if kind is Kind.UNIFORM and shape is not None and all(isinstance(size, int) for size in shape):
        return uniform([int(size) for size in shape if isinstance(size, int)])
    return State(kind)


def _axis(value: int, rank: int) -> int:
    return value + rank if value < 0 else value


def _the_rows(states: Sequence[State | None]) -> State:
    """The only ROWS input of an operator whose other inputs are uniform."""
    found = [state for state in states if state is not None and state.kind is Kind.ROWS]
    others = [s for s in states if s is not None and s.kind not in (Kind.ROWS, Kind.UNIFORM)]
    if others or len(found) != 1:
        raise NotFlattenable("tokens meet values that are not the same for all tokens")
    return found[0]


def _keep_off(state: State, axis: int, what: str) -> None:
    if _axis(axis, state.rank) == state.axis:
        raise NotFlattenable(f"{what} runs along the token axis {state.axis}")


def _ints(graph: Graph, name: str) -> list[int]:
    value = graph.constant(name)
    if value is None:
        raise NotFlattenable(f"{name!r} is not a constant")
    return [int(item) for item in np.asarray(value).reshape(-1)]


def _axes(graph: Graph, node: Node, input_index: int = 1) -> list[int] | None:
    """Axes given as an input (newer operator sets) or as an attribute (older ones)."""
    if len(node.inputs) > input_index and node.inputs[input_index]:
        return _ints(graph, node.inputs[input_index])
    axes = node.attribute("axes", None)
    return None if axes is None else [int(axis) for axis in axes]


# --- element by element -----------------------------------------------------------------------------------------


ELEMENTWISE = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Add And BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike "
    "Ceil Celu Clip Cos Cosh Div Dropout Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish "
    "Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal "
    "Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where "
    "Xor"
)


@rule(*ELEMENTWISE.split())
def elementwise(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    given = [state for state in states if state is not None]
    if all(state.kind in (Kind.LENGTHS, Kind.UNIFORM) for state in given):
        return [_length_arithmetic(graph, node, states)]
    if any(state.kind not in (Kind.ROWS, Kind.UNIFORM) for state in given):
        raise NotFlattenable("tokens meet values computed from the attention mask or from lengths")
    rank = max(state.rank for state in given)
    axes = {state.axis + rank - state.rank for state in given if state.kind is Kind.ROWS}
    if len(axes) != 1:
        raise NotFlattenable("two values bring their tokens along different axes")
    axis = axes.pop()
    shape = tuple(_broadcast(given, rank, i, axis) for i in range(rank))
    return [State(Kind.ROWS, shape, axis)] * len(node.outputs)


def _broadcast(given: Sequence[State], rank: int, index: int, axis: int) -> Dim:
    result = ONE
    for state in given:
        own = index - (rank - state.rank)
        dim = state.known_shape[own] if own >= 0 else ONE
        if state.kind is Kind.UNIFORM and index == axis and dim != ONE:
            raise NotFlattenable(f"a constant of size {dim} runs along the token axis")
        result = dim if dim != ONE else result
    return result


def _length_arithmetic(graph: Graph, node: Node, states: Sequence[State | None]) -> State:
    if node.op_type in ("Cast", "Identity"):
        assert states[0] is not None
        return states[0]
    if node.op_type == "Mul" and len(states) == 2:
        left, right = (_entries(graph, name, state) for name, state in zip(node.inputs, states, strict=True))
        if left and right and len(left) == len(right):
            return State(Kind.LENGTHS, entries=tuple(a * b for a, b in zip(left, right, strict=True)))
    return State(Kind.CONTEXT)


@rule("RotaryEmbedding", domain=MS)
def rotary_embedding(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    x, positions, *tables = states
    if x is None or positions is None or {x.kind, positions.kind} != {Kind.ROWS}:
        raise NotFlattenable("needs one position per token")
    if any(table is None or table.kind not in (Kind.UNIFORM, Kind.TABLES) for table in tables):
        raise NotFlattenable("needs constant cos and sin tables")
    if any(table is not None and table.kind is Kind.TABLES for table in tables):
        raise NotFlattenable("tables chosen by the total length are known inside attention only")
    return [x]


# --- along the last axis or another fixed one --------------------------------------------------------------------


@rule("LpNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization", "Softmax")
@rule("LogSoftmax", "Hardmax")
def along_axis(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows(states)
    axis = _axis(int(node.attribute("axis", -1)), state.rank)
    wide = node.op_type in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
    for each in range(axis, state.rank) if wide else (axis,):
        _keep_off(state, each, node.op_type)
    return [state] * len(node.outputs)


@rule("SkipSimplifiedLayerNormalization", "SkipLayerNormalization", "QuickGelu", "FastGelu", "BiasGelu", domain=MS)
def skip_norm(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    result = elementwise(graph, node, states, found)[0]
    _keep_off(result, -1, node.op_type)
    return [result] * len(node.outputs)


@rule(
    *[
        "ReduceSum",
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSumExp",
    ]
)
def reduce(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows(states)
    axes = _axes(graph, node)
    axes = list(range(state.rank)) if axes is None else [_axis(axis, state.rank) for axis in axes]
    for axis in axes:
        _keep_off(state, axis, node.op_type)
    if node.attribute("keepdims", 1):
        return [with_shape(state, tuple(ONE if i in axes else d for i, d in enumerate(state.known_shape)), state.axis)]
    return [_without_axes(state, axes)]


@rule("ArgMax", "ArgMin")
def arg_reduce(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows(states)
    axis = _axis(int(node.attribute("axis", 0)), state.rank)
    _keep_off(state, axis, node.op_type)
    if node.attribute("keepdims", 1):
        return [_resized(state, axis, ONE)]
    return [_without_axes(state, [axis])]


@rule("TopK")
def top_k(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows(states)
    axis = _axis(int(node.attribute("axis", -1)), state.rank)
    _keep_off(state, axis, node.op_type)
    k = _ints(graph, node.inputs[1])[0]
    return [_resized(state, axis, Dim(k))] * 2


def _resized(state: State, axis: int, size: Dim) -> State:
    shape = tuple(size if i == axis else dim for i, dim in enumerate(state.known_shape))
    return with_shape(state, shape, state.axis)


def _without_axes(state: State, axes: Sequence[int]) -> State:
    shape = tuple(dim for i, dim in enumerate(state.known_shape) if i not in axes)
    return with_shape(state, shape, state.axis - sum(axis < state.axis for axis in axes))


# --- products ----------------------------------------------------------------------------------------------------


@rule("MatMul")
def matmul(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    x, weight = states
    if x is None or weight is None or x.kind is not Kind.ROWS or weight.kind is not Kind.UNIFORM:
        raise NotFlattenable("a product whose right side is not constant mixes tokens")
    if weight.rank != 2:
        raise NotFlattenable("a product with a stacked constant is not known here")
    _keep_off(x, -1, "the contraction")
    return [_resized(x, x.rank - 1, weight.known_shape[1])]


@rule("Gemm")
def gemm(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows(states)
    if states[0] is not state or node.attribute("transA", 0) or state.axis != 0:
        raise NotFlattenable("the tokens must be the rows of the left matrix")
    weight = states[1]
    assert weight is not None
    return [_resized(state, 1, weight.known_shape[0 if node.attribute("transB", 0) else 1])]


@rule("MatMulNBits", domain=MS)
def matmul_nbits(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows(states)
    _keep_off(state, -1, "the contraction")
    return [_resized(state, state.rank - 1, Dim(int(node.attribute("N", 0))))]


# --- moving data -------------------------------------------------------------------------------------------------


@rule("Gather", "GatherBlockQuantized")
@rule("GatherBlockQuantized", domain=MS)
def gather(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    data, indices = states[0], states[1]
    assert data is not None and indices is not None
    name = "gather_axis" if node.op_type == "GatherBlockQuantized" else "axis"
    if data.kind is Kind.LENGTHS:
        return [_pick_lengths(graph, node, data)]
    axis = _axis(int(node.attribute(name, 0)), data.rank)
    if data.kind is Kind.UNIFORM and indices.kind is Kind.ROWS:
        shape = [*data.known_shape[:axis], *indices.known_shape, *data.known_shape[axis + 1 :]]
        if node.op_type == "GatherBlockQuantized" and int(node.attribute("bits", 4)) == 4:
            shape[-1] = _unpacked_width(data, states)
        return [State(Kind.ROWS, tuple(shape), axis + indices.axis)]
    if data.kind is Kind.ROWS and indices.kind is Kind.UNIFORM:
        if axis == data.axis:
            return [_last_row(graph, node, data, indices, found)]
        shape = [*data.known_shape[:axis], *indices.known_shape, *data.known_shape[axis + 1 :]]
        return [State(Kind.ROWS, tuple(shape), data.axis + (indices.rank - 1) * (axis < data.axis))]
    raise NotFlattenable("tokens are looked up by other tokens")


def _unpacked_width(data: State, states: Sequence[State | None]) -> Dim:
    """Two 4-bit values a byte when the data is stored as uint8; the scales tell the number of blocks either way."""
    return Dim(data.known_shape[-1].factor * 2)


def _last_row(graph: Graph, node: Node, data: State, indices: State, found: Found) -> State:
    """Gather(index -1) along the token axis: the last row of each sequence, the wanted rows of the step."""
    index = graph.constant(node.inputs[1])
    if index is None or index.ndim != 0 or int(index) != -1 or data.axis != 1 or data.known_shape[0] != BATCH:
        raise NotFlattenable("picks tokens by their place in the sequence")
    found.last_row_gathers.append(node)
    shape = (Dim(1, tokens=True), *data.known_shape[2:])
    return State(Kind.ROWS, shape, 0)


def _pick_lengths(graph: Graph, node: Node, data: State) -> State:
    picks = _ints(graph, node.inputs[1])
    try:
        entries = tuple(data.entries[i] for i in picks)
    except IndexError:
        raise NotFlattenable(f"picks dimension {picks} of {len(data.entries)}") from None
    return State(Kind.LENGTHS, entries=entries)


@rule("Shape")
def shape_of(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = states[0]
    assert state is not None
    if state.kind in (Kind.ROWS, Kind.UNIFORM) and state.shape is not None:
        start, end = int(node.attribute("start", 0)), node.attribute("end", None)
        return [State(Kind.LENGTHS, entries=state.known_shape[start : None if end is None else int(end)])]
    return [State(Kind.CONTEXT)]


@rule("Reshape")
def reshape(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state, target = states[0], states[1]
    assert state is not None and target is not None
    if state.kind is Kind.LENGTHS:
        return [state]
    if state.kind is not Kind.ROWS:
        return [State(state.kind)]
    wanted = _entries(graph, node.inputs[1], target)
    if wanted is None:
        raise NotFlattenable("the new shape is not known")
    shape = _resolve(state.known_shape, wanted, bool(node.attribute("allowzero", 0)))
    return [_regrouped(state, shape)]


def _entries(graph: Graph, name: str, state: State | None) -> tuple[Dim, ...] | None:
    """The dimensions that a shape vector holds; -1 and 0 keep their meaning as factors."""
    if state is not None and state.kind is Kind.LENGTHS:
        return state.entries
    value = graph.constant(name)
    return None if value is None else tuple(Dim(int(item)) for item in np.asarray(value).reshape(-1))


def _resolve(old: Shape, wanted: Shape, allow_zero: bool) -> Shape:
    copied = [old[i] if dim == Dim(0) and not allow_zero and i < len(old) else dim for i, dim in enumerate(wanted)]
    rest = product(tuple(dim for dim in copied if dim != Dim(-1)))
    total = product(old)
    if Dim(-1) not in copied:
        return tuple(copied)
    if (
        rest.factor == 0
        or total.factor % rest.factor
        or (rest.batch and not total.batch)
        or (rest.tokens and not total.tokens)
    ):
        raise NotFlattenable(f"cannot divide {total} elements by {rest}")
    missing = Dim(total.factor // rest.factor, total.batch and not rest.batch, total.tokens and not rest.tokens)
    return tuple(missing if dim == Dim(-1) else dim for dim in copied)


def _regrouped(state: State, shape: Shape) -> State:
    """Tokens stay rows if as many elements lie before their axis as did before (the batch counting as one)."""
    axes = [i for i, dim in enumerate(shape) if dim.tokens]
    if len(axes) != 1:
        raise NotFlattenable(f"no token axis is left in [{', '.join(map(str, shape))}]")
    before_old = product(state.known_shape[: state.axis]).factor
    before_new = product(shape[: axes[0]]).factor
    if before_old != before_new:
        raise NotFlattenable("the new shape cuts across tokens")
    return State(Kind.ROWS, shape, axes[0])


@rule("Flatten")
def flatten(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows(states)
    axis = _axis(int(node.attribute("axis", 1)), state.rank)
    shape = (product(state.known_shape[:axis]), product(state.known_shape[axis:]))
    return [_regrouped(state, shape)]


@rule("Transpose")
def transpose(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows(states)
    order = node.attribute("perm", None) or list(range(state.rank))[::-1]
    return [State(Kind.ROWS, tuple(state.known_shape[i] for i in order), list(order).index(state.axis))]


@rule("Unsqueeze")
def unsqueeze(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = states[0]
    assert state is not None
    if state.kind is Kind.LENGTHS:
        return [state]
    axes = _axes(graph, node) or []
    rank = state.rank + len(axes)
    axes = sorted(_axis(axis, rank) for axis in axes)
    shape = list(state.known_shape)
    for axis in axes:
        shape.insert(axis, ONE)
    return [rows(tuple(shape))]


@rule("Squeeze")
def squeeze(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = states[0]
    assert state is not None
    if state.kind is Kind.LENGTHS:
        return [state]
    axes = _axes(graph, node)
    if axes is None:
        raise NotFlattenable("the axes to drop depend on run-time sizes")
    axes = [_axis(axis, state.rank) for axis in axes]
    for axis in axes:
        _keep_off(state, axis, "Squeeze")
    return [_without_axes(state, axes)]


@rule("Concat")
def concat(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    given = [state for state in states if state is not None]
    if any(state.kind is Kind.LENGTHS for state in given):
        parts = [_entries(graph, name, state) for name, state in zip(node.inputs, states, strict=True)]
        if all(part is not None for part in parts):
            return [State(Kind.LENGTHS, entries=tuple(dim for part in parts for dim in part or ()))]
        return [State(Kind.CONTEXT)]
    if any(state.kind is not Kind.ROWS for state in given):
        raise NotFlattenable("tokens are joined with values that are not per token")
    first = given[0]
    axis = _axis(int(node.attribute("axis", 0)), first.rank)
    for state in given:
        _keep_off(state, axis, "Concat")
    if len({state.axis for state in given}) != 1:
        raise NotFlattenable("two values bring their tokens along different axes")
    width = sum(state.known_shape[axis].factor for state in given)
    return [_resized(first, axis, Dim(width))]


@rule("Split")
def split(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows(states)
    axis = _axis(int(node.attribute("axis", 0)), state.rank)
    _keep_off(state, axis, "Split")
    sizes = _split_sizes(graph, node, state.known_shape[axis].factor)
    return [_resized(state, axis, Dim(size)) for size in sizes]


def _split_sizes(graph: Graph, node: Node, width: int) -> list[int]:
    if len(node.inputs) > 1 and node.inputs[1]:
        return _ints(graph, node.inputs[1])
    if node.attribute("split", None):
        return [int(size) for size in node.attribute("split", None)]
    count = len(node.outputs)
    chunk = -(-width // count)
    return [min(chunk, width - i * chunk) for i in range(count)]


@rule("Slice")
def slice_(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = states[0]
    assert state is not None
    starts, ends, axes, steps = _slice_arguments(graph, node)
    if state.kind is Kind.LENGTHS:
        return [State(Kind.LENGTHS, entries=state.entries[starts[0] : ends[0] : steps[0]])]
    shape = list(state.known_shape)
    for start, end, axis, step in zip(starts, ends, axes or range(len(starts)), steps, strict=False):
        axis = _axis(axis, state.rank)
        _keep_off(state, axis, "Slice")
        shape[axis] = Dim(len(range(shape[axis].factor)[start:end:step]))
    return [with_shape(state, tuple(shape), state.axis)]


def _slice_arguments(graph: Graph, node: Node) -> tuple[list[int], list[int], list[int], list[int]]:
    if len(node.inputs) == 1:
        starts, ends = (list(node.attribute(name, [])) for name in ("starts", "ends"))
        return starts, ends, list(node.attribute("axes", None) or range(len(starts))), [1] * len(starts)
    given = [_ints(graph, name) if name else None for name in node.inputs[1:]]
    starts, ends = given[0] or [], given[1] or []
    axes = given[2] if len(given) > 2 and given[2] is not None else list(range(len(starts)))
    steps = given[3] if len(given) > 3 and given[3] is not None else [1] * len(starts)
    return starts, ends, axes, steps


@rule("Expand")
def expand(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = _the_rows([states[0]])
    wanted = _entries(graph, node.inputs[1], states[1])
    if wanted is None or len(wanted) > state.rank:
        raise NotFlattenable("the new shape is not known")
    shape = list(state.known_shape)
    for index, dim in enumerate(wanted, start=state.rank - len(wanted)):
        if index != state.axis and dim != ONE:
            shape[index] = dim
    return [with_shape(state, tuple(shape), state.axis)]


# --- known exchanges between tokens ------------------------------------------------------------------------------


@rule("GroupQueryAttention", domain=MS)
def group_query_attention(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    query, key, value = states[0], states[1], states[2]
    for state in (query, key, value):
        if state is not None and (state.kind is not Kind.ROWS or state.axis != 1 or state.rank != 3):
            raise NotFlattenable("query, key and value must be [batch, tokens, features]")
    if query is None:
        raise NotFlattenable("the query is missing")
    _check_attention_inputs(node, states)
    heads, kv_heads = int(node.attribute("num_heads", 0)), int(node.attribute("kv_num_heads", 0))
    width = query.known_shape[2].factor
    head_size = width // heads if key is not None else width // (heads + 2 * kv_heads)
    found.attention.append(node)
    output = _resized(query, 2, Dim(heads * head_size))
    return [output, State(Kind.CACHE), State(Kind.CACHE), *([State(Kind.CONTEXT)] * (len(node.outputs) - 3))]


def _check_attention_inputs(node: Node, states: Sequence[State | None]) -> None:
    def kind(index: int) -> Kind | None:
        state = states[index] if index < len(states) else None
        return state.kind if state is not None else None

    if not {kind(3), kind(4)} <= {Kind.CACHE, None}:
        raise NotFlattenable("past keys and values must be inputs of the graph")
    if not {kind(7), kind(8)} <= {Kind.UNIFORM, Kind.TABLES, None}:
        raise NotFlattenable("cos and sin tables must be constant or chosen by the total length")
    if kind(10) is not None:
        raise NotFlattenable("an attention bias is not supported in paged attention")
    if kind(9) not in (Kind.ROWS, None):
        raise NotFlattenable("positions must be one per token")
    if len(node.outputs) > 3 and node.outputs[3]:
        raise NotFlattenable("the attention scores are asked for as an output")


@rule("If")
def choose_tables(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    condition = states[0]
    if condition is None or condition.kind is not Kind.CONTEXT:
        raise NotFlattenable("a branch on a value that is not the total length")
    for branch in node.subgraphs():
        if any(inner.op_type != "Constant" for inner in branch.nodes):
            raise NotFlattenable("a branch that does more than choose constants")
    found.table_choices.append(node)
    return [State(Kind.TABLES)] * len(node.outputs)


def describe(states: dict[str, State]) -> dict[str, Any]:
    """Shapes as text, for printing an analysis."""
    return {name: f"{s.kind.name} [{', '.join(map(str, s.shape or ()))}]" for name, s in states.items()}
