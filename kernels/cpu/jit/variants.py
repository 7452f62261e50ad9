"""Creation of kernel variants at first use, by one thread at a time because each variant registers its kernel name."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from genai.common.forks import renew_locks

Given = ParamSpec("Given")
Made = TypeVar("Made")
# One reentrant lock for all variants, because variants are built from other variants.
_lock = threading.RLock()
renew_locks(sys.modules[__name__], "_lock")


def once(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """Cache results by the values of all arguments, and never call `make` twice for equal ones (decorator).

    Unlike with functools.cache, it makes no difference whether an argument is passed by position, by name, or omitted
    because it has its default.
    """
    by_value, signature = cache(make), inspect.signature(make)

    @cache  # of the arguments as they are passed, because binding them takes microseconds
    def known(*args: Any, **kwargs: Any) -> Made:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return by_value(*given.args, **given.kwargs)

    @wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        with _lock:
            return known(*args, **kwargs)  # type: ignore[arg-type]

    return made
