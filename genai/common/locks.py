"""Locks on folders, which the system releases when the process ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from genai.common.interrupts import InterruptsDeferred


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool | None]:
    """Hold a folder's lock: yield True; False if another process holds the lock; None if locks are not available."""
    descriptor, held = None, None
    try:
        with contextlib.suppress(ImportError, OSError):  # not available on Windows and some network file systems
            import fcntl

            with InterruptsDeferred():
                descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                held = True
            except BlockingIOError:
                held = False
        yield held
    finally:
        if descriptor is not None:
            os.close(descriptor)
