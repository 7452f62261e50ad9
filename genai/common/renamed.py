"""Deprecated names of arguments, fields and functions, which still work with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def renamed_arguments(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let callers of a function pass arguments by their deprecated names.

    >>> @renamed_arguments(form="format")
    ... def write(*, format: str) -> str:
    ...     return format
    >>> write(form="text")
    'text'
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            _rename(function.__name__, kwargs, new_names)
            return function(*args, **kwargs)

        return call

    return decorate


def renamed_fields(**new_names: str) -> Callable[[C], C]:
    """Let users of a dataclass pass and read fields by their deprecated names. Apply it above `@dataclass`."""

    def decorate(cls: C) -> C:
        initialise = cls.__init__  # type: ignore[misc]

        @wraps(initialise)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            _rename(cls.__name__, kwargs, new_names)
            initialise(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[misc]
        cls.__setstate__ = _restored(new_names)  # type: ignore[attr-defined]
        for old, new in new_names.items():
            setattr(cls, old, property(partial(_read, cls.__name__, old, new)))
        return cls

    return decorate


def _restored(new_names: dict[str, str]) -> Callable[[Any, dict[str, Any]], None]:
    """Return a class's `__setstate__` that restores pickles with deprecated names."""

    def restore(self: Any, state: dict[str, Any]) -> None:
        self.__dict__.update({new_names.get(name, name): value for name, value in state.items()})

    return restore


def renamed_names(module: str, **new_names: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that finds functions and classes by their deprecated names."""

    def find(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = new_names[name]
        warnings.warn(f"{module}.{name} is now {module}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new)

    return find


def _rename(owner: str, kwargs: dict[str, Any], new_names: dict[str, str]) -> None:
    for old in new_names.keys() & kwargs.keys():
        new = new_names[old]
        if new in kwargs:
            raise TypeError(f"{owner}: {old} is the old name of {new}, so pass only {new}")
        # The warning points to the caller of the wrapper that calls this function.
        warnings.warn(f"{owner}({old}=…) is now {owner}({new}=…)", DeprecationWarning, stacklevel=3)
        kwargs[new] = kwargs.pop(old)


def _read(owner: str, old: str, new: str, instance: Any) -> Any:
    warnings.warn(f"{owner}.{old} is now {owner}.{new}", DeprecationWarning, stacklevel=2)
    return getattr(instance, new)
