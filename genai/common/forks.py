"""Locks in forked children: what another thread held when the process was forked is never released there."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

THREAD_NAMES = "genai-pool-"
"""How names of threads begin that hold no lock between their runs: a process that has only these can be forked."""

_LOCKS: WeakKeyDictionary[Any, tuple[tuple[str, ...], str]] = WeakKeyDictionary()


def renew_locks(owner: Any, *names: str, flag: str = "") -> None:
    """In forked children, give an object (or module) new locks in place of those that are held.

    Args:
        flag: an attribute that is then set to True: what the lock protects may be half changed; "" = none.
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
