"""The implementation of `LLM.map`, which maps a stream of items to replies.

Items are read a window at a time, and run on one engine.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, TypeVar

from genai.common.interrupts import Task

from ..engine.worker import Worker
from ..errors import GenaiError, StateError
from .completion import ChatReply, Completion
from .generation import Generation
from .streaming import GenerationGroup

Item = TypeVar("Item")

DEFAULT_WINDOW = 1024
# The maximum number of prompt tokens to read ahead. Each token takes 36 bytes.
_MOST_TOKENS_AHEAD = 2**20
# A prompt waits until a similar prompt is processed if that saves at least this many tokens and half of the prompt.
_WORTH_WAITING = 64
# Among sorted prompts, the last one is the most similar. Before the first window is sorted, it is one of the last few.
_MOST_COMPARED = 4
# Items are read in groups for as long as reading a group is fast.
_MOST_AT_A_TIME, _SECONDS_TO_READ = 16, 0.01


@dataclass(frozen=True)
class Answer(Generic[Item]):
    """The result of one item.

    Attributes:
        index: index of the item, from 0.
        item: the item itself.
        completions: one per prompt and sample; empty if the item failed.
        replies: for a conversation, each completion split into its parts.
        error: the error of an item that failed, or None.
    """

    index: int
    item: Item
    completions: tuple[Completion, ...] = ()
    replies: tuple[ChatReply, ...] = ()
    error: GenaiError | None = None

    @property
    def completion(self) -> Completion:
        """The first completion. Raises the error of a failed item."""
        if self.error is not None:
            raise self.error
        return self.completions[0]

    @property
    def text(self) -> str:
        """The text of the first completion, or of the first reply to a conversation. Raises a failed item's error."""
        return self.replies[0].text if self.replies else self.completion.text


@dataclass
class MapFigures:
    """Progress figures of a map, counted from its start.

    Attributes:
        done: finished items, including failed ones.
        failed: items that ended with an error.
        prompt_tokens: prompt tokens that were computed.
        cached_tokens: prompt tokens of finished items that were in the prefix cache.
        generated_tokens: generated tokens, including tokens of unfinished answers.
        seconds: time since the first answer was requested.
    """

    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: Answer[Any]) -> None:
        """Add an answer to the figures."""
        prompts = [completion for completion in answer.completions if not completion.sample_index]
        self.done += 1
        self.failed += answer.error is not None
        self.prompt_tokens += sum(completion.prompt_tokens for completion in prompts)
        self.cached_tokens += sum(completion.cached_tokens for completion in prompts)
        self.generated_tokens += sum(len(completion.token_ids) for completion in answer.completions)


@dataclass
class MapRequest:
    """The requests for an item, not yet submitted.

    Attributes:
        leaders: the first sample of each prompt.
        split: splits a completion into its parts; None if the item is not a conversation.
    """

    leaders: list[Generation]
    split: Callable[[Completion], ChatReply] | None = None


@dataclass(eq=False)
class _Work(Generic[Item]):
    """An item that was read but is not finished."""

    index: int
    item: Item
    request: MapRequest
    group: GenerationGroup | None = None

    @property
    def prompt(self) -> Sequence[int]:
        return self.request.leaders[0].prompt

    @property
    def num_tokens(self) -> int:
        return sum(len(leader.prompt) for leader in self.request.leaders)

    @property
    def is_read(self) -> bool:
        """True if the item's prompt is processed."""
        done, total = self.request.leaders[0].prompt_progress
        return done == total


@dataclass
class MapOptions(Generic[Item]):
    """Options of a map; see LLM.map.

    Attributes:
        most_running: maximum number of items in the engine.
    """

    window: int = DEFAULT_WINDOW
    most_running: int = 64
    in_order: bool = True
    on_answer: Callable[[Answer[Item]], object] | None = None
    progress: Callable[[MapFigures], object] | None = None


