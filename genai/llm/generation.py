"""A sample during generation: decodes its tokens to text, and checks the text for stop strings and banned strings."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..devices import compile_seconds
from ..engine.adapter_mix import AdapterMix
from ..engine.sampling.batch import TokenLogprob, token_logprobs
from ..engine.sampling.plan import RowSampler, SamplingPlan
from ..engine.sampling.state import SamplerState
from ..engine.sampling.strings import BannedStrings, Rewind, StopStrings, Symbols, visible
from ..engine.sequence import ContextShift, DecoderSequence, Logits
from ..errors import DeadlineError
from ..lora.store import NamedChoice
from ..text.tokenizer import TokenizerStream
from .completion import Completion, FinishReason, Timings

if TYPE_CHECKING:
    import asyncio

_NO_LIMIT = 2**62


def _now() -> float:
    """Return the time in seconds on a clock that excludes kernel compilation."""
    return time.perf_counter() - compile_seconds()


class Sink(Protocol):
    """The receiver of a generation's output. Its methods are called on the engine's thread."""

    def text(self, generation: Generation, piece: str) -> None:
        """Receive a piece of text that later tokens cannot change."""

    def finished(self, generation: Generation, error: BaseException | None) -> None:
        """Receive the end of the generation, and the error that ended it, if any."""


class Generation:
    """A request for the engine (see engine.Request): one sample for one prompt.

    Args:
        prompt: token ids, at least one.
        plan: the prepared sampling options.
        stream: a new stream of the model's tokenizer.
        seed: the request's seed.
        sample: index of this sample within the request.
        siblings: the request's other samples, which this sample leads.
        context_size: maximum number of tokens in the sequence.
        prompt_index: index of the prompt in the call, for the completion.
        adapters: the adapters of the sequence, held until the generation ends.
        output: tokens that were generated earlier, if the request resumes a saved state.

    Attributes:
        sink: the receiver of the output; set it before you submit the request.
        is_unwanted: set to True by a caller to cancel the request.
        loop: the event loop that waits for the request; when it is closed, the request is cancelled. None = no loop.
        reader: weak reference to the only reader of the output; when the reader is garbage-collected, the request is
            cancelled.
        origin: a sequence that this request continues.
        sampler: the sampler state that belongs to `origin`.
        priority: see engine.Request.
        deadline: see engine.Request.
        keeps_sequence: True if the sequence is to be kept after the end.
        retained: the sequence that was kept, and the adapters of its tokens.
        reads_only: True if the request ends when its prompt is processed.
        shift: the context shift to apply when the context is full; None = the request ends there.
        adapter: the adapters, as named by the caller.
        is_over: True if the request has ended.
        num_reply: number of tokens at the end of the prompt that belong to the reply and its grammar.
        cache_salt: see DecoderSequence.
        reuses_replies: False if the prompt uses only cached blocks whose numerics are those of a whole prompt.
    """

    sink: Sink
    loop: asyncio.AbstractEventLoop | None = None
    reader: weakref.ref[object] | None = None
    origin: DecoderSequence | None = None
    sampler: SamplerState | None = None
    priority = 0
    deadline: float | None = None
    keeps_sequence = reads_only = is_over = False
    retained: tuple[DecoderSequence, AdapterMix | None] | None = None
    shift: ContextShift | None = None
    adapter: NamedChoice = None
    num_reply = 0
    cache_salt = b""
    reuses_replies = True

    def __init__(
        self,
        prompt: Sequence[int],
        plan: SamplingPlan,
        *,
        seed: int,
        sample: int,
        stream: TokenizerStream,
        context_size: int,
        prompt_index: int = 0,
        siblings: Sequence[Generation] = (),
        adapters: AdapterMix | None = None,
        output: Sequence[int] = (),
    ) -> None:
        params = plan.params
        self.prompt, self.plan, self.seed, self.sample, self.prompt_index = prompt, plan, seed, sample, prompt_index
        self.adapters = adapters
        self.sequence: DecoderSequence
        self.has_sequence = False
        self.row: RowSampler
        self.num_prompt = len(prompt)
        self._context_size, self._most = context_size, len(prompt) + (params.max_tokens or _NO_LIMIT)
        self._forgotten = 0
        self.is_unwanted = False
        self._followers, self._waiting = siblings, siblings
        self.wants_prompt_logits = params.prompt_logprobs is not None and len(prompt) > 1 and sample == 0
        self._text: list[str] = []
        self._output: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: dict[int, TokenLogprob] = {}
        for sibling in siblings:
            sibling._prompt_logprobs = self._prompt_logprobs
        self._stream = stream
        self._stops = StopStrings(params.stop, stream.symbols)
        banned = params.banned_strings
        self._banned = BannedStrings(banned, len(output), stream.symbols) if banned else None
        self._looks_for_strings = bool(params.stop or banned)
        self._streams: list[TokenizerStream] = []  # the stream before each output token that may be taken back
        self._finish_reason: FinishReason = "cancelled"
        self._stopped_by: int | str | None = None
        self._cached_tokens = 0
        self._proposed = self._accepted = 0
        self._submitted, self._compiled_before = _now(), compile_seconds()
        self._started = self._first_token = self._last_token = self._compiled = 0.0
        self._already_shown = 0  # number of leading characters of the coming text that were delivered earlier
        self._num_before = len(output)
        self._repeat(output)

    def _repeat(self, output: Sequence[int]) -> None:
        """Decode tokens that were generated earlier, without delivering their text again."""
        for token in output:
            piece = self._symbols(token, self._stream.decode(token))
            self._already_shown += len(visible(piece)) - len(self._stops.feed(piece))
            self._output.append(token)
        self._logprobs = [TokenLogprob(token, 0.0) for token in output] if self.plan.params.logprobs is not None else []

    @property
    def cancelled(self) -> bool:
        """True if the request is cancelled, its reader was garbage-collected, or its event loop was closed.

        A closed loop never resumes the task that waits, so the task cannot cancel the request.
        A finaliser of the reader could not cancel the request: a finaliser can run on any thread, where it might
        deadlock on a lock of that thread or lose an interrupt.
        """
        is_closed = self.loop is not None and self.loop.is_closed()
        return self.is_unwanted or is_closed or (self.reader is not None and self.reader() is None)

    @property
    def is_watched(self) -> bool:
        """True if a reader receives the text as it is generated."""
        return self.reader is not None

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """The number of computed prompt tokens, and the total number of prompt tokens."""
        total = len(self.prompt)
        if self._first_token:
            return total, total
        sequence = getattr(self, "sequence", None)  # finish() deletes the attribute, possibly at the same time
        return (min(sequence.num_computed, total) if sequence is not None else 0), total

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in the sequence; see engine.Request."""
        return min(self._most, self._context_size + self.forgotten_tokens)

    @property
    def forgotten_tokens(self) -> int:
        """The number of tokens that context shifts have dropped."""
        sequence = getattr(self, "sequence", None)  # finish() deletes the attribute, possibly at the same time
        return self._forgotten if sequence is None else int(sequence.forgotten)

    @property
    def num_output(self) -> int:
        """The number of tokens generated so far."""
        return len(self._output)

    def certain_logprobs(self, start: int) -> list[TokenLogprob]:
        """Return the log-probabilities of output tokens, from a number on, that no banned string can remove."""
        held = 0 if self._banned is None or self.is_over else self._banned.num_held
        return self._logprobs[self._num_before + start : len(self._logprobs) - held]

    def new_stream(self) -> TokenizerStream:
        """Return a copy of the request's stream. Call this method only before the request starts."""
        return self._stream.copy()

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that the prefix cache supplied; 0 before the request starts."""
        return self._cached_tokens

    @property
    def samples(self) -> list[Generation]:
        """This sample and the samples that it leads."""
        return [self, *self._followers]

    # --- for the engine ------------------------------------------------------------------------------------------

    def start(self, sequence: DecoderSequence) -> None:
        num_computed = sequence.num_computed
        if not sequence.tokens:
            sequence.cache_salt = self.cache_salt
            if self.priority < 0:
                sequence.leave_first()
        if len(self.prompt) > len(sequence.tokens):
            sequence.append(self.prompt[len(sequence.tokens) :])
            sequence.mark_messages(self.plan.stop_ids)
        if not self.reuses_replies:
            sequence.settle()
        if num_computed == len(sequence.tokens):
            sequence.rewind(num_computed)  # the logits of the last token must be computed again
        self.adopt(sequence)
        self._cached_tokens = min(num_computed, len(self.prompt))

    def adopt(self, sequence: DecoderSequence) -> None:
        self.sequence, self.has_sequence = sequence, True
        self._started = self._started or _now()
        sequence.shift = self.shift
        self.row = RowSampler(
            self.plan, sequence.tokens, seed=self.seed, row=self.sample, prompt_length=len(self.prompt)
        )
        if self.sampler is not None:
            self.sampler.put_into(self.row)
        self.row.begin_grammar(self.num_reply + self._num_before)
        self._cached_tokens = len(self.prompt)

    def take_siblings(self) -> Sequence[Generation]:
        waiting, self._waiting = self._waiting, ()
        return waiting

    def note_reused(self, num_tokens: int) -> None:
        self._cached_tokens = num_tokens

    def take_prompt_logits(self, logits: Logits, start: int) -> None:
        """See Request.take_prompt_logits. The logits of token i give the log-probability of token i + 1."""
        top = self.plan.params.prompt_logprobs or 0
        targets = self.prompt[start + 1 : start + 1 + len(logits)]
        logprobs = token_logprobs(logits[: len(targets)], targets, top)
        self._prompt_logprobs |= dict(enumerate(logprobs, start + 1))

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        if self.reads_only:
            self._finish_reason = "length"
            return False
        goes_on = self._take(token, logprob)
        for forced in self.row.forced() if goes_on else ():
            goes_on = goes_on and self._take(forced, None)
        return goes_on

    def _take(self, token: int, logprob: TokenLogprob | None) -> bool:
        self._last_token, self._compiled = _now(), compile_seconds() - self._compiled_before
        if self._first_token == 0.0:
            self._first_token = self._last_token
        reason = self.row.finish_reason(token)
        is_shown = reason != "stop"
        if is_shown:
            # Append tokens one by one, even if there are many, so that they are computed with decode numerics.
            self.sequence.append([token])
            self._output.append(token)
            if logprob is not None:
                self._logprobs.append(logprob)
            if len(self.sequence.tokens) >= (self.max_length if self.shift is None else self._most):
                reason = "length"
            if self.row.follow(token):
                reason = "stop"
        rewind = self._read(token, is_shown=is_shown, is_last=reason is not None)
        if rewind is not None:
            self._go_back(rewind)
            return True
        if reason is not None:
            self._finish_reason, self._stopped_by = reason, None if is_shown else token
            self._flush()
        if self._stops.found is not None:
            self._finish_reason, self._stopped_by = "stop", self._stops.found
        return self._finish_reason == "cancelled"

    def expire(self) -> BaseException | None:
        self._finish_reason = "timeout"
        if self._output[self._num_before :]:
            self._flush()
            return None
        return DeadlineError(
            "the request's timeout expired before its first token",
            "the request was queued, or its prompt was being processed",
            "raise timeout, raise the priority, or shorten the prompt",
        )

    def keep(self, sequence: DecoderSequence) -> None:
        self.retained = sequence, self.adapters

    def note_proposals(self, proposed: int, accepted: int) -> None:
        self._proposed += proposed
        self._accepted += accepted

    def finish(self, error: BaseException | None) -> None:
        if error is None and self._finish_reason == "cancelled":
            self._flush()
        self._forgotten = self.forgotten_tokens
        self._drop_sequence()
        self.adapters, self.origin, self.is_over = None, None, True
        self.sink.finished(self, error)

    def _drop_sequence(self) -> None:
        if self.has_sequence:
            self.has_sequence = False
            del self.sequence

    # --- text ----------------------------------------------------------------------------------------------------

    def _read(self, token: int, *, is_shown: bool, is_last: bool) -> Rewind | None:
        """Decode and deliver a token's text. Return a Rewind if the text completes a banned string."""
        before = self._stream.copy() if self._banned is not None else None
        text = self._stream.decode(token) if is_shown else ""
        if is_last:
            text += self._stream.flush()
        symbols = self._symbols(token, text) if is_shown else text
        if self._banned is None or before is None:
            self._show(symbols)
            return None
        self._streams.append(before)
        certain = self._banned.feed(token, symbols)
        if isinstance(certain, Rewind):
            return certain
        self._show(certain)
        # A stop string in the held-back text ends the output now, even if a banned string could still follow.
        if self._looks_for_stops and self._stops.would_end(self._banned.held):
            self._show(self._banned.flush())
        del self._streams[: len(self._streams) - self._banned.num_held]
        return None

    def _symbols(self, token: int, text: str) -> Symbols:
        """Return a token's text and, if the token is hidden and strings are looked for, its id.

        If the id completes a string, the text that the stream still holds precedes it.
        """
        if not self._looks_for_strings or not self._stream.hides(token):
            return text
        symbols: list[str | int] = [*text, *self._stream.pending(), token]
        banned = self._banned
        coming = symbols if banned is None else [*banned.held, *symbols]
        ends = self._looks_for_stops and self._stops.would_end(coming)
        if ends or (banned is not None and banned.would_rewind(symbols)):
            self._stream.flush()
            return symbols
        return [*text, token]

    def _go_back(self, rewind: Rewind) -> None:
        remaining = len(self._streams) - rewind.num_tokens
        self._stream = self._streams[remaining]
        del self._streams[remaining:]
        del self._output[rewind.position :]
        del self._logprobs[rewind.position :]
        length = len(self.prompt) + rewind.position
        self.sequence.rewind(length)
        self.row.rewind(length, rewind.forbidden)

    def _show(self, text: Symbols) -> None:
        """Deliver text, up to any stop string. Stop strings are ignored before min_tokens."""
        self._pass_on(self._stops.feed(text) if self._looks_for_stops else visible(text))

    def _flush(self) -> None:
        """Deliver the text that was held back, because no more tokens follow."""
        if self._banned is not None:
            self._show(self._banned.flush())
        self._pass_on(self._stops.flush())

    def _pass_on(self, text: str) -> None:
        if self._already_shown:
            text, self._already_shown = text[self._already_shown :], max(0, self._already_shown - len(text))
        if text:
            self._text.append(text)
            self.sink.text(self, text)

    @property
    def _looks_for_stops(self) -> bool:
        return len(self._output) >= self.plan.params.min_tokens

    # --- results -------------------------------------------------------------------------------------------------

    def completion(self) -> Completion:
        """Return the result so far. It is complete after sink.finished was called."""
        params = self.plan.params
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            known = self._prompt_logprobs
            prompt_logprobs = (None, *(known[i] for i in range(1, len(self.prompt)) if i in known))
        first = self._first_token or _now()
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._output[self._num_before :]),
            finish_reason=self._finish_reason,
            stopped_by=self._stopped_by,
            prompt_tokens=len(self.prompt),
            cached_tokens=self._cached_tokens,
            timings=Timings(
                first - self._submitted,
                max(0.0, self._last_token - first),
                self._compiled,
                max(0.0, (self._started or first) - self._submitted),
            ),
            seed=self.seed,
            logprobs=tuple(self._logprobs[self._num_before :]) if params.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            prompt_index=self.prompt_index,
            sample_index=self.sample,
            proposed_tokens=self._proposed,
            accepted_tokens=self._accepted,
            forgotten_tokens=self.forgotten_tokens,
        )
