"""Converts an encoder graph to a graph over a flat batch of whole sequences, without padding.

An exported encoder computes padded batches: masks, positions and rotary tables are nodes of its graph, and attention
consists of plain operators. In a flat batch, there is no padding, so everything that the graph computes from lengths
and from the attention mask depends only on the position of a token. Exporters differ in the arithmetic, so this module
does not match it, but evaluates these values for a few lengths:

- A value that is equal for all lengths is a constant.
- A value with one row per token, whose rows do not depend on the length, is a table of positions.
- A value that is added to attention scores hides tokens (all tokens are visible, or those within a window), or is a
  bias that depends only on the distance between two tokens.

Any other value, and any operator that combines tokens in another way, raises `NotFlattenable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..onnx.ir import Graph, Node, OnnxModel, Value, make_node
from ..onnx.node import OURS
from ..onnx.types import DataType, TensorType
from ..optimize.base import made_by
from ..optimize.simplify import remove_dead_code
from .exported_attention import flat_swap
from .flatten import analyse_rows, select_logits_rows
from .positions import add_position_ids, context_inputs, replace_tables
from .rows import BATCH, TOKENS, Kind, NotFlattenable, RowAnalysis, State, rows

Array = NDArray[Any]
Evaluate = Callable[[Sequence[str], int], list[Array]]
"""Function that computes values of the graph for one sequence of a given number of visible tokens."""

# Lengths for which values are compared.
_TRIALS = (5, 8, 13)
# Masks of longer sequences are not evaluated, because their size grows with the square of the length.
LONGEST_MASK = 4096
LONGEST_BIAS = 2048
# Scores below this are hidden: their weights are zero in float32.
_HIDDEN = -1e4


@dataclass(frozen=True)
class EncoderInputs:
    """Names of an encoder's inputs; "" = the graph has no such input."""

    input_ids: str
    attention_mask: str = ""
    token_type_ids: str = ""
    position_ids: str = ""

    @property
    def per_token(self) -> tuple[str, ...]:
        """The inputs with one integer per token."""
        return tuple(name for name in (self.input_ids, self.token_type_ids, self.position_ids) if name)


@dataclass(frozen=True)
class FlatEncoder:
    """A flattened encoder.

    Attributes:
        model: the rewritten graph.
        position_ids: name of the input with the positions.
        rows: the rows of the outputs: "tokens" = one per token; "first" or "last" = one per sequence, computed from its
            first or last token.
        excluded_ids: token ids that a sequence must not contain, because the graph treats them as padding.
        heads: (key/value heads, head size, value head size) of the largest attention layer.
        max_tokens: maximum number of tokens of a sequence.
    """

    model: OnnxModel
    position_ids: str
    rows: str
    excluded_ids: frozenset[int]
    heads: tuple[tuple[int, int, int], ...]
    max_tokens: int


@dataclass
class _Sources:
    """The inputs that values depend on.

    Attributes:
        content: values that depend on token ids, token types or positions.
        context: values that depend only on lengths and on the attention mask.
        excluded_ids: see FlatEncoder.
    """

    content: set[str]
    context: set[str]
    excluded_ids: set[int] = field(default_factory=set)


