"""Converts a decoder graph with past/present tensors to a graph over a flat batch of tokens and a paged cache.

The row analysis proves that the conversion is possible. Four small rewrites follow: attention reads the step's block
tables, RoPE tables selected by the total length become two tables per sequence, the logits rows are gathered before the
head, and the mask subgraph, which is no longer used, is removed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..onnx.decoder_names import GraphNames
from ..onnx.ir import Attribute, DataType, Graph, Node, OnnxModel, Value
from ..onnx.node import OURS
from ..ops.weights import PRODUCTS
from ..optimize.simplify import remove_dead_code
from .latent import has_keys_as_values
from .rows import BATCH, TOKENS, Kind, NotFlattenable, RowAnalysis, RowDim, State, rows, uniform
from .rules import apply_rule

_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)


@dataclass(frozen=True)
class AttentionLayer:
    """The cache entries of one attention layer.

    Attributes:
        window: the number of visible tokens; None = all.
        chunk: the number of tokens in a chunk, if a row sees only the tokens of its chunk; None = no chunks.
        is_latent: True if a key is also the value of its token, except for numbers that are not used.
    """

    layer: int
    kv_heads: int
    head_size: int
    v_head_size: int
    window: int | None
    is_latent: bool = False
    chunk: int | None = None


@dataclass(frozen=True)
class RecurrentLayer:
    """The state of one recurrent layer; size: its number of float32 elements."""

    layer: int
    size: int


CacheEntry = AttentionLayer | RecurrentLayer


def attention_layers(layers: Sequence[CacheEntry]) -> list[AttentionLayer]:
    """Return the cache entries of attention layers."""
    return [layer for layer in layers if isinstance(layer, AttentionLayer)]


@dataclass(frozen=True)
class FlatDecoder:
    """A flattened decoder.

    Attributes:
        model: the rewritten model.
        layers: the cache entries of each attention layer and each recurrent layer. A layer of the model can have two
            entries: linear attention after a convolution.
        num_layers: number of layers of the model that have entries.
        rope_threshold: the length above which the long RoPE tables apply; None = there is only one table.
        output_names: the names of the graph's outputs: first the logits, then the other outputs with one row per token.
        has_token_rows: True if the graph has one more output, with a row for every token of a step.
    """

    model: OnnxModel
    layers: tuple[CacheEntry, ...]
    num_layers: int
    rope_threshold: int | None
    output_names: tuple[str, ...]
    has_token_rows: bool = False


def flatten_decoder(model: OnnxModel, names: GraphNames, token_rows: str = "") -> FlatDecoder:
    """Rewrite `model` in place.

    Args:
        model: the model.
        names: the names of the graph's inputs and outputs.
        token_rows: an output that is also returned for all tokens of a step, and not only for the logits rows.

    Raises:
        NotFlattenable: the model cannot be flattened; names the node and the reason. The model is unchanged.
    """
    graph = model.graph
    graph.topological_sort()
    analysis = analyse_rows(graph, _input_states(graph, names))
    if not (analysis.attention or analysis.recurrent) and any(
        state.kind is Kind.CACHE for state in analysis.states.values()
    ):
        raise NotFlattenable("no attention operator with a cache was found")
    if analysis.first_row_gathers:
        raise NotFlattenable("the first token of each sequence is selected")
    thresholds = {_threshold(graph, node, names) for node in analysis.table_choices}
    if len(thresholds) > 1:
        raise NotFlattenable("RoPE tables change at several lengths")
    owners = _owners(analysis.attention)
    nodes = [*owners, *analysis.recurrent]
    entries = [_layer_of(graph, node, others, names, analysis) for node, others in owners.items()]
    entries += [_recurrent_layer(graph, node, names, analysis) for node in analysis.recurrent]
    layers = _numbered(entries)

    head = None if analysis.last_row_gathers else _head_product(graph, names.logits, analysis)

    model.opset_imports.setdefault(OURS, 1)
    _settle_reshapes(graph, analysis)
    tables = {name: pair for node in analysis.table_choices for name, pair in _add_tables(graph, node).items()}
    for node, layer in zip(nodes, layers, strict=True):
        if isinstance(layer, AttentionLayer):
            for reader in owners[node]:
                _rewrite_attention(reader, layer, tables)
                reader.inputs = [reader.inputs[0], "", "", *reader.inputs[3:], "", node.outputs[0]]
            _rewrite_attention(node, layer, tables)
        else:
            _rewrite_recurrent(node, layer)
    _gather_logits_rows(graph, analysis, head)
    others = [value for value in graph.outputs if value.name != names.logits and _is_of_rows(value.name, analysis)]
    is_whole = head is None and not analysis.last_row_gathers
    (logits,) = (value for value in graph.outputs if value.name == names.logits)
    logits = _not_narrowed(graph, logits)
    graph.outputs = [_logits_rows(graph, logits) if is_whole else logits]
    graph.outputs += [_logits_rows(graph, value) for value in others]
    graph.outputs += [value for value in others if value.name == token_rows]
    graph.invalidate()
    remove_dead_code.apply(model)
    graph.inputs = [value for value in graph.inputs if graph.consumers(value.name)]
    output_names = (names.logits, *(value.name for value in others))
    ordered = tuple(sorted(layers, key=lambda layer: layer.layer))
    num_layers = len({layer.layer for _, layer in entries})
    has_token_rows = bool(token_rows) and token_rows in output_names
    return FlatDecoder(model, ordered, num_layers, next(iter(thresholds), None), output_names, has_token_rows)


def _input_states(graph: Graph, names: GraphNames) -> dict[str, State]:
    past = [_pattern(name) for name in names.caches]
    states: dict[str, State] = {}
    for value in graph.inputs:
        if value.name in graph.initializers:
            continue
        if value.name in (names.input_ids, names.position_ids):
            states[value.name] = rows((BATCH, TOKENS))
        elif value.name == names.hidden_states:
            states[value.name] = rows((BATCH, TOKENS, RowDim(hidden_width(value))))
        elif value.name == names.attention_mask:
            states[value.name] = State(Kind.CONTEXT)
        elif any(pattern.fullmatch(value.name) for pattern in past):
            states[value.name] = State(Kind.CACHE)
        else:
            raise NotFlattenable(f"the meaning of the graph's input {value.name!r} is unknown")
    return states


def hidden_width(value: Value) -> int:
    """Return the number of columns of an input with hidden states [batch, tokens, columns]."""
    shape: tuple[object, ...] = getattr(value.type, "shape", None) or ()
    if len(shape) != 3 or not isinstance(shape[2], int) or shape[2] < 1:
        shown = ", ".join(map(str, shape))
        raise NotFlattenable(f"the input {value.name!r} has the shape [{shown}] instead of [batch, tokens, columns]")
    return shape[2]


def _pattern(template: str) -> re.Pattern[str]:
    before, after = template.split("%d")
    return re.compile(re.escape(before) + r"(\d{1,18})" + re.escape(after))


def _settle_reshapes(graph: Graph, analysis: RowAnalysis) -> None:
    """Replace the computed shapes of reshapes by constants, which are known because a flat batch is [1, T]."""
    for node in graph.nodes:
        state = analysis.states.get(node.output(0))
        if node.key != ("", "Reshape") or state is None or state.kind is not Kind.ROWS or state.shape is None:
            continue
        if graph.constant(node.inputs[1]) is not None or any(dim.tokens and dim.factor != 1 for dim in state.shape):
            continue
        sizes = [-1 if dim.tokens else dim.factor for dim in state.shape]
        node.inputs[1] = graph.add_constant(f"{node.output(0)}/shape", np.array(sizes, np.int64))
        node.attributes.pop("allowzero", None)
        graph.update(node)


# --- long RoPE ---------------------------------------------------------------------------------------------------


def _threshold(graph: Graph, node: Node, names: GraphNames) -> int:
    """Return the length above which an If selects the long tables."""
    condition = graph.producer(node.inputs[0])
    if condition is not None and condition.op_type == "Greater":
        threshold = graph.constant(condition.inputs[1])
        if threshold is not None and threshold.size == 1 and _is_total_length(graph, condition.inputs[0], names):
            return int(threshold.reshape(-1)[0])
    raise NotFlattenable(f"the condition of If {node.name!r} is not 'total length > constant'")


def _is_total_length(graph: Graph, name: str, names: GraphNames) -> bool:
    """Return True if a value is Shape(attention_mask)[1]."""
    node = graph.producer(name)
    while node is not None and node.op_type in ("Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape"):
        node = graph.producer(node.inputs[0])
    if node is None or node.op_type != "Gather":
        return False
    index, shape = graph.constant(node.inputs[1]), graph.producer(node.inputs[0])
    return (
        index is not None
        and index.size == 1
        and int(index.reshape(-1)[0]) in (1, -1)
        and shape is not None
        and shape.op_type == "Shape"
        and shape.inputs[0] == names.attention_mask
    )


def _add_tables(graph: Graph, node: Node) -> dict[str, tuple[str, str]]:
    """Add both branches' constants as initializers; return the names (short, long) for each output of the If."""
    long_names = _branch_constants(graph, node.attribute("then_branch"))
    short_names = _branch_constants(graph, node.attribute("else_branch"))
    return dict(zip(node.outputs, zip(short_names, long_names, strict=True), strict=True))


