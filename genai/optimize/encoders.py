"""Rules for encoders: norms, rotations and attention biases that exporters write with plain operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..onnx.ir import Graph, Node, OnnxTensor, Value, make_node
from ..onnx.node import MS
from ..onnx.types import DataType, TensorType
from . import base
from .composites import is_along_last_axis

_ROOT = base.Pattern("Sqrt", base.Pattern("Add", base.Pattern("ReduceMean", (
    base.Pattern("Pow", "x", 2.0), base.Pattern("Mul", "x", "x")), name="mean"), "epsilon"))  # fmt: skip
_SCALED = (
    base.Pattern("Mul", "x", (base.Pattern("Reciprocal", _ROOT), base.Pattern("Div", 1.0, _ROOT))),
    base.Pattern("Div", "x", _ROOT),
)


@base.node_rule(base.Level.EXTENDED, ("", "Mul"))
def fuse_rms_norm(graph: Graph, end: Node) -> bool:
    """x / sqrt(mean(x ^ 2) + epsilon) * scale over the last axis -> SimplifiedLayerNormalization(x, scale)."""
    match = base.find(graph, end, base.Pattern("Mul", "scale", _SCALED))
    if not match or not base.is_float32(graph, match["x"]):
        return False
    epsilon, scale = base.number(graph, match["epsilon"]), graph.constant_tensor(match["scale"])
    known = graph.type_of(match["x"])
    shape = known.shape if isinstance(known, TensorType) else None
    if epsilon is None or scale is None or not shape or scale.shape != (shape[-1],):
        return False
    if not is_along_last_axis(graph, match["mean"]):
        return False
    inputs = [match["x"], match["scale"]]
    return base.replaced(graph, end, "SimplifiedLayerNormalization", inputs, axis=-1, epsilon=epsilon)


@base.node_rule(base.Level.EXTENDED, ("", "SimplifiedLayerNormalization"), ("", "RMSNormalization"))
def move_transpose_after_norm(graph: Graph, norm: Node) -> bool:
    """norm(Transpose(x)) -> Transpose(norm(x)), if the last axis, which is normalised, stays in place.

    Heads of queries and keys are normalised in the layout of their matmul, in which each row is contiguous.
    """
    swap = base.made_by(graph, norm.input(0), "Transpose")
    order = [] if swap is None else list(swap.attribute("perm", None) or [])
    if swap is None or not order or order[-1] != len(order) - 1 or norm.attribute("axis", -1) not in (-1, order[-1]):
        return False
    if base.only_user(graph, norm.input(0)) is None or len([name for name in norm.outputs if name]) != 1:
        return False
    name, source = norm.output(0), swap.inputs[0]
    inner = graph.fresh_name(f"{name}/before")
    graph.values[inner] = Value(inner, graph.type_of(source))
    moved = norm.copy()
    moved.inputs[0], moved.outputs = source, [inner]
    graph.replace_node(norm, moved, make_node("Transpose", [inner], [name], name=f"{name}/swap", perm=order))
    graph.remove_nodes([swap])
    return True


@base.node_rule(base.Level.EXTENDED, ("", "Add"))
def join_score_addends(graph: Graph, end: Node) -> bool:
    """(scores + a) + b -> scores + (a + b), for scores of a matmul: a relative bias and a mask become one bias."""
    if base.followed_by(graph, end.output(0), "Softmax") is None:
        return False
    for inner, mask in base.both_orders(end):
        addition = base.made_by(graph, inner, "Add")
        if addition is None or base.only_user(graph, inner) is None or not _is_addend(graph, mask):
            continue
        for scores, bias in base.both_orders(addition):
            product = base.made_by(graph, base.without_factors(graph, scores)[0], "MatMul")
            if product is None or not _is_addend(graph, bias):
                continue
            total = graph.fresh_name(f"{mask}/total")
            graph.insert_before(end, make_node("Add", [bias, mask], [total], name=total))
            graph.values[total] = Value(total, TensorType(DataType.FLOAT, None))
            end.inputs[:] = [scores, total]
            graph.update(end)
            return True
    return False


def _is_addend(graph: Graph, name: str) -> bool:
    factor = base.made_by(graph, base.without_factors(graph, name)[0], "MatMul")
    return factor is None and base.is_float32(graph, name)


def fuse_plain_rotation(position_ids: str) -> base.Rewrite:
    """x * cos + rotate_half(x) * sin -> com.microsoft.RotaryEmbedding (Su et al. 2021).

    If x is the first part of larger heads, and the rest is appended unchanged, one node rotates the whole heads.

    x is [B, heads, T, size] or [B, T, heads, size]; cos and sin are looked up in tables by `position_ids`, and
    rotate_half(x) is Concat(-second half of x, first half of x), or neighbouring columns (a, b) become (-b, a).

    Args:
        position_ids: graph input with the positions.
    """

    @base.node_rule(base.Level.EXTENDED, ("", "Add"), domain=MS)
    def fuse_plain_rotation(graph: Graph, end: Node) -> bool:
        for plain, turned in base.both_orders(end):
            first, second = base.made_by(graph, plain, "Mul"), base.made_by(graph, turned, "Mul")
            if first is None or second is None:
                continue
            for x, cos in base.both_orders(first):
                for half, sin in base.both_orders(second):
                    for pairs, is_turned in ((False, _half_turned), (True, _pairs_turned)):
                        if is_turned(graph, half) == x and _rotate(graph, end, x, cos, sin, position_ids, pairs=pairs):
                            return True
        return False

    return fuse_plain_rotation


def _half_turned(graph: Graph, name: str) -> str | None:
    """Match Concat(Neg(second half of x), first half of x) along the last axis; return x or None."""
    joined = base.made_by(graph, name, "Concat")
    if joined is None or len(joined.inputs) != 2 or not _is_last(graph, name, int(joined.attribute("axis", 0))):
        return None
    negated = base.made_by(graph, joined.inputs[0], "Neg")
    second = None if negated is None else _half(graph, negated.inputs[0])
    first = _half(graph, joined.inputs[1])
    if first is None or second is None or first[0] != second[0] or (first[1], second[1]) != (0, 1):
        return None
    return first[0]


def _pairs_turned(graph: Graph, name: str) -> str | None:
    """Match neighbouring columns (a, b) of x replaced by (-b, a): two slices with step 2, stacked; return x or None."""
    flat = base.made_by(graph, name, "Reshape")
    joined = None if flat is None else base.made_by(graph, flat.inputs[0], "Concat")
    if joined is None or len(joined.inputs) != 2 or joined.attribute("axis", 0) not in (-1, 4):
        return None
    columns = []
    for part in joined.inputs:
        apart = base.made_by(graph, part, "Unsqueeze")
        axes = None if apart is None else graph.constant(apart.input(1))
        if apart is None or axes is None or axes.tolist() not in ([-1], [4]):
            return None
        columns.append(apart.inputs[0])
    negated = base.made_by(graph, columns[0], "Neg")
    odd = None if negated is None else _every_second(graph, negated.inputs[0])
    even = _every_second(graph, columns[1])
    if odd is None or even is None or odd[0] != even[0] or (odd[1], even[1]) != (1, 0):
        return None
    before, after = _sizes(graph, odd[0]), _sizes(graph, name)
    return odd[0] if len(before) == 4 == len(after) and before[-1] == after[-1] and before[-1] is not None else None


def _every_second(graph: Graph, name: str) -> tuple[str, int] | None:
    """Return x and 0 or 1 if a value is the even or the odd columns of x, else None."""
    node = base.made_by(graph, name, "Slice")
    bounds = [] if node is None else [graph.constant(bound) for bound in node.inputs[1:]]
    if node is None or len(bounds) != 4 or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    begin, end, axis, step = (int(bound.reshape(-1)[0]) for bound in bounds if bound is not None)
    source = node.input(0)
    size = (*_sizes(graph, source), None)[-2] if _sizes(graph, source) else None
    if not isinstance(size, int) or size % 2 or step != 2 or begin not in (0, 1) or not _is_last(graph, source, axis):
        return None
    return (source, begin) if len(range(size)[begin:end:step]) == size // 2 else None


def _half(graph: Graph, name: str) -> tuple[str, int] | None:
    """Return x and 0 or 1 if a value is the first or the second half of x along the last axis, else None."""
    node = graph.producer(name)
    if node is None or node.domain or node.op_type not in ("Slice", "Split"):
        return None
    source = node.input(0)
    size = _sizes(graph, source)[-1:]
    if not size or not isinstance(size[0], int) or size[0] % 2:
        return None
    if node.op_type == "Split":
        sizes = graph.constant(node.input(1)) if node.input(1) else None
        even = len(node.outputs) == 2 if sizes is None else sizes.tolist() == [size[0] // 2] * 2
        return (
            (source, node.outputs.index(name)) if even and _is_last(graph, source, node.attribute("axis", 0)) else None
        )
    bounds = [graph.constant(bound) for bound in node.inputs[1:]]
    if len(bounds) < 3 or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    begin, end, axis, *step = (int(bound.reshape(-1)[0]) for bound in bounds if bound is not None)
    part = range(size[0])[begin : end : step[0] if step else 1]
    if not _is_last(graph, source, axis):
        return None
    halves = [range(size[0] // 2), range(size[0] // 2, size[0])]
    return (source, halves.index(part)) if part in halves else None


def _sizes(graph: Graph, name: str) -> tuple[Any, ...]:
    known = graph.type_of(name)
    return tuple(known.shape or ()) if isinstance(known, TensorType) else ()


def _is_last(graph: Graph, name: str, axis: int) -> bool:
    rank = len(_sizes(graph, name))
    return rank > 0 and axis in (-1, rank - 1)


def _rotate(graph: Graph, end: Node, x: str, cos: str, sin: str, position_ids: str, *, pairs: bool) -> bool:
    size = (_sizes(graph, x) or (None,))[-1]  # of the rotated part
    end, x = _whole_heads(graph, end, x)
    sizes = _sizes(graph, x)
    tables = [_looked_up(graph, name, position_ids) for name in (cos, sin)]
    if len(sizes) != 4 or any(table is None for table in tables):
        return False
    heads_first = all(table is not None and table[1] == 1 for table in tables)
    if not heads_first and not all(table is not None and table[1] == 2 for table in tables):
        return False
    heads, head_size = sizes[1 if heads_first else 2], sizes[3]
    if not isinstance(heads, int) or not isinstance(size, int) or not isinstance(head_size, int):
        return False
    names = []
    for table in tables:
        assert table is not None
        source, data = table[0], table[2]
        if data.shape[1] != size:
            return False
        first, second = (data[:, ::2], data[:, 1::2]) if pairs else (data[:, : size // 2], data[:, size // 2 :])
        if not np.array_equal(first, second):
            return False
        half = f"{source}/half"  # one constant for all layers
        if half not in graph.initializers:
            graph.add_initializer(OnnxTensor.from_array(half, np.ascontiguousarray(first)))
        names.append(half)
    return _replace_by_rotation(graph, end, x, size, [position_ids, *names], heads_first=heads_first, pairs=pairs)


def _replace_by_rotation(
    graph: Graph, end: Node, x: str, size: int, inputs: Sequence[str], *, heads_first: bool, pairs: bool
) -> bool:
    """Replace a node by com.microsoft.RotaryEmbedding of the first `size` columns of heads x.

    Args:
        x: name of the heads, [B, heads, T, head size] if `heads_first`, else [B, T, heads, head size].
        inputs: names of the positions, and of the tables of cosines and sines, [positions, size / 2].
        pairs: True if neighbouring columns are rotated together; otherwise, those of the two halves.
    """
    batch, *middle, head_size = _sizes(graph, x)
    heads, tokens = middle if heads_first else middle[::-1]
    name = end.output(0)
    rows, turned, apart = (graph.fresh_name(f"{name}/{part}") for part in ("rows", "rotated", "heads"))
    width = heads * head_size
    for value, shape in ((rows, (batch, tokens, width)), (turned, (batch, tokens, width)),
                         (apart, (batch, tokens, heads, head_size))):  # fmt: skip
        graph.values[value] = Value(value, TensorType(DataType.FLOAT, shape))
    join = graph.add_constant(f"{name}/join", np.array([0, 0, width], np.int64))
    split = graph.add_constant(f"{name}/split", np.array([0, 0, heads, head_size], np.int64))
    attributes = {"num_heads": heads, "interleaved": int(pairs)}
    if size != head_size:
        attributes["rotary_embedding_dim"] = size
    source, nodes = x, []
    if heads_first:
        moved = graph.fresh_name(f"{name}/tokens")
        graph.values[moved] = Value(moved, TensorType(DataType.FLOAT, (batch, tokens, heads, head_size)))
        nodes.append(make_node("Transpose", [x], [moved], name=moved, perm=[0, 2, 1, 3]))
        source = moved
    nodes += [
        make_node("Reshape", [source, join], [rows], name=rows),
        make_node("RotaryEmbedding", [rows, *inputs], [turned], domain=MS, name=turned, **attributes),
        make_node("Reshape", [turned, split], [apart if heads_first else name], name=apart),
    ]
    if heads_first:
        nodes.append(make_node("Transpose", [apart], [name], name=name, perm=[0, 2, 1, 3]))
    graph.replace_node(end, *nodes)
    return True


def fuse_cached_rotation(position_ids: str) -> base.Rewrite:
    """RotaryEmbedding(x, cos, sin) of opset 23, with look-ups by `position_ids` -> com.microsoft.RotaryEmbedding.

    x is [B, heads, T, size].
    """

    @base.node_rule(base.Level.EXTENDED, ("", "RotaryEmbedding"), domain=MS)
    def fuse_cached_rotation(graph: Graph, node: Node) -> bool:
        size = int(node.attribute("rotary_embedding_dim", 0)) or (_sizes(graph, node.input(0)) or (0,))[-1]
        end, x = _whole_heads(graph, node, node.input(0))
        sizes = _sizes(graph, x)
        if len(node.inputs) != 3 or len(sizes) != 4 or not all(isinstance(number, int) for number in sizes[1::2]):
            return False
        tables = []
        for name in node.inputs[1:]:
            found = base.made_by(graph, name, "Gather")
            table = None if found is None or found.attribute("axis", 0) else graph.constant(found.inputs[0])
            if found is None or table is None or table.ndim != 2 or found.inputs[1] != position_ids:
                return False
            if 2 * table.shape[1] != size:
                return False
            tables.append(found.inputs[0])
        pairs = bool(node.attribute("interleaved", 0))
        return _replace_by_rotation(graph, end, x, size, [position_ids, *tables], heads_first=True, pairs=pairs)

    return fuse_cached_rotation


def _whole_heads(graph: Graph, end: Node, x: str) -> tuple[Node, str]:
    """Return the node that appends the rest of the heads to their rotated part, and the heads; else the arguments."""
    join = base.only_user(graph, end.output(0))
    part = graph.producer(x)
    if join is None or part is None or join.key != ("", "Concat") or len(join.inputs) != 2:
        return end, x
    whole, name = part.input(0), join.output(0)
    sizes, axis = _sizes(graph, whole), int(join.attribute("axis", 0))
    if (
        not sizes
        or not isinstance(sizes[-1], int)
        or join.inputs[0] != end.output(0)
        or not _is_last(graph, name, axis)
    ):
        return end, x
    first, rest = (_columns(graph, value, whole) for value in (x, join.inputs[1]))
    if first is None or rest is None or first.start != 0 or first.stop != len(first):
        return end, x
    is_rest = rest == range(len(first), sizes[-1]) or (not rest and len(first) == sizes[-1])
    return (join, whole) if is_rest else (end, x)


def _columns(graph: Graph, name: str, source: str) -> range | None:
    """Return the columns that a Slice or a Split selects from the last axis of `source`, or None."""
    node, size = graph.producer(name), _sizes(graph, source)[-1]
    if node is None or node.domain or node.op_type not in ("Slice", "Split") or node.input(0) != source:
        return None
    if node.op_type == "Split":
        sizes = graph.constant(node.input(1)) if node.input(1) else None
        if sizes is None or not _is_last(graph, source, node.attribute("axis", 0)):
            return None
        index = node.outputs.index(name)
        start = int(sizes[:index].sum())
        return range(start, start + int(sizes[index]))
    bounds = [graph.constant(bound) for bound in node.inputs[1:]]
    if len(bounds) < 3 or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    begin, end, axis, *step = (int(bound.reshape(-1)[0]) for bound in bounds if bound is not None)
    if not _is_last(graph, source, axis) or (step and step[0] != 1):
        return None
    return range(size)[begin:end]


def _looked_up(graph: Graph, name: str, position_ids: str) -> tuple[str, int, Any] | None:
    """Return the name of a table in a look-up by position, the axis that repeats for heads, and [positions, size].

    The result of the look-up is [B, 1, T, size] or [B, T, 1, size].
    """
    node, axis = graph.producer(name), 2
    if node is not None and node.op_type == "Unsqueeze":
        axes = graph.constant(node.input(1))
        if axes is None or axes.size != 1:
            return None
        axis, node = int(axes.reshape(-1)[0]) % 4, graph.producer(node.input(0))
    if node is None or node.key != ("", "Gather") or node.inputs[1] != position_ids or node.attribute("axis", 0) != 0:
        return None
    table = graph.constant(node.inputs[0])
    if table is None or table.dtype != np.float32:
        return None
    if table.ndim == 3 and table.shape[1] == 1:
        return node.inputs[0], 2, table[:, 0]
    return (node.inputs[0], axis, table) if table.ndim == 2 and axis in (1, 2) else None
