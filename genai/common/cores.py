"""What of the processor this process may use: cores, within its control group's quota, and AMX's tile registers."""

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
        package, core = system_file(topology / "physical_package_id"), system_file(topology / "core_id")
        cores.add((package, core) if core else (str(processor), ""))
    return len(cores)


def request_tiles() -> bool:
    """Ask Linux for AMX's tile registers, as a program must before it uses them; False where they are not lent."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)


def group_quota(root: Path = _SYSTEM) -> float | None:
    """CPUs' worth of time that the control group grants; the smallest limit on the way up counts."""
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
    """Quota over period, in microseconds; None where there is no limit ("max", "-1"), or none that can be read."""
    if mount:  # version 1
        fields = [system_file(folder / "cpu.cfs_quota_us"), system_file(folder / "cpu.cfs_period_us")]
    else:
        fields = system_file(folder / "cpu.max").split()
    if len(fields) != 2 or not all(map(str.isdigit, fields)) or int(fields[1]) == 0:
        return None
    return int(fields[0]) / int(fields[1])


def system_file(path: Path) -> str:
    """A file's text without blanks around it; empty where there is no such file, as off Linux."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_sysctl(name: str, platform_name: str = sys.platform) -> str:
    """A macOS system value; empty if there is none, or no answer within two seconds."""
    if platform_name != "darwin":
        return ""
    try:
        result = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return result.stdout.strip()
