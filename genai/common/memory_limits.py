"""The amount of memory that this process may still allocate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from genai.common.cores import read_sysctl, system_file

# The assumed amount if the system cannot be queried, small enough for any machine that runs language models.
UNKNOWN_MEMORY_BYTES = 2 * 2**30
# cgroup v1 writes "no limit" as a number near 2**63.
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class MemoryBound:
    """A limit on the memory of this process.

    Attributes:
        source: "system", "control group /path", "ulimit -v", or a description of the guess.
        limit: maximum number of bytes.
        free: bytes of `limit` that can still be allocated; negative if usage exceeds the limit.
    """

    source: str
    limit: int
    free: int


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate without swapping or being killed (see `memory_bounds`).

    Args:
        root: the folder that contains proc and sys.
    """
    return max(tightest_bound(memory_bounds(root)).free, 0)


def tightest_bound(bounds: list[MemoryBound]) -> MemoryBound:
    """Return the bound with the least free memory."""
    return min(bounds, key=lambda bound: bound.free)


def memory_bounds(root: Path = Path("/")) -> list[MemoryBound]:
    """Return all known limits on this process's memory, at least one.

    On Linux, the limits are MemAvailable; the limit minus the usage of the process's control group (v1 and v2) and of
    each of its ancestors; and the rest of `ulimit -v`. The page cache of files counts as free, because it is dropped
    before a process is killed. On macOS, the limit is the memory that the system reports as free; on other systems with
    POSIX sysconf, half of the physical memory; and elsewhere, UNKNOWN_MEMORY_BYTES.
    """
    bounds = [*_system_bound(root / "proc"), *_group_bounds(root), *_address_space_bound(root / "proc")]
    return bounds or [_guessed_bound()]


def format_bytes(num_bytes: int) -> str:
    """Format a size in decimal units, as model hubs and disks do: "512 B", "1.5 kB", "3.2 GB"."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _system_bound(proc: Path) -> Iterator[MemoryBound]:
    available = _statistics(proc / "meminfo", "MemAvailable:")
    if available:
        total = _statistics(proc / "meminfo", "MemTotal:")
        yield MemoryBound("system", 1024 * max(total, available), 1024 * available)


def _group_bounds(root: Path) -> Iterator[MemoryBound]:
    """Yield the bounds of every limited control group that contains this process."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in system_file(root / "proc" / "self" / "cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            bounds, bases = _v2_bounds, (mounts, mounts / "unified")
        elif "memory" in controllers.split(","):
            bounds, bases = _v1_bounds, (mounts / "memory", mounts / controllers)
        else:
            continue
        for base in dict.fromkeys(bases):
            # Inside a container, the group's path may not exist below the mount. In this case, the mount's root is the
            # group.
            group = base / path.strip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(base):
                    yield from bounds(folder, f"control group /{folder.relative_to(base).as_posix().strip('.')}")


def _v2_bounds(folder: Path, source: str) -> Iterator[MemoryBound]:
    """Yield the bounds of memory.max, above which a process is killed, and memory.high, above which it almost stops."""
    usage = _number(folder / "memory.current")
    for name in ("memory.max", "memory.high"):
        limit = _number(folder / name)
        if limit is not None and usage is not None:
            cache = _statistics(folder / "memory.stat", "inactive_file", "active_file")
            yield MemoryBound(source, limit, limit - usage + min(cache, usage))


def _v1_bounds(folder: Path, source: str) -> Iterator[MemoryBound]:
    limit, usage = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    # A container cannot see the groups above its own group; this value includes their limits.
    inherited = _statistics(folder / "memory.stat", "hierarchical_memory_limit")
    if limit is not None and usage is not None:
        limit = min(limit, inherited or limit)
        if limit < _NO_LIMIT:
            cache = _statistics(folder / "memory.stat", "total_inactive_file", "total_active_file")
            yield MemoryBound(source, limit, limit - usage + min(cache, usage))


def _address_space_bound(proc: Path) -> Iterator[MemoryBound]:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _statistics(proc / "self" / "status", "VmSize:")
    if limit != resource.RLIM_INFINITY and used:
        yield MemoryBound("ulimit -v", limit, limit - used * 1024)


def _guessed_bound() -> MemoryBound:
    physical = _physical_memory()
    percent = _free_percent()
    if not physical:
        return MemoryBound(
            "default, because the system reports no memory size", UNKNOWN_MEMORY_BYTES, UNKNOWN_MEMORY_BYTES
        )
    if percent is not None:
        return MemoryBound("system", physical, physical * percent // 100)
    return MemoryBound("half of the physical memory", physical, physical // 2)


def _free_percent() -> int | None:
    """Return the percentage of memory that macOS reports as free (page cache included); None on other systems."""
    level = read_sysctl("kern.memorystatus_level")
    return int(level) if level.isdecimal() and int(level) <= 100 else None


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file does not exist or contains "max"."""
    text = system_file(path)
    return int(text) if text.isdecimal() else None


def _statistics(path: Path, *names: str) -> int:
    """Sum the named entries of a file of "name number" lines; missing and non-numeric entries count as 0."""
    total = 0
    for line in system_file(path).splitlines():
        fields = line.split()
        if len(fields) > 1 and fields[0] in names and fields[1].isdecimal():
            total += int(fields[1])
    return total
