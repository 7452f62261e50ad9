"""Compiling side by side: Numba's compiler runs on one thread at a time, so the work is shared by processes.

They are forked, because kernels are functions that only this process has: on Linux, where no other thread is at work,
so that forking is safe. Everywhere else, and when a process fails, kernels are compiled here.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from .cores import default_threads

# Threads of ours that sleep between steps, and hold nothing then.
_SLEEPERS = ("genai-walker-", "genai-kernels-")

if TYPE_CHECKING:
    from .jit import Compiled


def make_all(kernels: Sequence[Compiled]) -> Iterator[tuple[Compiled, bytes]]:
    """Compile kernels; yields each with its object file as soon as it is done."""
    processes = min(default_threads(), len(kernels))
    made = set()
    if processes > 1 and can_fork():
        for index, content in _share(kernels, processes):
            made.add(index)
            yield kernels[index], content
    for index, kernel in enumerate(kernels):
        if index not in made:
            yield kernel, kernel.make()


def can_fork() -> bool:
    """Whether a copy of this process is certain to work: no other thread may hold a lock."""
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return sys.platform == "linux" and all(thread.name.startswith(_SLEEPERS) for thread in others)


def _share(kernels: Sequence[Compiled], processes: int) -> Iterator[tuple[int, bytes]]:
    """What the processes have made; those that fail are left out."""
    from . import compiler

    compiler.make_ready()  # once, instead of in each of them
    context = multiprocessing.get_context("fork")
    following = context.Value("q", 0)
    pipes, workers = [], []
    try:
        for _ in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(kernels, following, sender), daemon=True)
            with warnings.catch_warnings():
                # Python counts the threads of other libraries too, which sleep and hold nothing.
                warnings.simplefilter("ignore", DeprecationWarning)
                worker.start()
            sender.close()
            pipes.append(receiver)
            workers.append(worker)
        yield from _received(pipes)
    except OSError:
        return  # no more processes or files to be had
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        for pipe in pipes:
            pipe.close()


def _received(pipes: Sequence[Connection]) -> Iterator[tuple[int, bytes]]:
    waiting = list(pipes)
    while waiting:
        ready = multiprocessing.connection.wait(waiting)
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            try:
                yield pipe.recv()
            except EOFError:
                waiting.remove(pipe)


def _work(kernels: Sequence[Compiled], following: Any, sender: Any) -> None:
    """A process: take the next kernel until none is left. It ends at the first that fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    sys.stderr = None  # what fails is compiled again, and told, by the parent
    while True:
        with following.get_lock():
            index = following.value
            following.value += 1
        if index >= len(kernels):
            return
        sender.send((index, kernels[index].make()))
