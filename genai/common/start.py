"""Conditions under which the libraries below this package cannot be loaded, with errors that name the cause."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ..errors import CacheCapacityError, StateError

# Texts of the dynamic loader and of errno 12 (ENOMEM).
_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "cannot map zero-fill pages")


def check_interpreter() -> None:
    """Raise StateError in a sub-interpreter, where calls from Numba's and NumPy's libraries deadlock."""
    if sys.implementation.name != "cpython":
        return
    import ctypes

    current, main = (getattr(ctypes.pythonapi, f"PyInterpreterState_{name}") for name in ("Get", "Main"))
    current.restype = main.restype = ctypes.c_void_p
    if current() != main():
        raise StateError(
            "genai was imported in a sub-interpreter",
            "NumPy and Numba, which it uses, work only in the main interpreter of a process",
            "use threads or processes; for mod_wsgi, set WSGIApplicationGroup %{GLOBAL}",
        )


def out_of_memory(error: BaseException) -> CacheCapacityError | None:
    """Return the error to raise for a failed import that memory is the cause of; None if there is another cause."""
    for cause in _chain(error):
        if isinstance(cause, MemoryError) or any(text in str(cause).lower() for text in _NO_MEMORY):
            return CacheCapacityError(
                "there is not enough memory to load the libraries",
                f"{cause}"[:200] or "an allocation failed",
                "free memory, or raise the limit of this process (ulimit -v, or the container's limit)",
            )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and the exceptions that it was raised from or during."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
