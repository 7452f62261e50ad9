"""Kernels: functions of one fixed signature, compiled once per machine and kept on disk.

Two kinds: `@kernel(signature)` is called from Python with arrays; `@native_op` is called by machine code with addresses
(see `tape`). Both decorators only record a function. It is compiled, or loaded from the cache, at its first call or by
`prepare`. Calls go straight to the machine code: read-only arrays are welcome, and only types and numbers of axes are
compared with the signature, so the typed wrappers check shapes first (see `checks`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .cache import CacheFolder, cache_root, compile_target, file_name, source_key
from .signature import NATIVE, Parameter, parse

if TYPE_CHECKING:
    from .objects import LoadedObject

# Every module that defines kernels, so that all can be compiled ahead.
_KERNEL_MODULES = (
    "channels",
    "logprobs",
    "rowwise.arrays",
    "sampling",
    "tape.driver",
    "tape.eager",
    "tape.replay",
    "trees",
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CompileReport:
    """What `prepare` did: kernels compiled, kernels loaded from disk, and the time it took."""

    compiled: int
    loaded: int
    seconds: float


class KernelError(RuntimeError):
    """A kernel ended with an error: what it was given does not fit."""


class Compiled:
    """A function and its machine code, which is compiled or loaded when it is first needed."""

    def __init__(
        self, function: Callable[..., Any], signature: str, fastmath: Collection[str], library: Library
    ) -> None:
        self.name = function.__name__
        self.signature = signature
        self.fastmath = frozenset(fastmath)
        self.allocates = False
        self._function = function
        self._library = library
        self._lock = threading.Lock()
        self._loaded: LoadedObject | None = None

    @property
    def ready(self) -> bool:
        """Whether its machine code is in memory."""
        return self._loaded is not None

    def compile(self) -> bool:
        """Make it ready to run. Returns whether anything had to be compiled (False: loaded, or ready).

        Raises:
            RuntimeError: Numba's compiler is switched off.
        """
        return not (self.ready or self.load()) and self.adopt(self.make())

    def load(self) -> bool:
        """Make it ready from the cache; False if it is not there, or damaged."""
        content = self._library.folder.load(self._file_name)
        return content is not None and self._link(content)

    def make(self) -> bytes:
        """Compile it; nothing else changes."""
        from .compiler import compile_object

        return compile_object(self._function, self.signature, self.fastmath, allocates=self.allocates)

    def adopt(self, content: bytes) -> bool:
        """Make it ready from what `make` returned, here or in another process, and keep that on disk."""
        self._library.folder.save(self._file_name, content)
        return self._link(content)

    def on_disk(self) -> bool:
        """Whether the cache has a file for it."""
        return self._library.folder.holds(self._file_name)

    @property
    def assembly(self) -> str:
        """The machine code, to look at."""
        from .compiler import assembly

        return assembly(self._function, self.signature, self.fastmath, allocates=self.allocates)

    @property
    def _file_name(self) -> str:
        return file_name(self.name, self.signature)

    def _link(self, content: bytes) -> bool:
        from .objects import ObjectError, link

        with self._lock:
            if self._loaded is None:
                try:
                    loaded = link(content)
                except ObjectError:
                    return False  # written by something else under our name: compile it anew
                self._use(loaded)
                self._loaded = loaded
        return True

    def _use(self, loaded: LoadedObject) -> None:
        raise NotImplementedError


class Kernel(Compiled):
    """A function compiled for one signature; callable like the function, without holding the GIL."""

    def __init__(
        self, function: Callable[..., Any], signature: str, fastmath: Collection[str], library: Library
    ) -> None:
        super().__init__(function, signature, fastmath, library)
        self._parameters = parse(signature)
        self._takes_arrays = any(parameter.dtype is not None for parameter in self._parameters)
        self._entry: Callable[..., int] = self._load_and_call

    def __call__(self, *arguments: Any) -> None:
        """Call the machine code.

        Raises:
            TypeError: an array has another type or number of axes than the signature says.
            KernelError: the kernel failed.
        """
        words: Sequence[Any] = arguments
        if self._takes_arrays or len(arguments) != len(self._parameters):
            # The arguments stay alive meanwhile, so arrays may travel as the addresses of their objects.
            words = [
                given if known.dtype is None else id(given) if known.fits(given) else self._refuse(known, given)
                for given, known in zip(arguments, self._parameters, strict=True)
            ]
        if self._entry(*words):
            raise KernelError(f"kernel {self.name} failed")

    def _load_and_call(self, *words: Any) -> int:
        self._library.announce(self)
        self.compile()
        return self._entry(*words)

    def _use(self, loaded: LoadedObject) -> None:
        types = [ctypes.c_double if parameter.is_float else ctypes.c_int64 for parameter in self._parameters]
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int64, *types)(loaded.address)

    def _refuse(self, parameter: Parameter, given: Any) -> int:
        found = f"{given.dtype} with {given.ndim} axes" if isinstance(given, np.ndarray) else type(given).__name__
        raise TypeError(f"kernel {self.name}: expected {parameter}, not {found}")


class NativeOp(Compiled):
    """A function that machine code calls by its address.

    int64 op(arguments, context, begin, end, scratch): addresses of its arguments and of the step (see `tape.context`),
    the range of items to work on, and the address of memory that the calling thread may write to. It must not raise
    nor allocate; it returns 0, or a code that the caller turns into an error.
    """

    def __init__(self, function: Callable[..., int], fastmath: Collection[str], library: Library) -> None:
        super().__init__(function, NATIVE, fastmath, library)
        self._address = 0

    @property
    def address(self) -> int:
        """Where its machine code lies."""
        if not self._address:
            self._library.announce(self)
            self.compile()
        return self._address

    def _use(self, loaded: LoadedObject) -> None:
        self._address = loaded.address


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
        self._expected: list[Compiled] = []
        self._operators: set[str] = set()
        self._announced = False
        self._lock = threading.Lock()

    @property
    def folder(self) -> CacheFolder:
        """The cache folder; chosen (and checked) at first use."""
        with self._lock:
            if self._folder is None:
                self._folder = CacheFolder(_root_or_none(), source_key(self._sources, compile_target()))
            return self._folder

    def kernel(
        self, signature: str, *, fastmath: Collection[str] = (), allocates: bool = False
    ) -> Callable[[Callable[..., Any]], Kernel]:
        """Decorator: a kernel of this Numba signature, with these LLVM fast-math flags. Names must be unique.

        Never pass `nnan` or `ninf`: infinities and NaNs must reach the output. One that `allocates` may make arrays,
        and needs Numba to run.
        """

        def add(function: Callable[..., Any]) -> Kernel:
            made = Kernel(function, signature, fastmath, self)
            made.allocates = allocates
            self._kernels[made.name] = made
            return made

        return add

    def native_op(self, function: Callable[..., int]) -> NativeOp:
        """Decorator: an operator that machine code calls (see `NativeOp`).

        Raises:
            ValueError: another operator has its name, by which both would be kept on disk.
        """
        if function.__name__ in self._operators:
            raise ValueError(f"native operator {function.__name__!r} is there already; each variant needs its own name")
        self._operators.add(function.__name__)
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

    def expect(self, kernels: Collection[Compiled]) -> None:
        """Note kernels that the next tape of a model should have prepared with its own: many share cores better."""
        self._expected.extend(kernels)

    def take_expected(self) -> list[Compiled]:
        """The kernels that were expected since the last call."""
        taken, self._expected = self._expected, []
        return taken

    def prepare(self, wanted: Collection[Compiled], progress: Progress | None = None) -> CompileReport:
        """Compile or load these kernels and operators, side by side in several processes where that is possible.

        Args:
            progress: called as progress(current, total) while kernels are compiled; None = as `report_progress` says,
                or else a line on stderr. Nothing is shown when everything is on disk.
        """
        started = time.perf_counter()
        waiting = [made for made in dict.fromkeys(wanted) if not made.ready]
        absent = [made for made in waiting if not made.load()]
        if absent:
            self._compile(absent, progress or _PROGRESS.get() or _Line(quiet=self._announced))
            self._announced = True
        return CompileReport(len(absent), len(waiting) - len(absent), time.perf_counter() - started)

    def _compile(self, absent: list[Compiled], show: Progress) -> None:
        from .workers import make_all

        show(1, len(absent))
        for done, (made, content) in enumerate(make_all(absent), 2):
            made.adopt(content)
            if done <= len(absent):
                show(done, len(absent))
        if isinstance(show, _Line):
            show.close()

    def announce(self, kernel: Compiled) -> None:
        """Say once per process that a kernel is compiled on the way, when it is not on disk."""
        if self._announced or kernel.on_disk():
            return
        self._announced = True
        if _PROGRESS.get() is None and sys.stderr is not None:
            print(f"{_ANNOUNCEMENT} ...", file=sys.stderr, flush=True)


_ANNOUNCEMENT = "Compiling CPU kernels (once per machine)"


class _Line:
    """The progress line on stderr: rewritten in place on a terminal, with a count of several kernels; otherwise written
    once, for all that will be compiled.

    Args:
        quiet: where there is no terminal, it has been written before.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._stream = sys.stderr
        self._terminal = self._stream is not None and self._stream.isatty()
        self._written = quiet

    def __call__(self, current: int, total: int) -> None:
        if self._stream is None or (self._written and not self._terminal):
            return
        if self._terminal:
            count = f"{current} of {total} " if total > 1 else ""
            print(f"\r{_ANNOUNCEMENT} {count}...", end="", file=self._stream, flush=True)
        else:
            print(f"{_ANNOUNCEMENT} ...", file=self._stream, flush=True)
        self._written = True

    def close(self) -> None:
        if self._written and self._terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


_PROGRESS: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def report_progress(progress: Progress | None) -> Iterator[None]:
    """Who hears of kernels that are compiled meanwhile, instead of a line on stderr."""
    token = _PROGRESS.set(progress)
    try:
        yield
    finally:
        _PROGRESS.reset(token)


def _root_or_none() -> Path | None:
    try:
        return cache_root(os.environ)
    except RuntimeError:
        return None


LIBRARY = Library(Path(__file__).resolve().parent.parent, _KERNEL_MODULES)
kernel, native_op = LIBRARY.kernel, LIBRARY.native_op


def warm_up(progress: Progress | None = None, names: Collection[str] | None = None) -> CompileReport:
    """Compile all CPU kernels, or load them from the cache, so that the first call does not wait.

    Args:
        progress: see `Library.prepare`.
        names: only these kernels (as named in the modules of `genai.kernels.cpu`); None = all.

    Raises:
        KeyError: a name is unknown.
    """
    return LIBRARY.warm_up(progress, names)
