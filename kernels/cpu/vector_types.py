"""Numba's side of `vector`: the type of a vector, and its operators. Imported when something is compiled."""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import register_model

from .vector import LANES, as_vector


class Vector(types.Type):
    """LANES numbers of one Numba type."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"vector({LANES} x {element})")

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point numbers."""
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
        operands = [
            as_vector(context, builder, value, given, vector) for value, given in zip(args, sig.args, strict=True)
        ]
        return getattr(builder, str(methods[vector.is_float]))(*operands)

    for pair in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(operation, *pair)(lower)


for _operation, _methods in _OPERATORS.items():
    _define_operator(_operation, _methods)
