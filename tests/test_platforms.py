"""The fallbacks for other systems that docs/reference/platforms.md lists: each is forced on the system of the tests."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from genai.cli import __main__ as entry, terminal
from genai.common import memory_limits
from genai.common.host_memory import ReservedMemory, huge_array
from genai.convert.build import _alone
from genai.convert.folder import locked, unfinished_folder
from genai.doctor.checkup import Machine, Mark, examine
from genai.doctor.processor import find_gpus, read_processor
from genai.kernels.cpu.arrays import blas
from genai.kernels.cpu.jit import isa, kernel_cache, workers
from genai.kernels.cpu.program.thread_pool import Threads
from genai.onnx import storage
from genai.text import template_server, template_worker
from genai.text.template_worker import RenderLimits, TemplateStopped, TemplateWorker

ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"

# Everything that this toolkit uses and that Python lacks on Windows; it is removed before the toolkit is imported.
BARE = """
import mmap, multiprocessing.connection, numba, os, select, shutil, signal, subprocess, sys, sysconfig, tempfile
sysconfig.get_config_vars()  # of this system, before it has another name
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
GONE = {
    os: "fork register_at_fork sched_getaffinity nice getuid sysconf set_blocking getppid",
    signal: "setitimer ITIMER_PROF SIGPROF pthread_kill pthread_sigmask",
    select: "poll epoll",
    mmap: "MADV_DONTNEED MADV_HUGEPAGE MAP_NORESERVE",
}
for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
ASK = """
from genai.text import template_worker
template_worker._PROGRAM = (
    "import sys, signal; sys.modules['resource'] = None; del signal.setitimer;" + template_worker._PROGRAM
)
from genai.cli.__main__ import main
main(["chat", "-p", "What is 12 + 7?", "--stats"])
"""


@pytest.fixture
def off_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "elsewhere")


@pytest.fixture
def worker() -> Iterator[TemplateWorker]:
    worker = TemplateWorker(RenderLimits(cpu_seconds=0.3, seconds=1.0))
    yield worker
    worker.close()


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=1200,
        check=False,
    )


def test_chat_without_what_windows_lacks() -> None:
    """Kernels of this system, which may be cached; the system's name changes after their selection."""
    kernels = "from genai.kernels.cpu.jit import isa\nfrom genai.kernels.cpu.program import waiting\nisa.isa()\n"
    result = run(BARE + kernels + "sys.platform = 'elsewhere'\n" + ASK)
    assert (result.returncode, result.stdout) == (0, "19\n"), result.stderr
    assert "ttft" in result.stderr


@pytest.mark.slow
def test_chat_off_linux_on_any_processor(tmp_path: Path) -> None:
    """Futexes, mapped memory and compiling processes are missing too. Kernels then differ, so the cache is separate."""
    program = BARE + "sys.platform = 'elsewhere'\n" + ASK
    result = run(program, GENAI_CPU_ISA="portable", GENAI_CACHE_DIR=str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "19\n"), result.stderr


