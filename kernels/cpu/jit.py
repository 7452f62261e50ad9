"""Kernels: Numba functions of one fixed signature, compiled once per machine and kept on disk.

`@kernel(signature)` only records a function. It is compiled, or loaded from the cache, at its first call or by
`warm_up`. Calls go straight to the machine code: read-only arrays are welcome, and nothing compares an argument with
the signature beyond its element size, so the typed wrappers check types and shapes first (see `checks`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numba

from .cache import CacheFolder, KernelCache, cache_root, compile_target, source_key

# Every module that defines kernels, so that all can be compiled ahead.
_KERNEL_MODULES = (
    "activations",
    "attention",
    "block_products",
    "channels",
    "depthwise",
    "embedding",
    "kv",
    "logprobs",
    "normalization",
    "quantize",
    "rope",
    "trees",
    "sampling",
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CompileReport:
    """What `warm_up` did: kernels compiled, kernels loaded from disk, and the time it took."""

    compiled: int
    loaded: int
    seconds: float


class Kernel:
    """A function compiled for one signature; callable like the function, without holding the GIL."""

    def __init__(
        self, function: Callable[..., None], signature: str, fastmath: Collection[str], library: Library
    ) -> None:
        self.name = function.__name__
        self.signature = signature
        self.fastmath = frozenset(fastmath)
        self._function = function
        self._library = library
        self._lock = threading.Lock()
        self._cache: KernelCache | None = None
        self._dispatcher: Any = None
        self._entry: Callable[..., None] = self._load_and_call

    def __call__(self, *arguments: Any) -> None:
        self._entry(*arguments)

    def _load_and_call(self, *arguments: Any) -> None:
        self._library.announce(self)
        self.compile()
        self._entry(*arguments)

    def compile(self) -> bool:
        """Make the kernel ready to run. Returns whether anything had to be compiled (False: loaded, or ready).

        Raises:
            RuntimeError: Numba's compiler is switched off.
        """
        with self._lock:
            if self.ready:
                return False
            if numba.config.DISABLE_JIT:
                raise RuntimeError(
                    "CPU kernels cannot run: NUMBA_DISABLE_JIT is set, and they exist as compiled code only. Unset it."
                )
            cache = self._own_cache()
            dispatcher = numba.njit(nogil=True, error_model="numpy", fastmath=set(self.fastmath))(self._function)
            dispatcher._cache = cache
            self._entry = dispatcher.compile(self.signature)
            self._dispatcher = dispatcher
            return not cache.loaded

    @property
    def ready(self) -> bool:
        """Whether the machine code is in memory."""
        return self._dispatcher is not None

    @property
    def assembly(self) -> str:
        """The machine code, to look at; Numba keeps it only of kernels compiled in this process."""
        self.compile()
        (text,) = self._dispatcher.inspect_asm().values()
        return str(text)

    def on_disk(self) -> bool:
        """Whether the cache has a file for it."""
        return self._library.folder.holds(self._own_cache().file_name(self.signature))

    def _own_cache(self) -> KernelCache:
        if self._cache is None:
            self._cache = KernelCache(self._library.folder, self.name)
        return self._cache


class Library:
    """All kernels of a program, and the folder that keeps their machine code.

    Args:
        sources: folder whose Python files the cache key covers.
        modules: modules that define kernels; imported by `kernels()`.
    """

    def __init__(self, sources: Path, modules: tuple[str, ...] = ()) -> None:
        self._sources = sources
        self._modules = modules
        self._kernels: dict[str, Kernel] = {}
        self._folder: CacheFolder | None = None
        self._announced = False
        self._lock = threading.Lock()

    @property
    def folder(self) -> CacheFolder:
        """The cache folder; chosen (and checked) at first use."""
        with self._lock:
            if self._folder is None:
                self._folder = CacheFolder(_root_or_none(), source_key(self._sources, compile_target()))
            return self._folder

    def kernel(self, signature: str, *, fastmath: Collection[str] = ()) -> Callable[[Callable[..., None]], Kernel]:
        """Decorator: a kernel of this Numba signature, with these LLVM fast-math flags. Names must be unique.

        Never pass `nnan` or `ninf`: infinities and NaNs must reach the output.
        """

        def add(function: Callable[..., None]) -> Kernel:
            made = Kernel(function, signature, fastmath, self)
            self._kernels[made.name] = made
            return made

        return add

    def kernels(self, names: Collection[str] | None = None) -> list[Kernel]:
        """All kernels, or those named.

        Raises:
            KeyError: a name is unknown.
        """
        for module in self._modules:
            import_module(f".{module}", __package__)
        unknown = set(names or ()) - set(self._kernels)
        if unknown:
            raise KeyError(f"no kernels named {sorted(unknown)}; there are {sorted(self._kernels)}")
        return [made for name, made in self._kernels.items() if names is None or name in names]

    def warm_up(self, progress: Progress | None = None, names: Collection[str] | None = None) -> CompileReport:
        """Compile or load kernels; see `warm_up`."""
        started = time.perf_counter()
        waiting = [made for made in self.kernels(names) if not made.ready]
        absent = [made for made in waiting if not made.on_disk()]
        show = progress or (_Line() if absent else None)
        compiled = 0
        # What must be compiled comes first: progress then counts real work.
        for made in [*absent, *(other for other in waiting if other not in absent)]:
            if show is not None and compiled < len(absent):
                show(compiled + 1, len(absent))
            compiled += made.compile()
        if isinstance(show, _Line):
            show.close()
        return CompileReport(compiled, len(waiting) - compiled, time.perf_counter() - started)

    def announce(self, kernel: Kernel) -> None:
        """Say once per process that a kernel is compiled on the way, when it is not on disk."""
        if self._announced or kernel.on_disk():
            return
        self._announced = True
        if sys.stderr is not None:
            print("Compiling CPU kernels (once per machine) ...", file=sys.stderr, flush=True)


class _Line:
    """The progress line on stderr: rewritten in place on a terminal, otherwise written once."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._terminal = self._stream is not None and self._stream.isatty()
        self._written = False

    def __call__(self, current: int, total: int) -> None:
        if self._stream is None or (self._written and not self._terminal):
            return
        start, end = ("\r", "") if self._terminal else ("", "\n")
        line = f"{start}Compiling CPU kernels {current}/{total} (once per machine) ..."
        print(line, end=end, file=self._stream, flush=True)
        self._written = True

    def close(self) -> None:
        if self._written and self._terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def _root_or_none() -> Path | None:
    try:
        return cache_root(os.environ)
    except RuntimeError:
        return None


LIBRARY = Library(Path(__file__).resolve().parent.parent, _KERNEL_MODULES)
kernel = LIBRARY.kernel


def warm_up(progress: Progress | None = None, names: Collection[str] | None = None) -> CompileReport:
    """Compile all CPU kernels, or load them from the cache, so that the first step does not wait.

    Args:
        progress: called as progress(current, total) before each kernel that is compiled; None writes a line on stderr
            while compiling. Nothing is shown when everything is cached.
        names: only these kernels (as named in the modules of `genai.kernels.cpu`); None = all.

    Raises:
        KeyError: a name is unknown.
    """
    return LIBRARY.warm_up(progress, names)
