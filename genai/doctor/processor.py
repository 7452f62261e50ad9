"""The processor (name, usable cores, instruction sets that kernels use) and the GPUs."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from genai.common.cores import (
    allowed_processors,
    default_threads,
    group_quota,
    physical_cores,
    read_sysctl,
    system_file,
)

Sysctl = Callable[[str], str]

# The usual names of instruction sets, and their flags in Linux's /proc/cpuinfo.
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
_ARM_FLAGS = {"NEON": "asimd", "FP16": "asimdhp", "dotprod": "asimddp", "i8mm": "i8mm", "BF16": "bf16", "SVE": "sve"}
_MAC_ARM_KEYS = {"FP16": "FEAT_FP16", "dotprod": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "BF16": "FEAT_BF16"}
# Linux on ARM identifies a processor by the numbers (implementer, part); the names are from Arm's manuals.
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


@dataclass(frozen=True)
class Processor:
    """The processor from the point of view of this process.

    Attributes:
        name: the manufacturer's name, or "unknown".
        architecture: for example "x86_64" or "arm64".
        logical_cores: logical cores of the machine.
        physical_cores: physical cores of the machine.
        allowed_cores: logical cores that this process may run on (affinity).
        quota: CPU time that the process's control group allows, in cores; None = no limit.
        threads: threads that kernels use by default.
        features: instruction sets that kernels can use and that the processor supports.
        missing_features: instruction sets that kernels can use but that the processor lacks.
        last_level_cache: size in bytes of the largest cache; 0 = unknown.
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


def read_processor(
    root: Path = Path("/"), *, architecture: str | None = None, sysctl: Sysctl = read_sysctl
) -> Processor:
    """Read the processor's properties from /proc and /sys below `root`, or from sysctl on macOS."""
    architecture = architecture or platform.machine() or "unknown"
    is_x86 = architecture.lower() in _X86_MACHINES
    cpuinfo = _cpuinfo(root)
    logical = os.cpu_count() or 1
    flag_names = _X86_FLAGS if is_x86 else _ARM_FLAGS
    flags = cpuinfo.get("flags" if is_x86 else "Features", "").split()
    features = {name for name in flag_names if flag_names[name] in flags} if cpuinfo else _mac_features(is_x86, sysctl)
    caches = (_largest_cache(root), *(_integer(sysctl(f"hw.{level}cachesize")) for level in ("l3", "l2")))
    return Processor(
        name=_name(cpuinfo, sysctl),
        architecture=architecture,
        logical_cores=logical,
        physical_cores=_integer(sysctl("hw.physicalcpu")) or physical_cores(range(logical), root),
        allowed_cores=len(allowed_processors()),
        quota=group_quota(root),
        threads=default_threads(root),
        features=tuple(name for name in flag_names if name in features),
        missing_features=tuple(name for name in flag_names if name not in features),
        last_level_cache=next(filter(None, caches), 0),
    )


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the first processor's entries in /proc/cpuinfo."""
    pairs = (line.partition(":") for line in reversed(system_file(root / "proc/cpuinfo").splitlines()))
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


def _mac_features(is_x86: bool, sysctl: Sysctl) -> set[str]:
    if is_x86:
        words = f"{sysctl('machdep.cpu.features')} {sysctl('machdep.cpu.leaf7_features')}".upper().split()
        return {name for name in _X86_FLAGS if name in words}
    features = {name for name, key in _MAC_ARM_KEYS.items() if sysctl(f"hw.optional.arm.{key}") == "1"}
    return features | ({"NEON"} if sysctl("hw.optional.neon") == "1" or features else set())


