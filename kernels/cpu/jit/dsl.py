"""The vocabulary of kernels. Importing it does not import Numba, which is deferred until something must be compiled.

If all kernels are on disk, a process never needs the compiler, and importing Numba takes longer than loading a small
model. So helpers and intrinsics are only registered here. When Numba encounters one of them, it requests the type (by
the protocol of the attribute `_numba_type_`), and `compiler` supplies it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import Any


class _LazyModule:
    """A module that is imported at the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


types: Any = _LazyModule("numba.core.types")
cgutils: Any = _LazyModule("numba.core.cgutils")


class Helper:
    """A function that kernels call and that becomes part of their machine code.

    Attributes:
        function: Python function.
        always_inline: True if calls must be inlined; otherwise LLVM decides.
        fastmath: LLVM's fast-math flags for the function's operations.
    """

    def __init__(self, function: Callable[..., Any], always_inline: bool, fastmath: Collection[str] = ()) -> None:
        self.function, self.always_inline, self.fastmath = function, always_inline, frozenset(fastmath)
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the plain Python function, which works only if everything that it calls can run in Python."""
        return self.function(*arguments, **named)

    @cached_property
    def _numba_type_(self) -> Any:
        from .compiler import helper_type  # imports Numba, which kernels on disk do not need

        return helper_type(self)


class VectorOf:
    """A vector of LANES numbers of a Numba type. This object represents the type until something is compiled.

    Args:
        element: name of the Numba type.
        or_number: True for the type of an argument that may also be a number, which is converted and repeated.
    """

    def __init__(self, element: str, or_number: bool = False) -> None:
        self.element, self.takes_numbers = element, or_number

    @cached_property
    def type(self) -> Any:
        """Numba's type."""
        from .numba_types import Vector  # imports Numba

        return Vector(getattr(types, self.element))

    @property
    def or_number(self) -> VectorOf:
        """The type of an argument that may also be a number."""
        return VectorOf(self.element, or_number=True)


FLOATS, INTEGERS = VectorOf("float32"), VectorOf("int32")


def numba_type(given: Any) -> Any:
    """Return the Numba type for a type, a type's name or a VectorOf. None stands for the type of no result."""
    if isinstance(given, str):
        return getattr(types, given)
    return types.void if given is None else given.type if isinstance(given, VectorOf) else given


class Intrinsic:
    """A function for kernels that is written in LLVM instructions: `emit(emitter, *values)`.

    Attributes:
        typing: function that maps the Numba types of the arguments to the signature and `emit`.
        parameters: names of the arguments.
    """

    def __init__(self, function: Callable[..., Any], typing: Callable[..., Any], parameters: Iterable[str]) -> None:
        self.typing, self.parameters = typing, tuple(parameters)
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} can be used only in compiled kernels")

    @cached_property
    def _numba_type_(self) -> Any:
        from .compiler import intrinsic_type  # imports Numba

        return intrinsic_type(self)


def intrinsic(result: Any, *given: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make `emit(emitter, *values)` an intrinsic (decorator).

    Args:
        result: type of the result, as for `numba_type`.
        given: types of the arguments.
    """

    def add(emit: Callable[..., Any]) -> Intrinsic:
        def typing(*found: Any) -> Any:
            repeated = [isinstance(wanted, VectorOf) and wanted.takes_numbers for wanted in given]
            known = [
                one if either else numba_type(wanted)
                for one, wanted, either in zip(found, given, repeated, strict=True)
            ]

            def write(e: Any, *values: Any) -> Any:
                parts = zip(values, found, given, repeated, strict=True)
                return emit(e, *[e.vector(value, *pair) if either else value for value, *pair, either in parts])

            return numba_type(result)(*known), write

        return Intrinsic(emit, typing, list(signature(emit).parameters)[1:])

    return add


def typed_intrinsic(typing: Callable[..., Any]) -> Any:
    """Make an intrinsic whose types depend on the types of its arguments. `typing` returns the signature and `emit`."""
    return Intrinsic(typing, typing, signature(typing).parameters)


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a helper that is always inlined into the kernels that use it (decorator)."""
    return Helper(function, always_inline=True)


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a helper that LLVM may keep as a separate function (decorator)."""
    return Helper(function, always_inline=False)


def contracted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a helper whose multiplications and additions may be fused into one instruction (decorator)."""
    return Helper(function, always_inline=False, fastmath={"contract"})
