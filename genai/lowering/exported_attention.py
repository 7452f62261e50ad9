"""Replaces attention in plain operators with GroupQueryAttention, which can be flattened.

The pattern is the pattern of torch.onnx and Optimum exports: keys and values are concatenated with their past and
repeated for grouped heads. Queries are multiplied with the keys; the scores are masked, normalised by a softmax and
multiplied with the values. The operators do not reveal which keys a mask hides; the caller must determine that for each
mask. onnxruntime-genai's builder writes com.microsoft.MultiHeadAttention with a mask, in 16 bits for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..onnx.decoder_names import GraphNames
from ..onnx.ir import Graph, Node, OnnxModel, make_node
from ..onnx.node import MS
from ..optimize.base import Pattern, both_orders, find, made_by, without_factors
from ..optimize.constant_folding import fold_constants
from ..optimize.reshapes import fold_known_shapes
from ..optimize.shapes import infer_shapes
from ..optimize.simplify import remove_dead_code

HIDDEN = -1e4
"""Scores below this are zero after a softmax."""

_HEADS_TO_TOKENS = [0, 2, 1, 3]


@dataclass(frozen=True)
class Cached:
    """Keys or values [B, heads, S, size]: the past (a graph input), the new ones, and both concatenated (present).

    Attributes:
        joined: True if the new keys or values are [B, S, heads * size].
    """

    past: str
    new: str
    present: str
    joined: bool = False


@dataclass(frozen=True)
class PlainAttention:
    """An attention layer in plain operators.

    Attributes:
        query: name of the queries [batch, heads, tokens, head_size]; [batch, tokens, heads * head_size] if `output` is
            an attention operator.
        scale: factor of the scores.
        softcap: cap of cap * tanh(x / cap), applied to the scores; 0 = none.
        masks: name of the values that are added to the scores, and possibly of a condition that selects scores.
        output: the node that moves the token axis of the result before its head axis, or an attention operator.
    """

    query: str
    key: Cached
    value: Cached
    scale: float
    softcap: float
    masks: tuple[str, ...]
    output: Node

    @property
    def is_operator(self) -> bool:
        """True if the output is the result of an attention operator, and not of plain operators."""
        return self.output.key == _OPERATOR


_OPERATOR = (MS, "MultiHeadAttention")


def find_plain_attention(graph: Graph, names: GraphNames) -> list[PlainAttention]:
    """Return every attention layer in plain operators, in graph order."""
    kinds = {("", "MatMul"): _match, ("", "Attention"): _match_standard, _OPERATOR: _match_operator}
    matches = (kinds[node.key](graph, node, names) for node in graph.nodes if node.key in kinds)
    return [match for match in matches if match is not None]


_ON_SCORES = ("Add", "Mul", "Div", "Where", "Reshape")


def other_form(graph: Graph) -> str:
    """Return the property of attention in plain operators that keeps it from being found, as part of a sentence."""
    steps: set[str] = set()
    for softmax in (node for node in graph.nodes if node.key == ("", "Softmax")):
        addends, name = 0, softmax.inputs[0]
        while (node := graph.producer(_skip(graph, name))) is not None and node.op_type in _ON_SCORES:
            sides = [side for side in node.inputs if _is_product(graph, side)]
            if len(sides) != 1:
                break
            others = [side for side in node.inputs if side != sides[0] and node.op_type == "Add"]
            addends += sum(2 if _differs_by_head(graph, side) else 1 for side in others)
            steps.add(node.op_type)
            name = sides[0]
        if addends > 1:
            return "the scores have a bias besides the mask, such as a bias by distance (ALiBi)"
    if "Where" in steps:
        return "a Where applies a mask to the scores"
    return "it does not consist of the operators of a known export"


def _is_product(graph: Graph, name: str) -> bool:
    """Return True if a value is the result of a MatMul, possibly with factors, addends and masks."""
    node = graph.producer(_skip(graph, name))
    if node is None or node.op_type == "MatMul":
        return node is not None
    inputs = node.inputs[:1] if node.op_type == "Reshape" else node.inputs
    return node.op_type in _ON_SCORES and any(_is_product(graph, side) for side in inputs)


def _differs_by_head(graph: Graph, name: str) -> bool:
    shape: tuple[int | str | None, ...] = getattr(graph.type_of(name), "shape", None) or ()
    return len(shape) > 2 and isinstance(shape[-3], int) and shape[-3] != 1


def replace_plain_attention(
    model: OnnxModel,
    layers: list[PlainAttention],
    heads: tuple[int, int],
    window: Callable[[tuple[str, ...]], int | None],
) -> None:
    """Replace each layer with GroupQueryAttention.

    Args:
        heads: numbers of query heads and of key/value heads.
        window: function that maps masks to the number of tokens that a query attends to, or to None for all tokens.
    """
    graph = model.graph
    for layer in layers:
        caches = layer.key, layer.value
        producers = {graph.producer(cached.present) for cached in caches} - {layer.output}
        named = [(layer.query, layer.is_operator), *((cached.new, cached.joined) for cached in caches)]
        inputs = [name if joined else _joined_heads(graph, layer.output, name) for name, joined in named]
        mixed = layer.output.outputs[0] if layer.is_operator else graph.fresh_name(f"{layer.output.name}/attention")
        attention = make_node(
            "GroupQueryAttention",
            [*inputs, layer.key.past, layer.value.past],
            [mixed, layer.key.present, layer.value.present],
            domain=MS,
            name=mixed,
            num_heads=heads[0],
            kv_num_heads=heads[1],
            scale=layer.scale,
            softcap=layer.softcap,
            local_window_size=window(layer.masks) or -1,
        )
        split = [] if layer.is_operator else [_split_heads(graph, layer.output, mixed, heads[0])]
        graph.insert_before(layer.output, attention, *split)
        graph.remove_nodes([layer.output, *(node for node in producers if node is not None)])
    model.opset_imports.setdefault(MS, 1)
    remove_dead_code.apply(model)


def _split_heads(graph: Graph, before: Node, mixed: str, heads: int) -> Node:
    """Return the node that converts [B, S, heads * size] to the outputs of `before`, [B, S, heads, size]."""
    shape = graph.add_constant(f"{mixed}/shape", np.array([0, 0, heads, -1], np.int64))
    return Node("Reshape", [mixed, shape], list(before.outputs), "", f"{mixed}/split")


def _match_operator(graph: Graph, node: Node, names: GraphNames) -> PlainAttention | None:
    """Match MultiHeadAttention with keys and values of the past, either as inputs or concatenated and repeated."""
    query, key, value, bias, padding, mask, past_key, past_value = (node.input(index) for index in range(8))
    scale = float(node.attribute("scale", 0.0))
    if not (query and key and value and mask) or bias or padding or not scale:
        return None
    if past_key:
        present = node.output(1), node.output(2)
        keys: Cached | None = Cached(past_key, key, present[0], True)
        values: Cached | None = Cached(past_value, value, present[1], True)
    else:
        keys, values = _cached_before_operator(graph, key), _cached_before_operator(graph, value)
    if keys is None or values is None or not _same_layer(graph, names, keys.past, values.past):
        return None
    return PlainAttention(query, keys, values, scale, 0.0, (_before_tile(graph, mask),), node)


def _cached_before_operator(graph: Graph, name: str) -> Cached | None:
    """Match cached keys or values whose heads are joined after the concatenation with the past."""
    reshape = _producer(graph, name, "Reshape")
    swap = None if reshape is None else _producer(graph, reshape.inputs[0], "Transpose")
    if swap is None or swap.attribute("perm", None) != _HEADS_TO_TOKENS:
        return None
    return _cached(graph, swap.inputs[0])


def _before_tile(graph: Graph, mask: str) -> str:
    """Return a mask [B, 1, S, T] before it is repeated for each head."""
    tile = _producer(graph, mask, "Tile")
    repeats = None if tile is None else graph.constant(tile.inputs[1])
    if tile is None or repeats is None or repeats.shape != (4,) or [*repeats[[0, 2, 3]]] != [1, 1, 1]:
        return mask
    return tile.inputs[0]


def _match(graph: Graph, product: Node, names: GraphNames) -> PlainAttention | None:
    softmax = _producer(graph, product.inputs[0], "Softmax")
    if softmax is None or softmax.attribute("axis", -1) not in (-1, 3):
        return None
    output = _tokens_first(graph, product.outputs[0])
    if output is None:
        return None
    masked = _producer(graph, softmax.inputs[0], "Add")
    if masked is None:
        return None
    for scores, mask in both_orders(masked):
        inner, scale = _without_factors(graph, scores)
        softcap, squashed = 0.0, _producer(graph, inner, "Tanh")
        if squashed is not None:
            inner, inside = _without_factors(graph, squashed.inputs[0])
            softcap, scale = scale, scale * inside
        hidden = _hiding(graph, inner) if scale == 1.0 and not softcap else None
        if hidden is not None:
            inner, scale = _without_factors(graph, hidden.inputs[1])
        dots = _producer(graph, inner, "MatMul")
        if dots is None:
            continue
        query, query_scale = _without_factors(graph, dots.inputs[0])
        keys = _transposed_keys(graph, dots.inputs[1])
        if keys is None:
            continue
        key, value = (_cached(graph, name) for name in (keys[0], product.inputs[1]))
        if key is None or value is None or not _same_layer(graph, names, key.past, value.past):
            continue
        masks = (mask,) if hidden is None else (mask, hidden.inputs[0])
        return PlainAttention(query, key, value, scale * query_scale * keys[1], softcap, masks, output)
    return None


def _hiding(graph: Graph, name: str) -> Node | None:
    """Return the Where that replaces scores by a number that is 0 after the softmax, or None."""
    node = _producer(graph, name, "Where")
    low = None if node is None else graph.constant(node.inputs[2])
    return node if low is not None and low.size == 1 and float(low.reshape(-1)[0]) < HIDDEN else None


def _match_standard(graph: Graph, node: Node, names: GraphNames) -> PlainAttention | None:
    """Match the operator Attention (opset 23) with queries, keys and values of four axes and a mask."""
    if len([name for name in node.inputs if name]) != 4 or not node.input(3) or any(node.outputs[1:]):
        return None
    known = ("scale", "softcap", "softmax_precision", "is_causal", "qk_matmul_output_mode")
    if set(node.attributes) - {*known} or node.attribute("is_causal", 0):
        return None
    query, output = _skip(graph, node.inputs[0]), _tokens_first(graph, node.outputs[0])
    sizes: tuple[int | str | None, ...] = getattr(graph.type_of(query), "shape", None) or (None,)
    size = sizes[-1]
    key, value = (_cached(graph, name) for name in node.inputs[1:3])
    if output is None or len(sizes) != 4 or not isinstance(size, int) or key is None or value is None:
        return None
    if not _same_layer(graph, names, key.past, value.past):
        return None
    scale, softcap = float(node.attribute("scale", size**-0.5)), float(node.attribute("softcap", 0.0))
    return PlainAttention(query, key, value, scale, softcap, (node.inputs[3],), output)


def _tokens_first(graph: Graph, name: str) -> Node | None:
    """Return a value's only use if it is a Transpose of [B, heads, S, size] to [B, S, heads, size], else None."""
    users = [node for node in graph.consumers(name) if node.op_type != "Shape"]
    if len(users) != 1:
        return None
    if users[0].key == ("", "Reshape"):
        before, after = (getattr(graph.type_of(n), "shape", None) for n in (name, users[0].outputs[0]))
        idle = before is not None and None not in before and before == after
        return _tokens_first(graph, users[0].outputs[0]) if idle else None
    swaps = users[0].key == ("", "Transpose") and users[0].attribute("perm", None) == _HEADS_TO_TOKENS
    return users[0] if swaps else None


