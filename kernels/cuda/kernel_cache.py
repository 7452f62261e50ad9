"""The cache of compiled kernels on disk, with the times of their last use and the deletion of unused kernels.

A kernel is identified by its source text, so that versions of the toolkit share equal kernels; the name of a kernel's
file does not identify the version that needs the kernel. Files are marked as used when they are read, and the files
that have been unused for longest are deleted. A process no longer needs a file that it has read, so files that other
processes have loaded may be deleted.
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

# All 900 kernels of one version occupy about 50 MB for one kind of GPU. The kernels of one model occupy a few MB.
MOST_BYTES = 256 << 20
UNUSED_DAYS = 30
_DAY = 86400.0
# Processes that are starting may be about to read files that were used this recently, so they are kept, whatever their
# size.
_IN_USE_SECONDS = 3600.0
_OURS = re.compile(r"[0-9a-f]{64}\.(?:cubin|ptx)(?P<unfinished>\.\d+\.[0-9a-f]{32}\.tmp)?")


@dataclass(frozen=True)
class CachedKernel:
    """The file of a compiled kernel, or a partial file that a killed process left behind.

    Attributes:
        path: path of the file.
        nbytes: size in bytes.
        idle: seconds since the last use.
        is_whole: False for a partial file.
    """

    path: Path
    nbytes: int
    idle: float
    is_whole: bool


def cached_kernels(folder: Path) -> list[CachedKernel]:
    """Return the files that compilers wrote to a folder, the least recently used first; other files are ignored."""
    now, found = time.time(), list[CachedKernel]()
    with suppress(OSError):
        for path in folder.iterdir():  # iterdir holds no resource open that an interrupt would leak
            with suppress(OSError):  # deleted meanwhile
                ours, status = _OURS.fullmatch(path.name), path.lstat()
                if ours and stat.S_ISREG(status.st_mode):
                    idle = now - status.st_mtime
                    found.append(CachedKernel(path, status.st_size, idle, not ours["unfinished"]))
    return sorted(found, key=lambda one: (-one.idle, one.path))


def unused(kernels: Sequence[CachedKernel]) -> list[CachedKernel]:
    """Return the kernels that were not used for UNUSED_DAYS days, and partial files older than a day."""
    return [one for one in kernels if one.idle > _DAY * (UNUSED_DAYS if one.is_whole else 1)]


def mark_used(file: Path) -> None:
    """Mark a kernel as used now."""
    with suppress(OSError):  # deleted meanwhile, or a read-only disk
        os.utime(file)


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Delete partial files, then the least recently used kernels until the rest occupies at most `most_bytes`.

    Several processes may call this at the same time. Kernels that were used in the last hour are kept.
    """
    kernels = cached_kernels(folder)
    beyond = sum(one.nbytes for one in kernels) - most_bytes
    for one in kernels:
        is_left_over = not one.is_whole and one.idle > _DAY
        if is_left_over or (beyond > 0 and one.is_whole and one.idle > _IN_USE_SECONDS):
            with suppress(OSError):
                one.path.unlink()
                beyond -= one.nbytes
