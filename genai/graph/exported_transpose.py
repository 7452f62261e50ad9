"""The detour by which torch.onnx swaps the last two axes of a value: joined to three axes, swapped, taken apart."""

from __future__ import annotations

from .ir import Graph, Node

_LAST = 1 << 62


def flat_swap(graph: Graph, name: str) -> str | None:
    """The x of Reshape(Transpose(Reshape(x, [-1, T, D]), [0, 2, 1]), [..., D, T]); None if it is anything else."""
    apart = _made_by(graph, name, "Reshape")
    swap = None if apart is None else _made_by(graph, apart.inputs[0], "Transpose")
    if apart is None or swap is None or swap.attribute("perm", None) != [0, 2, 1]:
        return None
    joined = _made_by(graph, swap.inputs[0], "Reshape")
    if joined is None:
        return None
    source = joined.inputs[0]
    rows, columns = (-2, -1), (-1, None)
    before, after = (_parts(graph, shape, source) for shape in (joined.inputs[1], apart.inputs[1]))
    return source if before == [-1, rows, columns] and after == [(None, -2), columns, rows] else None


def _parts(graph: Graph, name: str, source: str) -> list[object]:
    """What a shape is joined of: numbers, and spans (first, end) of the source's own shape."""
    join = _made_by(graph, name, "Concat")
    return [] if join is None else [_part(graph, part, source) for part in join.inputs]


def _part(graph: Graph, name: str, source: str) -> object:
    known = graph.constant(name)
    if known is not None:
        return int(known[0]) if known.shape == (1,) else None
    cut = _made_by(graph, name, "Slice")
    shape = None if cut is None else _made_by(graph, cut.inputs[0], "Shape")
    if cut is None or shape is None or shape.inputs[0] != source or shape.attribute("start", 0) or len(cut.inputs) > 3:
        return None
    bounds = [graph.constant(bound) for bound in cut.inputs[1:]]
    if any(bound is None or bound.shape != (1,) for bound in bounds):
        return None
    first, end = (int(bound[0]) for bound in bounds if bound is not None)
    return (None if first < -_LAST else first, None if end > _LAST else end)


def _made_by(graph: Graph, name: str, op_type: str) -> Node | None:
    node = graph.producer(name)
    return node if node is not None and node.key == ("", op_type) else None
