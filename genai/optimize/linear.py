"""Products with constant matrices: fusion with biases, additions and activations, and joining products of one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..onnx.ir import Graph, Node, OnnxModel, make_node
from ..onnx.node import MS, OURS
from ..onnx.types import DataType, TensorType
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
    other_input,
    replaced,
)
from .convolutions import batch_norm_step, float_constant


@node_rule(Level.EXTENDED, ("", "MatMul"), domain=OURS)
def fuse_linear(graph: Graph, product: Node) -> bool:
    """Add(MatMul(x, weight), bias) with constant weight [K, N] and bias [N] -> genai::Linear(x, weight, bias)."""
    weight = graph.constant_tensor(product.input(1))
    if weight is None or len(weight.shape) != 2 or not is_float32(graph, product.input(0)):
        return False
    bias_node = bias_after(graph, product.output(0), weight.shape[1])
    if bias_node is None:
        return False
    addition, bias = bias_node
    return replaced(graph, addition, "Linear", [*product.inputs, bias], domain=OURS, name=product.name)


@node_rule(Level.BASIC, ("", "BatchNormalization"), since=7)
def fold_product_batch_norm(graph: Graph, norm: Node) -> bool:
    """BatchNormalization(Gemm(x, w, b)) with constants, in inference mode -> Gemm(x, w', b').

    The rule also applies to MatMul(x, w) of matrices, and to MatMul(x, w) + b with a constant b per column.
    """
    source, terms = norm.input(0), _product_of(graph, norm.input(0))
    step = None if terms is None else batch_norm_step(graph, norm)
    if terms is None or step is None or only_user(graph, source) is not norm:
        return False
    nodes, (weight, bias), attributes = terms
    factor, shift = step
    columns = weight.shape[0 if attributes.get("transB") else 1]
    if factor.shape != (columns,):
        return False
    with np.errstate(over="ignore"):
        scaled = (weight * (factor[:, None] if attributes.get("transB") else factor)).astype(np.float32)
        moved = (bias * factor + shift).astype(np.float32)
    if not (np.isfinite(scaled).all() and np.isfinite(moved).all()):
        return False
    added = [graph.add_constant(f"{source}_{part}", new) for part, new in (("weight", scaled), ("bias", moved))]
    del norm.outputs[1:]  # their names are empty
    replaced(graph, norm, "Gemm", [nodes[0].input(0), *added], name=nodes[0].name, **attributes)
    graph.remove_nodes(nodes)
    return True


def _product_of(
    graph: Graph, name: str
) -> tuple[list[Node], tuple[NDArray[np.float64], NDArray[np.float64]], dict[str, Any]] | None:
    """Return the nodes that compute x @ weight + bias, both constants in float64, and Gemm's attributes, or None."""
    product, addition = graph.producer(name), made_by(graph, name, "Add")
    given, others = "", []
    if addition is not None:
        made = [source for source in addition.inputs if made_by(graph, source, "MatMul") is not None]
        other = other_input(addition, made[0]) if len(made) == 1 else None
        if other is None or only_user(graph, made[0]) is not addition:
            return None
        product, given, others = graph.producer(made[0]), other, [addition]
    if product is None or product.key not in (("", "Gemm"), ("", "MatMul")):
        return None
    attributes: dict[str, Any] = {}
    scale_of_product = scale_of_bias = 1.0
    if product.op_type == "Gemm":
        given = product.input(2)
        attributes = {key: 1 for key in ("transA", "transB") if product.attribute(key, 0)}
        scale_of_product, scale_of_bias = (float(product.attribute(key, 1.0)) for key in ("alpha", "beta"))
    elif _rank(graph, product.input(0)) != 2:
        return None
    weight, bias = float_constant(graph, product.input(1)), np.zeros(1)
    if weight is None or weight.ndim != 2:
        return None
    if given:
        found, columns = float_constant(graph, given), weight.shape[0 if attributes.get("transB") else 1]
        if found is None or found.ndim > 2 or (found.size != 1 and (found.size, found.shape[-1]) != (columns, columns)):
            return None
        bias = found.reshape(-1)
    return [product, *others], (weight * scale_of_product, bias * scale_of_bias), attributes


def _rank(graph: Graph, name: str) -> int | None:
    known = graph.type_of(name)
    return len(known.shape) if isinstance(known, TensorType) and known.shape is not None else None


