"""Rules for encoders: norms, rotations and attention biases that exporters write with plain operators."""

from __future__ import annotations

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

    x is [B, heads, T, size] or [B, T, heads, size]; cos and sin are looked up in tables by `position_ids`, and
    rotate_half(x) is Concat(-second half of x, first half of x).

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
                    if _half_turned(graph, half) == x and _rotate(graph, end, x, cos, sin, position_ids):
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


def _rotate(graph: Graph, end: Node, x: str, cos: str, sin: str, position_ids: str) -> bool:
    sizes = _sizes(graph, x)
    tables = [_looked_up(graph, name, position_ids) for name in (cos, sin)]
    if len(sizes) != 4 or any(table is None for table in tables):
        return False
    heads_first = all(table is not None and table[1] == 1 for table in tables)
    if not heads_first and not all(table is not None and table[1] == 2 for table in tables):
        return False
    heads, size = sizes[1 if heads_first else 2], sizes[3]
    if not isinstance(heads, int) or not isinstance(size, int):
        return False
    names = []
    for table in tables:
        assert table is not None
        source, data = table[0], table[2]
        if data.shape[1] != size or not np.array_equal(data[:, : size // 2], data[:, size // 2 :]):
            return False
        half = f"{source}/half"  # one constant for all layers
        if half not in graph.initializers:
            graph.add_initializer(OnnxTensor.from_array(half, np.ascontiguousarray(data[:, : size // 2])))
        names.append(half)
    name = end.output(0)
    rows, turned, apart = (graph.fresh_name(f"{name}/{part}") for part in ("rows", "rotated", "heads"))
    width = heads * size
    tokens = sizes[2 if heads_first else 1]
    for value, shape in ((rows, (sizes[0], tokens, width)), (turned, (sizes[0], tokens, width)),
                         (apart, (sizes[0], tokens, heads, size))):  # fmt: skip
        graph.values[value] = Value(value, TensorType(DataType.FLOAT, shape))
    join = graph.add_constant(f"{name}/join", np.array([0, 0, width], np.int64))
    split = graph.add_constant(f"{name}/split", np.array([0, 0, heads, size], np.int64))
    source, nodes = x, []
    if heads_first:
        moved = graph.fresh_name(f"{name}/tokens")
        graph.values[moved] = Value(moved, TensorType(DataType.FLOAT, (sizes[0], tokens, heads, size)))
        nodes.append(make_node("Transpose", [x], [moved], name=moved, perm=[0, 2, 1, 3]))
        source = moved
    nodes += [
        make_node("Reshape", [source, join], [rows], name=rows),
        make_node("RotaryEmbedding", [rows, position_ids, *names], [turned], domain=MS, name=turned, num_heads=heads),
        make_node("Reshape", [turned, split], [apart if heads_first else name], name=apart),
    ]
    if heads_first:
        nodes.append(make_node("Transpose", [apart], [name], name=name, perm=[0, 2, 1, 3]))
    graph.replace_node(end, *nodes)
    return True


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
