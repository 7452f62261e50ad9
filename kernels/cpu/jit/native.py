"""Kernels: functions of whole numbers and addresses, compiled once and kept on disk.

Two kinds: `@kernel` is called from Python; `@native_op(declaration)` by machine code with addresses (see `program`).
Both decorators only note a function. It is compiled, or loaded from the cache, at its first call or by `prepare`. What
makes the arguments checks them first (see `checks`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from genai.common.forks import renew_locks
from genai.common.log import logger
from genai.common.progress import Task, task

from .arguments import Arguments, Operator, layout
from .kernel_cache import CacheFolder, cache_root, compile_target, source_key

if TYPE_CHECKING:
    from .object_files import LoadedObject

Progress = Callable[[int, int], None]

_log = logger(__name__)


@dataclass(frozen=True)
class CompileReport:
    """What `prepare` did: kernels compiled, kernels loaded from disk, and the time it took."""

    compiled: int
    loaded: int
    seconds: float


class NativeFunctionError(RuntimeError):
    """A kernel ended with an error: what it was given does not fit."""


class Compiled(Operator):
    """A function and its machine code, which is compiled or loaded when it is first needed."""

    arguments: type[Arguments] | None = None

    def __init__(self, function: Callable[..., int], library: Library) -> None:
        self.name = function.__name__
        self._function = function
        self._library = library
        self._loaded: LoadedObject | None = None

    @property
    def ready(self) -> bool:
        """Whether its machine code is in memory."""
        return self._loaded is not None

    @property
    def address(self) -> int:
        """Where its machine code lies."""
        if self._loaded is None:
            self._library.prepare([self])
        assert self._loaded is not None
        return self._loaded.address

    def on_disk(self) -> bool:
        """Whether the cache has a file for it."""
        return self._library.folder.holds(self._file_name)

    def load(self) -> bool:
        """Make it ready from the cache; False if it is not there, or damaged."""
        content = self._library.folder.load(self._file_name)
        return content is not None and self._link(content)

    def make(self) -> bytes:
        """Compile it; nothing else changes."""
        from .compiler import compile_object

        return compile_object(self._function, self.arguments)

    def adopt(self, content: bytes) -> bool:
        """Make it ready from what `make` returned, here or in another process, and keep that on disk."""
        self._library.folder.save(self._file_name, content)
        return self._link(content)

    @property
    def _file_name(self) -> str:
        return f"{self.name}.o"

    def _link(self, content: bytes) -> bool:
        from .object_files import LoadedObject, ObjectError

        with self._library.lock:
            if self._loaded is None:
                try:
                    self._loaded = LoadedObject(content)
                except ObjectError:
                    return False  # written by something else under our name: compile it anew
        return True


class NativeFunction(Compiled):
    """Callable like the function, with whole numbers, without holding the GIL. It returns 0, or has failed."""

    def __call__(self, *arguments: int) -> None:
        """Call the machine code."""
        if self._entry(*arguments):
            raise NativeFunctionError(f"kernel {self.name} failed")

    @cached_property
    def _entry(self) -> Callable[..., int]:
        words = [ctypes.c_int64] * len(signature(self._function).parameters)
        return ctypes.CFUNCTYPE(ctypes.c_int64, *words)(self.address)


class NativeOp(Compiled):
    """A function that machine code calls by its address.

    int64 op(arguments, context, begin, end, scratch): its arguments as it declares them, the address of the step (see
    `program.context`), the range of items to work on, and the address of memory that the calling thread may write to.
    It must not raise nor allocate; it returns 0, or a code that the caller turns into an error.
    """

    def __init__(self, function: Callable[..., int], arguments: type[Arguments] | None, library: Library) -> None:
        super().__init__(function, library)
        self.arguments = arguments


class Library:
    """All kernels of a program, and the folder that keeps their machine code.

    Args:
        sources: folder whose Python files the cache key covers.
    """

    def __init__(self, sources: Path) -> None:
        self._sources = sources
        self._folder: CacheFolder | None = None
        self._expected: list[Compiled] = []
        self._names: set[str] = set()
        self._announced = False
        self.lock = threading.Lock()
        renew_locks(self, "lock")
        # What this process waited for kernels so far.
        self.compile_seconds = 0.0

    @property
    def folder(self) -> CacheFolder:
        """The cache folder; chosen (and checked) at first use."""
        with self.lock:
            if self._folder is None:
                root = None
                with suppress(RuntimeError):  # there is no home folder
                    root = cache_root(os.environ)
                self._folder = CacheFolder(root, source_key(self._sources, compile_target()))
            return self._folder

    def kernel(self, function: Callable[..., int]) -> NativeFunction:
        """Decorator: a kernel; its name must be its own."""
        return NativeFunction(self._named(function, ""), self)

    def native_op(
        self, arguments: type[Arguments] | None, *, name: str = ""
    ) -> Callable[[Callable[..., int]], NativeOp]:
        """Decorator: an operator that machine code calls (see `NativeOp`), told what `arguments` declares.

        Args:
            arguments: None: only other operators call it, with five numbers of which the first is an address as well.
            name: of this variant; "" = the function's own.

        Raises:
            TypeError: an argument is declared with a type that none can have.
            ValueError: another one has its name, by which both would be kept on disk. What makes variants when they
                are asked for does so `once`.
        """
        if arguments is not None:
            layout(arguments)

        def add(function: Callable[..., int]) -> NativeOp:
            return NativeOp(self._named(function, name), arguments, self)

        return add

    def _named(self, function: Callable[..., int], name: str) -> Callable[..., int]:
        function.__name__ = name or function.__name__
        with self.lock:
            if function.__name__ in self._names:
                raise ValueError(f"a kernel is named {function.__name__!r} already; each variant needs a name")
            self._names.add(function.__name__)
        return function

    def expect(self, kernels: Collection[Compiled]) -> None:
        """Note kernels that the next program of a model should have prepared with its own: many share cores better."""
        with self.lock:
            self._expected.extend(kernels)

    def take_expected(self) -> list[Compiled]:
        """The kernels that were expected since the last call."""
        with self.lock:
            taken, self._expected = self._expected, []
        return taken

    def prepare(
        self, wanted: Collection[Compiled], progress: Progress | None = None, *, later: Collection[Compiled] = ()
    ) -> CompileReport:
        """Compile or load these kernels and operators, side by side in several processes where that is possible.

        Args:
            progress: called as progress(current, total) while kernels are compiled; None = that is a task, which the
                log says once. Where everything is on disk, nothing is compiled.
            later: kernels that will be wanted: other processes make them meanwhile, where that is possible.
        """
        started = time.perf_counter()
        waiting = [made for made in dict.fromkeys(wanted) if not made.ready]
        absent = [made for made in waiting if not made.load()]
        behind = [made for made in dict.fromkeys(later) if not (made.ready or made.on_disk())]
        if behind and self.folder.path is not None:
            from .workers import make_behind  # processes, for what is not on disk; they are told which kernels

            make_behind(behind, prepared=bool(absent))
        if absent:
            absent.sort(key=_cost, reverse=True)  # so that the processes end together
            announced, self._announced = self._announced, True
            begin = time.perf_counter()
            try:
                with Task() if progress else task(_TASK, log=None if announced else _log) as compiling:
                    show = progress or _with_costs(compiling, absent)
                    show(1, len(absent))
                    with closing(_each_made(absent)) as each:
                        for done, _ in enumerate(each, 2):
                            if done <= len(absent):
                                show(done, len(absent))
            finally:
                self.compile_seconds += time.perf_counter() - begin
        return CompileReport(len(absent), len(waiting) - len(absent), time.perf_counter() - started)


def _each_made(absent: Sequence[Compiled]) -> Generator[Compiled, None, None]:
    """Make kernels ready, here or side by side in other processes; yields each when it is."""
    from .workers import is_made_behind, make_all  # as above

    coming = [made for made in absent if is_made_behind(made)]
    here = [made for made in absent if made not in coming]
    with closing(make_all(here)) as objects:  # an interrupt ends the processes
        for made, content in objects:
            made.adopt(content)
            yield made
    deadline = time.monotonic() + _MOST_SECONDS_BEHIND
    for made in coming:
        while is_made_behind(made) and not made.load() and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if not (made.ready or made.load()):
            made.adopt(made.make())
        yield made


_TASK = "Compiling CPU kernels (once per kernel)"
_SECONDS_BETWEEN_LOOKS = 0.02
# Those processes give way to all others: where these leave them no time, kernels are compiled here.
_MOST_SECONDS_BEHIND = 20.0
# Roughly how long kernels take, by the beginnings of their names; the others take 2.
_COSTS = {"sample_slots": 44, "prefill_": 12, "decode_": 10, "attend_": 6}


def _cost(made: Compiled) -> int:
    return next((cost for name, cost in _COSTS.items() if made.name.startswith(name)), 2)


def _with_costs(compiling: Task, absent: Sequence[Compiled]) -> Progress:
    """Progress of kernels in the order in which they are begun, by what they cost."""
    costs = list(map(_cost, absent))

    def show(current: int, total: int) -> None:
        compiling.show(sum(costs[: current - 1]), sum(costs), f"{current - 1} of {total}")

    return show


LIBRARY = Library(Path(__file__).resolve().parents[2])
kernel, native_op = LIBRARY.kernel, LIBRARY.native_op