def flatten_encoder(
    model: OnnxModel, inputs: EncoderInputs, outputs: Sequence[str], evaluate: Evaluate, max_tokens: int
) -> FlatEncoder:
    """Rewrite `model` in place. Its attention must have been fused (`optimize.composites.fuse_attention`).

    Args:
        inputs: names of the graph's inputs.
        outputs: names of the outputs to compute.
        evaluate: evaluates values of the graph as it is now.
        max_tokens: maximum number of tokens of a sequence.

    Raises:
        NotFlattenable: the graph cannot be flattened; the message names the node and the reason.
    """
    graph = model.graph
    graph.outputs = [value for value in graph.outputs if value.name in outputs]
    graph.invalidate()
    remove_dead_code.apply(model)
    graph.topological_sort()
    _read_lengths_from_ids(graph, inputs)
    sources = _sources(graph, inputs)
    if _gather_last_rows(graph, sources, evaluate):
        remove_dead_code.apply(model)
        sources = _sources(graph, inputs)
    attention = [node for node in graph.nodes if node.key == (OURS, "DenseAttention")]
    if not attention:
        raise NotFlattenable("no attention was found")
    masks = {node.input(3) for node in attention if node.input(3)}
    if bad := sorted(masks & sources.content):
        raise NotFlattenable(f"the attention bias {bad[0]!r} depends on the tokens")
    tables = context_inputs(graph, sources.content, sources.context) - masks
    position_ids = inputs.position_ids or add_position_ids(graph, graph.fresh_name("position_ids"), inputs.input_ids)
    biases, max_tokens = _biases(sorted(masks & sources.context), evaluate, max_tokens)
    trials = [(0, length) for length in _TRIALS if length <= max_tokens]
    if tables and len(trials) < 2:
        raise NotFlattenable(f"values cannot be compared for several lengths of at most {max_tokens} tokens")
    replace_tables(
        graph, sorted(tables), lambda names, trial: evaluate(names, trial[1]), trials, max_tokens, position_ids
    )
    heads = []
    for node in attention:
        constant = graph.constant(node.input(3)) if node.input(3) else None
        if constant is not None and np.any(constant):
            raise NotFlattenable(f"the attention bias {node.input(3)!r} is constant")
        heads.append(_replace_attention(graph, node, biases.get(node.input(3), _Visible())))
    model.opset_imports.setdefault(OURS, 1)
    remove_dead_code.apply(model)
    rows_of_sequence = _check_rows(graph, inputs, position_ids)
    used = (*inputs.per_token, position_ids)
    graph.inputs = [value for value in graph.inputs if value.name in used and graph.consumers(value.name)]
    graph.invalidate()
    excluded = frozenset(sources.excluded_ids)
    return FlatEncoder(model, position_ids, rows_of_sequence, excluded, tuple(heads), max_tokens)


# --- values that do not depend on the tokens -------------------------------------------------------------------------


def _sources(graph: Graph, inputs: EncoderInputs) -> _Sources:
    found = _Sources({*inputs.per_token}, {inputs.attention_mask} - {""})
    ids = {inputs.input_ids}
    for node in graph.nodes:
        if node.subgraphs():
            raise NotFlattenable(f"{node.op_type} {node.name!r} has a subgraph")
        names = {name for name in node.inputs if name}
        known = _compared_ids(graph, node, ids)
        if known is not None:  # false for every sequence without these ids
            found.excluded_ids |= known
            found.context.update(node.outputs)
        elif node.op_type in ("Shape", "Size"):
            found.context.update(node.outputs)
        elif names & found.content:
            found.content.update(node.outputs)
            if node.op_type in ("Cast", "Identity", "Unsqueeze", "Reshape") and node.inputs[0] in ids:
                ids.update(node.outputs)
        elif names & found.context:
            found.context.update(node.outputs)
    found.content -= {""}
    found.context -= {""}
    return found


def _read_lengths_from_ids(graph: Graph, inputs: EncoderInputs) -> None:
    """Replace Shape(attention_mask) and the like with Shape(input_ids); all these inputs are [batch, tokens]."""
    for node in graph.nodes:
        if node.op_type == "Shape" and node.inputs[0] in (inputs.attention_mask, *inputs.per_token):
            node.inputs[0] = inputs.input_ids
            graph.update(node)


def _compared_ids(graph: Graph, node: Node, ids: set[str]) -> set[int] | None:
    """Return the constants that a node compares token ids with, or None if the node is not such a comparison."""
    if node.key != ("", "Equal") or not ids & set(node.inputs):
        return None
    constants = [graph.constant(name) for name in node.inputs if name not in ids]
    if len(constants) != 1 or constants[0] is None:
        return None
    return {int(item) for item in np.asarray(constants[0]).reshape(-1)}


