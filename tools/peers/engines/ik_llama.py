"""ik_llama.cpp, compiled here from the sources inside the ik-llama-cpp-python source package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .llama_cpp import LlamaCpp


class IkLlama(LlamaCpp):
    """ik_llama.cpp, with weights converted to its interleaved formats when they are loaded (its option -rtr 1)."""

    name = "ik_llama.cpp"
    title = "ik_llama.cpp"
    worker = "ik_bindings.py"
    sources = "ik-llama-cpp-python"
    vendored = "ik_llama.cpp"
    # Without flash attention, the library does not link.
    switches = (
        "-DCMAKE_BUILD_TYPE=Release",
        "-DGGML_NATIVE=ON",
        "-DBUILD_SHARED_LIBS=ON",
        "-DGGML_IQK_FLASH_ATTENTION=ON",
        "-DGGML_IQK_FA_ALL_QUANTS=OFF",
        *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER")),
    )

    @property
    def home(self) -> str:
        return self.name

    def built(self, work: Path) -> tuple[Path, ...]:
        return (self.folder(work) / "build" / "bin" / "libllama.so",)

    def environment(self, work: Path) -> Mapping[str, str]:
        folder = self.folder(work)
        return {
            "IK_LLAMA_CPP_LIB_PATH": str(self.built(work)[0]),
            "LLAMA_CPP_BINDINGS": str(folder / "source" / "ik_llama_cpp"),
        }
