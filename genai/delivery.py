"""How a caller waits for generations: until all are over, piece by piece, or without blocking an event loop.

Whoever stops waiting (Ctrl-C, a cancelled task, a closed stream) cancels what it waited for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from .completion import Completion
from .engine.worker import Worker
from .errors import StateError
from .generation import Generation
from .requests import MakeGenerations

if TYPE_CHECKING:
    import asyncio

_END = None
# A signal that arrives just before a thread blocks is seen when the thread wakes, so that no wait is longer than this.
_SIGNAL_SECONDS = 0.1


class _Group:
    """Generations of one call, which are over when all of them are. A failing one cancels the others."""

    def __init__(self, make: MakeGenerations, worker: Worker, on_done: Callable[[], None]) -> None:
        self._worker = worker
        self._on_done = on_done
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.leaders = make(self)
        self.all = [one for leader in self.leaders for one in leader.samples]
        self._num_left = len(self.all)

    def submit(self) -> None:
        """Let the engine begin."""
        self._worker.submit(self.leaders)

    def text(self, generation: Generation, piece: str) -> None:
        """See Sink."""

    def finished(self, generation: Generation, error: BaseException | None) -> None:
        """See Sink."""
        with self._lock:
            self._num_left -= 1
            first_error = error is not None and self.error is None
            self.error = self.error or error
            done = self._num_left == 0
        if first_error:
            self.cancel()
        if done:
            self._on_done()

    def cancel(self) -> None:
        """Drop those that are not over yet."""
        for one in self.all:
            one.cancelled = True
        self._worker.wake()

    def completions(self) -> list[Completion]:
        """In order of prompts and samples."""
        if self.error is not None:
            raise self.error
        return [one.completion() for one in self.all]


def wait_for(make: MakeGenerations, worker: Worker) -> list[Completion]:
    """Run a request and wait until it is over."""
    done = threading.Event()
    group = _Group(make, worker, done.set)
    try:
        group.submit()
        while not done.wait(_SIGNAL_SECONDS):
            pass
    except BaseException:
        group.cancel()
        raise
    return group.completions()


async def await_for(make: MakeGenerations, worker: Worker) -> list[Completion]:
    """Run a request; other tasks go on."""
    loop = _running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def set_done() -> None:
        if not done.done():
            done.set_result(None)

    group = _Group(make, worker, lambda: _call_soon(loop, set_done))
    try:
        group.submit()
        await done
    except BaseException:
        group.cancel()
        raise
    return group.completions()


def _running_loop() -> asyncio.AbstractEventLoop:
    import asyncio  # takes 20 ms, and few callers need it

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise StateError(
            "no event loop is running", "an async stream delivers to one", "use stream, or await"
        ) from None


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    # A loop that was closed (its error is a RuntimeError) has nobody waiting.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


class _Mailbox:
    """Where a streamed generation delivers. It does not know the stream, so that a dropped stream can be collected."""

    def __init__(self, put: Callable[[str | None], None]) -> None:
        self._put = put
        self.error: BaseException | None = None

    def text(self, generation: Generation, piece: str) -> None:
        """See Sink."""
        self._put(piece)

    def finished(self, generation: Generation, error: BaseException | None) -> None:
        """See Sink."""
        self.error = error
        self._put(_END)


class _Stream:
    """One generation, delivered in pieces through a queue."""

    def __init__(self, make: MakeGenerations, worker: Worker, put: Callable[[str | None], None]) -> None:
        self._worker = worker
        self._mailbox = _Mailbox(put)
        self._over = False
        (self._generation,) = make(self._mailbox)
        worker.submit([self._generation])

    @property
    def completion(self) -> Completion:
        """Text, tokens and figures: so far, or of the whole once the stream has ended."""
        return self._generation.completion()

    def cancel(self) -> None:
        """Let it end where it is; what was made until then still arrives. May be called from a signal handler."""
        if not self._over:
            self._generation.cancelled = True
            self._worker.wake()

    def _took(self, piece: str | None) -> bool:
        """Whether there is a piece; raises what ended the generation."""
        self._over = piece is _END
        if self._over and self._mailbox.error is not None:
            raise self._mailbox.error
        return not self._over


class CompletionStream(_Stream):
    """An iterator over pieces of text, made by LLM.stream."""

    def __init__(self, make: MakeGenerations, worker: Worker) -> None:
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        super().__init__(make, worker, self._pieces.put)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._over:
            raise StopIteration
        self._worker.check_usable()
        try:
            piece = self._get()
        except BaseException:
            self.close()
            raise
        if not self._took(piece) or piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel what is left, and wait until the engine has let go of it. `completion` keeps what there was."""
        if not self._over:
            self._worker.check_usable()
        self.cancel()
        while not self._over:
            self._over = self._get() is _END

    def _get(self) -> str | None:
        while True:
            with suppress(queue.Empty):
                return self._pieces.get(timeout=_SIGNAL_SECONDS)

    def __enter__(self) -> CompletionStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_generation"):
            self.cancel()


class AsyncCompletionStream(_Stream):
    """An async iterator over pieces of text, made by LLM.astream inside a running event loop."""

    def __init__(self, make: MakeGenerations, worker: Worker) -> None:
        import asyncio

        loop = _running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        put = self._pieces.put_nowait
        super().__init__(make, worker, lambda piece: _call_soon(loop, lambda: put(piece)))

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        if self._over:
            raise StopAsyncIteration
        try:
            piece = await self._pieces.get()
        except BaseException:
            self.cancel()
            raise
        if not self._took(piece) or piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Cancel what is left; see CompletionStream.close."""
        self.cancel()
        while not self._over:
            self._over = await self._pieces.get() is _END

    async def __aenter__(self) -> AsyncCompletionStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_generation"):
            self.cancel()
