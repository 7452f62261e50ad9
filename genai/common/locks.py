"""Locks on folders, which end with the process that holds them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from genai.common.interrupts import InterruptsDeferred


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool | None]:
    """Hold a folder's lock, which ends with the process; False where another has it, None where locks do not work."""
    descriptor, held = None, None
    try:
        with contextlib.suppress(ImportError, OSError):  # Windows has no such locks, nor have some networks' disks
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