def test_templates_without_limits_of_the_system(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = "import sys, signal; sys.modules['resource'] = None; del signal.setitimer;"
    monkeypatch.setattr(template_worker, "_PROGRAM", bare + template_worker._PROGRAM)
    assert worker.render("{{ x }}", {"x": 5}) == [{"text": "5"}]
    with pytest.raises(TemplateStopped, match=r"longer than 1 seconds$"):  # wall-clock limit, which the parent enforces
        worker.render(ENDLESS, {})
    assert worker.render("again", {}) == [{"text": "again"}]


def test_templates_where_nothing_polls_pipes(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "poll")
    worker.limits = RenderLimits(seconds=60)
    for size in (0, 1, 2_000_000):
        assert worker.render("{{ x }}", {"x": "ü" * size}) == [{"text": "ü" * size}]
    worker.limits = RenderLimits(seconds=0.2)
    with pytest.raises(TemplateStopped, match=r"longer than 0\.2 seconds$"):
        worker.render(ENDLESS, {})
    assert worker.render("again", {}) == [{"text": "again"}]


def test_a_process_that_ends_for_a_signal_without_a_name(
    worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = int(signal.SIGPROF)
    monkeypatch.delattr(signal, "SIGPROF")
    worker.limits = RenderLimits(cpu_seconds=0.3, seconds=60)  # the wall-clock limit is never reached first
    with pytest.raises(TemplateStopped, match=f"ended by signal {number}"):
        worker.render(ENDLESS, {})


@pytest.mark.parametrize("name", ["darwin", "linux"])
def test_a_limit_that_the_system_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS refuses a limit below the used address space. On Linux, a refusal is an error, and nothing is rendered."""
    limited: list[int] = []

    def setrlimit(kind: int, values: tuple[int, int]) -> None:
        if kind == 1:
            raise ValueError("current limit exceeds maximum limit")
        limited.append(kind)

    made = SimpleNamespace(
        RLIMIT_AS=1, RLIMIT_FSIZE=2, RLIMIT_CORE=3, RLIM_INFINITY=-1, getrlimit=lambda _: (-1, -1), setrlimit=setrlimit
    )
    monkeypatch.setitem(sys.modules, "resource", made)
    monkeypatch.setattr(sys, "platform", name)
    if name == "linux":
        with pytest.raises(ValueError, match="exceeds"):
            template_server._lock_up(2**29)
    else:
        template_server._lock_up(2**29)
        assert limited == [2, 3]


def test_a_folder_that_cannot_be_opened_is_not_locked(tmp_path: Path) -> None:
    with locked(tmp_path / "nowhere") as held:
        assert held is None


@pytest.mark.parametrize("reason", ["no module", "no locks on this disk"])
def test_builds_without_locks(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if reason == "no module":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        monkeypatch.setattr("fcntl.flock", refuse)
    dead = tmp_path / ".model.0123.unfinished"
    dead.mkdir()
    with locked(tmp_path) as held:
        assert held is None
    said: list[Path] = []
    with _alone(tmp_path, said.append), unfinished_folder(tmp_path / "model") as folder:
        assert folder.is_dir()
    assert not said  # no other process to wait for
    assert list(tmp_path.iterdir()) == [dead]  # another process may be writing it


def test_peak_memory_where_the_system_says_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.common.cores.system_file", lambda path: "")
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=5_000_000))
    monkeypatch.setitem(sys.modules, "resource", usage)
    assert terminal.peak_megabytes() == 5120
    monkeypatch.setattr(sys, "platform", "darwin")  # macOS counts bytes, other systems kibibytes
    assert terminal.peak_megabytes() == 5
    monkeypatch.setitem(sys.modules, "resource", None)
    assert terminal.peak_megabytes() is None


@pytest.mark.parametrize("has_signals_for_threads", [True, False])
def test_a_lost_interrupt_comes_again(has_signals_for_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_signals_for_threads:
        monkeypatch.delattr(signal, "pthread_kill")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            entry._interrupt_again(SimpleNamespace(exc_type=KeyboardInterrupt))
            for _ in range(1000):
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)


def test_memory_where_the_system_says_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(memory_limits, "read_sysctl", lambda name: asked.append(name) or "25")
    monkeypatch.setitem(sys.modules, "resource", None)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_limits.available_memory(tmp_path) == physical * 25 // 100 and asked == ["kern.memorystatus_level"]
    for told in ("", "101", "many"):
        monkeypatch.setattr(memory_limits, "read_sysctl", lambda name, told=told: told)
        assert memory_limits.available_memory(tmp_path) == physical // 2
    monkeypatch.delattr(os, "sysconf")
    assert memory_limits.available_memory(tmp_path) == memory_limits.UNKNOWN_MEMORY_BYTES


def test_a_machine_without_proc_and_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    cpu = read_processor(tmp_path, architecture="arm64")
    assert cpu.threads == cpu.physical_cores == cpu.logical_cores == os.cpu_count()
    assert (cpu.quota, cpu.features, cpu.last_level_cache) == (None, (), 0)
    assert find_gpus(tmp_path, find_module=lambda name: None).names == ()
    findings = {finding.name: finding for finding in examine(Machine(root=tmp_path, threads=1))}
    assert findings["processor"].mark is Mark.OK and findings["memory"].mark is not Mark.PROBLEM
    assert not [one.text for one in findings.values() if "the check failed" in one.text]


def test_memory_that_is_not_mapped(off_linux: None) -> None:
    array = huge_array((1 << 20,), np.float32)
    assert not array.any() and array.ctypes.data % 64 == 0
    array[-1] = 1
    memory = ReservedMemory(1 << 22)
    assert memory.bytes.size == 1 << 22 and not memory.bytes.any()
    memory.close()
    assert memory.bytes.size == 0


def test_no_advice_on_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MADV_DONTNEED", "MADV_HUGEPAGE", "MAP_NORESERVE"):
        monkeypatch.delattr(mmap, name, raising=False)
    assert not huge_array((1 << 20,), np.float32).any()
    if sys.platform.startswith("linux"):
        for machine in ("x86_64", "mips"):
            monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
            memory = ReservedMemory(1 << 22)
            assert not memory.bytes.any()
            memory.close()
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 64)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        kept = storage.ExternalStorage(np.frombuffer(mapping, np.uint8), {}, mapping)
        kept.release_pages()
        assert kept.buffer[255] == 255
        del kept


def test_instructions_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = frozenset(isa._NEEDED["amx"])
    monkeypatch.setattr(isa, "request_tiles", lambda: True)
    assert isa.available(everything) == ("amx", "vnni", "avx2", "portable")
    monkeypatch.setattr(isa, "request_tiles", lambda: False)
    assert isa.available(everything) == ("vnni", "avx2", "portable")
    assert isa.available(frozenset({"neon", "dotprod"})) == ("portable",)


@pytest.mark.parametrize(("machine", "has"), [("x86_64", True), ("aarch64", True), ("riscv64", False)])
def test_futexes_where_their_number_is_known(machine: str, has: bool) -> None:
    program = (
        "import numba, platform, sys\n"
        f"sys.platform, platform.machine = 'linux', lambda: {machine!r}\n"
        "from genai.kernels.cpu.program import waiting\n"
        "print(waiting.HAS_FUTEX)"
    )
    assert run(program).stdout == f"{has}\n"


def test_products_without_openblas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_openblas", lambda: None)
    a, b = np.random.default_rng(0).standard_normal((2, 256, 256), np.float32)
    with blas.BLAS_THREADS.single():
        assert blas.BLAS_THREADS.library is None
        assert np.array_equal(blas.matmul(a, b, Threads(2)), a @ b)


def test_no_process_is_forked_off_linux(
    off_linux: None, kernels_are_compiled_here: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "can_fork", kernels_are_compiled_here)
    assert not workers.can_fork()
    made: list[Any] = [SimpleNamespace(make=lambda: b"a"), SimpleNamespace(make=lambda: b"b")]
    assert [content for _, content in workers.make_all(made)] == [b"a", b"b"]


def test_mode_bits_say_nothing_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    assert kernel_cache.reason_to_refuse(tmp_path) is not None
    monkeypatch.delattr(os, "getuid")
    assert kernel_cache.reason_to_refuse(tmp_path) is None
