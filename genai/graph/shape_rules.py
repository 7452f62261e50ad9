"""The registry of our own shape rules, and what a rule sees.

A rule sees a node and the types of its inputs, and gives the types of its outputs as far as they follow. It replaces
ONNX's inference for its operator. The rules themselves are in `shape_rules_contrib` and `shape_rules_standard`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from .node import Node
from .shape_values import ShapeValue
from .types import Shape, TensorType, Type


@dataclass(frozen=True)
class NodeTypes:
    """What a rule may look at.

    Attributes:
        inputs: per input its type, None where it is absent or unknown.
        constants: per input its value where that is constant and small, else None.
        values: per input the extents in it, where it is the result of a shape computation, else None.
    """

    node: Node
    inputs: Sequence[Type | None]
    constants: Sequence[NDArray[Any] | None]
    values: Sequence[ShapeValue | None] = ()

    def tensor(self, index: int) -> TensorType | None:
        """The type of input `index`, if it is a tensor's and known."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found if isinstance(found, TensorType) else None

    def shape(self, index: int, rank: int | None = None) -> Shape | None:
        """The shape of input `index`, if known and, where `rank` is given, of that rank."""
        found = self.tensor(index)
        shape = None if found is None else found.shape
        return None if shape is None or (rank is not None and len(shape) != rank) else shape

    def value(self, index: int) -> ShapeValue | None:
        """The extents in input `index`, if it is the result of a shape computation."""
        return self.values[index] if index < len(self.values) else None

    def constant(self, index: int) -> NDArray[Any] | None:
        """The value of input `index`, if it is constant and small."""
        return self.constants[index] if index < len(self.constants) else None

    def attribute(self, name: str, default: int) -> int:
        """An integer attribute of the node; GraphError if it is of another type."""
        return self.node.integer(name, default)


ShapeRule: TypeAlias = Callable[[NodeTypes], Sequence[Type | None]]
"""Gives one type per output, None where nothing follows; the list may be shorter than the node's outputs."""


class ShapeRules:
    """Shape rules by (domain, operator)."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], ShapeRule] = {}

    def register(self, *op_types: str, domain: str = "com.microsoft") -> Callable[[ShapeRule], ShapeRule]:
        """Decorator: let a rule serve these operators."""

        def add(rule: ShapeRule) -> ShapeRule:
            for op_type in op_types:
                self._rules[domain, op_type] = rule
            return rule

        return add

    def find(self, node: Node) -> ShapeRule | None:
        """The rule for a node, or None."""
        return self._rules.get(node.key)


SHAPE_RULES = ShapeRules()
shape_rule = SHAPE_RULES.register