def _transposed_keys(graph: Graph, name: str) -> tuple[str, float] | None:
    """Return keys [B, heads, T, size] before the swap of their last two axes, and their scale factor."""
    name, outer = _without_factors(graph, name)
    swap = _producer(graph, name, "Transpose")
    swaps = swap is not None and swap.attribute("perm") == [0, 1, 3, 2]
    before = swap.inputs[0] if swap is not None and swaps else flat_swap(graph, name)
    if before is None:
        return None
    name, inner = _without_factors(graph, before)
    return name, outer * inner


def _cached(graph: Graph, name: str) -> Cached | None:
    """Match past and new keys or values concatenated along tokens, before they are repeated for grouped heads."""
    reshape = _producer(graph, name, "Reshape")
    if reshape is not None:
        expand = _producer(graph, reshape.inputs[0], "Expand")
        unsqueeze = None if expand is None else _producer(graph, expand.inputs[0], "Unsqueeze")
        if unsqueeze is None:
            return None
        name = unsqueeze.inputs[0]
    joined = _producer(graph, name, "Concat")
    if joined is None or len(joined.inputs) != 2 or joined.attribute("axis", 0) not in (2, -2):
        return None
    return Cached(_skip(graph, joined.inputs[0]), joined.inputs[1], joined.outputs[0])