class Mapper(Generic[Item]):
    """Keeps the engine supplied with items.

    Items are read whenever there is no other work, in groups if reading is fast, until `window` items are ahead of the
    engine. The items are then sorted by their prompts, so that prompts with a common prefix follow each other: the
    first of these prompts leaves the prefix in the prefix cache. While the engine works on one window, the next window
    is read. No item waits longer than two windows, and memory use does not depend on the number of items.

    Args:
        items: the items.
        ask: converts an item to a prompt, or to a GenaiError, which becomes the answer to the item.
        prepare: returns the requests for prompts, or a GenaiError for each prompt that is invalid.
        worker: the worker that runs the requests.
        options: options of the map.
    """

    def __init__(
        self,
        items: Iterator[Item],
        ask: Callable[[Item], Any],
        prepare: Callable[[Sequence[Any]], Sequence[MapRequest | GenaiError]],
        worker: Worker,
        options: MapOptions[Item],
    ) -> None:
        self._items, self._ask, self._prepare = items, ask, prepare
        self._worker, self._options = worker, options
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._num_read, self._is_read, self._most_at_a_time = 0, False, 1
        self._broken: Exception | None = None
        self._ahead: list[_Work[Item]] = []
        self._sorted: deque[_Work[Item]] = deque()
        self._running: list[_Work[Item]] = []
        self._done: list[Answer[Item]] = []
        self._held: dict[int, Answer[Item]] = {}
        self._num_given, self._tokens_ahead = 0, 0
        self._supply = _Supply[Item]()
        self._figures = MapFigures()

    def answers(self) -> Iterator[Answer[Item]]:
        """Yield the answers. Closing the generator cancels the running requests.

        An exception from `items` or `ask` is raised after the answers to all earlier items. If the model is closed, the
        StateError is raised after all answers that were finished before.
        """
        self._begin = self._last_progress = time.monotonic()
        try:
            while True:
                self._submit()
                self._collect()
                yield from self._deliver()
                self._tell()
                if self._room > 0:
                    self._read()
                elif self._running:
                    with suppress(queue.Empty):
                        self._bell.get(timeout=Task.SECONDS)
                elif not (self._sorted or self._ahead or self._done):
                    break
            self._tell(at_once=True)
            yield from [self._held.pop(index) for index in sorted(self._held)]  # after an item that has no answer
            if self._broken is not None:
                raise self._broken
        finally:
            for work in self._running:
                if work.group is not None:
                    work.group.cancel()

    # --- in ------------------------------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        """The number of items that may be read now."""
        undelivered = self._num_read - self._num_given
        if self._is_read or (self._tokens_ahead >= _MOST_TOKENS_AHEAD and undelivered >= self._options.most_running):
            return 0
        most = 2 * self._options.window + self._options.most_running
        return min(self._options.window - len(self._ahead), most - undelivered)

    def _read(self) -> None:
        """Read the next items: one, or a growing number while reading is fast, so that answers are not delayed."""
        begin, group, prompts = time.monotonic(), list[Item](), list[Any]()
        try:
            for item in islice(self._items, min(self._most_at_a_time, self._room)):
                prompts.append(self._ask(item))
                group.append(item)
                if time.monotonic() - begin > _SECONDS_TO_READ:
                    break
        except Exception as error:
            self._broken = error
        is_fast = time.monotonic() - begin < _SECONDS_TO_READ
        self._most_at_a_time = min(2 * self._most_at_a_time, _MOST_AT_A_TIME) if is_fast else 1
        requests: Sequence[MapRequest | GenaiError] = ()
        try:
            requests = self._prepare(prompts) if prompts else ()
        except Exception as error:
            self._broken, group = error, []
        self._is_read = not group or self._broken is not None
        for item, request in zip(group, requests, strict=True):
            index, self._num_read = self._num_read, self._num_read + 1
            if isinstance(request, GenaiError):
                self._finish(Answer(index, item, error=request))
            else:
                self._ahead.append(_Work(index, item, request))
                self._tokens_ahead += self._ahead[-1].num_tokens

    def _submit(self) -> None:
        """Submit as many items as the engine can run."""
        while len(self._running) < self._options.most_running:
            if not self._sorted and self._ahead:
                # Otherwise the engine would run out of work, so these items are next, even if there are only a few.
                self._sorted = deque(sorted(self._ahead, key=_prompt))
                self._ahead = []
            if not self._sorted or not self._supply.may_follow(self._sorted[0]):
                return
            work = self._sorted.popleft()
            self._tokens_ahead -= work.num_tokens
            work.group = GenerationGroup(work.request.leaders, self._worker, self._ring, on_text=self._ring)
            self._running.append(work)
            self._supply.note(work)
            try:
                self._worker.submit(work.request.leaders)
            except StateError as error:
                self._stop(error)

    def _ring(self) -> None:
        self._bell.put(None)

    # --- out -----------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Collect the answers of finished requests."""
        over = [work for work in self._running if work.group is not None and not work.group.num_left]
        if over:
            self._running = [work for work in self._running if work not in over]
        for work in over:
            try:
                answer = self._answer(work)
            except StateError as error:
                self._stop(error)
            else:
                self._finish(answer)

    def _stop(self, error: StateError) -> None:
        """Raise this error after all finished answers, and wait for no others: the model is closed."""
        self._broken, self._is_read = error, True
        self._ahead.clear()
        self._sorted.clear()
        for work in self._running:
            if work.group is not None and work.group.num_left:
                work.group.cancel()
        self._running = [work for work in self._running if not _is_running(work)]

    def _answer(self, work: _Work[Item]) -> Answer[Item]:
        assert work.group is not None
        try:
            completions = work.group.completions()
        except StateError:
            raise
        except GenaiError as error:
            return Answer(work.index, work.item, error=error)
        if any(completion.finish_reason == "cancelled" for completion in completions):
            raise StateError(
                "the model was closed during the map",
                "running requests were cancelled",
                "close the model after the map",
            )
        split = work.request.split
        replies = tuple(map(split, completions)) if split is not None else ()
        return Answer(work.index, work.item, tuple(completions), replies)

    def _finish(self, answer: Answer[Item]) -> None:
        self._figures.add(answer)
        if self._options.on_answer is not None:
            self._options.on_answer(answer)
        if self._options.in_order:
            self._held[answer.index] = answer
        else:
            self._done.append(answer)

    def _deliver(self) -> Iterator[Answer[Item]]:
        while self._num_given in self._held:
            self._done.append(self._held.pop(self._num_given))
            self._num_given += 1
        done, self._done = self._done, []
        if not self._options.in_order:
            self._num_given += len(done)
        yield from done

    def _tell(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._options.progress is None or not (at_once or now - self._last_progress >= Task.SECONDS):
            return
        self._last_progress = now
        known, running = self._figures, [leader for work in self._running for leader in work.request.leaders]
        read = sum(leader.prompt_progress[0] for leader in running)
        written = sum(sample.num_output for leader in running for sample in leader.samples)
        self._options.progress(
            replace(
                known,
                prompt_tokens=known.prompt_tokens + read,
                generated_tokens=known.generated_tokens + written,
                seconds=now - self._begin,
            )
        )


@dataclass
class _Supply(Generic[Item]):
    """Tracks the submitted items in order, so that prompts with a common prefix are not computed at the same time.

    Attributes:
        pending: items whose prompts are not processed yet.
        computed: the most recent item whose prompt is processed.
    """

    pending: deque[_Work[Item]] = field(default_factory=deque)
    computed: _Work[Item] | None = None

    def note(self, work: _Work[Item]) -> None:
        self.pending.append(work)

    def may_follow(self, work: _Work[Item]) -> bool:
        """Return True if `work` can start now, because waiting for prompts in progress would save too few tokens."""
        while self.pending and (self.pending[0].is_read or not _is_running(self.pending[0])):
            self.computed = self.pending.popleft()
        if not self.pending:
            return True
        known = common_length(self.computed.prompt, work.prompt) if self.computed is not None else 0
        latest = islice(reversed(self.pending), _MOST_COMPARED)
        gain = max(common_length(other.prompt, work.prompt) for other in latest) - known
        return gain < max(_WORTH_WAITING, len(work.prompt) // 2)


def _prompt(work: _Work[Any]) -> list[int]:
    return list(work.prompt)


def _is_running(work: _Work[Item]) -> bool:
    return work.group is not None and work.group.num_left > 0


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two prompts, found by a binary search that compares slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
