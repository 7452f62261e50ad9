"""Folds shapes that are known before a run to constants, and makes reshapes copy dimensions of their input.

Shape inference names an unknown dimension only if the model does. In this module, every dimension has a name, so that
two values are known to have the same number of rows even if that number is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set as AbstractSet
from dataclasses import replace

import numpy as np

from ..onnx.ir import DataType, Graph, Node, OnnxModel, OnnxTensor
from ..onnx.node import MS, OURS
from ..onnx.types import ShapeValue, TensorType, Type, broadcast_dims
from .base import Level, graph_rule, made_by, node_rule, pass_through
from .shape_values import MAX_ELEMENTS, computed_value, constant_value, is_shape_computation

Extents = tuple[int | str, ...]

_SHAPE_PRESERVING = frozenset(
    {
        ("", "LayerNormalization"), ("", "Softmax"), ("", "Gelu"), ("", "Relu"), ("", "Tanh"), ("", "Erf"),
        ("", "Sigmoid"), ("", "Cast"), ("", "Identity"), ("", "QuantizeLinear"), ("", "DequantizeLinear"),
        ("", "DynamicQuantizeLinear"), (MS, "Gelu"), (MS, "FastGelu"),
    }
)  # fmt: skip
# Products with a constant matrix, and the index of the input that is added to their results (0 = none).
_PRODUCTS = {
    ("", "MatMul"): 0, ("", "MatMulInteger"): 0, (OURS, "Linear"): 3, (MS, "MatMulIntegerToFloat"): 0,
    (OURS, "IntegerLinear"): 7,
}  # fmt: skip
_SUMS = frozenset({("", "Add"), ("", "Sub"), ("", "Mul"), ("", "Div")})


class KnownExtents:
    """The dimensions of a graph's values; call `follow` for the nodes in order."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._extents: dict[str, Extents | None] = {}

    def of(self, name: str) -> Extents | None:
        """Return a number or a name for each axis, or None if the rank is unknown."""
        if name not in self._extents:
            known = self._graph.type_of(name) if name else None
            shape = known.shape if isinstance(known, TensorType) else None
            self._extents[name] = (
                None
                if shape is None
                else tuple(f"{name}[{axis}]" if extent is None else extent for axis, extent in enumerate(shape))
            )
        return self._extents[name]

    def type_of(self, name: str) -> TensorType | None:
        """Return a value's type with these dimensions, or None if unknown."""
        known, extents = self._graph.type_of(name) if name else None, self.of(name)
        return replace(known, shape=extents) if isinstance(known, TensorType) and extents is not None else None

    def follow(self, node: Node) -> None:
        """Propagate the dimensions of a node's inputs to its first output, if its operator preserves dimensions."""
        rule = _RULES.get(node.key)
        derived = None if rule is None else rule(self, node)
        inferred = self.of(node.output(0))
        if derived is None or (inferred is not None and len(inferred) != len(derived)):
            return
        numbers = inferred or derived
        self._extents[node.output(0)] = tuple(
            number if isinstance(number, int) else extent for number, extent in zip(numbers, derived, strict=True)
        )

    def preserved(self, node: Node) -> Extents | None:
        return self.of(node.input(0))

    def product(self, node: Node) -> Extents | None:
        x, weight = self.of(node.input(0)), self._graph.constant_tensor(node.input(1))
        if not x or weight is None or len(weight.shape) != 2:
            return None
        result, addend = (*x[:-1], weight.shape[1]), _PRODUCTS[node.key]
        return self._broadcast(node, result, self.of(node.input(addend))) if addend and node.input(addend) else result

    def elementwise(self, node: Node) -> Extents | None:
        return self._broadcast(node, self.of(node.input(0)), self.of(node.input(1)))

    def _broadcast(self, node: Node, a: Extents | None, b: Extents | None) -> Extents | None:
        if a is None or b is None:
            return None
        names = (f"{node.output(0)}[{axis}]" for axis in range(max(len(a), len(b))))
        return tuple(name if dim is None else dim for dim, name in zip(broadcast_dims(a, b), names, strict=True))

    def turned(self, node: Node) -> Extents | None:
        x = self.of(node.input(0))
        order = None if x is None else node.attribute("perm", None) or range(len(x))[::-1]
        return None if x is None or order is None or sorted(order) != [*range(len(x))] else tuple(x[i] for i in order)

    def reshaped(self, node: Node) -> Extents | None:
        x, target = self.of(node.input(0)), self._graph.constant_tensor(node.input(1))
        if x is None or target is None or len(target.shape) != 1 or node.attribute("allowzero", 0):
            return None
        extents: list[int | str] = []
        for axis, extent in enumerate(target.array().tolist()):
            if extent == 0 and axis >= len(x):
                return None
            extents.append(x[axis] if extent == 0 else f"{node.output(0)}[{axis}]" if extent < 0 else extent)
        return tuple(extents)

    def attention(self, node: Node) -> Extents | None:
        query, keys, values = (self.of(node.input(index)) for index in range(3))
        if query is None or keys is None or values is None or not query[:2] == keys[:2] == values[:2]:
            return None
        return (*query[:3], *values[3:])


