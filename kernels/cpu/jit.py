"""Kernels: Numba functions of one fixed signature, compiled once per machine and kept on disk.

Two kinds: `@kernel(signature)` is called from Python with arrays; `@native_op` is called by machine code with addresses
(see `tape`). Both decorators only record a function. It is compiled, or loaded from the cache, at its first call or by
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
from numba.core import sigutils
from numba.core.ccallback import CFunc

from .cache import CacheFolder, KernelCache, cache_root, compile_target, source_key

# Every module that defines kernels, so that all can be compiled ahead.
_KERNEL_MODULES = (
    "block_products",
    "channels",
    "embedding",
    "logprobs",
    "paged.eager",
    "quantize",
    "rowwise.arrays",
    "sampling",
    "tape.driver",
    "tape.replay",
    "trees",
)

Progress = Callable[[int, int], None]

NATIVE_SIGNATURE = "int64(int64, int64, int64, int64, int64)"


@dataclass(frozen=True)
class CompileReport:
    """What `warm_up` did: kernels compiled, kernels loaded from disk, and the time it took."""

    compiled: int
    loaded: int
    seconds: float


class Compiled:
    """A function and its machine code, which is compiled or loaded when it is first needed."""

    def __init__(
        self, function: Callable[..., Any], signature: str, fastmath: Collection[str], library: Library
    ) -> None:
        self.name = function.__name__
        self.signature = signature
        self.fastmath = frozenset(fastmath)
        self._function = function
        self._library = library
        self._lock = threading.Lock()
        self._cache: KernelCache | None = None
        self.ready = False

    def compile(self) -> bool:
        """Make it ready to run. Returns whether anything had to be compiled (False: loaded, or ready).

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
            self._build(cache)
            self.ready = True
            return not cache.loaded

    def on_disk(self) -> bool:
        """Whether the cache has a file for it."""
        return self._library.folder.holds(self._own_cache().file_name(self.signature))

    def _build(self, cache: KernelCache) -> None:
        raise NotImplementedError

    def _own_cache(self) -> KernelCache:
        if self._cache is None:
            self._cache = KernelCache(self._library.folder, self.name)
        return self._cache


class Kernel(Compiled):
    """A function compiled for one signature; callable like the function, without holding the GIL."""

    def __init__(
        self, function: Callable[..., Any], signature: str, fastmath: Collection[str], library: Library
    ) -> None:
        super().__init__(function, signature, fastmath, library)
        self._dispatcher: Any = None
        self._entry: Callable[..., Any] = self._load_and_call

    def __call__(self, *arguments: Any) -> Any:
        return self._entry(*arguments)

    def _load_and_call(self, *arguments: Any) -> Any:
        self._library.announce(self)
        self.compile()
        return self._entry(*arguments)

    def _build(self, cache: KernelCache) -> None:
        dispatcher = numba.njit(nogil=True, error_model="numpy", fastmath=set(self.fastmath))(self._function)
        dispatcher._cache = cache
        self._entry = dispatcher.compile(self.signature)
        self._dispatcher = dispatcher

    @property
    def assembly(self) -> str:
        """The machine code, to look at; Numba keeps it only of kernels compiled in this process."""
        self.compile()
        (text,) = self._dispatcher.inspect_asm().values()
        return str(text)


class NativeOp(Compiled):
    """A function that machine code calls by its address.

    int64 op(arguments, context, begin, end, scratch): addresses of its arguments and of the step (see `tape.context`),
    the range of items to work on, and the address of memory that the calling thread may write to. It must not raise
    nor allocate; it returns 0, or a code that the caller turns into an error.
    """

    def __init__(self, function: Callable[..., int], fastmath: Collection[str], library: Library) -> None:
        super().__init__(function, NATIVE_SIGNATURE, fastmath, library)
        self._native: Any = None
        self._address = 0

    @property
    def address(self) -> int:
        """Where its machine code lies."""
        if not self.ready:
            self._library.announce(self)
            self.compile()
        return self._address

    def _build(self, cache: KernelCache) -> None:
        signature = sigutils.normalize_signature(self.signature)
        options = {"nopython": True, "error_model": "numpy", "fastmath": set(self.fastmath)}
        native: Any = CFunc(self._function, signature, locals={}, options=options)
        native._cache = cache
        native.compile()
        self._native, self._address = native, int(native.address)

    @property
    def assembly(self) -> str:
        """The machine code, to look at; Numba keeps it only of operators compiled in this process."""
        self.compile()
        return str(self._native._library.get_asm_str())


class Library:
    """All kernels of a program, and the folder that keeps their machine code.

    Args:
        sources: folder whose Python files the cache key covers.
        modules: modules that define kernels; imported by `kernels()`.
    """

    def __init__(self, sources: Path, modules: tuple[str, ...] = ()) -> None:
        self._sources = sources
        self._modules = modules
        self._kernels: dict[str, Compiled] = {}
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

    def kernel(self, signature: str, *, fastmath: Collection[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
        """Decorator: a kernel of this Numba signature, with these LLVM fast-math flags. Names must be unique.

        Never pass `nnan` or `ninf`: infinities and NaNs must reach the output.
        """

        def add(function: Callable[..., Any]) -> Kernel:
            made = Kernel(function, signature, fastmath, self)
            self._kernels[made.name] = made
            return made

        return add

    def native_op(self, function: Callable[..., int]) -> NativeOp:
        """Decorator: an operator that machine code calls (see `NativeOp`). Names must be unique among operators."""
        return NativeOp(function, (), self)

    def include(self, op: NativeOp) -> None:
        """Compile an operator with the kernels: calls from Python use it, not tapes alone."""
        self._kernels[op.name] = op

    def kernels(self, names: Collection[str] | None = None) -> list[Compiled]:
        """All kernels and included operators, or those named.

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
        return self.prepare(self.kernels(names), progress)

    def prepare(self, wanted: Collection[Compiled], progress: Progress | None = None) -> CompileReport:
        """Compile or load these kernels and operators; see `warm_up`."""
        started = time.perf_counter()
        waiting = [made for made in dict.fromkeys(wanted) if not made.ready]
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

    def announce(self, kernel: Compiled) -> None:
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
kernel, native_op = LIBRARY.kernel, LIBRARY.native_op


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
