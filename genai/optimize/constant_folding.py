"""Computes nodes whose inputs are all constant, once, and stores the results as initializers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.ops.registry import evaluated

from ..onnx.ir import DataType, Graph, Node, OnnxModel, OnnxTensor, make_node
from ..onnx.node import NEW_EACH_TIME
from ..onnx.types import TensorType
from .base import Level, graph_rule
from .shapes import infer_node
from .simplify import changes_nothing

# A node is not folded if its inputs or any output exceed this size, or if an output's size is unknown before folding,
# because the memory would cost more than the time saved.
_MAX_BYTES = 8 << 20
# Quantised weights are not folded, because they are smaller, and because other rules and kernels match them.
_KEPT = frozenset({"DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear"})
# The results of these operators depend only on the types of their inputs.
_READS_NO_ELEMENTS = frozenset({"Shape", "Size"})
# The results of these operators have at most as many elements as their inputs, so their size need not be inferred
# before they are computed.
_BOUNDED = frozenset(("", name) for name in "Cast Concat Reshape Slice Squeeze Transpose Unsqueeze".split())
# Operators that may be folded: array operations with time and memory bounded by the sizes of their inputs and outputs.
# Other operators rarely have constant inputs, and some can be constructed to run for ever.
_FOLDABLE = frozenset(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr
    BitwiseXor BlackmanWindow Cast CastLike Ceil Celu Clip Concat ConstantOfShape Cos Cosh CumSum DepthToSpace Div Elu
    Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm Greater GreaterOrEqual
    HammingWindow HannWindow HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log LogSoftmax MatMul
    Max Mean Min Mish Mod Mul Neg Not OneHot Or PRelu Pad Pow Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round
    ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth
    Split Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu Tile Transpose Trilu Unsqueeze Where Xor
    """.split()
)


def evaluate(node: Node, inputs: Mapping[str, NDArray[Any]], version: int) -> Sequence[Any]:
    """Compute each named output with the node's kernel. Raises NotImplementedError if the node must not be folded."""
    domain, op_type = node.key
    if domain != "" or op_type not in _FOLDABLE:
        raise NotImplementedError(f"{op_type} of domain {domain!r} is not folded")
    if op_type.startswith("Reduce") and any(array.size == 0 for array in inputs.values()):
        raise NotImplementedError("NumPy warns about some reductions of empty arrays")
    values = evaluated(node, version, [inputs.get(name) for name in node.inputs])
    return [np.asarray(value) for name, value in zip(node.outputs, values, strict=False) if name]


@graph_rule(Level.BASIC)
def lift_constants(model: OnnxModel, graph: Graph) -> int:
    """Convert Constant nodes to initializers; this needs no types, and makes type inference cheaper."""
    return _lifted(graph)


@graph_rule(Level.BASIC)
def fold_before_inference(model: OnnxModel, graph: Graph) -> int:
    """Fold as `fold_constants` does, before types are known, so that type inference visits fewer nodes.

    Nodes that other rules treat differently are left to those rules: nodes that change nothing, which are removed, and
    nodes with 16-bit floats, which are computed in float32.
    """
    return _folded(model, graph, lambda node, tensors: not changes_nothing(graph, node, model) and _is_wide(tensors))


@graph_rule(Level.BASIC)
def fold_constants(model: OnnxModel, graph: Graph) -> int:
    """Convert nodes with constant inputs, and Constant nodes, to initializers; graph outputs become Constant nodes."""
    return _lifted(graph) + _folded(model, graph, lambda node, tensors: True)


def _is_wide(tensors: Iterable[OnnxTensor]) -> bool:
    return not any(tensor.dtype in (DataType.FLOAT16, DataType.BFLOAT16) for tensor in tensors)


def _folded(model: OnnxModel, graph: Graph, accepts: Callable[[Node, Sequence[OnnxTensor]], bool]) -> int:
    """Fold the nodes that `accepts` returns True for, given the node with its results or its inputs."""
    folded: list[Node] = []
    for node in list(graph.nodes):
        tensors = _results(model, graph, node, accepts)
        if tensors is None or not accepts(node, tensors):
            continue
        for tensor in tensors:
            if graph.is_output(tensor.name):
                graph.insert_before(node, make_node("Constant", [], [tensor.name], value=tensor))
            else:
                graph.add_initializer(tensor)
            graph.values.pop(tensor.name, None)
        folded.append(node)
    graph.remove_nodes(folded)
    return len(folded)


def _lifted(graph: Graph) -> int:
    lifted = []
    for node in graph.nodes:
        tensor = graph.constant_tensor(node.output(0)) if node.key == ("", "Constant") else None
        if tensor is not None and not graph.is_output(tensor.name):
            graph.add_initializer(tensor)
            graph.values.pop(tensor.name, None)
            lifted.append(node)
    graph.remove_nodes(lifted)
    return len(lifted)


def _results(
    model: OnnxModel, graph: Graph, node: Node, accepts: Callable[[Node, Sequence[OnnxTensor]], bool]
) -> list[OnnxTensor] | None:
    """Return the constants that replace a node, or None if the node cannot be replaced."""
    known: dict[str, OnnxTensor] = {}
    for name in filter(None, node.inputs):  # for most nodes, the first input is not constant, which ends the loop
        tensor = graph.constant_tensor(name)
        if tensor is None:
            return None
        known[name] = tensor
    version = model.opset_version(node.domain)
    if version is None or not _may_fold(model, node) or not accepts(node, [*known.values()]):
        return None
    total = sum(tensor.nbytes for tensor in known.values())
    if total > _MAX_BYTES and node.op_type not in _READS_NO_ELEMENTS:
        return None
    expected = None
    if node.key not in _BOUNDED:
        expected = infer_node(node, version, {name: t.type for name, t in known.items()}, known)
        if not all(_fits(expected.get(name)) for name in node.outputs if name):
            return None
    try:
        values = evaluate(node, {name: tensor.array() for name, tensor in known.items()}, version)
    except Exception:  # On any error, the node is not folded; if it runs, it reports the error itself.
        return None
    return _checked_tensors(node, values, expected)


def _fits(expected: Any) -> bool:
    if not isinstance(expected, TensorType) or expected.num_elements is None:
        return False
    # String sizes are unknown in advance; each string takes at least one pointer.
    item_bytes = 8 if expected.dtype is DataType.STRING else expected.dtype.numpy_dtype.itemsize
    return expected.num_elements * item_bytes <= _MAX_BYTES


def _may_fold(model: OnnxModel, node: Node) -> bool:
    domain, op_type = node.key
    if domain == "" and op_type in NEW_EACH_TIME | _KEPT:
        return False
    if model.function(node) is not None or node.subgraphs():
        return False
    return any(node.outputs) and not any(a.ref_attr_name for a in node.attributes.values())


def _checked_tensors(node: Node, values: Sequence[Any], expected: Mapping[str, Any] | None) -> list[OnnxTensor] | None:
    """Return the results as tensors, or None if a result is too large or does not have the expected type."""
    names = [name for name in node.outputs if name]
    if len(values) != len(names):
        return None
    tensors = []
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, np.ndarray | np.generic):
            return None
        tensor = OnnxTensor.from_array(name, value)
        if not _fits(tensor.type):
            return None
        if expected is not None and tensor.type != TensorType(expected[name].dtype, expected[name].shape):
            return None
        tensors.append(tensor)
    return tensors