_RULES: dict[tuple[str, str], Callable[[KnownExtents, Node], Extents | None]] = {
    **dict.fromkeys(_SHAPE_PRESERVING, KnownExtents.preserved),
    **dict.fromkeys(_PRODUCTS, KnownExtents.product),
    **dict.fromkeys(_SUMS, KnownExtents.elementwise),
    ("", "Transpose"): KnownExtents.turned,
    ("", "Reshape"): KnownExtents.reshaped,
    (OURS, "DenseAttention"): KnownExtents.attention,
}


# In a Reshape's target, this number copies the input's dimension at the same position.
_COPY = 0
_FOLDED = ("Shape", "Size", "Gather")


@graph_rule(Level.BASIC)
def fold_known_shapes(model: OnnxModel, graph: Graph) -> int:
    """Shape(x), Size(x), and elements of shapes such as Shape(x)[2] -> constants, if the dimensions are known."""
    folded = []
    # Constant folding handles the arithmetic.
    targets = {
        node.output(0) for node in graph.nodes if node.op_type in _FOLDED and not graph.is_output(node.output(0))
    }
    for node, value in _shape_values(model, graph, graph.type_of, targets):
        if value is None or node.output(0) not in targets or not all(isinstance(dim, int) for dim in value.dims):
            continue
        known = graph.type_of(node.output(0))
        if node.op_type == "Gather" and not (isinstance(known, TensorType) and known.dtype is DataType.INT64):
            continue
        array = np.array(value.dims, np.int64).reshape(value.shape)
        graph.values.pop(node.output(0), None)
        graph.add_initializer(OnnxTensor.from_array(node.output(0), array))
        folded.append(node)
    graph.remove_nodes(folded)
    return len(folded)


@graph_rule(Level.EXTENDED)
def fold_known_reshapes(model: OnnxModel, graph: Graph) -> int:
    """Reshape(x, Concat(Shape(x)[0], Shape(x)[1], [12, 64])) -> Reshape(x, [0, 0, 12, 64]).

    Each dimension of the target must be a number, or x's dimension at the same position (see `KnownExtents`).
    """
    reshapes = [node for node in graph.nodes if _is_computed(graph, node)]
    if not reshapes:
        return 0
    extents = KnownExtents(graph)
    for node in graph.nodes:
        extents.follow(node)
    targets = {
        node.output(0): value
        for node, value in _shape_values(model, graph, extents.type_of, {node.input(1) for node in reshapes})
    }
    return sum(_fold(graph, node, targets, extents) for node in reshapes)


def _is_computed(graph: Graph, node: Node) -> bool:
    """Return True for a Reshape whose target is not constant."""
    return node.key == ("", "Reshape") and len(node.inputs) == 2 and graph.constant_tensor(node.inputs[1]) is None


