"""How many threads this process should use: physical cores it may run on, within its control group's quota."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_SYSTEM = Path("/")


def default_threads(root: Path = _SYSTEM) -> int:
    """Physical cores available to this process, at least 1.

    Logical processors that share a core count once; a control group's CPU quota (versions 1 and 2) rounds up.

    Args:
        root: where /sys and /proc are found.
    """
    processors = allowed_processors()
    count = physical_cores(processors, root)
    quota = group_quota(root)
    if quota is not None:
        count = min(count, max(1, -int(-quota // 1)))
    return max(1, count)


def allowed_processors() -> set[int]:
    """Logical processors that this process may run on (its affinity)."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(processors: Iterable[int], root: Path = _SYSTEM) -> int:
    """How many cores these logical processors are on; without a topology, one each."""
    cores = set()
    for processor in processors:
        topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
        cores.add((package, core) if core else (str(processor), ""))
    return len(cores)


def group_quota(root: Path = _SYSTEM) -> float | None:
    """CPUs' worth of time that the control group grants; the smallest limit on the way up counts."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mount = controllers
        if mount and "cpu" not in mount.split(","):
            continue
        top = root / "sys/fs/cgroup" / mount
        folder = top / path.lstrip("/")
        limits += [_limit(level, mount) for level in (folder, *folder.parents) if level == top or top in level.parents]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(folder: Path, mount: str) -> float | None:
    """Quota over period, in microseconds; None where there is no limit ("max", "-1"), or none that can be read."""
    if mount:  # version 1
        fields = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    else:
        fields = _read(folder / "cpu.max").split()
    if len(fields) != 2 or not all(map(str.isdigit, fields)) or int(fields[1]) == 0:
        return None
    return int(fields[0]) / int(fields[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
