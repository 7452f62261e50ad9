"""Compiled kernels are kept: by what they were made of, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genai.common import progress
from genai.common.progress import Task
from genai.kernels.cpu.jit import kernel_cache
from genai.kernels.cuda import compiler, kernel_cache as cuda_cache
from genai.kernels.cuda.compiler import OPTIONS, CompileError, KernelCompiler, target

Logged = Callable[[], list[str]]


class Nvrtc:
    """A compiler that gives its text back; texts with "wrong" in them do not compile."""

    class NVRTCError(RuntimeError):
        """As CuPy names it."""

    def __init__(self, version: tuple[int, int] = (13, 0), together: int = 1) -> None:
        self.version, self.asked, self.open = version, list[tuple[str, tuple[str, ...]]](), 0
        self.meeting = threading.Barrier(together)

    def getVersion(self) -> tuple[int, int]:
        return self.version

    def getSupportedArchs(self) -> tuple[int, ...]:
        return (80, 90, 100)

    def createProgram(self, source: str, name: str, headers: Any, includes: Any) -> Any:
        self.open += 1
        return SimpleNamespace(source=source)

    def compileProgram(self, program: Any, options: tuple[str, ...]) -> None:
        self.meeting.wait(60)
        self.asked.append((program.source, options))
        if "wrong" in program.source:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getCUBIN(self, program: Any) -> bytes:
        return f"cubin of {program.source}".encode()

    def getPTX(self, program: Any) -> bytes:
        return f"ptx of {program.source}".encode()

    def getProgramLog(self, program: Any) -> str:
        return "line 1: what is that?"

    def destroyProgram(self, program: Any) -> None:
        self.open -= 1


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kernel_cache, "_told", {})  # as in a new process
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path))
    return tmp_path / "genai" / "kernels" / "cuda"


def test_what_is_compiled_once_is_found_again(folder: Path) -> None:
    first, again = Nvrtc(), Nvrtc()
    assert KernelCompiler(first, 90).images(["a"]) == KernelCompiler(again, 90).images(["a"]) == [b"cubin of a"]
    assert first.asked == [("a", ("-arch=sm_90a", *OPTIONS))] and not again.asked and not first.open
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("version", "capability", "source"), [((13, 1), 90, "a"), ((13, 0), 80, "a"), ((13, 0), 90, "b")]
)
def test_what_is_made_of_something_else_is_not(version: tuple[int, int], capability: int, source: str) -> None:
    KernelCompiler(Nvrtc(), 90).images(["a"])
    other = Nvrtc(version)
    KernelCompiler(other, capability).images([source])
    assert len(other.asked) == 1


@pytest.mark.parametrize("damage", [b"", b"cubin of a", b"x" * 100])
def test_what_was_damaged_is_compiled_again(folder: Path, damage: bytes) -> None:
    KernelCompiler(Nvrtc(), 90).images(["a"])
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage)
    other = Nvrtc()
    assert KernelCompiler(other, 90).images(["a"]) == [b"cubin of a"]
    assert len(other.asked) == 1 and file.read_bytes() == whole


def test_texts_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until the others have come."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert KernelCompiler(Nvrtc(together=3), 80).images(["a", "b", "c"]) == [
        b"cubin of a",
        b"cubin of b",
        b"cubin of c",
    ]
    assert KernelCompiler(Nvrtc(), 80).images([]) == []


def test_one_bar_counts_what_is_compiled(monkeypatch: pytest.MonkeyPatch, logged: Logged) -> None:
    tasks: list[tuple[str, float, list[float]]] = []

    class Recorded(Task):
        def __init__(self, label: str, total: float = 0, **options: Any) -> None:
            self.counts: list[float] = []
            tasks.append((label, total, self.counts))

        def add(self, count: float) -> None:
            self.counts.append(count)

    monkeypatch.setattr(progress, "_renderer", Recorded)
    KernelCompiler(Nvrtc(), 90).images(["a"])
    assert KernelCompiler(Nvrtc(), 90).images(["b", "a", "c", "b"]) == [
        b"cubin of b", b"cubin of a", b"cubin of c", b"cubin of b",
    ]  # fmt: skip
    label = "Compiling CUDA kernels (once per kernel)"
    assert tasks == [(label, 1, [1]), (label, 2, [1, 1])]
    assert logged() == [f"{label} ..."] * 2
    KernelCompiler(Nvrtc(), 90).images(["c"])
    assert len(tasks) == 2 and not logged(), "everything was there"


def test_what_does_not_compile_is_not_kept(folder: Path) -> None:
    nvrtc = Nvrtc()
    with pytest.raises(CompileError, match=r"NVRTC_ERROR_COMPILATION \(6\)\nline 1: what is that\?"):
        KernelCompiler(nvrtc, 90).images(["wrong"])
    assert not nvrtc.open and not list(folder.iterdir())


def test_a_gpu_that_the_compiler_does_not_know_gets_a_text() -> None:
    assert target(90, (80, 90)) == ("sm_90a", True) and target(100, (90, 100)) == ("sm_100", True)
    assert target(121, (80, 90, 100)) == ("compute_100", False)
    nvrtc = Nvrtc()
    assert KernelCompiler(nvrtc, 121).images(["a"]) == [b"ptx of a"]
    assert nvrtc.asked[0][1][0] == "-arch=compute_100"


def test_without_a_folder_it_is_compiled_every_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    folder.parent.mkdir(parents=True)
    folder.parent.chmod(0o777)
    nvrtc = Nvrtc()
    for one in (KernelCompiler(nvrtc, 90), KernelCompiler(nvrtc, 90)):  # of two GPUs, say
        assert one.images(["a"]) == one.images(["a"]) == [b"cubin of a"]
    one.images([f"text {number}" for number in range(16)])  # side by side
    assert len(nvrtc.asked) == 20
    assert str(logged()).count("compiled CUDA kernels are not stored on disk") == 1


def aged(file: Path, days: float) -> Path:
    """Make a file look unused for a number of days."""
    then = time.time() - days * 86400
    os.utime(file, (then, then))
    return file


def kernel(folder: Path, number: int, days: float, nbytes: int = 100, after: str = "") -> Path:
    """A kernel that another process has compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{number:064x}.cubin{after}"
    file.write_bytes(bytes(nbytes))
    return aged(file, days)


