"""Ways to wait for generations: until all of them are finished, as a stream, or without blocking an event loop.

When a caller stops waiting (Ctrl-C, a cancelled task, a closed stream), the generations are cancelled.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from typing import TYPE_CHECKING

from genai.common.interrupts import Task

from ..common.single import Single
from ..engine.worker import Worker
from ..errors import DeadlineError, GenaiError, StateError, located
from .completion import Completion
from .generation import Generation

if TYPE_CHECKING:
    import asyncio

    from .states import TextState  # completions contain states

_END = None


class GenerationGroup:
    """Generations that succeed or fail together. If one fails, the others are cancelled.

    The group is finished when all generations are.

    Args:
        leaders: the first sample for each prompt.
        worker: the worker that runs the generations.
        on_done: called on the engine's thread when all generations are finished.
        on_text: called on the engine's thread when the first text of any generation arrives.
    """

    def __init__(
        self,
        leaders: list[Generation],
        worker: Worker,
        on_done: Callable[[], None],
        on_text: Callable[[], None] | None = None,
    ) -> None:
        self._worker = worker
        self._on_done, self._on_text = on_done, on_text
        self.error: BaseException | None = None
        self._too_late: DeadlineError | None = None
        self.all = [generation for leader in leaders for generation in leader.samples]
        self.num_left = len(self.all)
        for generation in self.all:
            generation.sink = self

    def text(self, generation: Generation, piece: str) -> None:
        """See Sink."""
        if self._on_text is not None:
            self._on_text()
            self._on_text = None

    def finished(self, generation: Generation, error: BaseException | None) -> None:
        """See Sink. Only the engine's thread calls it."""
        if isinstance(error, DeadlineError):
            self._too_late = error  # the other generations have separate deadlines
        elif error is not None and self.error is None:
            self.error = self._located(generation, error)
            self.cancel()
        self.num_left -= 1
        if not self.num_left:
            self._on_done()

    def _located(self, generation: Generation, error: BaseException) -> BaseException:
        """Return the error with the index of its prompt, if there are several prompts."""
        is_alone = self.all[0].prompt_index == self.all[-1].prompt_index
        if is_alone or not isinstance(error, GenaiError) or isinstance(error, StateError):
            return error
        return located(error, f"prompt {generation.prompt_index}")

    def cancel(self) -> None:
        """Cancel the generations that are not finished."""
        for generation in self.all:
            generation.is_unwanted = True
        self._worker.wake()

    def completions(self) -> list[Completion]:
        """Return the completions in the order of prompts and samples, or raise the error that ended the group."""
        if self.error is not None:
            raise self.error
        if self._too_late is not None and not any(generation.num_output for generation in self.all):
            raise self._too_late
        return [generation.completion() for generation in self.all]


Progress = Callable[[int, int], None]
"""A callback that receives (number done, total number) ten times per second while a caller waits."""


def wait_for(leaders: list[Generation], worker: Worker, progress: Progress | None = None) -> list[Completion]:
    """Run a request and wait until it is finished. `progress` receives the number of finished completions and all."""
    (group,) = wait_for_groups([leaders], worker, progress)
    return group.completions()


def wait_for_groups(
    requests: Sequence[list[Generation]], worker: Worker, progress: Progress | None = None
) -> list[GenerationGroup]:
    """Run requests that succeed or fail separately, and wait until all are finished. See wait_for."""
    bell: queue.SimpleQueue[None] = queue.SimpleQueue()
    groups = [GenerationGroup(leaders, worker, lambda: bell.put(None)) for leaders in requests]
    total = sum(len(group.all) for group in groups)
    try:
        worker.submit([leader for leaders in requests for leader in leaders])
        while left := sum(group.num_left for group in groups):
            with suppress(queue.Empty):
                bell.get(timeout=Task.SECONDS)
            if progress is not None:
                left = sum(group.num_left for group in groups)
                progress(total - left, total)
    except BaseException:
        for group in groups:
            group.cancel()
        raise
    return groups


async def await_for(leaders: list[Generation], worker: Worker) -> list[Completion]:
    """Run a request without blocking other tasks."""
    (group,) = await await_groups([leaders], worker)
    return group.completions()


async def await_groups(requests: Sequence[list[Generation]], worker: Worker) -> list[GenerationGroup]:
    """Run requests that succeed or fail separately, without blocking other tasks."""
    loop = running_loop()
    done: asyncio.Future[None] = loop.create_future()
    groups: list[GenerationGroup] = []

    def set_done() -> None:
        if not done.done() and not any(group.num_left for group in groups):
            done.set_result(None)

    groups += [GenerationGroup(leaders, worker, lambda: call_soon(loop, set_done)) for leaders in requests]
    for generation in (generation for group in groups for generation in group.all):
        generation.loop = loop
    try:
        if groups:
            worker.submit([leader for leaders in requests for leader in leaders])
            await done
    except BaseException:
        for group in groups:
            group.cancel()
        raise
    return groups


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop. Raise StateError if there is none."""
    import asyncio  # the import takes 20 ms, and few callers need it

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise StateError(
            "no event loop is running",
            "an async stream delivers to an event loop",
            "use stream, or call this method in an event loop",
        ) from None


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call a function on the thread of an event loop, from any thread."""
    # If the loop is closed (its error is a RuntimeError), no task is waiting.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


