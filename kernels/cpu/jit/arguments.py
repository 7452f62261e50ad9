"""What an operator is told, declared once: the class says names and types, machine code reads by the same names.

    class ScaleArguments(Arguments):
        x: Address
        count: int
        factor: float

Python writes `ScaleArguments(x=array, count=4, factor=0.5)` into a call; a wrong name or type is an error there. The
operator is decorated with `@native_op(ScaleArguments)`, and its first parameter reads `a.x`, `a.count` and `a.factor`;
a name that is not declared is an error when it is compiled. Every field takes one entry of eight bytes, in the order
in which they are declared, those of a base class first; a field of such a class itself takes the entries of its own.
Machine code reads a `float` as float32.
Arguments keep alive what they are made of.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from typing import Annotated, Any, dataclass_transform

import numpy as np


@dataclass(frozen=True)
class Binding:
    """An address, or another whole number, that is known at a run: what is bound to a name, plus an offset."""

    name: str
    offset: int = 0

    def __add__(self, offset: int) -> Binding:
        return Binding(self.name, self.offset + offset)


@dataclass(frozen=True)
class BoundVector(Binding):
    """The address of a contiguous float32 vector of `size` numbers that is known when a program runs."""

    size: int = 0


class Operator:
    """Machine code that other machine code calls by its address."""

    @property
    def address(self) -> int:
        """Where it lies; it is compiled when this is first asked for."""
        raise NotImplementedError


# Entries of a call's table that its arguments may take.
MAX_ARGUMENTS = 56
# Of memory: a number, an array (its first element), an operator that machine code calls, a binding; None is 0.
Address = Annotated[Any, "address"]
# What an address points into: kept alive, and no entry.
Held = Annotated[Any, "held"]


@dataclass(frozen=True)
class ArgumentField:
    """One argument: its name, what it is ("int", "float", "address", or a class of arguments), its first entry."""

    name: str
    kind: str | type[Arguments]
    first_entry: int


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
class Arguments:
    """Base class of declarations; see the module."""

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        dataclass(frozen=True, kw_only=kw_only, eq=False)(cls)

    def encoded(self) -> list[int | Binding]:
        """The values in order, as int64: floats as the bits of float64, bindings as they are.

        Raises:
            TypeError: a value is not of its declared type; names the operator's argument.
        """
        result: list[int | Binding] = []
        for field in layout(type(self)):
            value = getattr(self, field.name)
            if isinstance(field.kind, str):
                result.append(_encoded(field.kind, value, self, field))
            elif isinstance(value, field.kind):
                result.extend(value.encoded())
            else:
                raise TypeError(f"{type(self).__name__}.{field.name} is {value!r}, expected {field.kind.__name__}")
        return result

    def operators(self) -> list[Operator]:
        """The operators among the values: machine code calls them, so they are compiled with their caller."""
        values = [getattr(self, field.name) for field in layout(type(self)) if field.kind not in _NUMBERS]
        nested = [op for value in values if isinstance(value, Arguments) for op in value.operators()]
        return [value for value in values if isinstance(value, Operator)] + nested


_LAYOUTS: dict[type[Arguments], tuple[ArgumentField, ...]] = {}
_NUMBERS = ("int", "float")
_WHOLE, _REAL = (int, np.integer), (float, int, np.floating)


def layout(declaration: type[Arguments]) -> tuple[ArgumentField, ...]:
    """The fields of a declaration in order.

    Raises:
        TypeError: a field has a type that no argument can have, or there are more than MAX_ARGUMENTS entries.
    """
    if declaration in _LAYOUTS:
        return _LAYOUTS[declaration]
    hints = typing.get_type_hints(declaration, include_extras=True)
    result: list[ArgumentField] = []
    entries = 0
    for field in fields(declaration):  # type: ignore[arg-type]
        if hasattr(Arguments, field.name):
            raise TypeError(f"{declaration.__name__}.{field.name} hides a method of Arguments: give it another name")
        kind = _kind(hints[field.name])
        if kind is None:
            raise TypeError(f"{declaration.__name__}.{field.name} cannot be {hints[field.name]}")
        if kind == "held":
            continue
        result.append(ArgumentField(field.name, kind, entries))
        entries += 1 if isinstance(kind, str) else size(kind)
    if entries > MAX_ARGUMENTS:
        raise TypeError(f"{declaration.__name__} takes {entries} entries, a call has room for {MAX_ARGUMENTS}")
    found = _LAYOUTS[declaration] = tuple(result)
    return found


def size(declaration: type[Arguments]) -> int:
    """How many entries a declaration takes."""
    return sum(1 if isinstance(field.kind, str) else size(field.kind) for field in layout(declaration))


def offset_of(declaration: type[Arguments], *path: str) -> int:
    """How many bytes behind the start of some arguments one of them lies, or one of those inside it."""
    entries, inside = 0, declaration
    for name in path:
        (field,) = (field for field in layout(inside) if field.name == name)
        entries += field.first_entry
        if not isinstance(field.kind, str):
            inside = field.kind
    return 8 * entries


def _kind(hint: Any) -> str | type[Arguments] | None:
    if isinstance(hint, type) and issubclass(hint, Arguments):
        return hint
    if isinstance(hint, type) and issubclass(hint, int | float):
        return "int" if issubclass(hint, int) else "float"
    kinds = ("address", "held")
    return next((str(note) for note in getattr(hint, "__metadata__", ()) if note in kinds), None)


def _encoded(kind: str, value: Any, owner: Arguments, field: ArgumentField) -> int | Binding:
    if kind == "address":
        if isinstance(value, np.ndarray):
            return int(value.__array_interface__["data"][0])
        if value is None:
            return 0
        if isinstance(value, Operator):
            return value.address
    elif kind != "int":
        if not isinstance(value, _REAL):
            raise TypeError(f"{type(owner).__name__}.{field.name} is {value!r}, expected a number")
        return int(np.float64(value).view(np.int64))
    if isinstance(value, _WHOLE):
        return int(value)
    if isinstance(value, Binding):
        return value
    expected = "an address" if kind == "address" else "a whole number"
    raise TypeError(f"{type(owner).__name__}.{field.name} is {value!r:.80}, expected {expected}")
