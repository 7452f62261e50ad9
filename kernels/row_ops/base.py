"""What row operators are made of: types of values, nodes, and the registry of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from ..cpu.tape.context import Word
from ..registry import NodeSpec

if TYPE_CHECKING:
    from .writer import Writer


@dataclass(frozen=True)
class RowType:
    """A value with one float32 row per token (or per wanted row).

    Attributes:
        shape: as the graph sees it, with -1 where the number of rows goes in, such as (1, -1, 2048).
        width: numbers per row; a multiple of the last axis, if a row holds several of those.
        counted: TOKENS or WANTED.
    """

    shape: tuple[int, ...]
    width: int
    counted: Word = Word.TOKENS

    @property
    def last(self) -> int:
        """Size of the last axis."""
        return self.shape[-1]

    def with_width(self, width: int) -> RowType:
        """The same rows with other contents: a last axis of `width` numbers, one per row."""
        return replace(self, shape=(*self.shape[:-1], width), width=width)


@dataclass(frozen=True)
class IdType:
    """A value that every step has: token ids or positions."""

    word: Word


ValueType = RowType | IdType | None


class RowNode(Protocol):
    """One node (or several, fused) as calls on a tape."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the row values that it reads."""

    @property
    def outputs(self) -> Mapping[str, RowType]:
        """Names and types of what it makes."""

    def write(self, writer: Writer) -> None:
        """Add its calls to a tape."""


Rule = Callable[[NodeSpec, Sequence[ValueType]], RowNode | None]

_RULES: dict[tuple[str, str], Rule] = {}
_MODULES = ("attention", "elementwise", "movement", "norms", "products")


def rule(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Decorator: the rule for operators of a domain."""

    def add(function: Rule) -> Rule:
        for op_type in op_types:
            _RULES[domain, op_type] = function
        return function

    return add


def find_rule(domain: str, op_type: str) -> Rule | None:
    """The rule for an operator, or None."""
    for module in _MODULES:
        import_module(f".{module}", __package__)
    return _RULES.get((domain, op_type))


def row_input(types: Sequence[ValueType], index: int) -> RowType | None:
    """The type of input `index` if it is a value of rows."""
    found = types[index] if index < len(types) else None
    return found if isinstance(found, RowType) else None