def _branch_constants(graph: Graph, branch: Graph) -> list[str]:
    names = []
    for output in branch.outputs:
        producer = branch.producer(output.name)
        tensor = producer.attribute("value") if producer is not None else branch.initializers[output.name]
        name = graph.fresh_name(output.name)
        graph.add_initializer(tensor.renamed(name))
        names.append(name)
    return names


# --- attention ---------------------------------------------------------------------------------------------------


# A cache entry that has the number of its layer in the model, and its place among the layer's entries.
_Entry = tuple[int, CacheEntry]


_PAST = slice(3, 5)


def _owners(attention: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the nodes that store keys and values, each with the later nodes that only read them.

    A node reads the keys and values of another node if its inputs are the same past tensors, keys and values (Gemma 3n
    and Gemma 4). Both nodes would store the same numbers.
    """
    owners: dict[tuple[str, ...], Node] = {}
    readers: dict[Node, list[Node]] = {}
    for node in attention:
        owner = owners.setdefault(tuple(node.inputs[_PAST]), node)
        if owner is node:
            readers[node] = []
        elif _stored_alike(owner) == _stored_alike(node) and node.input(1):
            readers[owner].append(node)
        else:
            raise NotFlattenable(f"attention {node.name!r} and {owner.name!r} share a past tensor, but not its content")
    return readers


def _stored_alike(node: Node) -> tuple[object, ...]:
    """Return all inputs and attributes that affect the keys and values that a node stores, and those that it sees."""
    names = ("kv_num_heads", "do_rotary", "rotary_interleaved", "local_window_size", "chunk", "qk_norm_epsilon")
    inputs = [node.input(index) for index in (1, 2, 7, 8, 15)]
    return *inputs, *(node.attribute(name, None) for name in names)


def _layer_of(graph: Graph, node: Node, readers: Sequence[Node], names: GraphNames, analysis: RowAnalysis) -> _Entry:
    match = _pattern(names.past_key).fullmatch(node.input(3))
    if match is None:
        raise NotFlattenable(f"the past key of attention {node.name!r} has an unknown name")
    if node.attribute("causal", 1) == 0:
        raise NotFlattenable(f"attention {node.name!r} is not causal")
    if any(node.attribute(name, "NONE") != "NONE" for name in ("k_quant_type", "v_quant_type")):
        raise NotFlattenable(f"attention {node.name!r} has a quantised cache")
    if node.input(9) not in ("", names.position_ids):
        raise NotFlattenable(f"attention {node.name!r} computes its own positions")
    heads, kv_heads = int(node.attribute("num_heads", 0)), int(node.attribute("kv_num_heads", 0))
    if heads < 1 or kv_heads < 1:
        raise NotFlattenable(f"attention {node.name!r} has num_heads {heads} and kv_num_heads {kv_heads}")
    width = analysis.states[node.inputs[0]].known_shape[2].factor
    packed = not node.inputs[1]
    head_size = width // (heads + 2 * kv_heads) if packed else width // heads
    v_width = kv_heads * head_size if packed else analysis.states[node.inputs[2]].known_shape[2].factor
    window = int(node.attribute("local_window_size", -1))
    limit = window if window > 0 else None
    is_latent = all(has_keys_as_values(graph, one) for one in (node, *readers))
    chunk = int(node.attribute("chunk", 0)) or None
    return 0, AttentionLayer(int(match[1]), kv_heads, head_size, v_width // kv_heads, limit, is_latent, chunk)


def _recurrent_layer(graph: Graph, node: Node, names: GraphNames, analysis: RowAnalysis) -> _Entry:
    place, (template, size) = (
        (1, (names.past_conv, _conv_size(graph, node)))
        if node.op_type == "CausalConv"
        else (2, (names.past_recurrent, _attention_size(node, analysis)))
    )
    match = _pattern(template).fullmatch(node.input(3))
    if match is None:
        raise NotFlattenable(f"the state of {node.op_type} {node.name!r} has the unknown name {node.input(3)!r}")
    declared = getattr(graph.type_of(node.input(3)), "shape", None) or ()
    if all(isinstance(dim, int) for dim in declared[1:]) and declared[1:] and math.prod(declared[1:]) != size:
        raise NotFlattenable(
            f"the state {node.input(3)!r} has {math.prod(declared[1:])} numbers for each sequence, but {node.op_type} "
            f"{node.name!r} computes states of {size} numbers"
        )
    return place, RecurrentLayer(int(match[1]), size)


def _conv_size(graph: Graph, node: Node) -> int:
    weight = graph.constant_tensor(node.input(1))
    if weight is None or len(weight.shape) != 3 or weight.shape[1] != 1 or weight.shape[2] < 2:
        raise NotFlattenable(f"the weight of {node.op_type} {node.name!r} is not a constant [channels, 1, at least 2]")
    return int(weight.shape[0] * (weight.shape[2] - 1) * int(node.attribute("dilation", 1)))


def _attention_size(node: Node, analysis: RowAnalysis) -> int:
    """Return the size of the state of linear attention, after a check of the numbers of heads."""
    heads, value_heads = int(node.attribute("q_num_heads", 0)), int(node.attribute("kv_num_heads", 0))
    query, key, value = (analysis.states[node.input(index)].known_shape[2].factor for index in range(3))
    size, v_size = query // heads, value // value_heads
    key_heads = key // size if size else 0
    fits = (size * heads, size * key_heads, v_size * value_heads) == (query, key, value)
    most = max(heads, value_heads)
    if (
        not fits
        or not size
        or not v_size
        or not key_heads
        or most % heads
        or most % value_heads
        or value_heads % key_heads
    ):
        raise NotFlattenable(
            f"{node.op_type} {node.name!r} has {heads} query heads, {value_heads} value heads, and queries, keys and "
            f"values of {query}, {key} and {value} numbers"
        )
    return value_heads * size * v_size


def _numbered(entries: list[_Entry]) -> list[CacheEntry]:
    """Renumber the layers from 0, in the order of the numbers in the names; those numbers may have gaps."""
    keys = [(layer.layer, place) for place, layer in entries]
    order = {key: index for index, key in enumerate(sorted(set(keys)))}
    if len(order) != len(entries):
        raise NotFlattenable("two operators share one past tensor")
    return [replace(layer, layer=order[key]) for key, (_, layer) in zip(keys, entries, strict=True)]


def _rewrite_recurrent(node: Node, layer: RecurrentLayer) -> None:
    """Remove the state from a node's inputs and outputs, and give it the number of its cache layer."""
    node.inputs[3], node.outputs = "", node.outputs[:1]
    node.set_attribute("layer", layer.layer)


_KEPT_ATTRIBUTES = (
    "num_heads kv_num_heads scale softcap do_rotary rotary_interleaved smooth_softmax qk_norm_epsilon"
).split()


def _rewrite_attention(node: Node, layer: AttentionLayer, tables: dict[str, tuple[str, str]]) -> None:
    """Replace GroupQueryAttention with genai.PagedAttention.

    Inputs: query, key, value, cos, sin, long cos, long sin, head sink, q norm weight, k norm weight.
    """
    cos, long_cos = tables.get(node.input(7), (node.input(7), ""))
    sin, long_sin = tables.get(node.input(8), (node.input(8), ""))
    attributes = {name: node.attributes[name] for name in _KEPT_ATTRIBUTES if name in node.attributes}
    node.domain, node.op_type = OURS, "PagedAttention"
    first_inputs, more = ([node.input(index) for index in indices] for indices in ((0, 1, 2), (11, 14, 15)))
    node.inputs = [*first_inputs, cos, sin, long_cos, long_sin, *more]
    node.outputs = node.outputs[:1]
    node.attributes = attributes
    node.set_attribute("layer", layer.layer)
    node.set_attribute("window", layer.window or -1)
    node.set_attribute("chunk", layer.chunk or 0)
    node.set_attribute("head_size", layer.head_size)
    node.set_attribute("v_head_size", layer.v_head_size)


# --- logits rows -------------------------------------------------------------------------------------------------


def _gather_logits_rows(graph: Graph, analysis: RowAnalysis, head: Node | None) -> None:
    """Compute the head only for `logits_indices`: from the graph's last-row Gather onwards, or in its last matmul."""
    select_logits_rows(analysis.last_row_gathers)
    if head is None:
        return
    source = head.inputs[0]
    gathered = graph.fresh_name(f"{source}/logits_rows")
    graph.insert_before(head, Node("LogitsRows", [source], [gathered], OURS, gathered))
    head.inputs[0] = gathered
    graph.update(head)


def select_logits_rows(gathers: Sequence[Node]) -> None:
    """Replace the selection of one row per sequence with the selection of the step's logits rows."""
    for node in gathers:
        node.domain, node.op_type, node.inputs = OURS, "LogitsRows", node.inputs[:1]
        node.attributes = {"squeeze": Attribute.of("squeeze", 1)}


def _not_narrowed(graph: Graph, logits: Value) -> Value:
    """Return the logits before a conversion to 16 bits, because samplers read float32."""
    node = graph.producer(logits.name)
    if node is not None and node.key == ("", "Cast") and node.attribute("to") in _NARROW:
        return Value(node.input(0))
    return logits


def _is_of_rows(name: str, analysis: RowAnalysis) -> bool:
    state = analysis.states.get(name)
    return state is not None and state.kind is Kind.ROWS and (state.shape or ())[:2] == (BATCH, TOKENS)


def _logits_rows(graph: Graph, output: Value) -> Value:
    """Restrict an output other than the logits to the logits rows."""
    gathered = graph.fresh_name(f"{output.name}/logits_rows")
    graph.values.setdefault(output.name, output)  # the type is needed if the value is computed on the host
    graph.append(Node("LogitsRows", [output.name], [gathered], OURS, gathered))
    return Value(gathered)


def _head_product(graph: Graph, logits: str, analysis: RowAnalysis) -> Node | None:
    """Return the last matmul before the logits, if only operators with a single per-token input lie between."""
    name = logits
    while (node := graph.producer(name)) is not None:
        per_token = [i for i in node.inputs if i and analysis.states[i].kind is Kind.ROWS]
        if len(per_token) != 1:
            break
        if node.op_type in PRODUCTS and per_token[0] == node.inputs[0]:
            return node
        name = per_token[0]
    return None


def analyse_rows(graph: Graph, inputs: dict[str, State]) -> RowAnalysis:
    """Analyse a topologically sorted graph, given its inputs' states. NotFlattenable names the node and the reason."""
    states = {name: uniform(tensor.shape) for name, tensor in graph.initializers.items()} | inputs
    analysis = RowAnalysis(states)
    for node in graph.nodes:
        arguments = [states.get(name) if name else None for name in node.inputs]
        try:
            results = apply_rule(graph, node, arguments, analysis)
        except NotFlattenable as error:
            raise NotFlattenable(f"{node.op_type} {node.name!r}: {error}") from None
        states.update((name, state) for name, state in zip(node.outputs, results, strict=False) if name)
    for value in graph.outputs:
        state = states.get(value.name)
        if state is None or state.kind not in (Kind.ROWS, Kind.CACHE):
            kind = state.kind.value if state else "never computed"
            raise NotFlattenable(f"output {value.name!r} is {kind}, not one row per token")
    return analysis
