"""Facts about processors, on simulated machines."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from genai.common.cores import read_sysctl, request_tiles
from genai.doctor.processor import read_processor

Write = Callable[[str, object], Path]
Sysctl = Callable[[str], str]

X86 = """processor\t: 0
model name\t: Example(R) CPU @ 3.00GHz
flags\t\t: fpu sse2 avx avx2 fma f16c avx512f avx512bw avx512_vnni amx_tile amx_int8

processor\t: 1
model name\t: Another
flags\t\t: fpu"""
ARM = """processor\t: 0
Features\t: fp asimd asimdhp asimddp i8mm
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""
MAC = {
    "machdep.cpu.brand_string": "Apple M9",
    "hw.physicalcpu": "10",
    "hw.optional.neon": "1",
    "hw.optional.arm.FEAT_DotProd": "1",
    "hw.optional.arm.FEAT_I8MM": "0",
    "hw.l2cachesize": "4194304",
}


def test_x86_on_linux(root: Path, write: Write, nothing_known: Sysctl) -> None:
    write("proc/cpuinfo", X86)
    write("sys/devices/system/cpu/cpu0/cache/index0/size", "48K")
    write("sys/devices/system/cpu/cpu0/cache/index3/size", "32M")
    cpu = read_processor(root, architecture="x86_64", sysctl=nothing_known)
    assert cpu.name == "Example(R) CPU @ 3.00GHz"
    assert cpu.features == ("AVX2", "FMA", "F16C", "AVX512F", "AVX512BW", "AVX512-VNNI", "AMX-INT8")
    assert cpu.missing_features == ("AVX-VNNI", "AVX512-BF16", "AMX-BF16")
    assert cpu.last_level_cache == 32 * 2**20
    assert 1 <= cpu.threads <= cpu.allowed_cores <= cpu.logical_cores == os.cpu_count()


def test_arm_on_linux(root: Path, write: Write, nothing_known: Sysctl) -> None:
    write("proc/cpuinfo", ARM)
    cpu = read_processor(root, architecture="aarch64", sysctl=nothing_known)
    assert cpu.name == "Neoverse V1"
    assert cpu.features == ("NEON", "FP16", "dotprod", "i8mm")
    write("proc/cpuinfo", ARM.replace("0xd40", "0xfff"))
    assert read_processor(root, architecture="aarch64", sysctl=nothing_known).name == "ARM processor 0x41/0xfff"


def test_a_mac_has_no_proc(root: Path) -> None:
    cpu = read_processor(root, architecture="arm64", sysctl=lambda name: MAC.get(name, ""))
    assert (cpu.name, cpu.physical_cores, cpu.last_level_cache) == ("Apple M9", 10, 4 * 2**20)
    assert cpu.features == ("NEON", "dotprod")
    assert "i8mm" in cpu.missing_features


def test_an_intel_mac(root: Path) -> None:
    known = {"machdep.cpu.features": "SSE2 FMA F16C", "machdep.cpu.leaf7_features": "AVX2"}
    cpu = read_processor(root, architecture="x86_64", sysctl=lambda name: known.get(name, ""))
    assert cpu.features == ("AVX2", "FMA", "F16C")


def test_a_machine_that_says_nothing(root: Path, nothing_known: Sysctl) -> None:
    cpu = read_processor(root, architecture="riscv64", sysctl=nothing_known)
    assert cpu.name == (platform.processor() or "unknown")
    assert cpu.features == ()
    assert cpu.quota is None
    assert cpu.last_level_cache == 0


def test_a_quota_and_damaged_files(root: Path, write: Write, nothing_known: Sysctl) -> None:
    write("proc/self/cgroup", "no colons at all\n0::/job")
    write("sys/fs/cgroup/job/cpu.max", "50000 100000")
    write("sys/devices/system/cpu/cpu0/cache/index0/size", "many")
    (root / "proc/cpuinfo").write_bytes(b"\xff\xfe model name : x\nmodel name : caf\xe9\n:\n")
    cpu = read_processor(root, architecture="x86_64", sysctl=nothing_known)
    assert cpu.quota == 0.5
    assert cpu.threads == 1
    assert cpu.name == "caf\ufffd"
    assert cpu.last_level_cache == 0


@pytest.mark.skipif(sys.platform == "darwin", reason="there sysctl answers")
def test_sysctl_is_asked_on_macs_only() -> None:
    assert read_sysctl("hw.ncpu") == ""
    assert read_sysctl("hw.ncpu", "darwin") == ""  # macOS's program does not exist here, which is not an error


def test_tiles_are_asked_for_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert request_tiles() in (True, False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not request_tiles()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not request_tiles()


def test_this_machine() -> None:
    cpu = read_processor()
    assert cpu.name
    assert 1 <= cpu.physical_cores <= cpu.logical_cores
