"""Compilation of kernels by NVRTC, with a cache on disk.

CuPy also compiles and caches kernels, but only for plain architectures; Hopper's specific instructions need "sm_90a".
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any

from genai.common.log import logger
from genai.common.progress import task

from ..cpu.jit.kernel_cache import CacheFolder, cache_root
from .kernel_cache import mark_used, trim

_log = logger(__name__)

# float32 denormals are flushed to zero, as in CuPy.
OPTIONS = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space")
# Compute capabilities (times ten) that have specific instructions which kernels use.
_WITH_OWN = (90,)
_MOST_THREADS = 16


class CompileError(RuntimeError):
    """A source text does not compile. The message is the compiler's message."""


class KernelCompiler:
    """NVRTC, set up for one architecture.

    Args:
        nvrtc: CuPy's module of that name.
        capability: compute capability of the GPUs to compile for, times ten.
    """

    def __init__(self, nvrtc: Any, capability: int) -> None:
        self._nvrtc = nvrtc
        self._target, self._is_binary = target(capability, nvrtc.getSupportedArchs())

    def images(self, sources: Sequence[str]) -> list[bytes]:
        """Return the image that a GPU's driver loads for each text, and compile texts that are not cached in parallel.

        Raises:
            CompileError: if a text does not compile.
        """
        names = {source: self._name(source) for source in sources}
        found = {source: self._folder.load(name) for source, name in names.items()}
        absent = [source for source, image in found.items() if image is None]
        if self._folder.path is not None:
            for source in names.keys() - absent:
                mark_used(self._folder.path / names[source])

        def make(source: str) -> bytes:
            image = self._compiled(source)
            self._folder.save(names[source], image)
            return image

        if absent:
            with (
                task("Compiling CUDA kernels (once per kernel)", len(absent), log=_log) as compiling,
                ThreadPoolExecutor(min(len(absent), os.cpu_count() or 1, _MOST_THREADS)) as threads,
            ):
                for source, made in zip(absent, threads.map(make, absent), strict=True):
                    found[source] = made
                    compiling.add(1)
            if self._folder.path is not None:
                trim(self._folder.path)
        return [image for source in sources if (image := found[source]) is not None]

    @cached_property
    def _folder(self) -> CacheFolder:
        try:
            root = cache_root()
        except RuntimeError:
            root = None
        return CacheFolder(root, "cuda", "CUDA", "a minute")

    def _name(self, source: str) -> str:
        """Return the name of a text's file in the cache."""
        key = json.dumps([source, OPTIONS, self._target, self._nvrtc.getVersion()])
        return f"{hashlib.sha256(key.encode()).hexdigest()}.{'cubin' if self._is_binary else 'ptx'}"

    def _compiled(self, source: str) -> bytes:
        nvrtc = self._nvrtc
        try:
            program = nvrtc.createProgram(source, "kernels.cu", (), ())
        except nvrtc.NVRTCError as error:
            raise CompileError(f"{error}") from error
        try:
            nvrtc.compileProgram(program, (f"-arch={self._target}", *OPTIONS))
            return bytes(nvrtc.getCUBIN(program) if self._is_binary else nvrtc.getPTX(program))
        except nvrtc.NVRTCError as error:
            raise CompileError(f"{error}{self._log(program)}") from error
        finally:
            with suppress(nvrtc.NVRTCError):
                nvrtc.destroyProgram(program)

    def _log(self, program: Any) -> str:
        try:
            return f"\n{self._nvrtc.getProgramLog(program)}"
        except self._nvrtc.NVRTCError:
            return ""


def target(capability: int, known: Collection[int]) -> tuple[str, bool]:
    """Return the target, and True if it yields a binary. For GPUs unknown to NVRTC, the driver compiles PTX."""
    if capability in known:
        return f"sm_{capability}{'a' if capability in _WITH_OWN else ''}", True
    return f"compute_{max((one for one in known if one < capability), default=capability)}", False
