"""The processor: name, cores, what this process may use of them, and the instructions that matter to kernels."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from genai.kernels.cpu.cores import allowed_processors, default_threads, group_quota, physical_cores

Sysctl = Callable[[str], str]

# What people call an instruction set -> what Linux calls it in /proc/cpuinfo.
_X86_FLAGS = {
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX512F": "avx512f",
    "AVX512BW": "avx512bw",
    "AVX512-VNNI": "avx512_vnni",
    "AVX-VNNI": "avx_vnni",
    "AVX512-BF16": "avx512_bf16",
    "AMX-INT8": "amx_int8",
    "AMX-BF16": "amx_bf16",
}
_ARM_FLAGS = {
    "NEON": "asimd",
    "FP16": "asimdhp",
    "dotprod": "asimddp",
    "i8mm": "i8mm",
    "BF16": "bf16",
    "SVE": "sve",
}
_MAC_ARM_KEYS = {"FP16": "FEAT_FP16", "dotprod": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "BF16": "FEAT_BF16"}
# Linux on ARM gives numbers for names: (implementer, part), from Arm's manuals.
_ARM_PARTS = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
}
_X86_MACHINES = ("x86_64", "amd64", "i686")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), see Documentation/arch/x86/xstate.rst.
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Processor:
    """The processor as this process sees it.

    Attributes:
        name: the maker's name, or "unknown".
        architecture: such as "x86_64" or "arm64".
        logical_cores, physical_cores: of the machine.
        allowed_cores: logical cores that this process may run on (affinity).
        quota: cores' worth of time that its control group grants; None = no limit.
        threads: threads that kernels use by default.
        features: instruction sets it has, of those that matter here.
        missing_features: those it lacks.
        last_level_cache: bytes of the largest cache; 0 = unknown.
    """

    name: str
    architecture: str
    logical_cores: int
    physical_cores: int
    allowed_cores: int
    quota: float | None
    threads: int
    features: tuple[str, ...]
    missing_features: tuple[str, ...]
    last_level_cache: int


def read_sysctl(name: str, platform_name: str = sys.platform) -> str:
    """A macOS system value; empty if there is none, or no answer within two seconds."""
    if platform_name != "darwin":
        return ""
    try:
        result = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=2, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return result.stdout.strip()


def read_processor(
    root: Path = Path("/"), *, architecture: str | None = None, sysctl: Sysctl = read_sysctl
) -> Processor:
    """Ask the system: /proc and /sys below `root`, or else macOS's sysctl."""
    architecture = architecture or platform.machine() or "unknown"
    is_x86 = architecture.lower() in _X86_MACHINES
    cpuinfo = _cpuinfo(root)
    logical = os.cpu_count() or 1
    wanted = tuple(_X86_FLAGS if is_x86 else _ARM_FLAGS)
    features = _linux_features(cpuinfo, is_x86) if cpuinfo else _mac_features(is_x86, sysctl)
    caches = (_largest_cache(root), *(_integer(sysctl(f"hw.{level}cachesize")) for level in ("l3", "l2")))
    return Processor(
        name=_name(cpuinfo, sysctl),
        architecture=architecture,
        logical_cores=logical,
        physical_cores=_integer(sysctl("hw.physicalcpu")) or physical_cores(range(logical), root),
        allowed_cores=len(allowed_processors()),
        quota=group_quota(root),
        threads=default_threads(root),
        features=tuple(name for name in wanted if name in features),
        missing_features=tuple(name for name in wanted if name not in features),
        last_level_cache=next(filter(None, caches), 0),
    )


def request_amx_tiles(platform_name: str = sys.platform) -> bool | None:
    """Ask the kernel for AMX tiles, as a program must before it uses them; None where there is nothing to ask."""
    if platform_name != "linux" or platform.machine() != "x86_64":
        return None
    try:
        syscall = ctypes.CDLL(None).syscall
    except (AttributeError, OSError):
        return None
    return bool(syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(text.splitlines()))
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


def _name(cpuinfo: dict[str, str], sysctl: Sysctl) -> str:
    part = cpuinfo.get("CPU implementer", ""), cpuinfo.get("CPU part", "")
    names: Iterable[str] = (
        cpuinfo.get("model name", ""),
        _ARM_PARTS.get(part, f"ARM processor {part[0]}/{part[1]}" if any(part) else ""),
        sysctl("machdep.cpu.brand_string"),
        platform.processor(),
    )
    return next(filter(None, names), "unknown")


def _linux_features(cpuinfo: dict[str, str], is_x86: bool) -> set[str]:
    flags = set(cpuinfo.get("flags" if is_x86 else "Features", "").split())
    return {name for name, flag in (_X86_FLAGS if is_x86 else _ARM_FLAGS).items() if flag in flags}


def _mac_features(is_x86: bool, sysctl: Sysctl) -> set[str]:
    if is_x86:
        words = f"{sysctl('machdep.cpu.features')} {sysctl('machdep.cpu.leaf7_features')}".upper().split()
        return {name for name in _X86_FLAGS if name in words}
    found = {name for name, key in _MAC_ARM_KEYS.items() if sysctl(f"hw.optional.arm.{key}") == "1"}
    return found | ({"NEON"} if sysctl("hw.optional.neon") == "1" or found else set())


def _largest_cache(root: Path) -> int:
    sizes = [0]
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            continue
        sizes.append(_integer(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else _integer(text))
    return max(sizes)


def _integer(text: str) -> int:
    return int(text) if text.isdecimal() else 0
