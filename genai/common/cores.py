"""Processor resources of this process: cores, the CPU quota of its control group, and AMX tile registers."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_SYSTEM = Path("/")
# arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), see Documentation/arch/x86/xstate.rst.
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


def default_threads(root: Path = _SYSTEM) -> int:
    """Return the number of physical cores that are available to this process, at least 1.

    Logical processors that share a core count as one. A control group's CPU quota (versions 1 and 2) is rounded up.

    Args:
        root: the folder that contains sys/ and proc/.
    """
    processors = allowed_processors()
    count = physical_cores(processors, root)
    quota = group_quota(root)
    if quota is not None:
        count = min(count, max(1, -int(-quota // 1)))
    return max(1, count)


def allowed_processors() -> set[int]:
    """Return the logical processors on which this process may run (its affinity)."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(processors: Iterable[int], root: Path = _SYSTEM) -> int:
    """Count the physical cores of these logical processors; without topology data, each counts as one core."""
    cores = set()
    for processor in processors:
        topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        package, core = system_file(topology / "physical_package_id"), system_file(topology / "core_id")
        cores.add((package, core) if core else (str(processor), ""))
    return len(cores)


def request_tiles() -> bool:
    """Request AMX tile registers, as Linux requires before their first use; return False if they are unavailable."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)


def group_quota(root: Path = _SYSTEM) -> float | None:
    """Return the control group's CPU quota in CPUs; None if unlimited. The limits of its ancestors also apply."""
    limits = []
    for line in system_file(root / "proc/self/cgroup").splitlines():
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
    """Return the quota divided by the period (both in microseconds); None if unlimited ("max", "-1") or unreadable."""
    if mount:  # version 1
        fields = [system_file(folder / "cpu.cfs_quota_us"), system_file(folder / "cpu.cfs_period_us")]
    else:
        fields = system_file(folder / "cpu.max").split()
    if len(fields) != 2 or not all(map(str.isdigit, fields)) or int(fields[1]) == 0:
        return None
    return int(fields[0]) / int(fields[1])


def system_file(path: Path) -> str:
    """Return a file's text without surrounding blanks; "" if there is no such file, for example outside Linux."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_sysctl(name: str, platform_name: str = sys.platform) -> str:
    """Return a macOS system value; "" if the value does not exist or sysctl does not answer within two seconds."""
    if platform_name != "darwin":
        return ""
    try:
        result = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return result.stdout.strip()
