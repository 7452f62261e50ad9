"""Turns a decoder graph with past/present tensors into one that works on a flat batch of tokens and a paged cache.

The row analysis proves that it may; then four small rewrites follow: attention reads the step's block tables, RoPE
tables chosen by total length become two tables per sequence, the wanted rows are gathered before the head, and the
mask subgraph, now unused, is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .ir import Attribute, Graph, Model, Node
from .names import GraphNames
from .rewrites.dead_code import RemoveDeadCode
from .rows import BATCH, TOKENS, Kind, NotFlattenable, RowAnalysis, State, analyse_rows, rows

DOMAIN = "genai"


@dataclass(frozen=True)
class AttentionLayer:
    """What one attention layer keeps in the cache; window = visible tokens (None = all)."""

    layer: int
    kv_heads: int
    head_size: int
    v_head_size: int
    window: int | None


@dataclass(frozen=True)
class FlatDecoder:
    """A flattened decoder: the rewritten model, its cache layers, and the length above which long RoPE tables apply."""

    model: Model
    layers: tuple[AttentionLayer, ...]
    rope_threshold: int | None


def flatten_decoder(model: Model, names: GraphNames) -> FlatDecoder:
    """Rewrite `model` in place.

    Raises:
        NotFlattenable: with the node and the reason; the model is then unchanged.
    """
    graph = model.graph
    graph.topological_sort()
    analysis = analyse_rows(graph, _input_states(graph, names))
    if not analysis.attention:
        raise NotFlattenable("no attention operator that keeps a cache was found")
    choices = [_read_choice(graph, node, names) for node in analysis.table_choices]
    if len({choice.threshold for choice in choices}) > 1:
        raise NotFlattenable("RoPE tables change at several lengths")
    layers = [_layer_of(node, names, analysis) for node in analysis.attention]
    if len({layer.layer for layer in layers}) != len(layers):
        raise NotFlattenable("two attention operators share one past tensor")

    head = None if analysis.last_row_gathers else _head_product(graph, names.logits, analysis)

    model.opset_imports.setdefault(DOMAIN, 1)
    tables = {name: pair for choice in choices for name, pair in _add_tables(graph, choice).items()}
    for node, layer in zip(analysis.attention, layers, strict=True):
        _rewrite_attention(node, layer, tables)
    _gather_wanted_rows(graph, analysis, head)
    graph.outputs = [value for value in graph.outputs if value.name == names.logits]
    graph.invalidate()
    RemoveDeadCode().apply(model)
    graph.inputs = [value for value in graph.inputs if graph.consumers(value.name)]
    threshold = choices[0].threshold if choices else None
    return FlatDecoder(model, tuple(sorted(layers, key=lambda layer: layer.layer)), threshold)


def _input_states(graph: Graph, names: GraphNames) -> dict[str, State]:
    past = [_pattern(name) for name in (names.past_key, names.past_value)]
    states: dict[str, State] = {}
    for value in graph.inputs:
        if value.name in graph.initializers:
            continue
        if value.name in (names.input_ids, names.position_ids):
            states[value.name] = rows((BATCH, TOKENS))
        elif value.name == names.attention_mask:
            states[value.name] = State(Kind.CONTEXT)
        elif any(pattern.fullmatch(value.name) for pattern in past):
            states[value.name] = State(Kind.CACHE)
        else:
            raise NotFlattenable(f"the graph wants input {value.name!r}, whose meaning is not known")
    return states


def _pattern(template: str) -> re.Pattern[str]:
    before, after = template.split("%d")
    return re.compile(re.escape(before) + r"(\d+)" + re.escape(after))


# --- long RoPE ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TableChoice:
    """An If that picks tables by total length: the long ones above `threshold`."""

    node: Node
    threshold: int


def _read_choice(graph: Graph, node: Node, names: GraphNames) -> _TableChoice:
    condition = graph.producer(node.inputs[0])
    if condition is None or condition.op_type != "Greater":
        raise NotFlattenable(f"If {node.name!r}: its condition is not 'total length > constant'")
    threshold = graph.constant(condition.inputs[1])
    if threshold is None or threshold.size != 1 or not _is_total_length(graph, condition.inputs[0], names):
        raise NotFlattenable(f"If {node.name!r}: its condition is not 'total length > constant'")
    return _TableChoice(node, int(threshold.reshape(-1)[0]))


def _is_total_length(graph: Graph, name: str, names: GraphNames) -> bool:
    """Whether a value is Shape(attention_mask)[1]."""
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


def _add_tables(graph: Graph, choice: _TableChoice) -> dict[str, tuple[str, str]]:
    """Make both branches' constants initialisers; returns (short, long) names per output of the If."""
    long_names = _branch_constants(graph, choice.node.attribute("then_branch"))
    short_names = _branch_constants(graph, choice.node.attribute("else_branch"))
    return dict(zip(choice.node.outputs, zip(short_names, long_names, strict=True), strict=True))


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


