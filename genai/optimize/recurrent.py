"""Rules for decoders with recurrent layers, which run before row analysis: one layout and one set of operators.

Exporters write convolutions channels first, so they transpose rows of tokens before and after each of them. The rules
write them channels last, and move the transposes until they cancel each other.
"""

from __future__ import annotations

import numpy as np

from ..onnx.ir import Graph, Node, OnnxModel, Value, make_node
from ..onnx.node import MS, OURS
from ..onnx.types import TensorType
from .base import Level, Rewrite, made_by, node_rule, only_user, replaced, run_rewrites
from .simplify import merge_transposes, remove_dead_code, remove_identities

CONV, ATTENTION = "CausalConvWithState", "LinearAttention"
_SWAP = [0, 2, 1]
# A zero vector keeps a norm of zero, as onnxruntime's LpNormalization does.
_LEAST = 1e-30


def has_states(graph: Graph) -> bool:
    """Return True if the graph has recurrent layers."""
    return any(node.op_type in (CONV, ATTENTION, "CausalConv") for node in graph.nodes)


def prepare_states(model: OnnxModel) -> None:
    """Run the rules of this module on a decoder with recurrent layers."""
    run_rewrites(model, RULES, Level.ALL)


@node_rule(Level.ALL, ("", CONV), (MS, CONV), domain=OURS)
def convolve_last_axis(graph: Graph, node: Node) -> bool:
    """CausalConvWithState(x) -> genai::CausalConv(x, weight, bias, past) over rows of channels."""
    if node.attribute("ndim", 1) != 1 or node.attribute("state_window", 0) or len(_used_outputs(graph, node)) > 2:
        return False
    rows, out = node.input(0), node.output(0)
    before: list[Node] = []
    after: list[Node] = []
    if not node.attribute("channels_last", 0):
        rows, out = graph.fresh_name(f"{rows}/rows"), graph.fresh_name(f"{out}/rows")
        known = graph.type_of(node.output(0))
        if isinstance(known, TensorType) and known.shape is not None and len(known.shape) == len(_SWAP):
            shape = tuple(known.shape[axis] for axis in _SWAP)
            graph.values[out] = Value(out, TensorType(known.dtype, shape))
        before = [make_node("Transpose", [node.input(0)], [rows], name=rows, perm=_SWAP)]
        after = [make_node("Transpose", [out], [node.output(0)], name=out, perm=_SWAP)]
    convolution = make_node(
        "CausalConv", [rows, node.input(1), node.input(2), node.input(3)], [out, node.output(1)], domain=OURS,
        name=node.name, activation=node.attribute("activation", "none"), dilation=int(node.attribute("dilation", 1)),
    )  # fmt: skip
    graph.replace_node(node, *before, convolution, *after)
    return True


def _used_outputs(graph: Graph, node: Node) -> list[str]:
    return [name for name in node.outputs if name and graph.is_used(name)]


@node_rule(Level.ALL, ("", "Transpose"))
def sink_transposes(graph: Graph, node: Node) -> bool:
    """f(Transpose(x), …) -> Transpose(f(x, …)) for elementwise f and for Split, if the last two of three axes swap."""
    if node.attribute("perm", None) != _SWAP:
        return False
    user = only_user(graph, node.output(0))
    if user is None or user.key[0] != "":
        return False
    if user.op_type == "Split":
        return _sink_through_split(graph, node, user)
    if user.op_type not in ("Mul", "Add", "Sub", "Div", "Sigmoid"):
        return False
    sources = [made_by(graph, name, "Transpose") for name in user.inputs]
    if not all(one is not None and one.attribute("perm", None) == _SWAP for one in sources):
        return False
    moved = graph.fresh_name(f"{user.output(0)}/rows")
    inputs = [one.input(0) for one in sources if one is not None]
    inner = make_node(user.op_type, inputs, [moved], name=user.name)
    graph.replace_node(user, inner, make_node("Transpose", [moved], [user.output(0)], name=moved, perm=_SWAP))
    return True


def _sink_through_split(graph: Graph, node: Node, split: Node) -> bool:
    axis = int(split.attribute("axis", 0)) % 3
    names = [graph.fresh_name(f"{name}/rows") for name in split.outputs]
    inner = split.copy()
    inner.inputs[0], inner.outputs = node.input(0), names
    inner.set_attribute("axis", _SWAP[axis])
    swaps = [
        make_node("Transpose", [name], [out], name=name, perm=_SWAP)
        for name, out in zip(names, split.outputs, strict=True)
    ]
    graph.replace_node(split, inner, *swaps)
    return True


@node_rule(Level.ALL, ("", "LpNormalization"))
def norm_of_vectors(graph: Graph, node: Node) -> bool:
    """LpNormalization of order 2 over the last axis of n numbers -> SimplifiedLayerNormalization * 1 / sqrt(n)."""
    shape = getattr(graph.type_of(node.input(0)), "shape", None)
    if shape is None or int(node.attribute("p", 2)) != 2 or not isinstance(shape[-1], int):
        return False
    if int(node.attribute("axis", -1)) not in (-1, len(shape) - 1):
        return False
    weight = np.full(shape[-1], shape[-1] ** -0.5, np.float32)
    name = graph.add_constant(f"{node.output(0)}/weight", weight)
    return replaced(
        graph, node, "SimplifiedLayerNormalization", [node.input(0), name], axis=-1, epsilon=_LEAST / shape[-1]
    )


@node_rule(Level.ALL, ("", "Split"))
def take_parts_of_heads(graph: Graph, node: Node) -> bool:
    """Split(Reshape(x, [0, 0, heads, size])), and a Reshape of each part to one axis -> Gather of columns of x.

    Qwen 3.5 has queries and their gates side by side in each head.
    """
    apart = made_by(graph, node.input(0), "Reshape")
    shape = getattr(graph.type_of(node.input(0)), "shape", None)
    sizes = graph.constant(node.input(1)) if node.input(1) else None
    if (
        apart is None
        or shape is None
        or len(shape) != 4
        or sizes is None
        or int(node.attribute("axis", 0)) not in (3, -1)
    ):
        return False
    heads, size = shape[2:]
    joined = [only_user(graph, name) for name in node.outputs]
    if not isinstance(heads, int) or not isinstance(size, int) or int(sizes.sum()) != size:
        return False
    for part, one in zip(joined, sizes, strict=True):
        out = None if part is None or part.key != ("", "Reshape") else graph.type_of(part.output(0))
        known = getattr(out, "shape", None)
        if known is None or len(known) != 3 or known[2] != heads * int(one):
            return False
    first = 0
    for part, one in zip(joined, sizes.tolist(), strict=True):
        assert part is not None
        columns = (np.arange(heads)[:, None] * size + np.arange(first, first + one)).reshape(-1)
        order = graph.add_constant(f"{part.output(0)}/columns", columns.astype(np.int64))
        replaced(graph, part, "Gather", [apart.input(0), order], axis=2)
        first += one
    return True


RULES: tuple[Rewrite, ...] = (
    convolve_last_axis, sink_transposes, merge_transposes, remove_identities, norm_of_vectors, take_parts_of_heads,
    remove_dead_code,
)  # fmt: skip
