"""What the engine wants of a request, which knows what its tokens mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .adapter_mix import AdapterMix
from .sampling.batch import TokenLogprob
from .sampling.plan import RowSampler
from .sequence import DecoderSequence, Logits


class EngineRequest(Protocol):
    """One sequence to generate. The engine opens `sequence` with the request's tokens and drives it; all calls come
    from the thread that calls Engine.step.

    Attributes:
        sequence: the decoder's state, from `start` or `adopt` to `finish`. has_sequence: whether it is there.
        row: chooses its tokens; reads `sequence.tokens`.
        num_prompt: tokens that the sequence starts with. max_length: most tokens that it may have; of one whose context
            shifts, before that happens again.
        cancelled: set from any thread; the engine then drops the request at the next step.
        wants_prompt_logits: whether take_prompt_logits is called.
        is_watched: somebody reads its tokens as they come.
        adapters: what its tokens go through; None = none.
        origin: a sequence that it goes on from, sharing what is cached; None = it starts empty.
        priority: a higher one is admitted sooner. deadline: of time.monotonic(); None = it has all the time.
        keeps_sequence: whether `keep` is called.
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
        """See above."""

    @property
    def is_watched(self) -> bool:
        """See above."""

    @property
    def cancelled(self) -> bool:
        """See above."""

    def take_siblings(self) -> Sequence[EngineRequest]:
        """Requests with the same prompt, to be started as copies of this one; given once."""

    def start(self, sequence: DecoderSequence) -> None:
        """Take an empty sequence, put the prompt in and make `row`."""

    def adopt(self, sequence: DecoderSequence) -> None:
        """Take a sequence that holds the computed prompt, and make `row`."""

    def note_reused(self, num_tokens: int) -> None:
        """This many prompt tokens need not be computed."""

    def take_prompt_logits(self, logits: Logits, start: int) -> None:
        """The logits [rows, V] after the prompt tokens from `start` on; a request that had to wait gets them again."""

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        """A token was chosen: append it, or take tokens back. False = the request is done."""

    def expire(self) -> BaseException | None:
        """Its deadline passed: the error with which it ends; None = what there is counts."""

    def keep(self, sequence: DecoderSequence) -> None:
        """A fork of its sequence at its end, which is the request's."""

    def note_proposals(self, proposed: int, kept: int) -> None:
        """So many more tokens were proposed, and so many more are those that were chosen."""

    def finish(self, error: BaseException | None) -> None:
        """Called once, when the request is over; its sequence is closed already."""