def _gather_last_rows(graph: Graph, sources: _Sources, evaluate: Evaluate) -> bool:
    """Replace a GatherND whose index is the last token's, for every length, with a Gather of row -1."""
    found = False
    for node in list(graph.nodes):
        if node.key != ("", "GatherND") or node.inputs[0] not in sources.content:
            continue
        if node.inputs[1] not in sources.context:
            continue
        batch = node.attribute("batch_dims", 0)
        indices = [evaluate([node.inputs[1]], length)[0] for length in _TRIALS]
        last = [[[length - 1]] if batch else [[0, length - 1]] for length in _TRIALS]
        if all(np.array_equal(index, expected) for index, expected in zip(indices, last, strict=True)):
            index = graph.add_constant(f"{node.output(0)}/last", np.array(-1, np.int64))
            name = node.output(0)
            graph.replace_node(node, make_node("Gather", [node.inputs[0], index], [name], name=node.name, axis=1))
            found = True
    return found


# --- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Visible:
    """The tokens that a row sees: `causal` and `window` as in ir.Attention, and a bias [heads, distances] or None."""

    causal: bool = False
    window: int = -1
    bias: Array | None = None


def _biases(masks: list[str], evaluate: Evaluate, max_tokens: int) -> tuple[Mapping[str, _Visible], int]:
    """Return what each mask means, and the number of tokens up to which this is known."""
    found: dict[str, _Visible] = {}
    if not masks:
        return found, max_tokens
    lengths = [length for length in _TRIALS if length <= max_tokens]
    trials = [evaluate(masks, length) for length in lengths]
    has_bias = False
    for index, name in enumerate(masks):
        for arrays, length in zip(trials, lengths, strict=True):
            has_bias |= _is_bias(_checked(name, arrays[index], length))
    longest = min(max_tokens, LONGEST_BIAS if has_bias else LONGEST_MASK)
    if has_bias:
        max_tokens = longest
    for name, array in zip(masks, evaluate(masks, longest), strict=True):
        checked = _checked(name, array, longest)
        found[name] = _bias(name, checked) if _is_bias(checked) else _window(name, checked)
    return found, max_tokens


def _checked(name: str, array: Array, length: int) -> Array:
    """Return a mask as [heads or 1, length or 1, length]."""
    if array.ndim > 4 or array.ndim < 1 or array.shape[-1] != length:
        raise NotFlattenable(f"the attention bias {name!r} has the shape {list(array.shape)} for {length} tokens")
    array = array.reshape(*([1] * (4 - array.ndim)), *array.shape)
    if array.shape[0] != 1 or array.shape[2] not in (1, length):
        raise NotFlattenable(f"the attention bias {name!r} has the shape {list(array.shape)} for {length} tokens")
    return np.asarray(array[0])


def _is_bias(mask: Array) -> bool:
    visible = mask > _HIDDEN
    return bool(np.any(mask[visible]))


def _window(name: str, mask: Array) -> _Visible:
    length = mask.shape[-1]
    seen = np.broadcast_to(mask, (len(mask), length, length)) > _HIDDEN
    if len(mask) > 1 and not np.array_equal(seen, np.broadcast_to(seen[:1], seen.shape)):
        raise NotFlattenable(f"the attention bias {name!r} hides other tokens for each head")
    if seen.all():
        return _Visible()
    distance = np.subtract.outer(np.arange(length), np.arange(length))
    window = int(seen[0, -1].sum())  # the last token sees no later token
    for causal in (False, True):
        if np.array_equal(seen[0], (np.abs(distance) < window) & (distance >= (0 if causal else -length))):
            return _Visible(causal, window if window < length else -1)
    raise NotFlattenable(f"the attention bias {name!r} is neither full nor causal nor a window")