def _shape_values(
    model: OnnxModel, graph: Graph, type_of: Callable[[str], Type | None], targets: AbstractSet[str]
) -> Iterator[tuple[Node, ShapeValue | None]]:
    """Yield the nodes that compute shapes for the target values, in order, with the known parts of their results."""
    needed, computing = set(targets), []
    for node in reversed(graph.nodes):
        if node.output(0) not in needed or not is_shape_computation(node) or model.function(node) is not None:
            continue
        if not any(a.ref_attr_name for a in node.attributes.values()):
            computing.append(node)
            needed.update(node.inputs)
    values: dict[str, ShapeValue | None] = {}
    version = model.opset_version() or 1
    for node in reversed(computing):
        # Shape and Size need the type of their first input; no other operator needs types.
        types = [type_of(node.inputs[0])] if node.op_type in ("Shape", "Size") else []
        inputs = [values[name] if name in values else _constant(graph, name) for name in node.inputs]
        values[node.output(0)] = value = computed_value(node, version, inputs, types)
        yield node, value


def _constant(graph: Graph, name: str) -> ShapeValue | None:
    tensor = graph.constant_tensor(name)
    return constant_value(tensor.array()) if tensor is not None and tensor.num_elements <= MAX_ELEMENTS else None


def _fold(graph: Graph, node: Node, targets: Mapping[str, ShapeValue | None], known: KnownExtents) -> bool:
    target, source = targets.get(node.input(1)), known.of(node.input(0))
    if target is None or len(target.shape) != 1 or source is None:
        return False
    if any(item.ref_attr_name for item in node.attributes.values()):
        return False
    if node.attribute("allowzero", 0) and 0 in target.dims:  # a dimension of 0, which the folded shape cannot express
        return False
    extents: list[int] = []
    for index, extent in enumerate(target.dims):
        if isinstance(extent, int):
            extents.append(extent)
        elif extent is not None and index < len(source) and source[index] == extent:
            extents.append(_COPY)
        else:
            return False
    node.inputs[1] = graph.add_constant(f"{node.input(1)}/known", np.asarray(extents, np.int64))
    node.attributes.pop("allowzero", None)
    graph.update(node)
    return True


@node_rule(Level.BASIC, ("", "Reshape"))
def merge_reshapes(graph: Graph, node: Node) -> bool:
    """Reshape(Reshape(x, a), b) -> Reshape(x, b), if dimensions that b copies are copied from x by a."""
    inner = made_by(graph, node.input(0), "Reshape")
    first, second = None if inner is None else reshape_target(graph, inner), reshape_target(graph, node)
    if inner is None or first is None or second is None:
        return False
    if any(extent == _COPY and first[axis : axis + 1] != [_COPY] for axis, extent in enumerate(second)):
        return False
    node.inputs[0] = inner.inputs[0]
    graph.update(node)
    return True


@node_rule(Level.BASIC, ("", "Reshape"))
def remove_idle_reshapes(graph: Graph, node: Node) -> bool:
    """Reshape(x, shape of x) -> x. One dimension of the shape may be -1."""
    known, target = graph.type_of(node.input(0)), reshape_target(graph, node)
    shape = known.shape if isinstance(known, TensorType) else None
    if shape is None or target is None or len(shape) != len(target) or target.count(-1) > 1:
        return False
    same = (extent in (_COPY, -1) or extent == size for extent, size in zip(target, shape, strict=True))
    return all(same) and pass_through(graph, node)


def reshape_target(graph: Graph, node: Node) -> list[int] | None:
    """Return the constant target of a Reshape, or None."""
    tensor = graph.constant_tensor(node.input(1)) if len(node.inputs) == 2 else None
    if tensor is None or tensor.num_elements > MAX_ELEMENTS or any(a.ref_attr_name for a in node.attributes.values()):
        return None
    target = [int(item) for item in tensor.array().reshape(-1)]
    return None if 0 in target and node.attribute("allowzero", 0) else target