def _largest_cache(root: Path) -> int:
    sizes = [0]
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = system_file(path)
        sizes.append(_integer(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else _integer(text))
    return max(sizes)


def _integer(text: str) -> int:
    return int(text) if text.isdecimal() else 0


_SWITCHES = ("CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "OPT", "DISABLE_JIT", "LOOP_VECTORIZE", "SLP_VECTORIZE")


@dataclass(frozen=True)
class KernelPath:
    """The target of compiled kernels, whose vectors of TILE_ROWS numbers LLVM splits into a processor's registers.

    The target is the host processor unless NUMBA_* variables override it.

    Attributes:
        processor: LLVM's name of the target processor.
        registers: for example "AVX-512".
        vector_bits: width of a register.
        half_instructions: True if instructions convert float16, False if integer arithmetic converts float16.
        host_vector_bits: register width of the host processor.
        overrides: NUMBA_* variables that are set and control code generation.
        compiled: False if Numba's compiler is disabled, so that kernels cannot run.
    """

    processor: str
    registers: str
    vector_bits: int
    half_instructions: bool
    host_vector_bits: int
    overrides: Mapping[str, str]
    compiled: bool = True

    @property
    def lanes(self) -> str:
        """A description of the registers that hold a kernel's vector."""
        from genai.kernels.weight_layout import TILE_ROWS

        count = TILE_ROWS * 32 // self.vector_bits
        return f"{TILE_ROWS} float32 lanes in {count} register{'' if count == 1 else 's'} of {self.vector_bits} bits"


def find_kernel_path(environment: Mapping[str, str]) -> KernelPath:
    """Query Numba and LLVM without compiling. Raise ImportError if Numba or llvmlite is missing or broken."""
    import llvmlite.binding
    import numba
    from numba.core.registry import cpu_target

    from genai.kernels.cpu.jit.emit import has_half_instructions

    triple, processor, features = cpu_target.target_context.codegen().magic_tuple()
    names = {name[1:] for name in features.split(",") if name.startswith("+")}
    host = {name for name, present in llvmlite.binding.get_host_cpu_features().items() if present}
    registers, bits = vector_registers(triple, names)
    return KernelPath(
        processor=processor,
        registers=registers,
        vector_bits=bits,
        half_instructions=has_half_instructions(cpu_target.target_context),
        host_vector_bits=vector_registers(triple, host)[1],
        overrides={f"NUMBA_{s}": environment[f"NUMBA_{s}"] for s in _SWITCHES if f"NUMBA_{s}" in environment},
        compiled=not numba.config.DISABLE_JIT,
    )


def vector_registers(triple: str, features: Collection[str]) -> tuple[str, int]:
    """Return the name and width in bits of the widest vector registers that LLVM may use."""
    if triple.startswith(("aarch64", "arm64")):
        return "NEON", 128
    for feature, name, bits in (("avx512f", "AVX-512", 512), ("avx2", "AVX2", 256), ("avx", "AVX", 256)):
        if feature in features:
            return name, bits
    return ("SSE2", 128) if triple.startswith(("x86_64", "i686")) else ("generic vectors", 128)


@dataclass(frozen=True)
class Gpus:
    """The GPUs of the machine and the software for them.

    Attributes:
        names: models of the NVIDIA GPUs that the driver sees.
        driver: version of NVIDIA's driver; empty if the driver is not loaded.
        cupy: True if cupy is installed.
        hints: reasons why no GPU may be usable, and unsupported GPUs.
    """

    names: tuple[str, ...]
    driver: str
    cupy: bool
    hints: tuple[str, ...]


def find_gpus(root: Path = Path("/"), *, find_module: Callable[[str], Any] = find_spec) -> Gpus:
    """Search for drivers below `root`, and for cupy among the installed packages."""
    driver = _driver_version(root / "proc/driver/nvidia/version")
    names = tuple(map(_model, sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))))
    hints = []
    if not driver:
        hints.append("no NVIDIA driver is loaded")
    elif not names and not (root / "dev/nvidia0").exists():
        hints.append("the NVIDIA driver shows no GPU to this process")
    if (root / "dev/kfd").exists():
        hints.append("the AMD GPU is not supported")
    if (root / "dev/dxg").exists():
        hints.append("in WSL, Windows provides the GPU driver")
    try:
        cupy = find_module("cupy") is not None
    except (ImportError, ValueError):
        cupy = False
    return Gpus(names, driver, cupy, tuple(hints))


def _driver_version(path: Path) -> str:
    """Return the driver's version, for example 550.54: the first word of the first line that looks like a version."""
    words = system_file(path).partition("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown" if words else "")


def _model(path: Path) -> str:
    for line in system_file(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return "unknown model"
