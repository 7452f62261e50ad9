"""What follows a product with a constant matrix becomes part of it: an addition, or an activation of its results."""

from __future__ import annotations

from ..ir import Graph, Model, Node
from ..types import DataType
from .base import Level, fuse_nodes
from .linear import DOMAIN, OP_TYPE
from .patterns import is_float32, made_by, only_user, other_input

MS = "com.microsoft"
INTEGER_OP_TYPE = "IntegerLinear"
# Larger weights are not packed, and BLAS knows no activations.
_MAX_BYTES = 1 << 31
# Products that can have a tail -> the place of what is added to their results.
_ADDEND = {(DOMAIN, OP_TYPE): 3, (MS, "MatMulIntegerToFloat"): 7, (DOMAIN, INTEGER_OP_TYPE): 7}
# Operator -> the function's name in `kernels.cpu.rowwise.unary`.
_FUNCTIONS = {
    (MS, "Gelu"): "gelu",
    (MS, "FastGelu"): "gelu_tanh",
    ("", "Relu"): "relu",
    ("", "Sigmoid"): "sigmoid",
    ("", "Tanh"): "tanh",
}


class FuseLinearAddition:
    """Linear(x, weight, bias) + y -> Linear(x, weight, bias, y), y being float32 and no constant.

    Kernels see at the run whether y has the product's shape, and else add it afterwards.

    MatMulIntegerToFloat becomes genai::IntegerLinear.
    """

    name = "fuse_linear_addition"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return fuse_nodes(model, _fuse_addition, DOMAIN)


class FuseLinearActivation:
    """f(Linear(x, weight, bias)) -> Linear with the attribute `function`, where f is an activation of float32 rows.

    MatMulIntegerToFloat becomes genai::IntegerLinear.
    """

    name = "fuse_linear_activation"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return fuse_nodes(model, _fuse, DOMAIN)


def _fuse_addition(graph: Graph, product: Node) -> bool:
    if product.key not in _ADDEND or product.input(_ADDEND[product.key]) or not _is_open(graph, product):
        return False
    addition = only_user(graph, product.output(0))
    if addition is None or addition.key != ("", "Add"):
        return False
    other = other_input(addition, product.output(0))
    # A constant may yet become the bias.
    if other is None or graph.constant_tensor(other) is not None or not is_float32(graph, other):
        return False
    fused = _with_tail(product, addition)
    place = _ADDEND[product.key]
    fused.inputs = [*[product.input(index) for index in range(place)], other]
    graph.replace_node(addition, fused)
    graph.remove_nodes([product])
    return True


def _fuse(graph: Graph, product: Node) -> bool:
    if product.key not in _ADDEND or product.input(_ADDEND[product.key]) or not _is_open(graph, product):
        return False
    after = only_user(graph, product.output(0))
    function = None if after is None else _function(after)
    if after is None or function is None or len([name for name in after.inputs if name]) != 1:
        return False
    fused = _with_tail(product, after)
    fused.set_attribute("function", function)
    graph.replace_node(after, fused)
    graph.remove_nodes([product])
    return True


def _is_open(graph: Graph, product: Node) -> bool:
    """Whether a product will be a packed one, and has no function yet."""
    weight = graph.constant_tensor(product.input(1))
    if weight is None or len(weight.shape) != 2 or product.attribute("function", ""):
        return False
    if product.key == (DOMAIN, OP_TYPE):
        return 4 * weight.num_elements < _MAX_BYTES
    if weight.dtype not in (DataType.INT8, DataType.UINT8) or not 0 < weight.num_elements < _MAX_BYTES:
        return False
    columns, bias = weight.shape[1], graph.constant_tensor(product.input(6)) if product.input(6) else None
    return (
        _has_size(graph, product.input(3), (1, columns))
        and (not product.input(5) or _has_size(graph, product.input(5), (1, columns)))
        and (not product.input(6) or (bias is not None and bias.shape == (columns,)))
        and made_by(graph, product.input(0), "DynamicQuantizeLinear") is not None
    )


def _has_size(graph: Graph, name: str, sizes: tuple[int, ...]) -> bool:
    tensor = graph.constant_tensor(name)
    return tensor is not None and len(tensor.shape) <= 1 and tensor.num_elements in sizes


def _with_tail(product: Node, end: Node) -> Node:
    """The product, in the form that can have a tail, making what `end` made."""
    fused = product.copy()
    if product.key == (MS, "MatMulIntegerToFloat"):
        fused.op_type, fused.domain = INTEGER_OP_TYPE, DOMAIN
    fused.outputs = list(end.outputs)
    return fused


def _function(node: Node) -> str | None:
    if node.key == ("", "Gelu"):
        return "gelu_tanh" if node.attribute("approximate", "none") == "tanh" else "gelu"
    return _FUNCTIONS.get(node.key)
