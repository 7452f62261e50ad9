"""Row nodes that most operators are: a call of some rows into new ones, and another name for rows that exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..cpu.tape.program import Call, Rows
from .base import RowType
from .writer import Writer


@dataclass(frozen=True)
class RowCall:
    """One call: `make(inputs, outputs)` gives it."""

    inputs: tuple[str, ...]
    outputs: Mapping[str, RowType]
    make: Callable[[Sequence[Rows], Sequence[Rows]], Call]

    def write(self, writer: Writer) -> None:
        sources = [writer.rows(name) for name in self.inputs]
        targets = [writer.make(name, type_) for name, type_ in self.outputs.items()]
        writer.run([[self.make(sources, targets)]], self.inputs, list(self.outputs))


@dataclass(frozen=True)
class Columns:
    """A part of every row of a value, or all of it in another shape: nothing is copied."""

    source: str
    name: str
    type: RowType
    first: int = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def outputs(self) -> Mapping[str, RowType]:
        return {self.name: self.type}

    def write(self, writer: Writer) -> None:
        writer.alias(self.name, self.source, writer.rows(self.source).columns(self.first, self.type.width))


@dataclass(frozen=True)
class Gate:
    """activation(gate) * up."""

    activation: str
    gate: str
    up: str
    out: str
    type: RowType

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.gate, self.up)

    @property
    def outputs(self) -> Mapping[str, RowType]:
        return {self.out: self.type}

    def write(self, writer: Writer) -> None:
        from ..cpu.rowwise.binary import gate

        sources = writer.rows(self.gate), writer.rows(self.up)
        out = writer.make(self.out, self.type)
        writer.run([[gate(self.activation, *sources, out)]], self.inputs, [self.out])
