"""Python's search for cycles of garbage, left until something large has been built."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses: list[bool] = []  # one per block that is inside: whether the first of them found the search on


@contextmanager
def collection_paused() -> Iterator[None]:
    """Leave Python's search for cycles of garbage until afterwards.

    It walks through all objects again each time their number has grown by a quarter, and of a graph that is being
    read, rewritten and compiled nearly all objects stay: of 16,000 nodes that walk is a quarter of the time.
    """
    with _lock:
        _pauses.append(_pauses[0] if _pauses else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _pauses.pop() and not _pauses:
                gc.enable()
