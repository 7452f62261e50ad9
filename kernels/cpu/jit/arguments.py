"""Declarations of an operator's arguments: a class lists names and types, and compiled code reads them by name.

    class ScaleArguments(Arguments):
        x: Address
        count: int
        factor: float

Python passes `ScaleArguments(x=array, count=4, factor=0.5)` to a call; a wrong name or type raises an error. The
operator is decorated with `@native_op(ScaleArguments)`, and its first parameter has the attributes `a.x`, `a.count` and
`a.factor`; an undeclared name raises an error when the operator is compiled. Every field occupies one entry of eight
bytes, in the order of declaration, with the fields of a base class first. A field of type Arguments occupies the
entries of its own fields. Compiled code reads a `float` as float32. Arguments keep the objects that they refer to
alive.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from typing import Annotated, Any, dataclass_transform

import numpy as np


@dataclass(frozen=True)
class Binding:
    """An address or another integer that is known at run time: the value bound to a name, plus an offset."""

    name: str
    offset: int = 0

    def __add__(self, offset: int) -> Binding:
        return Binding(self.name, self.offset + offset)


@dataclass(frozen=True)
class BoundVector(Binding):
    """The address of a contiguous float32 vector of `size` numbers that is known at run time."""

    size: int = 0


class Operator:
    """Machine code that other machine code calls by its address."""

    @property
    def address(self) -> int:
        """The address of the machine code, compiled at the first access."""
        raise NotImplementedError


# The maximum number of entries that the arguments of a call may occupy.
MAX_ARGUMENTS = 64
# An address: a number, an array (its first element), an operator to call, or a binding; None is 0.
Address = Annotated[Any, "address"]
# The owner of memory that an address points to. The owner is kept alive and occupies no entry.
Held = Annotated[Any, "held"]


@dataclass(frozen=True)
class ArgumentField:
    """One argument: its name, its kind ("int", "float", "address", or a class of arguments), and its first entry."""

    name: str
    kind: str | type[Arguments]
    first_entry: int


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
class Arguments:
    """Base class of declarations; see the module's docstring."""

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        dataclass(frozen=True, kw_only=kw_only, eq=False)(cls)

    def encoded(self) -> list[int | Binding]:
        """Return the values in order, as int64: floats as the bits of float64, bindings unchanged.

        Raises:
            TypeError: a value is not of its declared type; the message names the argument.
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
        """Return the operators among the values. Compiled code calls them, so they are compiled with their caller."""
        values = [getattr(self, field.name) for field in layout(type(self)) if field.kind not in _NUMBERS]
        nested = [op for value in values if isinstance(value, Arguments) for op in value.operators()]
        return [value for value in values if isinstance(value, Operator)] + nested


_LAYOUTS: dict[type[Arguments], tuple[ArgumentField, ...]] = {}
_NUMBERS = ("int", "float")
_WHOLE, _REAL = (int, np.integer), (float, int, np.floating)


def layout(declaration: type[Arguments]) -> tuple[ArgumentField, ...]:
    """Return the fields of a declaration in order.

    Raises:
        TypeError: a field has an unsupported type, or there are more than MAX_ARGUMENTS entries.
    """
    if declaration in _LAYOUTS:
        return _LAYOUTS[declaration]
    hints = typing.get_type_hints(declaration, include_extras=True)
    result: list[ArgumentField] = []
    entries = 0
    for field in fields(declaration):  # type: ignore[arg-type]
        if hasattr(Arguments, field.name):
            raise TypeError(f"{declaration.__name__}.{field.name} hides a method of Arguments; rename the field")
        kind = _kind(hints[field.name])
        if kind is None:
            raise TypeError(f"{declaration.__name__}.{field.name} cannot be {hints[field.name]}")
        if kind == "held":
            continue
        result.append(ArgumentField(field.name, kind, entries))
        entries += 1 if isinstance(kind, str) else size(kind)
    if entries > MAX_ARGUMENTS:
        raise TypeError(f"{declaration.__name__} has {entries} entries, but the maximum is {MAX_ARGUMENTS}")
    found = _LAYOUTS[declaration] = tuple(result)
    return found


def size(declaration: type[Arguments]) -> int:
    """Return the number of entries that a declaration occupies."""
    return sum(1 if isinstance(field.kind, str) else size(field.kind) for field in layout(declaration))


def offset_of(declaration: type[Arguments], *path: str) -> int:
    """Return the byte offset of an argument (or an argument nested inside it) from the start of the arguments."""
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
