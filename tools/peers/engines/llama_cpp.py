"""llama.cpp, compiled here from the sources in llama-cpp-python's source package, and run through its bindings."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from genai.doctor.processor import read_processor

from ..processes import PeerError, run_logged
from .base import WORKERS, InEnvironment

_SWITCHES = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    *(f"-DLLAMA_{part}=OFF" for part in ("OPENSSL", "SUBPROCESS")),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TOOLS", "TESTS", "EXAMPLES", "SERVER", "APP")),
)
_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


class LlamaCpp(InEnvironment):
    """llama.cpp with Q4_0 in every matrix, so that its head is as large as the other engines' INT4 heads."""

    name = "llama.cpp"
    title = "llama.cpp"
    form = "Q4_0 in every matrix, written by its `gguf` package"
    packages = ("gguf", "numpy", "typing-extensions")
    worker = "llama_bindings.py"
    libraries: ClassVar[str] = "build"
    sources: ClassVar[str] = "llama-cpp-python"
    vendored: ClassVar[str] = "llama.cpp"
    switches: ClassVar[tuple[str, ...]] = _SWITCHES

    @property
    def archives(self) -> str:
        """A pattern that matches the file name of the source package."""
        return f"{self.sources.replace('-', '_')}-*.tar.gz"

    @property
    def home(self) -> str:
        return "llama.cpp"

    def model(self, work: Path, shape: str) -> Path:
        return self.folder(work) / "models" / f"{shape}.gguf"

    def install(self, work: Path) -> None:
        if not shutil.which("cmake") or not shutil.which("c++"):
            raise PeerError("llama.cpp must be compiled here, which needs cmake and a C++ compiler")
        self.venv(work).install(self.packages)
        self._unpack(work)
        # GCC 12 removes the stores to the tile configuration, because its _tile_loadconfig has no memory clobber, and
        # the program crashes. The header redefines the intrinsic with a clobber. The header is copied, so that the
        # compiler flags do not depend on the location of this checkout.
        header = self.folder(work) / "tile_loadconfig.h"
        shutil.copyfile(WORKERS / header.name, header)
        self._compile(work, "build", "llama", f"-include {header}")

    def versions(self, work: Path) -> dict[str, str]:
        folder = self.folder(work)
        sources = next(folder.glob(self.archives), None)
        if sources is None or not all(library.exists() for library in self.built(work)):
            return {}
        return self.venv(work).versions() | {self.sources: sources.name.removesuffix(".tar.gz").rpartition("-")[2]}

    def built(self, work: Path) -> tuple[Path, ...]:
        """Return the paths of the compiled libraries."""
        folder = self.folder(work)
        return (folder / "build" / "bin" / "libllama.so", folder / self.libraries / "bin" / "libggml-cpu.so")

    def build(self, work: Path, checkpoint: Path, output: Path) -> None:
        command = [self.venv(work).python, str(WORKERS / "write_gguf.py"), str(checkpoint), str(output)]
        run_logged(command, self.venv(work).log)

    def adapted(self, work: Path, shape: str) -> tuple[Path, Path]:
        return self.model(work, shape), self.folder(work) / "adapters" / f"{shape}.gguf"

    def build_adapter(self, work: Path, adapter: Path, shape: str) -> None:
        output = self.adapted(work, shape)[1]
        output.parent.mkdir(parents=True, exist_ok=True)
        config = work / "checkpoints" / shape / "config.json"
        command = [str(WORKERS / "write_gguf_adapter.py"), str(config), str(adapter), str(output)]
        run_logged([self.venv(work).python, *command], self.venv(work).log)

    def environment(self, work: Path) -> Mapping[str, str]:
        """Return the paths of the libraries, including this build's CPU library, and of the bindings in the sources."""
        folder = self.folder(work)
        return {
            "LD_LIBRARY_PATH": str(folder / self.libraries / "bin"),
            "LLAMA_CPP_LIB_PATH": str(folder / "build" / "bin"),
            "LLAMA_CPP_BINDINGS": str(folder / "source" / "llama_cpp"),
        }

    def _unpack(self, work: Path) -> None:
        folder = self.folder(work)
        if (folder / "source").is_dir():
            return
        self.venv(work).pip("download", "--no-deps", "--no-binary", self.sources, "-d", str(folder), self.sources)
        with tarfile.open(next(folder.glob(self.archives))) as sources:
            sources.extractall(folder / "unpacking", filter="data")
        next((folder / "unpacking").iterdir()).rename(folder / "source")
        (folder / "unpacking").rmdir()

    def _compile(self, work: Path, build: str, target: str, flags: str) -> None:
        """Build lib`target`.so with the given compiler flags, unless the library exists."""
        folder, log = self.folder(work), self.venv(work).log
        if (folder / build / "bin" / f"lib{target}.so").exists():
            return
        place = ["-S", str(folder / "source" / "vendor" / self.vendored), "-B", str(folder / build)]
        place.append(f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder / build / 'bin'}")
        languages = [f"-DCMAKE_{language}_FLAGS={flags}" for language in ("C", "CXX")]
        run_logged(["cmake", *place, *self.switches, *languages], log)
        run_logged(["cmake", "--build", str(folder / build), "-j", "2", "--target", target], log)


class LlamaCppWithoutAmx(LlamaCpp):
    """llama.cpp with a CPU backend that uses no AMX instructions."""

    name = "llama.cpp-no-amx"
    title = "llama.cpp without AMX"
    libraries = "build-no-amx"

    def install(self, work: Path) -> None:
        if "AMX-INT8" not in read_processor().features:
            raise PeerError("this processor has no AMX, so the llama.cpp build is the same")
        super().install(work)
        self._compile(work, self.libraries, "ggml-cpu", _WITHOUT_AMX)
