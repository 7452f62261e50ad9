"""Compiling side by side: Numba's compiler runs on one thread at a time, so the work is shared by processes.

They are forked, because kernels are functions that only this process has: on Linux, where no other thread is at work,
so that forking is safe. Everywhere else, and when a process fails, kernels are compiled here.
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
from genai.common.forks import THREAD_NAMES
from genai.common.interrupts import InterruptsDeferred

_NUMBER = struct.Struct("=i")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_NICENESS = 19

if TYPE_CHECKING:  # workers compile what the library, which starts them, asks for
    from .native import Compiled


def make_all(kernels: Sequence[Compiled]) -> Generator[tuple[Compiled, bytes]]:
    """Compile kernels; yields each with its object file as soon as it is done. Closing it ends the processes."""
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
    """A process that nobody waits for, not even at exit: where the machine is busy, it takes long to end."""

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
        except ChildProcessError:  # somebody else asked before
            return False


_BEHIND: list[_Behind] = []


def make_behind(kernels: Sequence[Compiled], *, prepared: bool) -> None:
    """Let other processes compile kernels and keep them on disk while this one goes on. They end with this one.

    There are never more of them than threads; what they leave is compiled when it is wanted.

    Args:
        prepared: this process needs the compiler as well, so that it may as well load it first.
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
            return  # no more processes to be had: this one compiles them when they are wanted
        _BEHIND.append(process)


def is_made_behind(kernel: Compiled) -> bool:
    """Whether a process that `make_behind` started is at work on it, or will be."""
    _BEHIND[:] = [one for one in _BEHIND if one.is_at_work]
    return any(kernel in one.kernels for one in _BEHIND)


def _keep(kernels: Sequence[Compiled], parent: int) -> None:
    """A process of `make_behind`."""
    _leave_the_terminal()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # whoever reads what the parent writes waits for the parent only
        os.dup2(nothing, number)
    os.nice(_NICENESS)  # the first answer goes first
    for kernel in kernels:
        if os.getppid() != parent:
            return
        kernel.adopt(kernel.make())


def _leave_the_terminal() -> None:
    """A process that ends with its parent, and says nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What fails is compiled again, and told, by the parent.
    sys.stderr = None
    logging.disable()


def can_fork() -> bool:
    """Whether a copy of this process is certain to work: no other thread but those of our pool, which hold no lock."""
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return sys.platform == "linux" and all(thread.name.startswith(THREAD_NAMES) for thread in others)


def _share(kernels: Sequence[Compiled], processes: int) -> Generator[tuple[int, bytes]]:
    """What the processes have made; those that fail are left out.

    The numbers of the kernels lie in a pipe from which each takes the next: no lock that one of them could keep.
    """
    from . import compiler

    compiler.make_ready()  # once, instead of in each of them
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    workers = []
    try:
        with InterruptsDeferred():
            following, numbers = context.Pipe(duplex=False)
        try:
            os.set_blocking(numbers.fileno(), False)  # more than the pipe holds are compiled here
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
        return  # no more processes or files to be had
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()
        for pipe in pipes:
            pipe.close()


def _start(worker: BaseProcess | _Behind) -> None:
    """Start a process, which gets no signals before it has its own way with them."""
    with InterruptsDeferred(), warnings.catch_warnings():
        # Python counts the threads of other libraries too, which sleep and hold nothing.
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
    """A process: take the next kernel until none is left. It ends at the first that fails, and with its parent."""
    _leave_the_terminal()
    for pipe in pipes:
        pipe.close()  # else nobody would see that the parent's end of a pipe is gone
    while os.getppid() == parent and (number := os.read(following.fileno(), _NUMBER.size)):
        (index,) = _NUMBER.unpack(number)
        sender.send((index, kernels[index].make()))
