"""A draft model: a smaller model that proposes tokens with the same options and random numbers as the target model.

A token depends on the logits and on the random number for its position. The draft model uses the same random number as
the target model, so both often choose the same token even at a high temperature.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...errors import CacheCapacityError, GrammarError, SamplingError
from ..decoder import Decoder, compute
from ..sampling.batch import BatchSampler, stacked
from ..sampling.plan import RowSampler, SamplingPlan
from ..scheduler import plan_step
from ..sequence import DecoderSequence, Logits
from .policy import StepCosts

# If the draft model lags further behind than this, it first computes the missing tokens in steps without drafting.
_MOST_BEHIND = 32


class Followed(Protocol):
    """The part of a request that a draft model uses; see request.EngineRequest."""

    @property
    def sequence(self) -> DecoderSequence:
        """The sequence of the target model."""

    @property
    def row(self) -> RowSampler:
        """The sampler of the sequence."""


@dataclass
class Follower:
    """A request's sequence in the draft model; `refused` is set when no more tokens can be drafted for the request."""

    sequence: DecoderSequence
    row: RowSampler
    refused: bool = False


class DraftModel:
    """A model that generates draft tokens for requests of a target model with the same vocabulary.

    Args:
        decoder, sampler: the draft model's decoder and sampler.
        context_size: maximum number of tokens in a sequence of the draft model.
        vocab_size: vocabulary size of the target model; larger token ids are not proposed.

    Attributes:
        costs: durations of the draft model's steps.
        num_drafted: number of steps that chose draft tokens.
        read_seconds: time that the last call to `read` took to process prompts.
    """

    def __init__(self, decoder: Decoder, sampler: BatchSampler, *, context_size: int, vocab_size: int) -> None:
        self._decoder, self._sampler = decoder, sampler
        self._context_size, self._vocab_size = context_size, vocab_size
        self._followers: dict[Followed, Follower] = {}
        self.costs = StepCosts()
        self.num_drafted = 0
        self.read_seconds = 0.0

    def watch(self, requests: Sequence[Followed]) -> None:
        """Prepare new requests before their first step."""

    def read(self, requests: Sequence[Followed]) -> None:
        """Compute a step of sequences that lag far behind: prompts, and tokens generated while drafting was paused."""
        self.read_seconds = 0.0
        behind = [
            own for request in requests if not (own := self._follow(request)).refused and _lag(own) > _MOST_BEHIND
        ]
        if not behind:
            return
        began = time.perf_counter()
        sequences = [own.sequence for own in behind]
        try:
            step = plan_step([one.pending() for one in sequences], self._decoder.token_budget)
            self._decoder.step(sequences, step)
            for own in behind:
                if not _lag(own):
                    self._note_read(own)
        except CacheCapacityError:
            refuse(behind)
        self.read_seconds = time.perf_counter() - began

    def _note_read(self, own: Follower) -> None:
        """Note that `read` has computed all tokens of a sequence. Drafting begins when there are more."""

    def catch_up(self, request: Followed) -> None:
        """Compute all tokens of a request that lags far behind, except the last one, so that `draft` can begin.

        The alternative to `read`, for callers that draft for one request and do not share steps.
        """
        own = self._follow(request)
        if own.refused or _lag(own) <= _MOST_BEHIND:
            return
        try:
            compute(self._decoder, [own.sequence])
            own.sequence.truncate(len(own.sequence.tokens) - 1)
        except CacheCapacityError:
            refuse([own])

    def room(self, request: Followed) -> int:
        """Return the number of tokens that could be drafted for a request now."""
        own = self._followers.get(request)
        if own is None or own.refused or not 0 < _lag(own) <= _MOST_BEHIND:
            return 0
        return max(self._context_size - len(own.sequence.tokens) - 1, 0)

    def draft(self, requests: Sequence[Followed], depths: Sequence[int]) -> list[list[int]]:
        """Draft up to the given number of tokens for each request of the last `read` that has room."""
        found: list[list[int]] = [[] for _ in requests]
        over: set[int] = set()
        for request in requests:
            self._begin_grammar(request)
        for depth in range(max(depths, default=0)):
            going = [i for i, own in enumerate(found) if len(own) == depth < depths[i] and i not in over]
            if not going:
                break
            own = [self._followers[requests[index]] for index in going]
            for index, one, token in zip(going, own, self._step(own), strict=False):
                if token < self._vocab_size and (one.row.matcher is None or one.row.matcher.num_allowed([token])):
                    self._extend(one, token)
                    found[index].append(token)
                    if one.row.follow(token):
                        over.add(index)
        for request in requests:
            self._followers[request].row.matcher = None  # the request's own matcher remains in use
        return found

    def _extend(self, one: Follower, token: int) -> None:
        """Append a drafted token."""
        one.sequence.append([token])

    def _begin_grammar(self, request: Followed) -> None:
        """Apply the request's grammar to its draft if both vocabularies have the same size, which masks require."""
        matcher = request.row.matcher
        if matcher is not None and self._decoder.vocab_size == self._vocab_size:
            self._followers[request].row.matcher = matcher.fork()

    def forget(self, request: Followed) -> None:
        """Remove a finished request; its computed prefix is published for later requests."""
        own = self._followers.pop(request, None)
        if own is not None:
            own.sequence.publish()
            own.sequence.close()

    def interrupt(self) -> None:
        """Cancel the current step; see Decoder.interrupt."""
        self._decoder.interrupt([own.sequence for own in list(self._followers.values())])

    def _step(self, own: Sequence[Follower]) -> list[int]:
        """Choose the next token of each sequence; return an empty list if the cache is full or a row has no token."""
        sequences = [one.sequence for one in own]
        rows = sum(map(_lag, own))
        began = time.perf_counter()
        try:
            logits: list[Logits] = compute(self._decoder, sequences)
            sampled = self._sampler.sample(stacked([one[-1] for one in logits]), [one.row for one in own])
            self.costs.note(rows, rows, time.perf_counter() - began)  # asynchronous devices have finished by now
            self.num_drafted += 1
        except CacheCapacityError:
            refuse(own)
            return []
        except (SamplingError, GrammarError):
            return []  # if the target model has the same problem, it raises the error
        tokens: list[int] = sampled.tokens.tolist()
        return tokens

    def _follow(self, request: Followed) -> Follower:
        """Update the draft sequence to the request's tokens, and drop draft tokens that differ."""
        begins = request not in self._followers
        if begins:
            self._followers[request] = self._begin(request)
        own = self._followers[request]
        if own.refused:
            return own
        have, want = own.sequence.tokens, request.sequence.tokens
        same = common(have, want)
        if same < len(have):
            own.sequence.rewind(same)
            own.row.rewind(same)
        if max(want[same:], default=0) >= self._decoder.vocab_size or len(want) >= self._context_size:
            refuse([own])
        else:
            own.sequence.append(want[same:])
            if begins:
                own.sequence.reuse()
        return own

    def _begin(self, request: Followed) -> Follower:
        """Create a follower, without tokens, for a request."""
        sequence, plan = self._decoder.open(), narrowed(request.row.plan, self._decoder.vocab_size)
        row = RowSampler(
            plan, sequence.tokens, seed=request.row.seed, row=request.row.row, prompt_length=request.row.prompt_length
        )
        return Follower(sequence, row, plan.params.top_k > self._decoder.vocab_size)


def _lag(own: Follower) -> int:
    """Return the number of tokens that are not computed yet."""
    return len(own.sequence.tokens) - int(own.sequence.num_computed)


def refuse(followers: Sequence[Follower]) -> None:
    """Draft no more tokens for the followers' requests."""
    for own in followers:
        own.refused = True
        own.sequence.truncate()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def narrowed(plan: SamplingPlan, vocab_size: int) -> SamplingPlan:
    """Return a request's plan for drafting, without logits processors, because these expect each token only once."""
    known = plan.edit_ids < vocab_size
    return replace(
        plan,
        matcher=None,
        params=plan.params.replace(logits_processors=(), logprobs=None, prompt_logprobs=None),
        edit_ids=plan.edit_ids[known],
        edit_values=plan.edit_values[known],
        held_back=plan.held_back[plan.held_back < vocab_size],
        not_first=plan.not_first[plan.not_first < vocab_size],
        sequences=None if plan.sequences is None else plan.sequences.within(vocab_size),
    )
