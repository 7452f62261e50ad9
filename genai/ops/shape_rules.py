"""Shape rules: output types of operators that ONNX's own inference does not cover.

A shape rule receives a node and the types of its inputs, and returns the types of its outputs as far as they are
determined. It replaces ONNX's inference for its operator.
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
    """A rule requested the type of an input that has an unknown type."""


@dataclass(frozen=True)
class NodeTypes:
    """The inputs of a shape rule.

    Attributes:
        inputs: type per input, None if it is absent or unknown.
        constants: value per input if it is constant and small, else None.
        values: dimensions that each input holds if it is the result of a shape computation, else None.
    """

    node: Node
    inputs: Sequence[Type | None]
    constants: Sequence[NDArray[Any] | None]
    values: Sequence[ShapeValue | None] = ()

    @property
    def source(self) -> TensorType:
        """The type of input 0. If it is unknown, raises UnknownType, which ends the rule."""
        tensor = self.tensor(0)
        if tensor is None:
            raise UnknownType
        return tensor

    def tensor(self, index: int) -> TensorType | None:
        """Return the type of input `index` if it is a known tensor type, else None."""
        type_ = self.inputs[index] if index < len(self.inputs) else None
        return type_ if isinstance(type_, TensorType) else None

    def shape(self, index: int, rank: int | None = None) -> Shape | None:
        """Return the shape of input `index` if it is known and has `rank` (None = any), else None."""
        tensor = self.tensor(index)
        shape = None if tensor is None else tensor.shape
        return None if shape is None or (rank is not None and len(shape) != rank) else shape

    def value(self, index: int) -> ShapeValue | None:
        """Return the dimensions that input `index` holds if it is the result of a shape computation, else None."""
        return self.values[index] if index < len(self.values) else None

    def constant(self, index: int) -> NDArray[Any] | None:
        """Return the value of input `index` if it is constant and small, else None."""
        return self.constants[index] if index < len(self.constants) else None

    def attribute(self, name: str, default: int) -> int:
        """Return an integer attribute of the node. Raises GraphError if it has another type."""
        return self.node.integer(name, default)


ShapeRule: TypeAlias = Callable[[NodeTypes], Sequence[Type | None]]
"""Returns one type per output, or None if it is undetermined; the list may be shorter than the node's outputs."""


SHAPE_RULES: dict[tuple[str, str], ShapeRule] = {}


shape_rule = rules_by_operator(SHAPE_RULES, MS)


def find_shape_rule(domain: str, op_type: str) -> ShapeRule | None:
    """Return an operator's rule, or None."""
    load_operator(domain, op_type)
    return SHAPE_RULES.get((domain, op_type))


def same_as_input(types: NodeTypes) -> list[Type | None]:
    """Return one output type, equal to the type of the first input."""
    return [types.tensor(0)]


def times(dim: Dim, factor: int) -> Dim:
    return dim * factor if isinstance(dim, int) else None


def divided(dim: Dim, divisor: int) -> Dim:
    return dim // divisor if isinstance(dim, int) and divisor > 0 else None


def data_type(number: int) -> DataType:
    return DataType(number) if number in set(DataType) else DataType.UNDEFINED
