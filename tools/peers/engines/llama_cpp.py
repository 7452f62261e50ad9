"""llama.cpp, compiled here from the sources inside the llama-cpp-python source package, with its own programs."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

from genai.machine.processor import read_processor

from ..cases import Job, Measured
from ..environment import VirtualEnvironment
from ..processes import Outcome, PeerError, run_logged
from .base import WORKERS, Engine, last_json

_PACKAGE = "llama-cpp-python"
_PROGRAMS = ("llama-bench", "llama-batched-bench")
_SWITCHES = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    *(f"-DLLAMA_{part}=OFF" for part in ("OPENSSL", "SUBPROCESS")),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER", "APP")),
)
_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
# Several warm-up and measured prompts share one cache.
_SPARE_TOKENS = 64


class LlamaCpp(Engine):
    """Q4_0 in every matrix, so that the head has the bytes of the others' INT4 heads (--pure)."""

    name = "llama.cpp"
    title = "llama.cpp"
    form = "Q4_0 in every matrix, written by its `gguf` package"
    packages = ("gguf", "numpy", "safetensors")
    libraries = "build"

    @property
    def home(self) -> str:
        return "llama.cpp"

    def venv(self, work: Path) -> VirtualEnvironment:
        """The virtual environment of what writes GGUF."""
        return VirtualEnvironment(self.folder(work))

    def model(self, work: Path, shape: str) -> Path:
        return self.folder(work) / "models" / f"{shape}.gguf"

    def install(self, work: Path) -> None:
        if not shutil.which("cmake") or not shutil.which("c++"):
            raise PeerError("llama.cpp is compiled here, which needs cmake and a C++ compiler")
        self.venv(work).install(self.packages)
        self._unpack(work)
        # GCC 12 leaves out the stores to the tile configuration, as its _tile_loadconfig has no memory clobber, and
        # the program dies of it; the header defines that intrinsic with one.
        self._compile(work, "build", f"-include {WORKERS / 'tile_loadconfig.h'}", _PROGRAMS)

    def versions(self, work: Path) -> dict[str, str]:
        sources = next(self.folder(work).glob("llama_cpp_python-*.tar.gz"), None)
        if sources is None or not (self.folder(work) / self.libraries / "bin").is_dir():
            return {}
        return self.venv(work).versions() | {_PACKAGE: sources.name.removesuffix(".tar.gz").rpartition("-")[2]}

    def build(self, work: Path, checkpoint: Path, output: Path) -> None:
        command = [self.venv(work).python, str(WORKERS / "write_gguf.py"), str(checkpoint), str(output)]
        run_logged(command, self.venv(work).log)

    def command(self, work: Path, job: Job) -> list[str]:
        programs = self.folder(work) / "build" / "bin"
        common = ["-m", job.model, "-t", str(job.threads), "-fa", "off"]
        if not job.warm:
            run = ["-p", str(job.prompt), "-n", "0", "-r", "1", "--no-warmup", "-o", "jsonl"]
            return [str(programs / "llama-bench"), *common, *run]
        # The first prompt length warms up.
        lengths = f"{min(job.prompt, 512)},{job.prompt}"
        context = job.batch * (job.prompt + job.new + _SPARE_TOKENS)
        run = ["-tb", str(job.threads), "-c", str(context), "-npp", lengths, "-ntg", str(job.new)]
        return [
            str(programs / "llama-batched-bench"),
            *common,
            *run,
            "-npl",
            str(job.batch),
            "--output-format",
            "jsonl",
        ]

    def environment(self, work: Path) -> Mapping[str, str]:
        """The CPU library of this build comes first."""
        return {"LD_LIBRARY_PATH": str(self.folder(work) / self.libraries / "bin")}

    def measured(self, job: Job, outcome: Outcome) -> Measured:
        said = last_json(outcome.output)
        if not job.warm:
            # llama-bench ends after the prompt: its whole life, a little more than the time to the first token.
            return Measured(None, None, outcome.seconds, outcome.peak_bytes)
        try:
            return Measured(said["speed_pp"], said["speed_tg"], None, outcome.peak_bytes)
        except KeyError as error:
            raise PeerError(f"{self.name}: not what llama-batched-bench says: {said}") from error

    def _unpack(self, work: Path) -> None:
        folder = self.folder(work)
        if (folder / "source").is_dir():
            return
        self.venv(work).pip("download", "--no-deps", "--no-binary", _PACKAGE, "-d", str(folder), _PACKAGE)
        with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as sources:
            sources.extractall(folder / "unpacking", filter="data")
        next((folder / "unpacking").iterdir()).rename(folder / "source")
        (folder / "unpacking").rmdir()

    def _compile(self, work: Path, build: str, flags: str, targets: tuple[str, ...]) -> None:
        folder, log = self.folder(work), self.venv(work).log
        place = ["-S", str(folder / "source" / "vendor" / "llama.cpp"), "-B", str(folder / build)]
        languages = [f"-DCMAKE_{language}_FLAGS={flags}" for language in ("C", "CXX")]
        run_logged(["cmake", *place, *_SWITCHES, *languages], log)
        run_logged(["cmake", "--build", str(folder / build), "-j", "2", "--target", *targets], log)


class LlamaCppWithoutAmx(LlamaCpp):
    """The same programs with a CPU library that has no AMX instructions."""

    name = "llama.cpp-no-amx"
    title = "llama.cpp without AMX"
    libraries = "build-no-amx"

    def install(self, work: Path) -> None:
        if "AMX-INT8" not in read_processor().features:
            raise PeerError("this processor has no AMX: the other build is the same")
        super().install(work)
        self._compile(work, self.libraries, _WITHOUT_AMX, ("ggml-cpu",))
