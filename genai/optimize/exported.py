"""Rules for decoders that torch.onnx and Optimum exported: cuts and norms in forms that have kernels."""

from __future__ import annotations

import numpy as np

from ..onnx.ir import Graph, Node
from ..onnx.types import TensorType
from . import base
from .composites import is_along_last_axis
from .reshapes import reshape_target

_HEADS_TO_TOKENS = [0, 2, 1, 3]


@base.node_rule(base.Level.EXTENDED, ("", "Reshape"))
def select_columns_of_heads(graph: Graph, end: Node) -> bool:
    """The same part of each head of [B, S, heads * size], joined again -> Gather of columns.

    GPT-NeoX's projection computes the query, the key and the value of one head after another. The graph splits its
    result as [B, heads, S, size], cuts the last axis, and joins the heads of each part.
    """
    swap = base.made_by(graph, end.input(0), "Transpose")
    part = None if swap is None else graph.producer(swap.input(0))
    if swap is None or part is None or part.key not in (("", "Slice"), ("", "Split")):
        return False
    apart = base.made_by(graph, part.input(0), "Transpose")
    split = None if apart is None else base.made_by(graph, apart.input(0), "Reshape")
    if (
        apart is None
        or split is None
        or any(each.attribute("perm", None) != _HEADS_TO_TOKENS for each in (swap, apart))
    ):
        return False
    heads, size = _last_two(graph, split)
    columns = _columns(graph, part, swap.input(0), size)
    if not heads or not columns or reshape_target(graph, end) not in ([0, 0, -1], [0, 0, heads * len(columns)]):
        return False
    order = np.arange(heads)[:, None] * size + np.array(columns)
    name = graph.add_constant(f"{end.output(0)}/columns", order.reshape(-1))
    return base.replaced(graph, end, "Gather", [split.input(0), name], axis=-1)


def _last_two(graph: Graph, split: Node) -> tuple[int, int]:
    """Return heads and size of Reshape([B, S, heads * size], [0, 0, heads, size]), or zeros for another Reshape."""
    target, known = reshape_target(graph, split), graph.type_of(split.input(0))
    shape = known.shape if isinstance(known, TensorType) else None
    if target is None or len(target) != 4 or target[:2] != [0, 0] or shape is None or len(shape) != 3:
        return 0, 0
    width, (heads, size) = shape[2], target[2:]
    if not isinstance(width, int) or not width:
        return 0, 0
    heads, size = (width // size if heads == -1 and size > 0 else heads), (width // heads if size == -1 else size)
    return (heads, size) if heads > 0 and size > 0 and heads * size == width else (0, 0)


def _columns(graph: Graph, part: Node, name: str, size: int) -> range | None:
    """Return the columns of the last axis, with `size` columns, that an output of a Slice or Split consists of."""
    if part.op_type == "Slice":
        starts, ends, axes, steps = ([1] if index == 4 and not part.input(4) else _ints(graph, part, index)
                                     for index in range(1, 5))  # fmt: skip
        if starts is None or ends is None or axes not in ([-1], [3]) or steps != [1] or len(starts) != 1:
            return None
        return range(size)[starts[0] : ends[0]]
    if part.attribute("axis", 0) not in (-1, 3):
        return None
    count, index = len(part.outputs), part.outputs.index(name)
    sizes = _ints(graph, part, 1) if part.input(1) else part.attribute("split", None) or [-(-size // count)] * count
    if sizes is None or len(sizes) != count:
        return None
    first = sum(sizes[:index])
    return range(size)[first : first + sizes[index]]


def _ints(graph: Graph, node: Node, index: int) -> list[int] | None:
    value = graph.constant(node.input(index)) if node.input(index) else None
    return None if value is None else [int(item) for item in value.reshape(-1)]


_NO_END = (1 << 31) - 1


@base.node_rule(base.Level.EXTENDED, ("", "Slice"))
def remove_whole_slices(graph: Graph, node: Node) -> bool:
    """Slice(x) from 0 without an end -> x: the slice of all rows that `num_logits_to_keep` = 0 selects."""
    starts, ends = (_ints(graph, node, index) for index in (1, 2))
    steps = _ints(graph, node, 4) if node.input(4) else [1]
    if not starts or not ends or not steps or any(starts) or min(ends) < _NO_END or {*steps} != {1}:
        return False
    return base.pass_through(graph, node)


@base.node_rule(base.Level.EXTENDED, ("", "SimplifiedLayerNormalization"), ("", "RMSNormalization"), since=17)
def join_centred_norm(graph: Graph, norm: Node) -> bool:
    """RMS norm(x - mean(x), scale) -> LayerNormalization(x, scale): Cohere's norm has no bias."""
    centred = base.made_by(graph, norm.input(0), "Sub")
    if centred is None or norm.attribute("axis", -1) != -1 or any(norm.outputs[1:]):
        return False
    source, mean = centred.inputs
    average = base.made_by(graph, mean, "ReduceMean")
    if average is None or average.input(0) != source or not is_along_last_axis(graph, mean):
        return False
    epsilon = norm.attribute("epsilon", 1e-5)
    return base.replaced(graph, norm, "LayerNormalization", [source, norm.input(1)], axis=-1, epsilon=epsilon)
