"""Renewal of locks in forked children, in which locks held by other threads at the fork are never released."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

THREAD_NAMES = "genai-pool-"
"""The name prefix of threads that hold no lock between runs."""
STATUS_THREAD = "genai-status"
"""The name of the thread that redraws the status line, which holds no lock but one that is renewed."""
FORKABLE = (THREAD_NAMES, STATUS_THREAD)
"""Prefixes of names of threads. A process whose other threads all have such names can be forked."""

_LOCKS: WeakKeyDictionary[Any, tuple[tuple[str, ...], str]] = WeakKeyDictionary()


def renew_locks(owner: Any, *names: str, flag: str = "") -> None:
    """Replace the held locks of an object or module with new ones in forked children.

    Args:
        owner: the object or module that has the locks.
        names: the attributes that hold the locks.
        flag: an attribute that is set to True if a lock is replaced, because the data that it protects may be half
            changed; "" = none.
    """
    _LOCKS[owner] = names, flag


def _renew() -> None:
    for owner, (names, flag) in list(_LOCKS.items()):
        for name in names:
            lock = getattr(owner, name)
            if lock.acquire(blocking=False):
                lock.release()
                continue
            if flag:
                setattr(owner, flag, True)
            setattr(owner, name, threading.RLock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
