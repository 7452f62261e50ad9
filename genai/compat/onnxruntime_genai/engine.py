"""Engine and Request: onnxruntime-genai's API for conversations with continuous batching, over our engine.

A request keeps its tokens and its KV cache from turn to turn. `Engine.run` computes one step of all running turns, and
reports the results as events.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import Any

import numpy as np

from ...common.single import Single
from ...engine import engine as core
from ...engine.adapter_mix import AdapterMix
from ...engine.sampling.batch import TokenLogprob
from ...engine.sampling.params import SamplingParams
from ...engine.sampling.plan import RowSampler, plan_sampling, request_seed
from ...engine.sampling.strings import StopStrings
from ...engine.sequence import DecoderSequence, Logits
from ...errors import CacheCapacityError, ContextOverflowError, InputError, OptionError, StateError, kind_of
from ...models.model import Model
from ...text.token_ids import token_row
from ...text.tokenizer import Tokenizer, TokenizerStream
from ...text.vocabulary import guidance_of
from ..refused import GENERATING_PAGE, refusing_method
from .turn_options import RequestOptions, TurnOptions

# onnxruntime-genai's defaults: concurrent turns, and tokens per step.
_MOST_RUNNING, _MOST_SCHEDULED = 16, 256


class EngineEventFlags(IntFlag):
    """The contents of an event."""

    NONE = 0
    TOKEN = 1
    TURN_FINISHED = 2
    CAPACITY_BLOCKED = 4
    FAILED = 8
    RETRYABLE = 16


FinishReason = Enum(
    "FinishReason",
    "NONE EOS STOP_STRING MAX_GENERATED_TOKENS MAX_SESSION_TOKENS CANCELLED FAILED",
    module=__name__,
    start=0,
)
EngineErrorCode = Enum(
    "EngineErrorCode",
    "NONE CAPACITY_DEFERRED EXECUTION_CAPACITY_EXCEEDED RETRYABLE_EXECUTION REQUEST_UNSERVICEABLE "
    "ENGINE_CONTRACT_FAILURE ENGINE_EXECUTION_FAILURE",
    module=__name__,
    start=0,
)


@dataclass(frozen=True)
class TurnUsage:
    """Token counts of a turn, 0 until the turn ends. cached_prompt_tokens counts tokens found in the KV cache."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True)
class EngineEvent:
    """An event of a turn.

    Attributes:
        token: the generated token; None in an event without a token, such as an EOS.
        matched_stop_string_index: index of the stop string that ended the turn.
        error: the exception that ended the turn, if it failed.
    """

    request: Request
    turn_id: int
    token: int | None
    flags: EngineEventFlags
    finish_reason: Any = FinishReason.NONE
    error_code: Any = EngineErrorCode.NONE
    matched_stop_string_index: int | None = None
    usage: TurnUsage = field(default_factory=TurnUsage)
    error: BaseException | None = None


