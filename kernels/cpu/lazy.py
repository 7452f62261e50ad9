"""What kernels are written with, without importing Numba: that waits until something has to be compiled.

A process whose kernels are all on disk never needs the compiler, and Numba takes longer to import than a small model
takes to load. So helpers and intrinsics are only noted down here; Numba asks them for their types when it meets them
(its protocol is the attribute `_numba_type_`), and `compiler` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from importlib import import_module
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
        from .compiler import helper_type

        return helper_type(self)


class Intrinsic:
    """A function of Numba types that returns a signature, and a function that writes LLVM instructions."""

    def __init__(self, typing: Callable[..., Any]) -> None:
        self.typing = typing
        self.__name__, self.__doc__ = typing.__name__, typing.__doc__

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} exists in compiled kernels only")

    @cached_property
    def _numba_type_(self) -> Any:
        from .compiler import intrinsic_type

        return intrinsic_type(self)


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a helper that must become part of the kernels that use it."""
    return Helper(function, always_inline=True)


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a helper that LLVM may leave as a function."""
    return Helper(function, always_inline=False)


def contracted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a helper whose products and sums may become one instruction."""
    return Helper(function, always_inline=False, fastmath={"contract"})


def intrinsic(typing: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: an intrinsic, as in Numba."""
    return Intrinsic(typing)
