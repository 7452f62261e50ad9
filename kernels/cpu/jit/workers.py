"""Parallel compilation: Numba's compiler runs on one thread at a time, so processes share the work.

The processes are forked, because kernels are functions that exist only in this process. Forking is safe only on Linux
and while no unknown thread runs. Otherwise, or if a process fails, kernels are compiled in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from genai.common.cores import default_threads
from genai.common.forks import FORKABLE
from genai.common.interrupts import InterruptsDeferred

_NUMBER = struct.Struct("=i")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_NICENESS = 19

if TYPE_CHECKING:  # at run time the library imports this module
    from .native import Compiled


def make_all(kernels: Sequence[Compiled]) -> Generator[tuple[Compiled, bytes]]:
    """Compile kernels. Yield each with its object file when it is done. Closing this generator kills the processes."""
    processes = min(default_threads(), len(kernels))
    made = set()
    if processes > 1 and can_fork():
        with contextlib.closing(_share(kernels, processes)) as shared:
            for index, content in shared:
                made.add(index)
                yield kernels[index], content
    for index, kernel in enumerate(kernels):
        if index not in made:
            yield kernel, kernel.make()


class _Behind:
    """A background process that is never waited for, even at exit, because it may run for long on a busy machine."""

    def __init__(self, kernels: Sequence[Compiled]) -> None:
        self.kernels, self._parent, self._pid = kernels, os.getpid(), 0

    def start(self) -> None:
        self._pid = os.fork()
        if not self._pid:
            try:
                _keep(self.kernels, self._parent)
            finally:
                os._exit(0)

    @property
    def is_at_work(self) -> bool:
        try:
            return self._parent == os.getpid() and os.waitpid(self._pid, os.WNOHANG) == (0, 0)
        except ChildProcessError:  # the process was already reaped elsewhere
            return False


_BEHIND: list[_Behind] = []


def make_behind(kernels: Sequence[Compiled], *, prepared: bool) -> None:
    """Compile kernels in background processes, which cache the kernels on disk and end with this process.

    There are never more background processes than threads. Kernels that they do not finish are compiled when needed.

    Args:
        prepared: True if this process also needs the compiler, and so may load it before forking.
    """
    kernels = [kernel for kernel in kernels if not is_made_behind(kernel)]
    processes = min(default_threads() - len(_BEHIND), len(kernels))
    if processes < 1 or not can_fork():
        return
    if prepared:
        from . import compiler

        compiler.make_ready()
    for first in range(processes):
        process = _Behind(kernels[first::processes])
        try:
            _start(process)
        except OSError:
            return  # the system allows no more processes: this process compiles the kernels when needed
        _BEHIND.append(process)


def is_made_behind(kernel: Compiled) -> bool:
    """Return True if a background process is compiling the kernel or has it in its list."""
    _BEHIND[:] = [one for one in _BEHIND if one.is_at_work]
    return any(kernel in one.kernels for one in _BEHIND)


def _keep(kernels: Sequence[Compiled], parent: int) -> None:
    """Run a background process of `make_behind`."""
    _leave_the_terminal()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # otherwise a reader of the parent's output would also wait for this process
        os.dup2(nothing, number)
    os.nice(_NICENESS)  # the parent's first reply has priority
    for kernel in kernels:
        if os.getppid() != parent:
            return
        kernel.adopt(kernel.make())


def _leave_the_terminal() -> None:
    """Make this process end with its parent and write nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is also interrupted, and kills this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent compiles failed kernels again and reports the error.
    sys.stderr = None
    logging.disable()


def can_fork() -> bool:
    """Return True if a fork is safe: no other thread holds a lock that the child needs."""
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return sys.platform == "linux" and all(thread.name.startswith(FORKABLE) for thread in others)


def _share(kernels: Sequence[Compiled], processes: int) -> Generator[tuple[int, bytes]]:
    """Yield the kernels' indices and object files as the processes compile them. Kernels that fail are left out.

    A pipe holds the indices of the kernels, and each process reads the next index. So no killed process holds a lock.
    """
    from . import compiler

    compiler.make_ready()  # once here, instead of in every process
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    workers = []
    try:
        with InterruptsDeferred():
            following, numbers = context.Pipe(duplex=False)
        try:
            os.set_blocking(numbers.fileno(), False)  # kernels that do not fit in the pipe are compiled here
            with contextlib.suppress(BlockingIOError):
                for index in range(len(kernels)):
                    os.write(numbers.fileno(), _NUMBER.pack(index))
            numbers.close()
            for _ in range(processes):
                with InterruptsDeferred():
                    receiver, sender = context.Pipe(duplex=False)
                pipes.append(receiver)
                worker = context.Process(
                    target=_work, args=(kernels, following, tuple(pipes), sender, os.getpid()), daemon=True
                )
                workers.append(worker)
                _start(worker)
                sender.close()
        finally:
            following.close()
        yield from _received(pipes)
    except OSError:
        return  # the system allows no more processes or files
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()
        for pipe in pipes:
            pipe.close()


def _start(worker: BaseProcess | _Behind) -> None:
    """Start a process. Signals to the process are blocked until it has installed its handlers."""
    with InterruptsDeferred(), warnings.catch_warnings():
        # Python also counts threads of other libraries, which sleep and hold no locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            worker.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _received(pipes: Sequence[Connection]) -> Iterator[tuple[int, bytes]]:
    waiting = list(pipes)
    while waiting:
        ready = multiprocessing.connection.wait(waiting)
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            try:
                yield pipe.recv()
            except (EOFError, OSError):
                waiting.remove(pipe)


def _work(
    kernels: Sequence[Compiled], following: Connection, pipes: Sequence[Connection], sender: Connection, parent: int
) -> None:
    """Compile kernels in a worker process until none is left, the first one fails, or the parent process ends."""
    _leave_the_terminal()
    for pipe in pipes:
        pipe.close()  # otherwise the workers would not notice when the parent's end of a pipe is closed
    while os.getppid() == parent and (number := os.read(following.fileno(), _NUMBER.size)):
        (index,) = _NUMBER.unpack(number)
        sender.send((index, kernels[index].make()))
