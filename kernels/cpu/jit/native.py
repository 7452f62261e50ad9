"""Kernels: functions of integers and addresses that are compiled once and cached on disk.

There are two kinds: Python calls a `@kernel`; compiled code calls a `@native_op(declaration)`, with addresses (see
`program`). Both decorators only register a function. The function is compiled, or loaded from the cache, at its first
call or by `prepare`. The code that builds the arguments checks them beforehand (see `kernels.checks`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from genai.common.forks import renew_locks
from genai.common.log import logger
from genai.common.progress import BEGINS_TASK, Task, is_quiet, task

from .arguments import Arguments, Operator, layout
from .kernel_cache import CacheFolder, cache_root, compile_target, source_key

if TYPE_CHECKING:
    from .object_files import LoadedObject

Progress = Callable[[int, int], None]
Needed = tuple[Collection["Compiled"], Collection["Compiled"]]
"""Operators that are needed now, and operators that are needed later."""
# The function that `Library.foreseen` set in this thread; None = no function, or it was called already.
_foreseen: ContextVar[Callable[[], Needed] | None] = ContextVar("_foreseen", default=None)

_log = logger(__name__)


@dataclass(frozen=True)
class CompileReport:
    """The result of `prepare`: the numbers of kernels compiled and loaded from disk, and the seconds that this took."""

    compiled: int
    loaded: int
    seconds: float


class NativeFunctionError(RuntimeError):
    """A kernel returned an error because its arguments are invalid."""


class Compiled(Operator):
    """A function with its machine code, which is compiled or loaded when it is first needed."""

    arguments: type[Arguments] | None = None

    def __init__(self, function: Callable[..., int], library: Library) -> None:
        self.name = function.__name__
        self._function = function
        self._library = library
        self._loaded: LoadedObject | None = None

    @property
    def ready(self) -> bool:
        """True if the machine code is in memory."""
        return self._loaded is not None

    @property
    def address(self) -> int:
        """The address of the machine code."""
        if self._loaded is None:
            self._library.prepare([self])
        assert self._loaded is not None
        return self._loaded.address

    def on_disk(self) -> bool:
        """Return True if the cache has a file for the function."""
        return self._library.folder.holds(self._file_name)

    def load(self) -> bool:
        """Load the machine code from the cache. Return False if it is absent or damaged."""
        content = self._library.folder.load(self._file_name)
        return content is not None and self._link(content)

    def make(self) -> bytes:
        """Compile the function and return its object file, without linking or caching it."""
        from .compiler import compile_object

        return compile_object(self._function, self.arguments)

    def adopt(self, content: bytes) -> bool:
        """Link an object file that `make` returned, in this process or another, and cache it on disk."""
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
                    return False  # another program wrote a file with this name: compile again
        return True


class NativeFunction(Compiled):
    """A kernel that Python calls with integers, without the GIL. The machine code returns 0 unless it fails."""

    def __call__(self, *arguments: int) -> None:
        """Call the machine code."""
        if self.entry(*arguments):
            raise NativeFunctionError(f"kernel {self.name} failed")

    @cached_property
    def entry(self) -> Callable[..., int]:
        """The machine code as a function that returns its status."""
        # ctypes converts an integer to a pointer in a third of the time that it needs for c_int64.
        words = [ctypes.c_void_p] * len(signature(self._function).parameters)
        return ctypes.CFUNCTYPE(ctypes.c_int64, *words)(self.address)


class NativeOp(Compiled):
    """A function that compiled code calls by its address.

    Its signature is int64 op(arguments, context, begin, end, scratch): the arguments as declared, the address of the
    step (see `program.step_table`), the range of items to work on, and the address of memory that the calling thread
    may write to. It must neither raise nor allocate. It returns 0, or a code that the caller turns into an exception.
    """

    def __init__(self, function: Callable[..., int], arguments: type[Arguments] | None, library: Library) -> None:
        super().__init__(function, library)
        self.arguments = arguments


class Library:
    """All kernels of the package, and the folder that caches their machine code.

    Args:
        sources: folder with the Python files that the cache key covers.
    """

    def __init__(self, sources: Path) -> None:
        self._sources = sources
        self._folder: CacheFolder | None = None
        self._expected: list[Compiled] = []
        self._names: set[str] = set()
        self._announced = False
        self.lock = threading.Lock()
        renew_locks(self, "lock")
        # Total time that this process has waited for kernels.
        self.compile_seconds = 0.0

    @property
    def folder(self) -> CacheFolder:
        """The cache folder, which is chosen (and checked) at first use."""
        with self.lock:
            if self._folder is None:
                root = None
                with suppress(RuntimeError):  # there is no home folder
                    root = cache_root(os.environ)
                self._folder = CacheFolder(root, source_key(self._sources, compile_target()))
            return self._folder

    def kernel(self, function: Callable[..., int]) -> NativeFunction:
        """Register a kernel (decorator). Its name must be unique."""
        return NativeFunction(self._named(function, ""), self)

    def native_op(
        self, arguments: type[Arguments] | None, *, name: str = ""
    ) -> Callable[[Callable[..., int]], NativeOp]:
        """Register an operator that compiled code calls (decorator); see `NativeOp`.

        Args:
            arguments: declaration of the operator's arguments. None = only other operators call it, with five integers,
                the first of which is also an address.
            name: name of this variant; "" = the function's name.

        Raises:
            TypeError: an argument is declared with an unsupported type.
            ValueError: the name is taken. Names must be unique because they are file names in the cache; functions
                that create variants use `once`.
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
                raise ValueError(
                    f"a kernel named {function.__name__!r} already exists; each variant needs a unique name"
                )
            self._names.add(function.__name__)
        return function

    def expect(self, kernels: Collection[Compiled]) -> None:
        """Add kernels to prepare with the next program of a model. Larger batches share the cores better."""
        with self.lock:
            self._expected.extend(kernels)

    def take_expected(self) -> list[Compiled]:
        """Return the kernels that were expected since the last call."""
        with self.lock:
            taken, self._expected = self._expected, []
        return taken

    @contextmanager
    def foreseen(self, operators: Callable[[], Needed]) -> Iterator[None]:
        """Compile all operators that a block needs together, so that one progress bar counts all of them.

        Args:
            operators: function that returns the operators. It is called only if the block needs an operator that must
                be compiled. If it raises an exception, operators are compiled when the block needs them.
        """
        before = _foreseen.set(operators)
        try:
            yield
        finally:
            _foreseen.reset(before)

    def _all_foreseen(self) -> Needed:
        operators = _foreseen.get()
        if operators is not None:
            _foreseen.set(None)
            with suppress(Exception):  # the block meets the same problem, and reports it
                now, later = operators()
                with self.lock:
                    return [*now, *self._expected], later
        return [], []

    def prepare(
        self, wanted: Collection[Compiled], progress: Progress | None = None, *, later: Collection[Compiled] = ()
    ) -> CompileReport:
        """Compile or load these kernels and operators, in several parallel processes if possible.

        Args:
            progress: called as progress(current, total) while kernels are compiled; None = show a task, which is
                logged once. If everything is on disk, nothing is compiled.
            later: kernels that will be needed later; other processes compile them in the background if possible.
        """
        started = time.perf_counter()
        waiting = [made for made in dict.fromkeys(wanted) if not made.ready]
        absent = [made for made in waiting if not made.load()]
        if absent:
            now, then = self._all_foreseen()
            others = [made for made in dict.fromkeys(now) if not made.ready and made not in waiting]
            waiting, absent = [*waiting, *others], [*absent, *(made for made in others if not made.load())]
            later = [*later, *then]
        behind = [made for made in dict.fromkeys(later) if not (made.ready or made.on_disk())]
        if behind and self.folder.path is not None:
            from .workers import make_behind  # imports multiprocessing, which kernels on disk do not need

            make_behind(behind, prepared=bool(absent))
        if absent:
            absent.sort(key=_cost, reverse=True)  # longest first, so that the processes finish together
            announced, self._announced = self._announced, True
            begin = time.perf_counter()
            if not (progress or announced or is_quiet()):
                counted = f"{len(absent)} CPU kernel{'s' if len(absent) > 1 else ''}"
                _log.info("%s ...", _TASK.replace("CPU kernels", counted), extra={BEGINS_TASK: True})
            try:
                with Task() if progress else task(_TASK) as compiling:
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
    """Link kernels that are compiled in this process or in parallel processes. Yield each kernel when it is ready."""
    from .workers import is_made_behind, make_all  # imported here for the same reason

    coming = [made for made in absent if is_made_behind(made)]
    here = [made for made in absent if made not in coming]
    with closing(make_all(here)) as objects:  # an interrupt kills the processes
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
# Background processes have the lowest priority. If they get no processor time, kernels are compiled in this process.
_MOST_SECONDS_BEHIND = 20.0
# Rough relative compile times of kernels, by the prefixes of their names; other kernels have 2.
_COSTS = {"sample_slots": 44, "prefill_": 12, "decode_": 10, "attend_": 6}


def _cost(made: Compiled) -> int:
    return next((cost for name, cost in _COSTS.items() if made.name.startswith(name)), 2)


def _with_costs(compiling: Task, absent: Sequence[Compiled]) -> Progress:
    """Return a progress function that weights kernels by their compile times, in the order in which they start."""
    costs = list(map(_cost, absent))

    def show(current: int, total: int) -> None:
        compiling.show(sum(costs[: current - 1]), sum(costs), f"{current - 1} of {total}")

    return show


LIBRARY = Library(Path(__file__).resolve().parents[2])
kernel, native_op = LIBRARY.kernel, LIBRARY.native_op