class EngineEventBuffer(Sequence[EngineEvent]):
    """The events of a run. Created by Engine.create_event_buffer."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._events: list[EngineEvent] = []

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def fill(self, events: deque[EngineEvent]) -> None:
        """Replace the contents with as many events as fit."""
        self._events = [events.popleft() for _ in range(min(self.capacity, len(events)))]


@dataclass(frozen=True)
class EngineCapabilities:
    """Limits: concurrent turns, tokens per request, tokens per step."""

    configured_max_batch_size: int
    max_request_length: int
    max_scheduled_tokens: int


class Engine(Single):
    """An engine that runs several requests of a model concurrently. Call it only from the thread that created it.

    Args:
        model: the model.

    >>> import genai as og                                    # doctest: +SKIP
    >>> engine = og.Engine(model)                             # doctest: +SKIP
    >>> events = engine.create_event_buffer(16)               # doctest: +SKIP
    >>> request = engine.create_request()                     # doctest: +SKIP
    >>> turn = request.begin_turn(tokenizer.encode("Hi"))     # doctest: +SKIP
    >>> while engine.has_pending_requests():                  # doctest: +SKIP
    ...     for event in engine.run(events):
    ...         print(event.token, event.finish_reason)
    """

    def __init__(self, model: Model) -> None:
        if not isinstance(model, Model):
            raise InputError(
                f"Engine needs a Model, not {type(model).__name__}", "an engine runs a model", "pass a Model"
            )
        self.model = model
        self._core = core.Engine(model.decoder, model.sampler, _MOST_RUNNING)
        self._events: deque[EngineEvent] = deque()
        self._thread = threading.get_ident()
        self._tokenizer: Tokenizer | None = None

    def create_request(self, *, options: RequestOptions | None = None) -> Request:
        """Start a new conversation."""
        self._check_thread()
        if options is not None and not isinstance(options, RequestOptions):
            raise InputError(
                f"options is {kind_of(options)}", "a RequestOptions object is expected", "pass RequestOptions()"
            )
        limit = 0 if options is None else options.max_session_tokens
        if limit > self.model.context_size:
            raise OptionError(
                f"max_session_tokens = {limit}",
                f"the context size is {self.model.context_size} tokens",
                "use a smaller limit",
            )
        return Request(self, limit or self.model.context_size)

    def create_event_buffer(self, capacity: int) -> EngineEventBuffer:
        """Create a buffer for this number of events per run. The next run returns further events."""
        if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise OptionError(f"capacity = {capacity!r:.40}", "an integer of at least 1 is expected", "pass an int")
        return EngineEventBuffer(int(capacity))

    def run(self, buffer: EngineEventBuffer) -> EngineEventBuffer:
        """Compute a step if no events are waiting, fill the buffer with events, and return the buffer.

        Raises:
            StateError: the call is from another thread, or the model is closed.
        """
        self._check_thread()
        if not isinstance(buffer, EngineEventBuffer):
            raise InputError(
                f"run({type(buffer).__name__})",
                "an EngineEventBuffer is expected",
                "pass the result of create_event_buffer()",
            )
        _ = self.model.decoder
        if not self._events and self._core.has_work:
            self._core.step()
        buffer.fill(self._events)
        return buffer

    def has_pending_requests(self) -> bool:
        """Return True if a turn is running or waiting, or events are waiting."""
        return bool(self._events) or self._core.has_work

    def get_capabilities(self) -> EngineCapabilities:
        """Return the limits of the engine."""
        budget = min(self.model.decoder.token_budget, _MOST_SCHEDULED)
        return EngineCapabilities(_MOST_RUNNING, self.model.context_size, budget)

    def max_draft_tokens_per_proposal(self) -> int:
        """Return 0: callers cannot propose tokens."""
        return 0

    get_speculative_stats = refusing_method(
        "get_speculative_stats",
        "this engine does not support speculative decoding; use LLM(speculation=…)",
        GENERATING_PAGE,
    )

    # --- for requests ------------------------------------------------------------------------------------------------

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise StateError(
                "Engine operations must be called from the Engine owner thread.",
                "another thread created this engine, and a step may be in progress there",
                "create the engine on the thread that runs it, or use LLM, which any thread may call",
            )

    def _submit(self, turn: _Turn) -> None:
        self._core.submit(turn)

    def _say(self, event: EngineEvent) -> None:
        self._events.append(event)

    def _stream(self, prompt: Sequence[int]) -> TokenizerStream:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.model)
        return self._tokenizer.create_stream(after=prompt)


class Request(Single):
    """A conversation of consecutive turns. Created by Engine.create_request.

    Attributes:
        engine: the engine that runs the request.
        max_session_tokens: maximum number of tokens of all turns.
    """

    def __init__(self, engine: Engine, max_session_tokens: int) -> None:
        self.engine, self.max_session_tokens = engine, max_session_tokens
        self._tokens: list[int] = []
        self._kept: DecoderSequence | None = None  # the sequence, kept between two turns
        self._starts: dict[int, int] = {}  # the number of tokens before each turn
        self._turn: _Turn | None = None
        self._seed: int | None = None
        self._closed = False

    def begin_turn(self, tokens: Any, turn_options: TurnOptions | None = None) -> int:
        """Append tokens and start generating a reply; return the turn's id, 1 for the first.

        Raises:
            StateError: a turn is in progress, or the request is closed.
            InputError: there are no tokens, or ids are outside the vocabulary.
            OptionError: options contradict each other.
            ContextOverflowError: the tokens leave no room for a reply.
        """
        self._check_open()
        if self._turn is not None:
            raise StateError(
                "BeginTurn is only valid for a new request or after the current turn is complete.",
                "a request runs one turn at a time",
                "run the engine until its TURN_FINISHED event, or cancel the turn",
            )
        if turn_options is not None and (not isinstance(turn_options, TurnOptions) or turn_options.request is not self):
            raise InputError(
                "turn_options were not created for this request",
                "the options depend on the request",
                "create TurnOptions(request)",
            )
        options = TurnOptions(self) if turn_options is None else turn_options
        new = token_row(tokens, self.engine.model.config.model.vocab_size)
        if len(self._tokens) + len(new) >= self.max_session_tokens:
            raise ContextOverflowError(
                f"{len(new)} tokens cannot be appended to {len(self._tokens)} tokens",
                f"the request can have at most {self.max_session_tokens} tokens, including the reply",
                "shorten the prompt, rewind to the start of a turn, or create a new request",
            )
        params = options.sampling()
        turn_id = len(self._starts) + 1
        self._turn = _Turn(self, turn_id, [*self._tokens, *new], len(self._tokens), params, options)
        self._starts[turn_id] = len(self._tokens)
        self.engine._submit(self._turn)
        return turn_id

    def cancel_turn(self, turn_id: int) -> bool:
        """Cancel a turn at the next run. Return False if the turn is not running."""
        self._check_open()
        if self._turn is None or self._turn.turn_id != turn_id:
            return False
        self._turn.cancelled = True
        return True

    def rewind_to_start_of_turn(self, turn_id: int) -> None:
        """Discard a turn and all later turns.

        Raises:
            StateError: a turn is in progress.
            InputError: the turn does not exist.
        """
        self._check_open()
        if self._turn is not None:
            raise StateError(
                "a turn is in progress", "only completed turns can be discarded", "cancel the current turn first"
            )
        if turn_id not in self._starts:
            known = ", ".join(map(str, self._starts)) or "none"
            raise InputError(
                f"Cannot rewind to unknown Turn ID {turn_id}.", f"the turns are {known}", "use one of these turn IDs"
            )
        start = self._starts[turn_id]
        self._starts = {turn: begin for turn, begin in self._starts.items() if turn < turn_id}
        del self._tokens[start:]
        if self._kept is not None:
            self._kept.rewind(start)

    set_draft_tokens = refusing_method(
        "set_draft_tokens", "callers cannot propose tokens to this engine", GENERATING_PAGE
    )

    def close(self) -> None:
        """End the conversation and free its cache blocks; a turn in progress is cancelled."""
        self.engine._check_thread()
        self._closed = True
        if self._turn is not None:
            self._turn.cancelled = True
        self._drop()

    def _check_open(self) -> None:
        self.engine._check_thread()
        if self._closed:
            raise StateError(
                "Cannot use a closed request.", "close() freed the tokens of the request", "create another request"
            )

    def _drop(self) -> None:
        if self._kept is not None:
            self._kept.close()
        self._kept = None

    def _seed_of(self, options: TurnOptions, params: SamplingParams) -> int:
        """Return the seed of a turn. A request can keep its seed across turns, because the positions differ."""
        if options.seed is not None or self._seed is None:
            self._seed = request_seed(params) if options.seed is None else options.seed
        return self._seed

    def _ended(self, turn: _Turn) -> None:
        self._drop()
        self._turn, self._tokens, self._kept = None, turn.tokens, turn.kept
        if self._closed:
            self._drop()


class _Turn:
    """A turn as a request of the core engine; see genai.engine.request.EngineRequest."""

    adapters: AdapterMix | None = None
    wants_prompt_logits = False
    keeps_sequence = is_watched = True
    priority = 0
    deadline: float | None = None

    def __init__(
        self,
        request: Request,
        turn_id: int,
        prompt: list[int],
        num_before: int,
        params: SamplingParams,
        options: TurnOptions,
    ) -> None:
        model = request.engine.model
        self.request, self.turn_id, self._prompt, self._num_before = request, turn_id, prompt, num_before
        self.origin = request._kept
        self.sequence: DecoderSequence
        self.has_sequence = False
        self.row: RowSampler
        self.num_prompt = len(prompt)
        most = params.max_tokens or request.max_session_tokens
        self.max_length = min(request.max_session_tokens, len(prompt) + most)
        self.cancelled = False
        self.tokens = prompt[:num_before]
        self.kept: DecoderSequence | None = None
        self._plan = plan_sampling(
            params,
            vocab_size=model.decoder.vocab_size,
            eos_token_ids=model.config.model.eos_token_ids,
            matcher=None if options.grammar is None else guidance_of(model).matcher(options.grammar),
        )
        self._seed = request._seed_of(options, params)
        self._stops, self._texts = StopStrings(options.stops), options.stops
        self._stream = request.engine._stream(prompt) if options.stops else None
        self._cached = self._generated = 0
        self._said: EngineEvent | None = None  # the final event

    def take_siblings(self) -> Sequence[_Turn]:
        return ()

    def start(self, sequence: DecoderSequence) -> None:
        self._cached = 0
        sequence.append(self._prompt[len(sequence.tokens) :])
        self.adopt(sequence)

    def adopt(self, sequence: DecoderSequence) -> None:
        self.sequence, self.has_sequence = sequence, True
        self.row = RowSampler(self._plan, sequence.tokens, seed=self._seed, prompt_length=len(self._prompt))

    def note_reused(self, num_tokens: int) -> None:
        self._cached = num_tokens

    def take_prompt_logits(self, logits: Logits, start: int) -> None:
        """Not used: prompt logits are never requested."""

    def note_proposals(self, proposed: int, kept: int) -> None:
        """Not used: no tokens are proposed here."""

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        reason = self.row.finish_reason(token)
        if reason == "stop":
            self._finish(None, FinishReason.EOS)
            return False
        self.sequence.append([token])
        self.row.follow(token)
        self._generated += 1
        if self._stream is not None:
            self._stops.feed(self._stream.decode(token))
            if self._stops.found is not None:
                self._finish(token, FinishReason.STOP_STRING, self._texts.index(self._stops.found))
                return False
        if reason == "length":
            self._finish(token, FinishReason.MAX_GENERATED_TOKENS)
        elif len(self.sequence.tokens) >= self.max_length:
            self._finish(token, FinishReason.MAX_SESSION_TOKENS)
        else:
            self._say(EngineEventFlags.TOKEN, token)
        return self._said is None

    def expire(self) -> BaseException | None:
        """Return None: turns have no deadline."""
        return None

    def keep(self, sequence: DecoderSequence) -> None:
        self.kept, self.tokens = sequence, list(sequence.tokens)

    def finish(self, error: BaseException | None) -> None:
        if self.has_sequence:
            self.has_sequence = False
            del self.sequence
        self.origin = None
        if error is not None:
            code = EngineErrorCode.ENGINE_EXECUTION_FAILURE
            if isinstance(error, CacheCapacityError):
                code = EngineErrorCode.EXECUTION_CAPACITY_EXCEEDED
            flags = EngineEventFlags.TURN_FINISHED | EngineEventFlags.FAILED
            self._said = self._event(flags, None, FinishReason.FAILED, error_code=code, error=error)
        elif self._said is None:
            self._finish(None, FinishReason.CANCELLED)
        self.request._ended(self)
        assert self._said is not None
        self.request.engine._say(self._said)

    def _finish(self, token: int | None, reason: Any, matched: int | None = None) -> None:
        flags = EngineEventFlags.TURN_FINISHED | (EngineEventFlags.NONE if token is None else EngineEventFlags.TOKEN)
        self._said = self._event(flags, token, reason, matched_stop_string_index=matched)

    def _say(self, flags: EngineEventFlags, token: int) -> None:
        self.request.engine._say(EngineEvent(self.request, self.turn_id, token, flags))

    def _event(self, flags: EngineEventFlags, token: int | None, reason: Any, **more: Any) -> EngineEvent:
        usage = TurnUsage(len(self._prompt) - self._num_before, self._cached, self._generated)
        return EngineEvent(self.request, self.turn_id, token, flags, reason, usage=usage, **more)
