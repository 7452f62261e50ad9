"""Compiled kernels on disk: when they were used last, and which of them go.

A kernel is known by its text, so that a version of the toolkit finds those that it shares with others; nobody can tell
from its name who needs it. What is read is marked as used, and what was not used for longest goes. Whoever has read a
file needs it no more, so what other processes have loaded may be removed.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# All 900 kernels that there are, of one version for one kind of GPU, take about 50 MB, what a model needs a few.
MOST_BYTES = 256 << 20
UNUSED_DAYS = 30
_DAY = 86400.0
# What processes that start now are about to read: it stays, however much it is.
_IN_USE_SECONDS = 3600.0
_OURS = re.compile(r"[0-9a-f]{64}\.(?:cubin|ptx)(?P<unfinished>\.\d+\.[0-9a-f]{32}\.tmp)?")


@dataclass(frozen=True)
class CachedKernel:
    """A file of a compiled kernel, or what a process that was killed has left of one.

    Attributes:
        idle: seconds since it was used.
    """

    path: Path
    nbytes: int
    idle: float
    is_whole: bool


def cached_kernels(folder: Path) -> list[CachedKernel]:
    """What compilers have written to a folder, what was not used for longest first; nothing that others put there."""
    now, found = time.time(), list[CachedKernel]()
    with suppress(OSError):
        for path in folder.iterdir():  # which holds nothing open that an interrupt would leave
            with suppress(OSError):  # removed meanwhile
                ours, status = _OURS.fullmatch(path.name), path.lstat()
                if ours and stat.S_ISREG(status.st_mode):
                    idle = now - status.st_mtime
                    found.append(CachedKernel(path, status.st_size, idle, not ours["unfinished"]))
    return sorted(found, key=lambda one: (-one.idle, one.path))


def unused(kernels: Sequence[CachedKernel]) -> list[CachedKernel]:
    """Those that nobody has used for so long that nobody may need them, and leftovers of a day ago."""
    return [one for one in kernels if one.idle > _DAY * (UNUSED_DAYS if one.is_whole else 1)]


def mark_used(file: Path) -> None:
    """Say that a kernel is needed now."""
    with suppress(OSError):  # removed meanwhile, or a disk that is read alone
        os.utime(file)


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove leftovers, and what was not used for longest, until the rest takes at most so many bytes.

    Several processes may do so at once. What was used in the last hour stays.
    """
    kernels = cached_kernels(folder)
    beyond = sum(one.nbytes for one in kernels) - most_bytes
    for one in kernels:
        is_left_over = not one.is_whole and one.idle > _DAY
        if is_left_over or (beyond > 0 and one.is_whole and one.idle > _IN_USE_SECONDS):
            with suppress(OSError):
                one.path.unlink()
                beyond -= one.nbytes
