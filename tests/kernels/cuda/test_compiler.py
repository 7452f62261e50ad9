"""Compiled kernels are kept: by what they were made of, whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genai.kernels.cpu import cache
from genai.kernels.cuda.compiler import OPTIONS, CompileError, KernelCompiler, target


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
    monkeypatch.setattr(cache, "_told", {})  # as in a new process
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
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.parent.mkdir(parents=True)
    folder.parent.chmod(0o777)
    nvrtc = Nvrtc()
    for compiler in (KernelCompiler(nvrtc, 90), KernelCompiler(nvrtc, 90)):  # of two GPUs, say
        assert compiler.images(["a"]) == compiler.images(["a"]) == [b"cubin of a"]
    compiler.images([f"text {number}" for number in range(16)])  # side by side
    assert len(nvrtc.asked) == 20
    assert capsys.readouterr().err.count("compiled CUDA kernels are not kept on disk") == 1
