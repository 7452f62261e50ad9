"""Rules for decoders: fused operators for which kernels exist, and wider floats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..onnx.ir import Attribute, DataType, Graph, Node, OnnxModel, OnnxTensor, make_node
from ..onnx.node import MS, OURS
from ..onnx.own_functions import QUANTIZED_PRODUCT
from ..onnx.types import TensorType
from ..ops.weights import BLOCK_PRODUCT
from .base import Level, Pattern, Rewrite, bias_after, find, made_by, node_rule, replaced

_SILU = (
    Pattern("Mul", "gate", Pattern("Sigmoid", "gate", once=True, name="squashed"), once=True, name="silu"),
    Pattern("Swish", "gate", once=True, name="silu"),
)


@node_rule(Level.EXTENDED, ("", "Mul"), domain=OURS)
def fuse_swiglu(graph: Graph, node: Node) -> bool:
    """Mul(Mul(gate, Sigmoid(gate)), up) or Mul(Swish(gate), up), operands in any order -> genai::SwiGLU(gate, up)."""
    match = find(graph, node, Pattern("Mul", _SILU, "up"))
    inner = [producer for name in ("silu", "squashed") if (producer := graph.producer(match.get(name, ""))) is not None]
    if not inner or inner[0].attribute("alpha", 1.0) != 1.0 or not _same_shape(graph, match["gate"], match["up"]):
        return False
    replaced(graph, node, "SwiGLU", [match["gate"], match["up"]], domain=OURS)
    graph.remove_nodes(inner)
    return True


def _same_shape(graph: Graph, left: str, right: str) -> bool:
    """Return True if both sides are per-token rows of equal width; broadcasting is not fused."""
    first, second = (getattr(graph.type_of(name), "shape", None) for name in (left, right))
    if first is None or second is None or len(first) != len(second):
        return False
    return bool(first[-1] == second[-1] is not None)


# The input index of the bias, for each product.
_BIAS_INPUTS = {(MS, BLOCK_PRODUCT): 5, (OURS, QUANTIZED_PRODUCT): 7}


@node_rule(Level.EXTENDED, *_BIAS_INPUTS)
def fuse_matmul_bias(graph: Graph, product: Node) -> bool:
    """Add(product(x, …), bias) with a constant bias [N] -> product(x, …, bias)."""
    bias_node = bias_after(graph, product.output(0), int(product.attribute("N", 0)))
    index = _BIAS_INPUTS[product.key]
    if bias_node is None or product.input(index):
        return False
    addition, bias = bias_node
    product.inputs += [""] * (index + 1 - len(product.inputs))
    product.inputs[index] = bias
    graph.remove_nodes([addition])
    product.outputs[:] = addition.outputs
    graph.update(product)
    return True


_QUERY, _KEY, _COS, _LONG_COS, _Q_NORM, _K_NORM = 0, 1, 3, 5, 8, 9


def fuse_rotation(position_ids: str) -> Rewrite:
    """PagedAttention(RotaryEmbedding(q), RotaryEmbedding(k), v) -> PagedAttention(q, k, v, cos, sin) with do_rotary.

    Args:
        position_ids: graph input with the positions of both rotations; attention uses the same positions in each step.
    """

    @node_rule(Level.EXTENDED, (OURS, "PagedAttention"))
    def fuse_rotation(graph: Graph, attention: Node) -> bool:
        inputs = [*attention.inputs, *[""] * (_K_NORM + 1 - len(attention.inputs))]
        if attention.attribute("do_rotary", 0) or any(inputs[i] for i in (_COS, _LONG_COS, _Q_NORM, _K_NORM)):
            return False
        query, key = (
            _rotation(graph, attention, inputs[index], int(attention.attribute(heads, 0)), position_ids)
            for index, heads in ((_QUERY, "num_heads"), (_KEY, "kv_num_heads"))
        )
        if query is None or key is None or query.inputs[1:4] != key.inputs[1:4]:
            return False
        interleaved = int(query.attribute("interleaved", 0))
        if interleaved != int(key.attribute("interleaved", 0)):
            return False
        inputs[_QUERY], inputs[_KEY] = query.inputs[0], key.inputs[0]
        inputs[_COS : _COS + 2] = query.inputs[2:4]
        attention.inputs = inputs
        attention.set_attribute("do_rotary", 1)
        attention.set_attribute("rotary_interleaved", interleaved)
        graph.update(attention)
        graph.remove_nodes([query, key])
        return True

    return fuse_rotation


def _rotation(graph: Graph, attention: Node, name: str, heads: int, position_ids: str) -> Node | None:
    """Return the rotation that computes a value for this attention node only, if attention supports it, else None."""
    node = graph.producer(name) if name else None
    if node is None or node.key != (MS, "RotaryEmbedding"):
        return None
    if graph.consumers(name) != [attention] or graph.is_output(name) or node.inputs[1] != position_ids:
        return None
    if float(node.attribute("scale", 1.0)) != 1.0 or int(node.attribute("is_packed_batching", 0)):
        return None
    shape = getattr(graph.type_of(node.inputs[0]), "shape", None)
    table = getattr(graph.type_of(node.inputs[2]), "shape", None)
    if shape is None or table is None or len(shape) != 3 or not isinstance(table[1], int):
        return None
    own_heads = int(node.attribute("num_heads", 0))
    if not own_heads and isinstance(shape[2], int):
        own_heads = shape[2] // (2 * table[1])
    return node if own_heads == heads else None


_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)


def has_narrow_floats(graph: Graph) -> bool:
    """Return True if a constant, an input or a Cast of a graph is float16 or bfloat16."""
    types = [value.type for value in graph.inputs]
    if any(isinstance(type_, TensorType) and type_.dtype in _NARROW for type_ in types):
        return True
    if any(tensor.dtype in _NARROW for tensor in graph.initializers.values()):
        return True
    return any(node.key == ("", "Cast") and node.attribute("to") in _NARROW for node in graph.nodes)


def widen_floats(model: OnnxModel) -> None:
    """Convert float16 and bfloat16 to float32 everywhere; constants are stored unchanged and followed by a Cast.

    Intermediate results are no longer rounded to 16 bits, so results are closer to the exact results.
    """
    for graph in list(model.graphs()):
        for value in (*graph.inputs, *graph.outputs, *graph.values.values()):
            if isinstance(value.type, TensorType) and value.type.dtype in _NARROW:
                value.type = replace(value.type, dtype=DataType.FLOAT)
        for node in graph.nodes:
            for name, attribute in node.attributes.items():
                if node.key == ("", "Cast") and name == "to" and attribute.value in _NARROW:
                    node.attributes[name] = Attribute.of(name, int(DataType.FLOAT))
                elif isinstance(attribute.value, OnnxTensor) and attribute.value.dtype in _NARROW:
                    wide = attribute.value.array().astype(np.float32)
                    node.attributes[name] = Attribute.of(name, OnnxTensor.from_array(attribute.value.name, wide))
        casts = []
        for tensor in [tensor for tensor in graph.initializers.values() if tensor.dtype in _NARROW]:
            name = graph.fresh_name(f"{tensor.name}/float32")
            graph.replace_uses(tensor.name, name)
            casts.append(Node("Cast", [tensor.name], [name], "", name, {"to": Attribute.of("to", int(DataType.FLOAT))}))
        graph.nodes[:0] = casts
        graph.invalidate()


_PRODUCTS = (("", "MatMul"), ("", "Gemm"))


@node_rule(Level.EXTENDED, *_PRODUCTS)
def read_narrow_matrices(graph: Graph, node: Node) -> bool:
    """Apply read_narrow_weights to MatMul and Gemm only, whose results keep the type of x."""
    return _read_narrow(graph, node, 1)


@node_rule(Level.EXTENDED, *_PRODUCTS, ("", "Gather"))
def read_narrow_weights(graph: Graph, node: Node) -> bool:
    """MatMul(x, Cast(w)) -> MatMul(x, w) for a constant w of 16 bits, and the same for Gemm and Gather.

    Kernels read 16-bit weights unchanged. As float32 constants, they would take twice the memory. A Transpose may
    follow the Cast.
    """
    return _read_narrow(graph, node, 0 if node.op_type == "Gather" else 1)


def _read_narrow(graph: Graph, node: Node, index: int) -> bool:
    name, turn = node.input(index), None
    if (found := made_by(graph, name, "Transpose")) is not None:
        turn, name = found, found.input(0)
    cast = made_by(graph, name, "Cast")
    tensor = None if cast is None else graph.constant_tensor(cast.input(0))
    if cast is None or tensor is None or tensor.dtype not in _NARROW or len(tensor.shape) != 2:
        return False
    if cast.attribute("to") != DataType.FLOAT:
        return False
    narrow = tensor.name
    if turn is not None:
        narrow = graph.fresh_name(f"{tensor.name}/transposed")
        graph.insert_before(node, make_node("Transpose", [tensor.name], [narrow], **turn.attribute_values()))
    node.inputs[index] = narrow
    graph.update(node)
    return True