def _layer_of(node: Node, names: GraphNames, analysis: RowAnalysis) -> AttentionLayer:
    match = _pattern(names.past_key).fullmatch(node.inputs[3]) if len(node.inputs) > 3 else None
    if match is None:
        raise NotFlattenable(f"attention {node.name!r} has no past key of a known name")
    if node.attribute("causal", 1) == 0:
        raise NotFlattenable(f"attention {node.name!r} is not causal")
    if any(node.attribute(name, "NONE") != "NONE" for name in ("k_quant_type", "v_quant_type")):
        raise NotFlattenable(f"attention {node.name!r} keeps a quantised cache")
    if len(node.inputs) > 9 and node.inputs[9] not in ("", names.position_ids):
        raise NotFlattenable(f"attention {node.name!r} computes its own positions")
    heads, kv_heads = int(node.attribute("num_heads", 0)), int(node.attribute("kv_num_heads", 0))
    if heads < 1 or kv_heads < 1:
        raise NotFlattenable(f"attention {node.name!r} has num_heads {heads} and kv_num_heads {kv_heads}")
    width = analysis.states[node.inputs[0]].known_shape[2].factor
    packed = not node.inputs[1]
    head_size = width // (heads + 2 * kv_heads) if packed else width // heads
    v_width = kv_heads * head_size if packed else analysis.states[node.inputs[2]].known_shape[2].factor
    window = int(node.attribute("local_window_size", -1))
    return AttentionLayer(int(match[1]), kv_heads, head_size, v_width // kv_heads, window if window > 0 else None)


_KEPT_ATTRIBUTES = (
    "num_heads kv_num_heads scale softcap do_rotary rotary_interleaved smooth_softmax qk_norm_epsilon"
).split()


def _rewrite_attention(node: Node, layer: AttentionLayer, tables: dict[str, tuple[str, str]]) -> None:
    """GroupQueryAttention becomes genai.PagedAttention.

    Inputs: query, key, value, cos, sin, long cos, long sin, head sink, q norm weight, k norm weight.
    """

    def given(index: int) -> str:
        return node.inputs[index] if index < len(node.inputs) else ""

    cos, long_cos = tables.get(given(7), (given(7), ""))
    sin, long_sin = tables.get(given(8), (given(8), ""))
    attributes = {name: node.attributes[name] for name in _KEPT_ATTRIBUTES if name in node.attributes}
    attributes["layer"] = Attribute.of("layer", layer.layer)
    attributes["window"] = Attribute.of("window", layer.window or -1)
    attributes["v_head_size"] = Attribute.of("v_head_size", layer.v_head_size)
    node.domain, node.op_type = DOMAIN, "PagedAttention"
    node.inputs = [*(given(i) for i in range(3)), cos, sin, long_cos, long_sin, given(11), given(14), given(15)]
    node.outputs = node.outputs[:1]
    node.attributes = attributes


# --- wanted rows -------------------------------------------------------------------------------------------------


def _gather_wanted_rows(graph: Graph, analysis: RowAnalysis, head: Node | None) -> None:
    """Compute the head for wanted rows only: where the graph takes the last row, or else before its last product."""
    for node in analysis.last_row_gathers:
        node.domain, node.op_type, node.inputs = DOMAIN, "WantedRows", node.inputs[:1]
        node.attributes = {"squeeze": Attribute.of("squeeze", 1)}
    if head is None:
        return
    source = head.inputs[0]
    gathered = graph.fresh_name(f"{source}/wanted")
    graph.insert_before(head, Node("WantedRows", [source], [gathered], DOMAIN, gathered))
    head.inputs[0] = gathered
    graph.update(head)


def _head_product(graph: Graph, logits: str, analysis: RowAnalysis) -> Node:
    """The last matrix product before the logits, reached through operators with a single per-token input."""
    name = logits
    while (node := graph.producer(name)) is not None:
        per_token = [i for i in node.inputs if i and analysis.states[i].kind is Kind.ROWS]
        if len(per_token) != 1:
            break
        if node.op_type in ("MatMul", "MatMulNBits", "Gemm") and per_token[0] == node.inputs[0]:
            return node
        name = per_token[0]
    raise NotFlattenable(f"no matrix product leads straight to {logits!r}, so the model's head was not found")
