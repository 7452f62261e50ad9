"""Memory budgets: the value from each source, and the source that counts."""

import resource
import sys
from pathlib import Path

import pytest

from genai.common import memory_limits

GIB = 2**30


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A file system root with 8 GiB available and no control group."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    write(tmp_path, "proc/meminfo", f"MemTotal: 16000000 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def v2(root: Path, group: str, limit: object, usage: int, inactive_file: int = 0) -> None:
    folder = f"sys/fs/cgroup/{group}"
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.current", usage)
    write(root, f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive_file}")


def test_without_a_control_group_the_system_counts(root):
    assert memory_limits.available_memory(root) == 8 * GIB


def test_a_v2_limit_counts_less_its_use_and_with_droppable_cache(root):
    write(root, "proc/self/cgroup", "0::/app/one")
    v2(root, "app/one", 3 * GIB, 2 * GIB, GIB // 2)
    assert memory_limits.available_memory(root) == 3 * GIB // 2


def test_the_tightest_ancestor_counts(root):
    write(root, "proc/self/cgroup", "0::/app/one")
    v2(root, "app/one", "max", GIB)
    v2(root, "app", 2 * GIB, GIB)
    v2(root, ".", 4 * GIB, GIB)
    assert memory_limits.available_memory(root) == GIB


def test_a_container_sees_its_limit_at_the_root_of_the_mount(root):
    write(root, "proc/self/cgroup", "0::/not/visible/here")
    v2(root, ".", GIB, GIB // 4)
    assert memory_limits.available_memory(root) == GIB - GIB // 4


def test_v2_beside_v1(root):
    write(root, "proc/self/cgroup", "4:cpu:/x\n0::/app")
    v2(root, "unified/app", GIB, 0)
    assert memory_limits.available_memory(root) == GIB


def test_v1_limit(root):
    write(root, "proc/self/cgroup", "9:name=systemd:/\n4:memory:/app")
    folder = "sys/fs/cgroup/memory/app"
    write(root, f"{folder}/memory.limit_in_bytes", GIB)
    write(root, f"{folder}/memory.usage_in_bytes", GIB // 2)
    write(root, f"{folder}/memory.stat", "total_inactive_file 4096")
    assert memory_limits.available_memory(root) == GIB // 2 + 4096


def test_v1_without_limit(root):
    write(root, "proc/self/cgroup", "4:memory:/")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    assert memory_limits.available_memory(root) == 8 * GIB


def test_v2_slows_down_above_memory_high(root):
    write(root, "proc/self/cgroup", "0::/app")
    v2(root, "app", 4 * GIB, GIB)
    write(root, "sys/fs/cgroup/app/memory.high", 2 * GIB)
    assert memory_limits.available_memory(root) == GIB
    write(root, "sys/fs/cgroup/app/memory.high", "max")
    assert memory_limits.available_memory(root) == 3 * GIB


def test_page_cache_in_use_is_free_too_but_never_more_than_is_in_use(root):
    write(root, "proc/self/cgroup", "0::/app")
    v2(root, "app", 3 * GIB, 2 * GIB)
    write(root, "sys/fs/cgroup/app/memory.stat", f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 2}")
    assert memory_limits.available_memory(root) == 2 * GIB
    write(root, "sys/fs/cgroup/app/memory.stat", f"inactive_file {9 * GIB}")
    assert memory_limits.available_memory(root) == 3 * GIB


def test_v1_knows_of_limits_above_the_container(root):
    write(root, "proc/self/cgroup", "4:memory:/docker/abc")
    folder = "sys/fs/cgroup/memory"
    write(root, f"{folder}/memory.limit_in_bytes", 9223372036854771712)
    write(root, f"{folder}/memory.usage_in_bytes", GIB // 2)
    write(root, f"{folder}/memory.stat", f"hierarchical_memory_limit {GIB}")
    assert memory_limits.available_memory(root) == GIB // 2


def test_bounds_name_their_source(root):
    write(root, "proc/self/cgroup", "0::/app/one")
    v2(root, "app", 2 * GIB, GIB)
    v2(root, ".", 4 * GIB, GIB)
    bounds = {bound.source: (bound.limit, bound.free) for bound in memory_limits.memory_bounds(root)}
    assert bounds == {
        "system": (16000000 * 1024, 8 * GIB),
        "control group /app": (2 * GIB, GIB),
        "control group /": (4 * GIB, 3 * GIB),
    }


@pytest.mark.parametrize("text", ["", "MemAvailable:", "MemAvailable: many kB", "\x00\xff", "MemTotal: 5 kB"])
def test_files_that_say_nothing_useful_are_passed_over(root, monkeypatch, text):
    monkeypatch.setattr(memory_limits, "_free_percent", lambda: None)
    write(root, "proc/meminfo", text)
    write(root, "proc/self/cgroup", "no colons\n0::/app\n::")
    v2(root, "app", "lots", 5)
    assert memory_limits.available_memory(root) == memory_limits._physical_memory() // 2


def test_a_group_path_that_leaves_the_mount(root):
    write(root, "proc/self/cgroup", "0::/../../other")
    v2(root, ".", GIB, 0)
    assert memory_limits.available_memory(root) == GIB


def test_more_in_use_than_allowed_leaves_nothing(root):
    write(root, "proc/self/cgroup", "0::/")
    v2(root, ".", GIB, 2 * GIB)
    assert memory_limits.available_memory(root) == 0


def test_ulimit_counts(root, monkeypatch):
    write(root, "proc/self/status", f"VmPeak: 9 kB\nVmSize: {GIB // 1024} kB")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * GIB, 3 * GIB))
    assert memory_limits.available_memory(root) == 2 * GIB


def test_off_linux_half_of_the_physical_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(memory_limits, "_physical_memory", lambda: 6 * GIB)
    monkeypatch.setattr(memory_limits, "_free_percent", lambda: None)
    assert memory_limits.available_memory(tmp_path) == 3 * GIB
    monkeypatch.setattr(memory_limits, "_free_percent", lambda: 75)
    assert memory_limits.available_memory(tmp_path) == 9 * GIB // 2
    monkeypatch.setattr(memory_limits, "_physical_memory", lambda: 0)
    assert memory_limits.available_memory(tmp_path) == memory_limits.UNKNOWN_MEMORY_BYTES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_this_machine():
    assert 0 < memory_limits.available_memory() < memory_limits._physical_memory()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 kB"),
        (999_960, "1.0 MB"),
        (3 * 10**6, "3.0 MB"),
        (25 * 10**8, "2.5 GB"),
        (4 * 10**12, "4.0 TB"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert memory_limits.format_bytes(num_bytes) == text
