"""Variants of kernels are made when they are first asked for, by one thread: each enters its name among the kernels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from genai.common.forks import renew_locks

Given = ParamSpec("Given")
Made = TypeVar("Made")
# One for all, which a thread may take again: variants ask for others that they are made of.
_lock = threading.RLock()
renew_locks(sys.modules[__name__], "_lock")


def once(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """Decorator: as functools.cache, which would let threads that ask at the same time make the same thing twice."""
    known = cache(make)

    @wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        with _lock:
            return known(*args, **kwargs)  # type: ignore[arg-type]

    return made
