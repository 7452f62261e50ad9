"""Requests whose samples are streamed together to an event loop, for servers.

Preparing a request (the chat template, the tokenizer, the grammar) can take milliseconds, so it is separate from
submitting it: a server prepares requests on other threads than the thread of its event loop.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..engine.sampling.batch import TokenLogprob
from ..text.parsing import ReplySplitter
from .completion import Completion
from .generation import Generation
from .requests import Prompt
from .streaming import call_soon, running_loop

if TYPE_CHECKING:
    import asyncio

    from .llm import LLM


@dataclass(frozen=True)
class Piece:
    """A piece of a sample's text.

    Attributes:
        sample: index of the sample.
        text: the text; "" if only log-probabilities follow.
        logprobs: the log-probabilities of tokens that no earlier piece had, if the request has log-probabilities.
    """

    sample: int
    text: str
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Finished:
    """The end of a sample, with its completion."""

    sample: int
    completion: Completion


Item: TypeAlias = Piece | Finished


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request that can be submitted once.

    Attributes:
        leader: the first sample, which leads the others.
        new_splitter: creates the splitter for the text of one sample; None for a raw completion.
    """

    leader: Generation
    new_splitter: Callable[[], ReplySplitter] | None = None

    @property
    def prompt(self) -> Sequence[int]:
        """The token ids of the prompt."""
        return self.leader.prompt

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that the prefix cache supplied; 0 before the request starts."""
        return self.leader.cached_tokens

    @property
    def seed(self) -> int:
        """The seed of the random numbers."""
        return self.leader.seed

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.leader.samples)


def prepare_chat(llm: LLM, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> PreparedRequest:
    """Return the request for replies to a conversation. Thread-safe.

    Args:
        llm: the model.
        messages, options: see LLM.chat; `n` may be greater than 1.

    Raises:
        GenaiError: see LLM.chat.
    """
    turn = llm._turn_parts(messages, dict(options))  # type: ignore[arg-type]
    markers = llm.parser.markers
    (leader,) = llm._requests.batch([turn.prompt], turn.params, turn.sampling, markers, turn.adapter, turn.shape)
    return PreparedRequest(leader, lambda: llm.splitter(turn.prompt, tools=turn.tools))


def prepare_completion(llm: LLM, prompt: Prompt, options: Mapping[str, Any]) -> PreparedRequest:
    """Return the request for completions of one prompt. Thread-safe. See LLM.generate."""
    given = dict(options)
    (leader,) = llm._requests.batch([prompt], given.pop("params", None), given, adapter=given.pop("adapter", None))
    return PreparedRequest(leader)


class SampleStream:
    """The samples of requests that were submitted together, as items for an event loop.

    Samples are numbered in the order of requests and samples. If a sample fails, the others are cancelled. Create the
    stream inside a running event loop. If the stream is dropped or cancelled, the requests are cancelled.

    Args:
        llm: the model.
        requests: the requests.
        watched: False to deliver only the ends of the samples.
        on_end: called on the event loop's thread when all samples have ended.
    """

    def __init__(
        self,
        llm: LLM,
        requests: Sequence[PreparedRequest],
        *,
        watched: bool = True,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = llm._worker
        self._samples = [sample for request in requests for sample in request.leader.samples]
        loop = running_loop()
        self._mailbox = _Mailbox(loop, self._samples, watched, on_end)
        for sample in self._samples:
            sample.sink, sample.loop = self._mailbox, loop
            sample.reader = weakref.ref(self) if watched else None
        self._worker.submit([request.leader for request in requests])

    async def take(self) -> list[Item]:
        """Wait for items, and return all items that have arrived; an empty list at the end.

        Raises:
            GenaiError: the request failed. Its other samples are cancelled.
        """
        try:
            return await self._mailbox.take()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the request early. Its samples end as cancelled."""
        if self._mailbox.num_open:
            for sample in self._samples:
                sample.is_unwanted = True
            self._worker.wake()


class _Mailbox:
    """The receiver of the samples' output. It has no reference to the stream, so a dropped stream is collected."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        samples: Sequence[Generation],
        watched: bool,
        on_end: Callable[[], None],
    ) -> None:
        self._loop, self._inbox, self._watched, self._on_end = loop, inbox_of(loop), watched, on_end
        self._samples = [weakref.ref(sample) for sample in samples]
        self._numbers = {id(sample): number for number, sample in enumerate(samples)}
        self._num_logprobs = [0] * len(samples)
        # Only the event loop's thread uses these attributes.
        self._items: deque[Item] = deque()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.num_open = len(samples)

    # --- on the engine's thread ------------------------------------------------------------------------------------

    def text(self, generation: Generation, piece: str) -> None:
        """See Sink."""
        if self._watched:
            number = self._numbers[id(generation)]
            self._inbox.put(self._loop, self, Piece(number, piece, self._new_logprobs(number, generation)))

    def finished(self, generation: Generation, error: BaseException | None) -> None:
        """See Sink."""
        number = self._numbers[id(generation)]
        if error is not None:
            for other in self._samples:
                if (sample := other()) is not None:
                    sample.is_unwanted = True
            self._inbox.put(self._loop, self, error)
            return
        if self._watched and (logprobs := self._new_logprobs(number, generation)):
            self._inbox.put(self._loop, self, Piece(number, "", logprobs))
        self._inbox.put(self._loop, self, Finished(number, generation.completion()))

    def _new_logprobs(self, number: int, generation: Generation) -> Sequence[TokenLogprob]:
        if generation.plan.params.logprobs is None:
            return ()
        found = generation.certain_logprobs(self._num_logprobs[number])
        self._num_logprobs[number] += len(found)
        return found

    # --- on the event loop's thread --------------------------------------------------------------------------------

    def receive(self, item: Item | BaseException) -> None:
        """Store an item, and wake the task that waits."""
        if isinstance(item, BaseException):
            self._error = self._error or item
            self.num_open -= 1
        else:
            self._items.append(item)
            self.num_open -= isinstance(item, Finished)
        if not self.num_open:
            self._on_end()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Item]:
        """See SampleStream."""
        while not self._items and self._error is None and self.num_open:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        found = [*self._items]
        self._items.clear()
        return found


class LoopInbox:
    """Passes items from engine threads to the tasks of an event loop, with one wake-up for many items."""

    def __init__(self) -> None:
        self._items: deque[tuple[_Mailbox, Item | BaseException]] = deque()
        self._is_woken = False

    def put(self, loop: asyncio.AbstractEventLoop, mailbox: _Mailbox, item: Item | BaseException) -> None:
        """Pass on an item. Thread-safe."""
        self._items.append((mailbox, item))
        if not self._is_woken:
            self._is_woken = True
            call_soon(loop, self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # before the items are removed: an item that arrives later wakes the loop again
        while self._items:
            mailbox, item = self._items.popleft()
            mailbox.receive(item)


_INBOXES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = weakref.WeakKeyDictionary()


def inbox_of(loop: asyncio.AbstractEventLoop) -> LoopInbox:
    """Return the inbox that all streams of an event loop share."""
    found = _INBOXES.get(loop)
    if found is None:
        found = _INBOXES[loop] = LoopInbox()
    return found