def test_what_was_not_used_for_longest_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When something new is kept; what was used in the last hour stays, however much it is."""
    first, second, third, now = (kernel(folder, number, days) for number, days in enumerate((3, 2, 1, 0.01)))
    assert cuda_cache.MOST_BYTES == 256 << 20
    monkeypatch.setattr(compiler, "trim", partial(cuda_cache.trim, most_bytes=250))
    KernelCompiler(Nvrtc(), 90).images(["a"])  # takes 42 bytes
    assert [file.exists() for file in (first, second, third, now)] == [False, False, True, True]
    monkeypatch.setattr(compiler, "trim", partial(cuda_cache.trim, most_bytes=10))
    KernelCompiler(Nvrtc(), 90).images(["a"])  # nothing is new
    assert third.exists()
    KernelCompiler(Nvrtc(), 90).images(["b"])
    assert not third.exists() and now.exists() and len(list(folder.iterdir())) == 3


def test_reading_a_kernel_is_using_it(folder: Path) -> None:
    KernelCompiler(Nvrtc(), 90).images(["a"])
    (file,) = folder.iterdir()
    aged(file, 40)
    assert [one.path for one in cuda_cache.unused(cuda_cache.cached_kernels(folder))] == [file]
    other = Nvrtc()
    KernelCompiler(other, 90).images(["a"])
    assert not other.asked and not cuda_cache.unused(cuda_cache.cached_kernels(folder))


def test_what_is_not_ours_stays(folder: Path, tmp_path: Path) -> None:
    """Partial files stay as well; those of killed processes are deleted after a day."""
    elsewhere = kernel(tmp_path / "elsewhere", 1, 90)
    left = f".12.{'a' * 32}.tmp"
    writing, leftover = kernel(folder, 1, 0.5, after=left), kernel(folder, 2, 2, after=left)
    strangers = [kernel(folder, number, 90, after=after) for number, after in ((3, ".bak"), (4, "x"), (4, ".tmp"))]
    link = folder / f"{5:064x}.ptx"
    link.symlink_to(elsewhere)
    (folder / f"{6:064x}.cubin").mkdir()
    whole = kernel(folder, 7, 90)
    cuda_cache.trim(folder, 0)
    assert not leftover.exists() and not whole.exists()
    assert writing.exists() and elsewhere.exists() and link.is_symlink() and (folder / f"{6:064x}.cubin").is_dir()
    assert all(file.exists() for file in strangers)
    cuda_cache.trim(tmp_path / "nothing there")


def test_processes_that_compile_and_tidy_at_once(folder: Path) -> None:
    """Each process has its kernels, even if another one deleted the files meanwhile."""
    code = """
import sys
from genai.kernels.cuda import compiler, kernel_cache as cuda_cache
from tests.kernels.cuda.test_compiler import Nvrtc

compiler.trim = lambda folder: cuda_cache.trim(folder, 0)
cuda_cache._IN_USE_SECONDS = -1.0
made = compiler.KernelCompiler(Nvrtc(), 90)
for turn in range(20):
    texts = [f"{turn} {number}" for number in range(8)]
    assert made.images(texts) == [f"cubin of {text}".encode() for text in texts]
"""
    run = [subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3]) for _ in range(3)]
    assert [one.wait(120) for one in run] == [0, 0, 0]
    assert not list(folder.iterdir())  # whoever wrote a file has tidied after that
