"""How much memory there is, and how many blocks fit into it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .groups import CacheLayout

# Where the system cannot be asked at all: small enough for any machine that runs language models.
UNKNOWN_MEMORY_BYTES = 2 * 2**30
# cgroup v1 writes "no limit" as a number near 2**63.
_NO_LIMIT = 2**60


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without swapping or being killed.

    On Linux the least of: MemAvailable; for the process's control group (v1 and v2) and each of its ancestors, the
    limit less what is in use, page cache that can be dropped not counted; and what `ulimit -v` leaves. On other
    systems with POSIX sysconf, half of the physical memory; elsewhere UNKNOWN_MEMORY_BYTES.

    Args:
        root: where proc and sys are mounted.
    """
    bounds = [*_meminfo_available(root / "proc"), *_cgroup_rooms(root), *_address_space_room(root / "proc")]
    if bounds:
        return max(min(bounds), 0)
    return _physical_memory() // 2 or UNKNOWN_MEMORY_BYTES


def blocks_that_fit(layout: CacheLayout, num_bytes: int) -> int:
    """How many whole blocks of all paged groups fit into a number of bytes.

    Raises:
        ValueError: the layout keeps nothing per token.
    """
    if layout.bytes_per_block == 0:
        raise ValueError("the layout has no paged group, so it has no blocks")
    return max(num_bytes, 0) // layout.bytes_per_block


def format_bytes(num_bytes: int) -> str:
    """A size for people: "512 B", "1.5 KiB", "3.2 GiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _meminfo_available(proc: Path) -> Iterator[int]:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Free bytes of every limited control group that this process is in."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in _lines(root / "proc" / "self" / "cgroup"):
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            bases = (mounts, mounts / "unified")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            bases = (mounts / "memory", mounts / controllers)
        else:
            continue
        for base in dict.fromkeys(bases):
            yield from _group_rooms(base, path, *names)


def _group_rooms(base: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    # Inside a container the group's own path may not exist below the mount; its root then is the container's group.
    group = base / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(base):
            break
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            yield limit - usage + _statistic(folder / "memory.stat", cache_name)


def _address_space_room(proc: Path) -> Iterator[int]:
    if sys.platform == "win32":
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        for line in _lines(proc / "self" / "status"):
            if line.startswith("VmSize:"):
                yield limit - int(line.split()[1]) * 1024


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file or it says "max"."""
    text = " ".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