def _same_layer(graph: Graph, names: GraphNames, key: str, value: str) -> bool:
    """Return True if both names are graph inputs, namely the past keys and past values of one layer."""
    before, after = names.past_key.split("%d")
    layer = key.removeprefix(before).removesuffix(after)
    named = key == names.past_key.replace("%d", layer) and value == names.past_value.replace("%d", layer)
    return named and layer.isdecimal() and graph.is_input(key) and graph.is_input(value)


def _skip(graph: Graph, name: str) -> str:
    """Follow a value back through operators that do not change it: casts, identities, a Concat with one input."""
    while (node := graph.producer(name)) is not None:
        same = node.op_type in ("Cast", "Identity", "Dropout") or (node.op_type == "Concat" and len(node.inputs) == 1)
        behind = node.inputs[0] if same else _nan_guard(graph, node)
        if behind is None:
            break
        name = behind
    return name


def _nan_guard(graph: Graph, node: Node) -> str | None:
    """Match Where(IsNaN(x), 0, x), which only affects fully masked rows; return x or None."""
    match = find(graph, node, Pattern("Where", Pattern("IsNaN", "x"), "zero", "x"))
    zero = graph.constant(match["zero"]) if match else None
    return match["x"] if zero is not None and not np.any(zero) else None


def _producer(graph: Graph, name: str, op_type: str) -> Node | None:
    node = graph.producer(_skip(graph, name))
    return node if node is not None and node.key == ("", op_type) else None


