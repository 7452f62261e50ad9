"""Creation of kernel variants at first use, by one thread at a time because each variant registers its kernel name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from genai.common.forks import renew_locks

Given = ParamSpec("Given")
Made = TypeVar("Made")
# One reentrant lock for all variants, because variants are built from other variants.
_lock = threading.RLock()
renew_locks(sys.modules[__name__], "_lock")


def once(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """Cache results like functools.cache, but never call `make` twice for concurrent requests (decorator)."""
    known = cache(make)

    @wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        with _lock:
            return known(*args, **kwargs)  # type: ignore[arg-type]

    return made
