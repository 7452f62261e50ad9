"""Which extents of a graph's values are equal, as far as operators keep them: open ones are followed by name.

Shape inference names an open extent where the model does. Here every extent has a name, so that "as many rows as this
value has" can be told even where nothing else is known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir import Graph, Node
from ..types import TensorType

Extents = tuple[int | str, ...]

_KEPT = frozenset(
    {
        ("", "LayerNormalization"), ("", "Softmax"), ("", "Gelu"), ("", "Relu"), ("", "Tanh"), ("", "Erf"),
        ("", "Sigmoid"), ("", "Cast"), ("", "Identity"), ("", "QuantizeLinear"), ("", "DequantizeLinear"),
        ("", "DynamicQuantizeLinear"), ("com.microsoft", "Gelu"), ("com.microsoft", "FastGelu"),
    }
)  # fmt: skip
# Products with a constant matrix, and which input is added to their results (0 = none).
_PRODUCTS = {
    ("", "MatMul"): 0, ("", "MatMulInteger"): 0, ("genai", "Linear"): 3, ("com.microsoft", "MatMulIntegerToFloat"): 0,
    ("genai", "IntegerLinear"): 7,
}  # fmt: skip
_SUMS = frozenset({("", "Add"), ("", "Sub"), ("", "Mul"), ("", "Div")})


class KnownExtents:
    """Extents of a graph's values; nodes are told in order by `follow`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._found: dict[str, Extents | None] = {}

    def of(self, name: str) -> Extents | None:
        """A number or a name per axis; None where the number of axes is open."""
        if name not in self._found:
            known = self._graph.type_of(name) if name else None
            shape = known.shape if isinstance(known, TensorType) else None
            self._found[name] = (
                None
                if shape is None
                else tuple(f"{name}[{axis}]" if extent is None else extent for axis, extent in enumerate(shape))
            )
        return self._found[name]

    def type_of(self, name: str) -> TensorType | None:
        """A value's type with these extents."""
        known, extents = self._graph.type_of(name) if name else None, self.of(name)
        return replace(known, shape=extents) if isinstance(known, TensorType) and extents is not None else None

    def follow(self, node: Node) -> None:
        """Carry the extents of a node's inputs to its first output, where its operator keeps them."""
        rule = _rule(node)
        derived = None if rule is None else rule(self, node)
        inferred = self.of(node.output(0))
        if derived is None or (inferred is not None and len(inferred) != len(derived)):
            return
        numbers = inferred or derived
        self._found[node.output(0)] = tuple(
            number if isinstance(number, int) else extent for number, extent in zip(numbers, derived, strict=True)
        )

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
        axes = max(len(a), len(b))
        pairs = zip((*[1] * (axes - len(a)), *a), (*[1] * (axes - len(b)), *b), strict=True)
        return tuple(_either(first, second, f"{node.output(0)}[{axis}]") for axis, (first, second) in enumerate(pairs))

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


def _rule(node: Node) -> Callable[[KnownExtents, Node], Extents | None] | None:
    if node.key in _KEPT:
        return lambda extents, node: extents.of(node.input(0))
    if node.key in _PRODUCTS:
        return KnownExtents.product
    if node.key in _SUMS:
        return KnownExtents.elementwise
    return _OTHERS.get(node.key)


_OTHERS = {
    ("", "Transpose"): KnownExtents.turned,
    ("", "Reshape"): KnownExtents.reshaped,
    ("genai", "DenseAttention"): KnownExtents.attention,
}


def _either(first: int | str, second: int | str, name: str) -> int | str:
    """The extent that two broadcast to."""
    if first == second or second == 1:
        return first
    if first == 1:
        return second
    numbers = [extent for extent in (first, second) if isinstance(extent, int)]
    return numbers[0] if numbers else name
