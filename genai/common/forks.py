"""Locks in forked children: what another thread held when the process was forked is never released there."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

_LOCKS: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
_BUSY: WeakSet[Any] = WeakSet()


def renew_locks(owner: Any, *names: str) -> None:
    """In forked children, give an object (or module) new locks in place of those that are held."""
    _LOCKS[owner] = names


def was_busy(owner: Any) -> bool:
    """Whether a lock of its was held when this process was forked: what it protects may be half changed."""
    return owner in _BUSY


def _renew() -> None:
    for owner, names in list(_LOCKS.items()):
        for name in names:
            lock = getattr(owner, name)
            if lock.acquire(blocking=False):
                lock.release()
                continue
            _BUSY.add(owner)
            setattr(owner, name, threading.RLock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
