"""Turns: a request of any wire format for text, and the events of its samples while they are generated."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import DeadlineError, RequestError
from ..llm.completion import Completion
from ..llm.requests import Prompt
from ..llm.samples import Finished, Item, PreparedRequest, SampleStream, prepare_chat, prepare_completion
from ..text import parsing
from .admission import Seat, Ticket
from .events import Event, Finish, Logprobs, Reasoning, Text, TokenCounts, ToolArguments, ToolCall, token_counts
from .keys import Key

if TYPE_CHECKING:  # a circular import: the server runs batches, whose replies are those of turns
    from ..llm.llm import LLM
    from .serving import Server


# JavaScript reads larger numbers inexactly, so that a client could not repeat a reply with its seed.
_SEED_BITS = 53
# A reply with as many log-probabilities has about 400 MB. A single sample can have more, if the context allows it.
_MOST_LOGPROBS, _MOST_ALTERNATIVES = 2**22, 20


@dataclass
class Turn:
    """A request for one or more samples of text.

    Attributes:
        key: the API key of the request.
        options: options of LLM.chat, or of LLM.generate for raw prompts; `timeout` and `priority` are among them.
        messages: the conversation; None for raw prompts.
        prompts: raw prompts, if there are no messages.
        stream: True to yield events while the samples are generated; False to yield them at the end.
        cache_salt: further salt of the prefix cache.
        record: facts for the request log, which the turn completes at its end.
        copies: number of times that each sample is returned.
    """

    key: Key
    options: dict[str, Any]
    messages: Sequence[Mapping[str, Any]] | None = None
    prompts: Sequence[Prompt] = ()
    stream: bool = False
    cache_salt: str | None = None
    record: dict[str, Any] = field(default_factory=dict)
    copies: int = 1

    def request_options(self, *, reuse_replies: bool) -> dict[str, Any]:
        """Return the options with those that concern the prefix cache."""
        salts = [salt for salt in (self.key.salt, self.cache_salt) if salt is not None]
        salt = {"cache_salt": "\0".join(salts)} if salts else {}
        return {**self.options, **salt, "reuse_replies": reuse_replies, "priority": self.priority}

    @property
    def priority(self) -> int:
        """The priority of the request, with that of its key."""
        return int(self.options.get("priority", 0)) + self.key.priority


@dataclass
class RunningTurn:
    """A turn that was admitted, and its events.

    Attributes:
        server: the server.
        turn: the request.
        requests: one request per prompt.
        stream: the samples.
        call_id: returns the identifier of a tool call, given its sample and its index.
        eos: the tokens that end a reply.
        completions: the completions of the samples that have ended, by number.
        reasoning_tokens: number of tokens in the reasoning of the samples that have ended.
    """

    server: Server
    turn: Turn
    requests: Sequence[PreparedRequest]
    stream: SampleStream
    call_id: Callable[[int, int], str]
    eos: Sequence[int]
    completions: dict[int, Completion] = field(default_factory=dict)
    reasoning_tokens: int = 0

    def __post_init__(self) -> None:
        self._readers = [
            _SampleReader(self, number, request)
            for number, request in enumerate(request for request in self.requests for _ in range(request.num_samples))
        ]

    async def events(self) -> AsyncIterator[list[Event]]:
        """Yield the events, in lists of those that arrived together. Closing the iterator cancels the turn."""
        adapter, metrics = str(self.turn.options.get("adapter") or ""), self.server.metrics
        try:
            metrics.note_adapter(adapter, 1)
            while items := await self.stream.take():
                if events := [event for item in items for event in self._readers[item.sample].read(item)]:
                    yield events if self.turn.copies == 1 else self._copied(events)
        finally:
            self.stream.cancel()
            metrics.note_adapter(adapter, -1)
            self._note_end()

    def _copied(self, events: Sequence[Event]) -> list[Event]:
        """Return the events of each sample once for each of its copies."""
        copies = self.turn.copies
        return [replace(event, sample=event.sample * copies + copy) for event in events for copy in range(copies)]

    def _note_end(self) -> None:
        usage, ended = self.usage, [*self.completions.values()]
        first = min((one.timings for one in ended), key=lambda timings: timings.time_to_first_token, default=None)
        self.turn.record.update(
            {
                "model": self.server.name,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": usage.cached,
                "completion_tokens": usage.completion,
                "finish_reasons": [one.finish_reason for one in ended],
                "seed": self.seed,
                "adapter": self.turn.options.get("adapter"),
                "queue_seconds": None if first is None else first.queue_seconds,
                "first_token_seconds": None if first is None else first.time_to_first_token,
                "decode_seconds": max((one.timings.decode_seconds for one in ended), default=None),
            }
        )

    @property
    def num_samples(self) -> int:
        """The number of samples of all prompts."""
        return len(self._readers) * self.turn.copies

    def prompt_of(self, sample: int) -> int:
        """Return the index of the prompt of a sample."""
        return sample // (self.requests[0].num_samples * self.turn.copies)

    @property
    def usage(self) -> TokenCounts:
        """The token counts of the samples that have ended."""
        return replace(token_counts([*self.completions.values()]), reasoning=self.reasoning_tokens)

    @property
    def num_logprobs(self) -> int:
        """The number of log-probabilities that a whole reply has."""
        found = [*self.completions.values()]
        tokens = sum(len(one.logprobs or ()) + len(one.prompt_logprobs or ()) for one in found) * self.turn.copies
        return tokens * (1 + (self.turn.options.get("logprobs") or 0))

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that the prefix cache supplied; final from the first event on."""
        return sum(request.cached_tokens for request in self.requests)

    @property
    def seed(self) -> int:
        """The seed of the first prompt's samples."""
        return self.requests[0].seed


