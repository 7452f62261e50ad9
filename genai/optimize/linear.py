"""Products with constant matrices: their bias, what follows them, and products of one value that become one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..onnx.ir import Graph, Node, OnnxModel, make_node
from ..onnx.node import MS, OURS
from ..onnx.types import DataType
from .base import (
    Level,
    bias_after,
    graph_rule,
    is_float32,
    made_by,
    moved_to,
    node_rule,
    only_user,
    operand_after,
    replaced,
)


@node_rule(Level.EXTENDED, ("", "MatMul"), domain=OURS)
def fuse_linear(graph: Graph, product: Node) -> bool:
    """Add(MatMul(x, weight), bias), weight a constant [K, N], bias a constant [N] -> genai::Linear(x, weight, bias)."""
    weight = graph.constant_tensor(product.input(1))
    if weight is None or len(weight.shape) != 2 or not is_float32(graph, product.input(0)):
        return False
    bias_node = bias_after(graph, product.output(0), weight.shape[1])
    if bias_node is None:
        return False
    addition, bias = bias_node
    return replaced(graph, addition, "Linear", [*product.inputs, bias], domain=OURS, name=product.name)


# Larger weights are not packed, and BLAS knows no activations.
_MAX_BYTES = 1 << 31
# Products that can have a tail -> the place of what is added to their results.
_ADDEND = {(OURS, "Linear"): 3, (MS, "MatMulIntegerToFloat"): 7, (OURS, "IntegerLinear"): 7}
# Operator -> the name of its function.
_FUNCTIONS = {
    (MS, "Gelu"): "gelu",
    (MS, "FastGelu"): "gelu_tanh",
    ("", "Relu"): "relu",
    ("", "Sigmoid"): "sigmoid",
    ("", "Tanh"): "tanh",
}


@node_rule(Level.EXTENDED, *_ADDEND, domain=OURS)
def fuse_linear_addition(graph: Graph, product: Node) -> bool:
    """Linear(x, weight, bias) + y -> Linear(x, weight, bias, y), y being float32 and no constant.

    Kernels see at the run whether y has the product's shape, and else add it afterwards.

    MatMulIntegerToFloat becomes genai::IntegerLinear.
    """
    match = operand_after(graph, product.output(0), "Add") if _is_open(graph, product) else None
    # A constant may yet become the bias.
    if match is None or graph.constant_tensor(match[1]) is not None or not is_float32(graph, match[1]):
        return False
    addition, other = match
    fused = _with_tail(graph, product, addition)
    fused.inputs = [*[product.input(index) for index in range(_ADDEND[product.key])], other]
    graph.update(fused)
    return True


@node_rule(Level.EXTENDED, *_ADDEND, domain=OURS)
def fuse_linear_activation(graph: Graph, product: Node) -> bool:
    """f(Linear(x, weight, bias)) -> Linear with the attribute `function`, where f is an activation of float32 rows.

    MatMulIntegerToFloat becomes genai::IntegerLinear.
    """
    after = only_user(graph, product.output(0)) if _is_open(graph, product) else None
    function = None if after is None else _function(after)
    if after is None or function is None or len([name for name in after.inputs if name]) != 1:
        return False
    _with_tail(graph, product, after).set_attribute("function", function)
    return True


def _is_open(graph: Graph, product: Node) -> bool:
    """Whether a product will be a packed one, and has no tail yet."""
    weight = graph.constant_tensor(product.input(1))
    has_tail = product.input(_ADDEND[product.key]) or product.attribute("function", "")
    if has_tail or weight is None or len(weight.shape) != 2:
        return False
    if product.key == (OURS, "Linear"):
        return 4 * weight.num_elements < _MAX_BYTES
    if weight.dtype not in (DataType.INT8, DataType.UINT8) or not 0 < weight.num_elements < _MAX_BYTES:
        return False
    columns, bias = weight.shape[1], graph.constant_tensor(product.input(6)) if product.input(6) else None
    return (
        _is_known(graph, product.input(3), columns)
        and (not product.input(5) or _is_known(graph, product.input(5), columns))
        and (not product.input(6) or (bias is not None and bias.shape == (columns,)))
        and made_by(graph, product.input(0), "DynamicQuantizeLinear") is not None
    )


def _with_tail(graph: Graph, product: Node, end: Node) -> Node:
    """Put the product, in the form that can have a tail, in the place of itself and of what follows it."""
    fused = moved_to(graph, product, end)
    if product.key == (MS, "MatMulIntegerToFloat"):
        fused.op_type, fused.domain = "IntegerLinear", OURS
    return fused


def _function(node: Node) -> str | None:
    if node.key == ("", "Gelu"):
        return "gelu_tanh" if node.attribute("approximate", "none") == "tanh" else "gelu"
    return _FUNCTIONS.get(node.key)


_LINEAR, _INTEGER = (OURS, "Linear"), (MS, "MatMulIntegerToFloat")
# Of smaller weights the product costs next to nothing.
_MIN_ELEMENTS = 1 << 13
# The operator set in which Split takes its sizes as an input.
_SPLIT_BY_INPUT = 13


@graph_rule(Level.EXTENDED, since=_SPLIT_BY_INPUT)
def join_products(model: OnnxModel, graph: Graph) -> int:
    """Linear(x, w1, b1), Linear(x, w2, b2) ... -> Split(Linear(x, [w1 w2 ...], [b1 b2 ...])), parts being views.

    Likewise MatMulIntegerToFloat, whose scales and zero points become one per column. Only where nothing else reads
    the matrices, which are kept once, in their new form.
    """
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if _fits(graph, node):
            groups.setdefault(_key(graph, node), []).append(node)
    return sum(len(nodes) > 1 and _join(graph, nodes) for nodes in groups.values())


def _fits(graph: Graph, node: Node) -> bool:
    """Whether weight, bias and what belongs to them are constants of this graph and of the usual shapes."""
    if node.key not in (_LINEAR, _INTEGER) or node.attribute("function", "") or len(node.outputs) != 1:
        return False
    weight = graph.initializers.get(node.input(1))
    if weight is None or len(weight.shape) != 2 or weight.num_elements < _MIN_ELEMENTS:
        return False
    if len(graph.consumers(node.input(1))) != 1 or graph.is_output(node.output(0)):
        return False
    columns = weight.shape[1]
    if node.key == _LINEAR:
        return not node.input(3) and weight.dtype is DataType.FLOAT and _per_column(graph, node.input(2), columns)
    is_bytes = weight.dtype in (DataType.INT8, DataType.UINT8)
    points = not node.input(5) or _is_known(graph, node.input(5), columns)
    scales = _is_known(graph, node.input(3), columns)
    return is_bytes and points and scales and _per_column(graph, node.input(6), columns)


def _per_column(graph: Graph, name: str, columns: int) -> bool:
    tensor = graph.constant_tensor(name)
    return tensor is not None and tensor.shape == (columns,) and tensor.dtype is DataType.FLOAT


def _is_known(graph: Graph, name: str, columns: int) -> bool:
    """Whether a value is one constant number, or one per column."""
    tensor = graph.constant_tensor(name)
    return tensor is not None and len(tensor.shape) <= 1 and tensor.num_elements in (1, columns)


def _key(graph: Graph, node: Node) -> tuple[object, ...]:
    """Equal for products that can be one: of the same value, and matrices of the same rows and type."""
    weight = graph.initializers[node.input(1)]
    shared = [node.input(index) for index in ((0,) if node.key == _LINEAR else (0, 2, 4))]
    return node.key, *shared, weight.shape[0], weight.dtype, bool(node.input(5))


def _join(graph: Graph, nodes: Sequence[Node]) -> bool:
    weights = [graph.initializers[node.input(1)].array() for node in nodes]
    if sum(weight.nbytes for weight in weights) >= _MAX_BYTES:
        return False
    first, sizes = nodes[0], [weight.shape[1] for weight in weights]
    inputs = list(first.inputs)
    inputs[1] = graph.add_constant(f"{first.input(1)}/joined", np.concatenate(weights, axis=1))
    for index in (2,) if first.key == _LINEAR else (3, 5, 6):
        if first.input(index):
            values_of = [np.asarray(graph.constant(node.input(index))).reshape(-1) for node in nodes]
            parts = [np.broadcast_to(values, (size,)) for values, size in zip(values_of, sizes, strict=True)]
            inputs[index] = graph.add_constant(f"{first.input(index)}/joined", np.concatenate(parts))
    whole = graph.fresh_name(f"{first.output(0)}/joined")
    cut = graph.add_constant(f"{whole}/sizes", np.asarray(sizes, np.int64))
    outputs = [node.output(0) for node in nodes]
    joined = make_node(first.op_type, inputs, [whole], domain=first.domain, name=first.name)
    graph.insert_before(first, joined, make_node("Split", [whole, cut], outputs, name=f"{first.name}/parts", axis=-1))
    graph.remove_nodes(nodes)
    return True
