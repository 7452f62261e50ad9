"""The interface that a request offers to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .adapter_mix import AdapterMix
from .sampling.batch import TokenLogprob
from .sampling.plan import RowSampler
from .sequence import DecoderSequence, Logits


class EngineRequest(Protocol):
    """A sequence to generate. The engine opens `sequence` with the request's tokens and drives it.

    The thread that calls Engine.step makes all calls.

    Attributes:
        sequence: the decoder's sequence, from `start` or `adopt` until `finish`.
        has_sequence: True if `sequence` is set.
        row: chooses the tokens; reads `sequence.tokens`.
        num_prompt: number of tokens that the sequence starts with.
        max_length: maximum number of tokens in the sequence; if its context shifts, the maximum before the next shift.
        cancelled: True if the request was cancelled, from any thread; the engine drops the request at the next step.
        wants_prompt_logits: True if the engine is to call take_prompt_logits.
        is_watched: True if the tokens are streamed to a reader.
        adapters: the adapters that the request's tokens are computed with; None = none.
        origin: a sequence to continue and to share cached blocks with; None = start empty.
        priority: requests with a higher priority are admitted first.
        deadline: a time on the clock of time.monotonic(); None = no deadline.
        keeps_sequence: True if the engine is to call `keep`.
    """

    sequence: DecoderSequence
    has_sequence: bool
    row: RowSampler
    num_prompt: int
    wants_prompt_logits: bool
    adapters: AdapterMix | None
    origin: DecoderSequence | None
    priority: int
    deadline: float | None
    keeps_sequence: bool

    @property
    def max_length(self) -> int:
        """See the class's attributes."""

    @property
    def is_watched(self) -> bool:
        """See the class's attributes."""

    @property
    def cancelled(self) -> bool:
        """See the class's attributes."""

    def take_siblings(self) -> Sequence[EngineRequest]:
        """Return the requests with the same prompt, to be started as copies of this request; only once each."""

    def start(self, sequence: DecoderSequence) -> None:
        """Store an empty sequence, append the prompt to it, and create `row`."""

    def adopt(self, sequence: DecoderSequence) -> None:
        """Store a sequence that contains the processed prompt, and create `row`."""

    def note_reused(self, num_tokens: int) -> None:
        """Record that `num_tokens` prompt tokens were found in the prefix cache."""

    def take_prompt_logits(self, logits: Logits, start: int) -> None:
        """Process the logits [rows, V] after the prompt tokens from index `start`; repeated after a preemption."""

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Process a chosen token: append it, or rewind the sequence. Return False if the request is done."""

    def expire(self) -> BaseException | None:
        """Return the error to finish with because the deadline passed; None = finish with the tokens so far."""

    def keep(self, sequence: DecoderSequence) -> None:
        """Store a fork of the sequence at its end; the request then owns it."""

    def note_proposals(self, proposed: int, kept: int) -> None:
        """Record that `proposed` more draft tokens were computed and `kept` more were accepted."""

    def finish(self, error: BaseException | None) -> None:
        """Handle the end of the request; called once, after its sequence is closed."""
