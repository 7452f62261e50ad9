"""Many items in, answers out: read a window at a time, computed by one engine, delivered as they are done."""

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
# Tokens of prompts that are read ahead: they take 36 bytes each.
_MOST_TOKENS_AHEAD = 2**20
# A prompt waits for another one to be computed that begins alike if that saves so many tokens, and half of its own.
_WORTH_WAITING = 64
# In the order of prompts the last one is most alike; before the first window is in order, one of the last few.
_MOST_COMPARED = 4
# Items are read in groups where reading one takes no longer.
_MOST_AT_A_TIME, _SECONDS_TO_READ = 16, 0.01


@dataclass(frozen=True)
class Answer(Generic[Item]):
    """What became of one item.

    Attributes:
        index: which item, from 0. item: as it was given.
        completions: one per prompt and sample; none where it failed.
        replies: of a conversation: each completion in its parts.
        error: why it failed; None if it did not.
    """

    index: int
    item: Item
    completions: tuple[Completion, ...] = ()
    replies: tuple[ChatReply, ...] = ()
    error: GenaiError | None = None

    @property
    def completion(self) -> Completion:
        """The first completion. Raises the error of an item that failed."""
        if self.error is not None:
            raise self.error
        return self.completions[0]

    @property
    def text(self) -> str:
        """The text of the first completion; of a conversation, the answer. Raises the error of an item that failed."""
        return self.replies[0].text if self.replies else self.completion.text


@dataclass
class MapFigures:
    """How far a map is, since it began.

    Attributes:
        done: items that are over, `failed` of them with an error.
        prompt_tokens: of the prompts, so far as they are read. cached_tokens: those of the items done that the prefix
            cache had. generated_tokens: also those of answers that are not finished yet.
        seconds: since the first item was asked for.
    """

    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: Answer[Any]) -> None:
        """Count an answer."""
        prompts = [completion for completion in answer.completions if not completion.sample_index]
        self.done += 1
        self.failed += answer.error is not None
        self.prompt_tokens += sum(completion.prompt_tokens for completion in prompts)
        self.cached_tokens += sum(completion.cached_tokens for completion in prompts)
        self.generated_tokens += sum(len(completion.token_ids) for completion in answer.completions)


@dataclass
class MapRequest:
    """An item's requests, not yet submitted.

    Attributes:
        leaders: the first sample of each prompt.
        split: each completion's parts; None where the item is no conversation.
    """

    leaders: list[Generation]
    split: Callable[[Completion], ChatReply] | None = None


@dataclass(eq=False)
class _Work(Generic[Item]):
    """An item on its way."""

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
        """Whether the cache has its prompt."""
        done, total = self.request.leaders[0].prompt_progress
        return done == total


@dataclass
class MapOptions(Generic[Item]):
    """How a map runs; see LLM.map.

    Attributes:
        most_running: items that the engine has at a time.
    """

    window: int = DEFAULT_WINDOW
    most_running: int = 64
    in_order: bool = True
    on_answer: Callable[[Answer[Item]], object] | None = None
    progress: Callable[[MapFigures], object] | None = None


class Mapper(Generic[Item]):
    """Keeps the engine supplied.

    Items are read whenever nothing else is to be done, a group at a time where that goes fast, until `window` of them
    are ahead of the engine. They are then put in order of their prompts, so that those with a common beginning follow
    each other: the first one leaves it in the prefix cache. While the engine works on one window, the next one is read.
    No item waits longer than for two windows, and nothing grows with the number of items.

    Args:
        items: what is asked.
        prepare: makes the requests of items; a GenaiError is the answer of an item.
        worker: runs them.
        options: how.
    """

    def __init__(
        self,
        items: Iterator[Item],
        prepare: Callable[[Sequence[Item]], Sequence[MapRequest | GenaiError]],
        worker: Worker,
        options: MapOptions[Item],
    ) -> None:
        self._items, self._prepare, self._worker, self._options = items, prepare, worker, options
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
        """The answers. Leaving it early cancels what runs. An error of the iterable comes after what it gave before."""
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
            if self._broken is not None:
                raise self._broken
        finally:
            for work in self._running:
                if work.group is not None:
                    work.group.cancel()

    # --- in ------------------------------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        """How many items may be read now."""
        undelivered = self._num_read - self._num_given
        if self._is_read or (self._tokens_ahead >= _MOST_TOKENS_AHEAD and undelivered >= self._options.most_running):
            return 0
        most = 2 * self._options.window + self._options.most_running
        return min(self._options.window - len(self._ahead), most - undelivered)

    def _read(self) -> None:
        """Read the next items: one, and the more the less time it takes; who awaits answers must not wait for them."""
        begin, group = time.monotonic(), []
        try:
            for item in islice(self._items, min(self._most_at_a_time, self._room)):
                group.append(item)
                if time.monotonic() - begin > _SECONDS_TO_READ:
                    break
        except Exception as error:
            self._broken = error
        is_fast = time.monotonic() - begin < _SECONDS_TO_READ
        self._is_read = not group or self._broken is not None
        self._most_at_a_time = min(2 * self._most_at_a_time, _MOST_AT_A_TIME) if is_fast else 1
        for item, request in zip(group, self._prepare(group) if group else (), strict=True):
            index, self._num_read = self._num_read, self._num_read + 1
            if isinstance(request, GenaiError):
                self._finish(Answer(index, item, error=request))
            else:
                self._ahead.append(_Work(index, item, request))
                self._tokens_ahead += self._ahead[-1].num_tokens

    def _submit(self) -> None:
        """Give the engine what it has room for."""
        while len(self._running) < self._options.most_running:
            if not self._sorted and self._ahead:
                # The engine would run dry: however many there are, they are next.
                self._sorted = deque(sorted(self._ahead, key=_prompt))
                self._ahead = []
            if not self._sorted or not self._supply.may_follow(self._sorted[0]):
                return
            work = self._sorted.popleft()
            self._tokens_ahead -= work.num_tokens
            work.group = GenerationGroup(work.request.leaders, self._worker, self._ring, on_text=self._ring)
            self._running.append(work)
            self._supply.note(work)
            self._worker.submit(work.request.leaders)

    def _ring(self) -> None:
        self._bell.put(None)

    # --- out -----------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take the answers of what is over."""
        over = [work for work in self._running if work.group is not None and not work.group.num_left]
        if over:
            self._running = [work for work in self._running if work not in over]
        for work in over:
            self._finish(self._answer(work))

    def _answer(self, work: _Work[Item]) -> Answer[Item]:
        assert work.group is not None
        try:
            completions = work.group.completions()
        except StateError:
            raise
        except GenaiError as error:
            return Answer(work.index, work.item, error=error)
        if any(completion.finish_reason == "cancelled" for completion in completions):
            raise StateError("the model was closed while it answered", "what ran was cancelled", "close it afterwards")
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
    """What the engine was given, in order; so that prompts which begin alike are not all computed at the same time.

    Attributes:
        pending: those whose prompts are not computed yet. computed: the last of those that are.
    """

    pending: deque[_Work[Item]] = field(default_factory=deque)
    computed: _Work[Item] | None = None

    def note(self, work: _Work[Item]) -> None:
        self.pending.append(work)

    def may_follow(self, work: _Work[Item]) -> bool:
        """Whether it would have nothing to gain from the prompts that are being computed."""
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
    """How many tokens two prompts begin with alike, in a few comparisons of slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