def _without_factors(graph: Graph, name: str) -> tuple[str, float]:
    return without_factors(graph, name, partial(_skip, graph))


def _joined_heads(graph: Graph, before: Node, name: str) -> str:
    """Insert nodes that convert [B, heads, S, size] to [B, S, heads * size]."""
    moved, joined = graph.fresh_name(f"{name}/tokens"), graph.fresh_name(f"{name}/joined")
    shape = graph.add_constant(f"{name}/joined_shape", np.array([0, 0, -1], np.int64))
    transpose = make_node("Transpose", [name], [moved], name=moved, perm=_HEADS_TO_TOKENS)
    graph.insert_before(before, transpose, Node("Reshape", [moved, shape], [joined], "", joined))
    return joined


_LAST = 1 << 62
_FLAT_SWAP = Pattern("Reshape", Pattern("Transpose", Pattern("Reshape", "x", "joined"), name="swapped"), "apart")


def flat_swap(graph: Graph, name: str) -> str | None:
    """Match Reshape(Transpose(Reshape(x, [-1, T, D]), [0, 2, 1]), [..., D, T]); return x or None."""
    node = graph.producer(name)
    match = {} if node is None else find(graph, node, _FLAT_SWAP)
    swap = made_by(graph, match.get("swapped", ""), "Transpose")
    if swap is None or swap.attribute("perm", None) != [0, 2, 1]:
        return None
    source = match["x"]
    rows, columns = (-2, -1), (-1, None)
    before, after = (_parts(graph, shape, source) for shape in (match["joined"], match["apart"]))
    return source if before == [-1, rows, columns] and after == [(None, -2), columns, rows] else None


def _parts(graph: Graph, name: str, source: str) -> list[object]:
    """Return the parts that are concatenated to a shape: numbers, and spans (first, end) of the source's shape."""
    join = made_by(graph, name, "Concat")
    return [] if join is None else [_part(graph, part, source) for part in join.inputs]


def _part(graph: Graph, name: str, source: str) -> object:
    known = graph.constant(name)
    if known is not None:
        return int(known[0]) if known.shape == (1,) else None
    cut = made_by(graph, name, "Slice")
    shape = None if cut is None else made_by(graph, cut.inputs[0], "Shape")
    if cut is None or shape is None or shape.inputs[0] != source or shape.attribute("start", 0) or len(cut.inputs) > 3:
        return None
    bounds = [graph.constant(bound) for bound in cut.inputs[1:]]
    if any(bound is None or bound.shape != (1,) for bound in bounds):
        return None
    first, end = (int(bound[0]) for bound in bounds if bound is not None)
    return (None if first < -_LAST else first, None if end > _LAST else end)


def settle_shapes(model: OnnxModel, names: GraphNames) -> None:
    """Fold the known shapes of a model to constants, in place; infer shapes before and after."""
    infer_shapes(model)
    ends = [pattern.split("%d") for pattern in names.pasts]
    for node in model.graph.nodes:
        first = node.key == ("", "Shape") and (node.attribute("start", 0), node.attribute("end", None)) == (0, 1)
        source = node.input(0)
        is_past = any(source.startswith(before) and source.endswith(after) for before, after in ends)
        if first and is_past and model.graph.is_input(source):
            node.inputs[0] = names.input_ids
            model.graph.update(node)
    if fold_known_shapes.apply(model):
        fold_constants.apply(model)
        infer_shapes(model)