# Weights of this size or more are not packed, and BLAS has no activations.
_MAX_BYTES = 1 << 31
# Products that support an epilogue (activation or addition) -> the input index of the addend.
_ADDEND = {(OURS, "Linear"): 3, (MS, "MatMulIntegerToFloat"): 7, (OURS, "IntegerLinear"): 7}
# Operator -> the name of its kernel function.
_FUNCTIONS = {
    (MS, "Gelu"): "gelu",
    (MS, "FastGelu"): "gelu_tanh",
    ("", "Relu"): "relu",
    ("", "Sigmoid"): "sigmoid",
    ("", "Tanh"): "tanh",
}


@node_rule(Level.EXTENDED, *_ADDEND, domain=OURS)
def fuse_linear_addition(graph: Graph, product: Node) -> bool:
    """Linear(x, weight, bias) + y -> Linear(x, weight, bias, y), for a float32 y that is not constant.

    The kernel checks at run time whether y has the product's shape; if the shapes differ, it adds y afterwards.

    MatMulIntegerToFloat becomes genai::IntegerLinear.
    """
    match = operand_after(graph, product.output(0), "Add") if _is_open(graph, product) else None
    # A constant may become the bias later.
    if match is None or graph.constant_tensor(match[1]) is not None or not is_float32(graph, match[1]):
        return False
    addition, other = match
    fused = _with_tail(graph, product, addition)
    fused.inputs = [*[product.input(index) for index in range(_ADDEND[product.key])], other]
    graph.update(fused)
    return True


@node_rule(Level.EXTENDED, *_ADDEND, domain=OURS)
def fuse_linear_activation(graph: Graph, product: Node) -> bool:
    """f(Linear(x, weight, bias)) -> Linear with the attribute `function`, for an activation f of float32 rows.

    MatMulIntegerToFloat becomes genai::IntegerLinear.
    """
    after = only_user(graph, product.output(0)) if _is_open(graph, product) else None
    function = None if after is None else _function(after)
    if after is None or function is None or len([name for name in after.inputs if name]) != 1:
        return False
    _with_tail(graph, product, after).set_attribute("function", function)
    return True


def _is_open(graph: Graph, product: Node) -> bool:
    """Return True if a product is to be packed and has no epilogue yet."""
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
    """Replace the product and the node after it with a product that supports an epilogue; return the new product."""
    fused = moved_to(graph, product, end)
    if product.key == (MS, "MatMulIntegerToFloat"):
        fused.op_type, fused.domain = "IntegerLinear", OURS
    return fused


def _function(node: Node) -> str | None:
    if node.key == ("", "Gelu"):
        return "gelu_tanh" if node.attribute("approximate", "none") == "tanh" else "gelu"
    return _FUNCTIONS.get(node.key)


_LINEAR, _INTEGER = (OURS, "Linear"), (MS, "MatMulIntegerToFloat")
# Joining products with smaller weights would save too little time.
_MIN_ELEMENTS = 1 << 13
# The first operator set in which Split takes its sizes as an input.
_SPLIT_BY_INPUT = 13


@graph_rule(Level.EXTENDED, since=_SPLIT_BY_INPUT)
def join_products(model: OnnxModel, graph: Graph) -> int:
    """Linear(x, w1, b1), Linear(x, w2, b2) ... -> Split(Linear(x, [w1 w2 ...], [b1 b2 ...])); the parts are views.

    The rule also applies to MatMulIntegerToFloat, with one scale and zero point per column. No other node may read the
    matrices, because only the joined matrix is stored.
    """
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if _fits(graph, node):
            groups.setdefault(_key(graph, node), []).append(node)
    return sum(len(nodes) > 1 and _join(graph, nodes) for nodes in groups.values())


def _fits(graph: Graph, node: Node) -> bool:
    """Return True if weight, bias, scales and zero points are constants of this graph with the usual shapes."""
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
    """Return True if a value is a constant number, or a constant with one number per column."""
    tensor = graph.constant_tensor(name)
    return tensor is not None and len(tensor.shape) <= 1 and tensor.num_elements in (1, columns)


def _key(graph: Graph, node: Node) -> tuple[object, ...]:
    """Return a key that is equal for products that can be joined: same input, and matrices of equal height and type."""
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