class _SampleReader:
    """Turns the items of one sample into events."""

    def __init__(self, running: RunningTurn, number: int, request: PreparedRequest) -> None:
        self._running, self._number = running, number
        self._splitter = None if request.new_splitter is None else request.new_splitter()
        self._num_calls = 0
        self._position, self._reasoning = 0, (0, 0)  # characters of the generated text

    def read(self, item: Item) -> list[Event]:
        """Return the events of an item."""
        if not isinstance(item, Finished):
            found: list[Event] = [Logprobs(self._number, item.logprobs)] if item.logprobs else []
            return found + self._texts(item.text)
        completion, found = item.completion, []
        self._running.completions[self._number] = completion
        self._running.server.metrics.note(completion)
        if not self._running.turn.stream:
            if completion.logprobs:
                found.append(Logprobs(self._number, completion.logprobs))
            found += self._texts(completion.text)
        if self._splitter is not None:
            found += self._converted(self._splitter.finish())
        if self._reasoning[1]:
            decode = self._running.server.llm.tokenizer.backend.decode
            begin, end = (_tokens_up_to(decode, completion.token_ids, place) for place in self._reasoning)
            self._running.reasoning_tokens += end - begin
        return [*found, Finish(self._number, self._num_calls > 0, completion, self._running.eos)]

    def _texts(self, text: str) -> list[Event]:
        if self._splitter is None:
            return [Text(self._number, text)] if text else []
        return self._converted(self._splitter.feed(text)) if text else []

    def _converted(self, events: Sequence[parsing.Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            begin, self._position = self._position, self._position + len(event.raw)
            if isinstance(event, parsing.Reasoning):
                self._reasoning = (self._reasoning[0] if self._reasoning[1] else begin), self._position
            if isinstance(event, parsing.Text):
                found.append(Text(self._number, event.text))
            elif isinstance(event, parsing.Reasoning):
                found.append(Reasoning(self._number, event.text))
            elif isinstance(event, parsing.ToolCall):
                self._num_calls += 1
                identifier = event.id or self._running.call_id(self._number, event.index)
                found.append(ToolCall(self._number, event.index, identifier, event.name))
                found.append(ToolArguments(self._number, event.index, event.arguments_text))
        return [event for event in found if not isinstance(event, Text | Reasoning) or event.text]


def _tokens_up_to(decode: Callable[..., str], tokens: Sequence[int], position: int) -> int:
    """Return the number of tokens whose text reaches a position, in characters."""
    return bisect_left(
        range(len(tokens)), position, key=lambda count: len(decode(tokens[:count], skip_special_tokens=False))
    )


async def start_turn(server: Server, turn: Turn, seat: Seat) -> RunningTurn:
    """Prepare a turn, wait for its place, and submit it.

    Raises:
        GenaiError: the request is invalid, or its timeout expired while it waited.
    """
    options = turn.request_options(reuse_replies=server.options.reuse_replies)
    if server.chooses_seeds:
        options.setdefault("seed", secrets.randbits(_SEED_BITS))
    requests = await server.in_thread(_prepared, server, turn, options)
    cost = sum(request.num_samples for request in requests)
    ticket = await _admitted(server, turn, seat, cost, requests[0].leader.deadline)
    try:
        stream = SampleStream(server.llm, requests, watched=turn.stream, on_end=ticket.release)
    except BaseException:
        ticket.release()
        raise
    call_id = _call_ids(requests[0], short=server.llm.parser.name == "mistral")
    return RunningTurn(server, turn, requests, stream, call_id, server.llm.model.config.model.eos_token_ids)


async def count_prompt_tokens(server: Server, turn: Turn) -> int:
    """Return the number of tokens of a conversation's prompt, which may be longer than the context.

    Raises:
        GenaiError: the chat template rejects the conversation.
    """
    return await server.in_thread(_num_tokens, server.llm, turn)


def _num_tokens(llm: LLM, turn: Turn) -> int:
    options = turn.options
    tools = None if options.get("tool_choice") == "none" else options.get("tools")
    rendering = {name: options[name] for name in ("template", "literal") if name in options}
    return len(llm.encode(llm.render(turn.messages or (), tools=tools, **rendering)))


async def run_turn(server: Server, turn: Turn, collect: Callable[[Sequence[Event]], object]) -> RunningTurn:
    """Run a turn to its end, and pass its events to `collect`. Raises as `start_turn`."""
    with server.admission.seat(turn.key.name) as seat:
        running = await start_turn(server, turn, seat)
        async for events in running.events():
            collect(events)
    return running


def _prepared(server: Server, turn: Turn, options: Mapping[str, Any]) -> list[PreparedRequest]:
    if turn.messages is not None:
        requests = [prepare_chat(server.llm, turn.messages, options)]
    else:
        requests = [prepare_completion(server.llm, prompt, options) for prompt in turn.prompts]
    _check_logprobs(turn, requests, server.context_size)
    return requests


def _check_logprobs(turn: Turn, requests: Sequence[PreparedRequest], context: int) -> None:
    """Raise RequestError if the reply could have so many log-probabilities that it would fill the memory."""
    alternatives, limit = turn.options.get("logprobs"), turn.options.get("max_tokens")
    if alternatives is None:
        return
    tokens = 0
    for request in requests:
        room = context - len(request.prompt)
        scored = len(request.prompt) if "prompt_logprobs" in turn.options else 0
        tokens += (scored + (room if limit is None else min(limit, room))) * request.num_samples * turn.copies
    most = max(_MOST_LOGPROBS, context * (1 + _MOST_ALTERNATIVES))
    if (count := tokens * (1 + alternatives)) > most:
        raise RequestError(
            400, f"the reply can have {count:,} log-probabilities", f"the limit is {most:,}",
            "set a smaller max_tokens, or ask for fewer samples or fewer alternatives per token", param="logprobs",
        )  # fmt: skip


async def _admitted(server: Server, turn: Turn, seat: Seat, cost: int, deadline: float | None) -> Ticket:
    entering = server.admission.enter(seat, cost, turn.priority)
    if deadline is None:
        return await entering
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await entering
    except TimeoutError:
        raise DeadlineError(
            "the request's timeout expired while the request waited", "other requests were running",
            "send the request again later, or raise the timeout",
        ) from None  # fmt: skip


def _call_ids(request: PreparedRequest, *, short: bool) -> Callable[[int, int], str]:
    """Return the function that names tool calls by sample and index.

    The same request with the same seed gets the same names, and other prompts get other names. The templates of Mistral
    accept only names of nine characters.
    """
    start = hashlib.sha256(struct.pack(f"<Q{len(request.prompt)}q", request.seed, *request.prompt))

    def name(sample: int, index: int) -> str:
        digest = start.copy()
        digest.update(struct.pack("<qq", sample, index))
        return digest.hexdigest()[:9] if short else f"call_{digest.hexdigest()[:24]}"

    return name
