"""Shape rules: the types of an operator's outputs, where ONNX's own inference knows nothing of it.

A shape rule sees a node and the types of its inputs, and gives the types of its outputs as far as they follow. It
replaces ONNX's inference for its operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from ..onnx.node import MS, Node
from ..onnx.types import DataType, Dim, Shape, ShapeValue, TensorType, Type
from .registry import load_operator, rules_by_operator


class UnknownType(Exception):
    """A rule asked for the type of an input of which nothing is known."""


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

    @property
    def source(self) -> TensorType:
        """The type of input 0; where it is not known, nothing follows, and the rule ends here."""
        tensor = self.tensor(0)
        if tensor is None:
            raise UnknownType
        return tensor

    def tensor(self, index: int) -> TensorType | None:
        """The type of input `index`, if it is a tensor's and known."""
        type_ = self.inputs[index] if index < len(self.inputs) else None
        return type_ if isinstance(type_, TensorType) else None

    def shape(self, index: int, rank: int | None = None) -> Shape | None:
        """The shape of input `index`, if known and, where `rank` is given, of that rank."""
        tensor = self.tensor(index)
        shape = None if tensor is None else tensor.shape
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


SHAPE_RULES: dict[tuple[str, str], ShapeRule] = {}


shape_rule = rules_by_operator(SHAPE_RULES, MS)


def find_shape_rule(domain: str, op_type: str) -> ShapeRule | None:
    """The rule for an operator, or None."""
    load_operator(domain, op_type)
    return SHAPE_RULES.get((domain, op_type))


def same_as_input(types: NodeTypes) -> list[Type | None]:
    """One output, of the first input's type."""
    return [types.tensor(0)]


def times(dim: Dim, factor: int) -> Dim:
    return dim * factor if isinstance(dim, int) else None


def divided(dim: Dim, divisor: int) -> Dim:
    return dim // divisor if isinstance(dim, int) and divisor > 0 else None


def data_type(number: int) -> DataType:
    return DataType(number) if number in set(DataType) else DataType.UNDEFINED