def _bias(name: str, mask: Array) -> _Visible:
    """Return the bias by distance, [heads, 2 * length - 1], if each number depends only on the distance."""
    length = mask.shape[-1]
    if np.any(mask <= _HIDDEN):
        raise NotFlattenable(f"the attention bias {name!r} hides tokens and has other values")
    full = np.broadcast_to(mask, (len(mask), length, length))
    bias = np.concatenate([full[:, ::-1, 0], full[:, 0, 1:]], axis=1)  # distances 1 - length to length - 1
    rows = np.lib.stride_tricks.sliding_window_view(bias, length, axis=1)[:, ::-1]
    if not np.array_equal(rows, full):
        raise NotFlattenable(f"the attention bias {name!r} depends on more than the distance of two tokens")
    return _Visible(bias=np.ascontiguousarray(bias, np.float32))


def _replace_attention(graph: Graph, node: Node, visible: _Visible) -> tuple[int, int, int]:
    """Replace an attention node; return its key/value heads, head size and value head size."""
    query, values = (_shape(graph, node.inputs[index]) for index in (0, 2))
    known = [*query[1::2], *values[1::2]]
    if len(known) != 4 or not all(isinstance(size, int) for size in known):
        raise NotFlattenable(f"the shapes of attention {node.name!r} are unknown")
    heads, head_size, kv_heads, v_head_size = (int(size) for size in known)
    swapped = _swapped_keys(graph, node.inputs[1])
    key, value = swapped or node.inputs[1], node.inputs[2]
    repeated = [_repeated_heads(graph, name) for name in (key, value)]
    if swapped and repeated[0] is not None and repeated[1] is not None and repeated[0][1] == repeated[1][1]:
        (key, kv_heads), (value, _) = repeated[0], repeated[1]
    name = node.output(0)
    inputs = [
        _joined(graph, node, node.inputs[0], [0, 2, 1, 3], "query"),
        _joined(graph, node, key, [0, 2, 1, 3] if swapped else [0, 3, 1, 2], "key"),
        _joined(graph, node, value, [0, 2, 1, 3], "value"),
    ]
    bias = "" if visible.bias is None else graph.add_constant(f"{name}/bias", _of_heads(visible.bias, heads))
    mixed, split = graph.fresh_name(f"{name}/rows"), graph.fresh_name(f"{name}/heads")
    attention = make_node(
        "PagedAttention", [*inputs, *[""] * 7, bias], [mixed], domain=OURS, name=node.name, num_heads=heads,
        kv_num_heads=kv_heads, head_size=head_size, v_head_size=v_head_size, layer=0, causal=int(visible.causal),
        window=visible.window, scale=float(node.attribute("scale", 1.0)),
    )  # fmt: skip
    shape = graph.add_constant(f"{name}/shape", np.array([0, 0, heads, v_head_size], np.int64))
    nodes = [
        attention,
        make_node("Reshape", [mixed, shape], [split], name=split),
        make_node("Transpose", [split], [name], name=name, perm=[0, 2, 1, 3]),
    ]
    graph.values[mixed] = Value(mixed, TensorType(DataType.FLOAT, (query[0], query[2], heads * v_head_size)))
    graph.values[split] = Value(split, TensorType(DataType.FLOAT, (query[0], query[2], heads, v_head_size)))
    graph.replace_node(node, *nodes)
    return kv_heads, head_size, v_head_size


def _shape(graph: Graph, name: str) -> tuple[Any, ...]:
    known = graph.type_of(name)
    return tuple(known.shape or ()) if isinstance(known, TensorType) else ()


def _swapped_keys(graph: Graph, name: str) -> str | None:
    """Return the name of keys [B, heads, T, size] if a value is these keys as [B, heads, size, T], else None."""
    swap = made_by(graph, name, "Transpose")
    if swap is not None and swap.attribute("perm", None) == [0, 1, 3, 2]:
        return swap.inputs[0]
    return flat_swap(graph, name)


