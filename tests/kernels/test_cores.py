"""How many threads a process gets by default, on made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from genai.common.cores import default_threads


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages of two cores of two processors each; this process may use all eight."""
    for processor in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{processor}/topology"
        write(topology / "physical_package_id", str(processor // 4))
        write(topology / "core_id", str(processor % 4 // 2))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


def test_counts_cores_not_processors(machine: Path) -> None:
    assert default_threads(machine) == 4


def test_affinity(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert default_threads(machine) == 2


def test_unknown_topology_counts_processors(tmp_path: Path, machine: Path) -> None:
    assert default_threads(tmp_path / "nowhere") == 8


def test_without_affinity(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert default_threads(machine) == 2
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads(machine) == 1


@pytest.mark.parametrize(
    ("quota", "threads"), [("max 100000", 4), ("300000 100000", 3), ("150000 100000", 2), ("5000 100000", 1), ("x", 4)]
)
def test_group_quota_version_2(machine: Path, quota: str, threads: int) -> None:
    write(machine / "proc/self/cgroup", "0::/work/job")
    write(machine / "sys/fs/cgroup/work/job/cpu.max", quota)
    assert default_threads(machine) == threads


def test_the_tightest_level_counts(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/work/job")
    write(machine / "sys/fs/cgroup/work/job/cpu.max", "400000 100000")
    write(machine / "sys/fs/cgroup/work/cpu.max", "100000 100000")
    assert default_threads(machine) == 1


@pytest.mark.parametrize(("quota", "threads"), [("-1", 4), ("200000", 2)])
def test_group_quota_version_1(machine: Path, quota: str, threads: int) -> None:
    write(machine / "proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/docker/abc\n")
    folder = machine / "sys/fs/cgroup/cpu,cpuacct"
    write(folder / "cpu.cfs_quota_us", quota)
    write(folder / "cpu.cfs_period_us", "100000")
    assert default_threads(machine) == threads


def test_this_machine() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
