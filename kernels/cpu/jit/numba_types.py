"""Numba types for `arguments` and `vector`: addresses with readable declared fields, and vectors with their operators.

This module is imported only when something is compiled.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global
from numba.extending import infer_getattr, lower_getattr_generic, register_model

from .arguments import ArgumentField, Arguments, layout
from .emit import LANES, Emitter

_WORD_BYTES = 8


class View(types.Type):
    """The arguments of an operator in compiled code: the address of the first one. The name identifies the type."""

    def __init__(self, declaration: type[Arguments]) -> None:
        self.declaration = declaration
        self.fields = {field.name: field for field in layout(declaration)}
        super().__init__(name=f"arguments({declaration.__module__}.{declaration.__qualname__})")


@register_model(View)
class _ViewModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, given: View) -> None:
        super().__init__(manager, given, ir.IntType(64))


def _type_of(field: ArgumentField) -> Any:
    if isinstance(field.kind, str):
        return types.float32 if field.kind == "float" else types.int64
    return View(field.kind)


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = View

    def generic_resolve(self, given: View, name: str) -> Any:
        """Return the type of a field; None for an undeclared name, which Numba rejects."""
        return _type_of(given.fields[name]) if name in given.fields else None


@lower_getattr_generic(View)  # type: ignore[untyped-decorator]
def _read(context: Any, builder: Any, given: View, value: Any, name: str) -> Any:
    field = given.fields[name]
    address = builder.add(value, ir.IntType(64)(_WORD_BYTES * field.first_entry))
    if not isinstance(field.kind, str):
        return address
    pointer = builder.inttoptr(address, ir.PointerType())
    if field.kind == "float":
        return builder.fptrunc(builder.load(pointer, typ=ir.DoubleType()), ir.FloatType())
    return builder.load(pointer, typ=ir.IntType(64))


class Vector(types.Type):
    """A vector of LANES numbers of one Numba type."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"vector({LANES} x {element})")

    @property
    def is_float(self) -> bool:
        """True if the elements are floating-point numbers."""
        return isinstance(self.element, types.Float)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        element = manager.lookup(vector.element).get_value_type()
        super().__init__(manager, vector, ir.VectorType(element, LANES))


# Operator -> builder methods for integers and for floats.
_OPERATORS: dict[Any, tuple[str | None, str | None]] = {
    operator.add: ("add", "fadd"),
    operator.sub: ("sub", "fsub"),
    operator.mul: ("mul", "fmul"),
    operator.truediv: (None, "fdiv"),
    operator.and_: ("and_", None),
    operator.lshift: ("shl", None),
    operator.rshift: ("ashr", None),
}


def _define_operator(operation: Any, methods: tuple[str | None, str | None]) -> None:
    @infer_global(operation)
    class _Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            vectors = [given for given in args if isinstance(given, Vector)]
            if len(args) != 2 or not vectors or any(other != vectors[0] for other in vectors):
                return None
            if methods[vectors[0].is_float] is None:
                return None
            if all(isinstance(given, (Vector, types.Number)) for given in args):
                return signature(vectors[0], *args)
            return None

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = sig.return_type
        e = Emitter(context, builder)
        operands = [e.vector(value, given, vector) for value, given in zip(args, sig.args, strict=True)]
        return getattr(builder, str(methods[vector.is_float]))(*operands)

    for pair in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(operation, *pair)(lower)


for _operation, _methods in _OPERATORS.items():
    _define_operator(_operation, _methods)