def _repeated_heads(graph: Graph, name: str) -> tuple[str, int] | None:
    """Match heads [B, heads, T, size] that are repeated, each several times in a row, for grouped queries.

    Exporters write a Gather along the heads, or Unsqueeze, Expand and Reshape.

    Returns:
        The name of the heads before they are repeated and their number, or None.
    """
    node, shape = graph.producer(name), _shape(graph, name)
    if node is None or node.domain or len(shape) != 4 or not isinstance(shape[1], int):
        return None
    if node.op_type == "Gather":
        source, indices = node.inputs[0], graph.constant(node.inputs[1])
        is_along_heads = indices is not None and node.attribute("axis", 0) in (1, -3)
    else:
        expanded = made_by(graph, node.inputs[0], "Expand") if node.op_type == "Reshape" else None
        apart = None if expanded is None else made_by(graph, expanded.inputs[0], "Unsqueeze")
        axes = None if apart is None else graph.constant(apart.input(1))
        if apart is None or axes is None or axes.tolist() not in ([2], [-3]):
            return None
        source, indices, is_along_heads = apart.inputs[0], None, True
    before = _shape(graph, source)
    if not is_along_heads or len(before) != 4 or not isinstance(before[1], int) or shape[1] % before[1]:
        return None
    if before[::2] != shape[::2] or before[3] != shape[3] or None in before:
        return None
    if indices is not None and not np.array_equal(indices, np.arange(shape[1]) // (shape[1] // before[1])):
        return None
    return source, before[1]


def _of_heads(bias: Array, heads: int) -> Array:
    return bias if len(bias) == heads else np.repeat(bias, heads, axis=0)


def _joined(graph: Graph, before: Node, name: str, order: list[int], role: str) -> str:
    """Insert nodes that convert heads to rows [B, T, heads * size]; return the name of the rows."""
    moved, joined = (graph.fresh_name(f"{before.output(0)}/{role}/{part}") for part in ("tokens", "rows"))
    shape = graph.add_constant(f"{joined}/shape", np.array([0, 0, -1], np.int64))
    sizes = getattr(graph.type_of(name), "shape", None) or (None,) * 4
    graph.values[moved] = Value(moved, TensorType(DataType.FLOAT, tuple(sizes[axis] for axis in order)))
    graph.insert_before(
        before,
        make_node("Transpose", [name], [moved], name=moved, perm=order),
        make_node("Reshape", [moved, shape], [joined], name=joined),
    )
    return joined


# --- rows ------------------------------------------------------------------------------------------------------------


def _check_rows(graph: Graph, inputs: EncoderInputs, position_ids: str) -> str:
    """Prove that the graph treats tokens independently; return the rows of its outputs (see FlatEncoder)."""
    states = {name: rows((BATCH, TOKENS)) for name in (*inputs.per_token, position_ids)}
    if inputs.attention_mask:
        states[inputs.attention_mask] = State(Kind.CONTEXT, (BATCH, TOKENS))
    for value in graph.inputs:
        if value.name not in states and value.name not in graph.initializers and graph.consumers(value.name):
            raise NotFlattenable(f"the meaning of the graph's input {value.name!r} is unknown")
    graph.topological_sort()
    analysis = analyse_rows(graph, states)
    select_logits_rows(analysis.first_row_gathers + analysis.last_row_gathers)
    graph.invalidate()
    found = {
        ("first" if analysis.first_row_gathers else "last") if _is_of_sequence(analysis, value.name) else "tokens"
        for value in graph.outputs
    }
    if len(found) != 1 or (analysis.first_row_gathers and analysis.last_row_gathers):
        raise NotFlattenable("the outputs have rows of different tokens")
    return found.pop()


def _is_of_sequence(analysis: RowAnalysis, name: str) -> bool:
    """Return True if a value has one row per sequence instead of one per token."""
    return analysis.states[name].known_shape[:2] != (BATCH, TOKENS)
