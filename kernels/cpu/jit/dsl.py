"""What kernels are written with, without importing Numba: that waits until something has to be compiled.

A process whose kernels are all on disk never needs the compiler, and Numba takes longer to import than a small model
takes to load. So helpers and intrinsics are only noted down here; Numba asks them for their types when it meets them
(its protocol is the attribute `_numba_type_`), and `compiler` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import Any


class _LazyModule:
    """A module that is imported when something in it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


types: Any = _LazyModule("numba.core.types")
cgutils: Any = _LazyModule("numba.core.cgutils")


class Helper:
    """A function that kernels call; it becomes part of their machine code.

    Attributes:
        function: the Python function.
        always_inline: whether the call must disappear; otherwise LLVM decides.
        fastmath: LLVM's fast-math flags of its operations.
    """

    def __init__(self, function: Callable[..., Any], always_inline: bool, fastmath: Collection[str] = ()) -> None:
        self.function, self.always_inline, self.fastmath = function, always_inline, frozenset(fastmath)
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """As plain Python, where everything that it calls allows that."""
        return self.function(*arguments, **named)

    @cached_property
    def _numba_type_(self) -> Any:
        from .compiler import helper_type  # takes Numba, which kernels that are on disk do without

        return helper_type(self)


class VectorOf:
    """LANES numbers of a Numba type, given by its name; stands for the type until something is compiled.

    Args:
        or_number: as the type of an argument: a number will do too, which is converted and repeated.
    """

    def __init__(self, element: str, or_number: bool = False) -> None:
        self.element, self.takes_numbers = element, or_number

    @cached_property
    def type(self) -> Any:
        """Numba's type."""
        from .numba_types import Vector  # takes Numba

        return Vector(getattr(types, self.element))

    @property
    def or_number(self) -> VectorOf:
        """The type of an argument that may be a number."""
        return VectorOf(self.element, or_number=True)


FLOATS, INTEGERS = VectorOf("float32"), VectorOf("int32")


def numba_type(given: Any) -> Any:
    """A Numba type: itself, by its name, or the one that a VectorOf stands for; None is that of no result."""
    if isinstance(given, str):
        return getattr(types, given)
    return types.void if given is None else given.type if isinstance(given, VectorOf) else given


class Intrinsic:
    """A function of kernels that is written in LLVM's instructions: `emit(emitter, *values)`.

    Attributes:
        typing: from the Numba types of its arguments to its signature and `emit`.
        parameters: the names of its arguments.
    """

    def __init__(self, function: Callable[..., Any], typing: Callable[..., Any], parameters: Iterable[str]) -> None:
        self.typing, self.parameters = typing, tuple(parameters)
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} exists in compiled kernels only")

    @cached_property
    def _numba_type_(self) -> Any:
        from .compiler import intrinsic_type  # takes Numba

        return intrinsic_type(self)


def intrinsic(result: Any, *given: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `emit(emitter, *values)` as an intrinsic.

    Args:
        result: its type, for `numba_type`. given: those of its arguments.
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
    """Decorator: an intrinsic whose types depend on those of its arguments: `typing` returns signature and `emit`."""
    return Intrinsic(typing, typing, signature(typing).parameters)


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a helper that must become part of the kernels that use it."""
    return Helper(function, always_inline=True)


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a helper that LLVM may leave as a function."""
    return Helper(function, always_inline=False)


def contracted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a helper whose products and sums may become one instruction."""
    return Helper(function, always_inline=False, fastmath={"contract"})