class _Mailbox:
    """The receiver of a stream's generation. It holds no reference to the stream, so a dropped stream is collected."""

    def __init__(self, put: Callable[[str | None], None]) -> None:
        self._put = put
        self.error: BaseException | None = None
        self.is_closed = False

    def text(self, generation: Generation, piece: str) -> None:
        self._put(piece)

    def finished(self, generation: Generation, error: BaseException | None) -> None:
        self.error, self.is_closed = error, True
        self._put(_END)


class _Stream(Single):
    """A generation that is delivered in pieces through a queue."""

    def __init__(self, generations: list[Generation], worker: Worker, put: Callable[[str | None], None]) -> None:
        self._worker = worker
        self._mailbox = _Mailbox(put)
        self._over = False
        (self._generation,) = generations
        self._generation.sink, self._generation.reader = self._mailbox, weakref.ref(self)
        worker.submit(generations)

    @property
    def completion(self) -> Completion:
        """The text, tokens and figures: the result so far, or the full result after the stream has ended."""
        return self._generation.completion()

    def cancel(self) -> None:
        """End the generation early. Text generated until then still arrives. Safe to call from a signal handler."""
        if not self._over:
            self._generation.is_unwanted = True
            self._worker.wake()

    def _took(self, piece: str | None) -> bool:
        """Return True if `piece` is text, and False at the end. Raise the error that ended the generation, if any."""
        self._over = piece is _END
        if self._over and self._mailbox.error is not None:
            raise self._mailbox.error
        return not self._over


class CompletionStream(_Stream, AbstractContextManager["CompletionStream"]):
    """An iterator over pieces of text. LLM.stream creates it.

    Attributes:
        on_prompt: called, while a caller waits for the first piece, with the number of computed prompt tokens and their
            total number.
        make_state: returns the state of a running request, on the engine's thread; set by the LLM.
    """

    on_prompt: Progress | None = None
    make_state: Callable[[Generation], TextState] | None = None

    def __init__(self, generations: list[Generation], worker: Worker) -> None:
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        super().__init__(generations, worker, self._pieces.put)

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
        """Cancel the rest, and wait until the engine has released the request. `completion` keeps the text so far."""
        if not self._over:
            self._worker.check_usable()
        self.cancel()
        while not self._over:
            self._over = self._get() is _END

    def _get(self) -> str | None:
        """Return the next piece, or _END. An interrupt just after queue.get can lose an item, even the end marker."""
        while True:
            is_closed = self._mailbox.is_closed  # if True, everything is already in the queue
            with suppress(queue.Empty):
                return self._pieces.get(timeout=0 if is_closed else Task.SECONDS)
            done, total = self._generation.prompt_progress
            if self.on_prompt is not None and done < total:
                self.on_prompt(done, total)
            if is_closed:
                return _END

    def fork(self) -> TextState:
        """Return the generation's current state, which shares its cache blocks.

        Both can continue: the state with `resume`, and this stream.

        Raises:
            StateError: the generation has not started, or it ended without keep_state=True.
        """
        make = self.make_state
        assert make is not None
        return self._worker.ask(lambda: make(self._generation))

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncCompletionStream(_Stream, AbstractAsyncContextManager["AsyncCompletionStream"]):
    """An async iterator over pieces of text. LLM.astream creates it inside a running event loop."""

    def __init__(self, generations: list[Generation], worker: Worker) -> None:
        import asyncio

        self._loop = loop = running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        put = self._pieces.put_nowait
        generations[0].loop = loop
        super().__init__(generations, worker, lambda piece: call_soon(loop, lambda: put(piece)))

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        if self._over:
            raise StopAsyncIteration
        try:
            piece = await self._get()
        except BaseException:
            self.cancel()
            raise
        if not self._took(piece) or piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Cancel the rest; see CompletionStream.close."""
        self.cancel()
        while not self._over:
            self._over = await self._get() is _END

    async def _get(self) -> str | None:
        """Return the next piece, or _END. The end marker stays in the queue for every task that waits."""
        if running_loop() is not self._loop:
            raise StateError(
                "this stream belongs to another event loop",
                "only the event loop that created a stream receives its text",
                "create a new stream",
            )
        piece = await self._pieces.get()
        if piece is _END:
            self._pieces.put_nowait(_END)
        return piece

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
