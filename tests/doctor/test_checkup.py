"""The findings, with marks and fixes; no check can fail."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from genai.doctor import checkup
from genai.doctor.checkup import CHECKS, Finding, Machine, Mark, examine, usable
from genai.doctor.processor import KernelPath

Write = Callable[[str, object], Path]
GIB = 2**30


@pytest.fixture
def place(root: Path, write: Write, tmp_path: Path) -> Machine:
    """A machine with 8 GiB of free memory, a writable home folder, and UTF-8 output."""
    write("proc/meminfo", f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB")
    home = tmp_path / "home"
    home.mkdir()
    environment = {"GENAI_CACHE_DIR": str(home), "LANG": "C.UTF-8"}
    return Machine(root, environment, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), threads=1)


def test_every_check_says_something(root: Path, tmp_path: Path) -> None:
    """A machine without /proc, /sys and a home folder, as far as this can be simulated."""
    output = io.StringIO()
    found = examine(Machine(root, {"GENAI_CACHE_DIR": str(tmp_path / "no" / "home")}, output, tmp_path))
    assert [finding.name for finding in found] == list(CHECKS)
    assert all(finding.text for finding in found)
    json.dumps([asdict(finding) for finding in found])


def test_the_docs_explain_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "check-machine.md").read_text(encoding="utf-8")
    table = page.split("| line | what the line reports |")[1].split("\n\n")[0]
    assert [row.split("|")[1].strip() for row in table.splitlines()[2:]] == list(CHECKS)


def test_a_check_that_fails_is_a_note(place: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(place: Machine) -> Finding:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(checkup, "CHECKS", {"disk": broken})
    (finding,) = checkup.examine(place)
    assert (finding.name, finding.mark) == ("disk", Mark.NOTE)
    assert "the disk is on fire" in finding.text


def test_usable_unless_there_is_a_problem() -> None:
    ok, note, problem = (Finding("x", mark, "y") for mark in Mark)
    assert usable([ok, note])
    assert not usable([ok, problem, note])


def test_versions(place: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup.check_versions(place).mark is Mark.OK
    monkeypatch.setattr(checkup, "PACKAGES", ("numpy", "no-such-package-of-ours"))
    missing = checkup.check_versions(place)
    assert missing.mark is Mark.PROBLEM
    assert missing.fix == "pip install no-such-package-of-ours"


def test_memory(place: Machine, write: Write) -> None:
    fine = checkup.check_memory(place)
    assert fine.mark is Mark.OK
    assert "8.6 GB of 17.2 GB" in fine.text
    write("proc/self/cgroup", "0::/job")
    write("sys/fs/cgroup/job/memory.max", GIB)
    write("sys/fs/cgroup/job/memory.current", GIB // 4)
    limited = checkup.check_memory(place)
    assert limited.mark is Mark.NOTE
    assert "the tightest limit is the control group /job" in limited.text
    assert limited.facts["available_bytes"] == GIB - GIB // 4
    write("sys/fs/cgroup/job/memory.max", 300 * 2**20)
    tiny = checkup.check_memory(place)
    assert tiny.mark is Mark.PROBLEM
    assert "control group /job" in tiny.fix


def test_a_quota_is_a_note(place: Machine, write: Write) -> None:
    write("proc/self/cgroup", "0::/job")
    write("sys/fs/cgroup/job/cpu.max", "50000 100000")
    found = checkup.check_processor(place)
    assert found.mark is Mark.NOTE
    assert "allows the CPU time of 0.5 cores" in found.text


def test_bandwidth_is_measured_where_there_is_memory(place: Machine, write: Write) -> None:
    found = checkup.check_bandwidth(place)
    assert found.mark is Mark.OK
    assert "GB/s read with 1 thread:" in found.text
    assert found.facts["bytes_per_second"] > 0
    write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 9 kB")
    assert checkup.check_bandwidth(place).mark is Mark.NOTE


def test_a_large_cache_is_said(place: Machine, write: Write) -> None:
    write("sys/devices/system/cpu/cpu0/cache/index3/size", "480M")
    assert "may contain part of" in checkup.check_bandwidth(place).text


def test_an_unsteady_measurement_is_said(place: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from genai.doctor import speeds

    unsteady = speeds.Bandwidth(20e9, 5e9, 30e9, 2**28, 1)
    monkeypatch.setattr(speeds, "measure_bandwidth", lambda *arguments, **options: unsteady)
    found = checkup.check_bandwidth(place)
    assert "varied from 5.0 to 30.0 GB/s" in found.text
    assert "at most 20.0/N tokens/s (5.0 at 4 GB)" in found.text


PATH = KernelPath("znver9", "AVX-512", 512, True, 512, {})


@pytest.mark.parametrize(
    ("path", "mark", "fix"),
    [
        (PATH, Mark.OK, ""),
        (replace(PATH, half_instructions=False), Mark.OK, ""),
        (
            replace(PATH, vector_bits=128, overrides={"NUMBA_CPU_NAME": "generic"}),
            Mark.NOTE,
            "unset NUMBA_CPU_NAME",
        ),
        (replace(PATH, vector_bits=256), Mark.NOTE, "check Numba's .numba_config.yaml"),
        (replace(PATH, compiled=False), Mark.PROBLEM, "unset NUMBA_DISABLE_JIT"),
    ],
)
def test_kernels(path: KernelPath, mark: Mark, fix: str) -> None:
    found = checkup._kernel_finding(path)
    assert (found.mark, found.fix) == (mark, fix)
    assert ("portable path" in found.text) == (not path.half_instructions)


def test_a_broken_numba_is_a_problem(place: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(environment: object) -> KernelPath:
        raise ImportError("libllvm.so: cannot open shared object file")

    monkeypatch.setattr(checkup, "find_kernel_path", broken)
    found = checkup.check_kernels(place)
    assert found.mark is Mark.PROBLEM
    assert "libllvm.so" in found.text
    assert "pip install" in found.fix


def test_gpu(place: Machine, write: Write) -> None:
    assert checkup.check_gpu(place).text.startswith("none: no NVIDIA driver is loaded")
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA 550.1")
    write("proc/driver/nvidia/gpus/0/information", "Model: NVIDIA T4")
    found = checkup.check_gpu(place)
    assert found.mark is Mark.NOTE
    assert "NVIDIA T4 (driver 550.1)" in found.text


def test_cache(place: Machine) -> None:
    assert "kernels are compiled at the first start" in checkup.check_cache(place).text
    stale = Path(place.environment["GENAI_CACHE_DIR"]) / "genai" / "kernels" / ("e" * 32)
    stale.mkdir(parents=True)
    (stale / "a.o").write_bytes(bytes(2048))
    found = checkup.check_cache(place)
    assert found.mark is Mark.NOTE
    assert "2.0 kB" in found.text
    assert "--clean-cache" in found.fix
    assert found.facts["stale"] == [str(stale)]


def test_the_bundled_model(place: Machine, tmp_path: Path) -> None:
    assert checkup.check_model(place).mark is Mark.OK
    absent = checkup.check_model(replace(place, model_folder=tmp_path))
    assert absent.mark is Mark.NOTE
    assert "genai_config.json" in absent.text


@pytest.mark.parametrize(
    ("encoding", "mark"), [("utf-8", Mark.OK), ("UTF8", Mark.OK), ("ascii", Mark.NOTE), ("latin-1", Mark.NOTE)]
)
def test_terminal(place: Machine, encoding: str, mark: Mark) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    found = checkup.check_terminal(replace(place, output=output))
    assert found.mark is mark
    assert found.facts["locale"] == "C.UTF-8"
    assert "not a terminal" in found.text


def test_amx_says_whether_tiles_are_granted(place: Machine, write: Write) -> None:
    write("proc/cpuinfo", "model name : x\nflags : avx2 amx_int8")
    found = checkup.check_features(place)
    if "AMX-INT8" in found.facts["features"]:  # on x86; other processors have other names
        assert "AMX tiles" in found.text
        assert "amx_tiles_granted" in found.facts
