"""A draft model: a smaller one that goes ahead of the other, with the same options and random numbers.

A token depends on the logits and on the random number of its place. The draft draws with the number that the other
model will draw with, so that the two often choose the same also where the temperature is high.
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

# A draft that is more tokens behind reads them first, a step's worth at a time.
_MOST_BEHIND = 32


class Followed(Protocol):
    """What a draft sees of a request, see engine.Request."""

    sequence: DecoderSequence
    row: RowSampler


@dataclass
class _Follower:
    """A request's sequence in the draft model; `refused` once it cannot be drafted any more."""

    sequence: DecoderSequence
    row: RowSampler
    refused: bool = False


class DraftModel:
    """Drafts for requests of another model with the same vocabulary.

    Args:
        decoder, sampler: of the draft model. context_size: most tokens of a sequence there.
        vocab_size: logits of the other model; no token beyond is proposed.

    Attributes:
        costs: seconds of its steps. read_seconds: what it took to read prompts since the last `read`.
    """

    def __init__(self, decoder: Decoder, sampler: BatchSampler, *, context_size: int, vocab_size: int) -> None:
        self._decoder, self._sampler = decoder, sampler
        self._context_size, self._vocab_size = context_size, vocab_size
        self._followers: dict[Followed, _Follower] = {}
        self.costs = StepCosts()
        self.read_seconds = 0.0

    def read(self, requests: Sequence[Followed]) -> None:
        """Compute a part of what is far behind: prompts, and what came while nothing was drafted."""
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
        except CacheCapacityError:
            _refuse(behind)
        self.read_seconds = time.perf_counter() - began

    def room(self, request: Followed) -> int:
        """How many tokens it could draft for a request now."""
        own = self._followers.get(request)
        if own is None or own.refused or not 0 < _lag(own) <= _MOST_BEHIND:
            return 0
        return max(self._context_size - len(own.sequence.tokens) - 1, 0)

    def draft(self, requests: Sequence[Followed], depths: Sequence[int]) -> list[list[int]]:
        """So many tokens for each request, or fewer; requests are those of the last `read`, with room."""
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
                    one.sequence.append([token])
                    found[index].append(token)
                    if one.row.follow(token):
                        over.add(index)
        for request in requests:
            self._followers[request].row.matcher = None  # it is the request's that goes on
        return found

    def _begin_grammar(self, request: Followed) -> None:
        """Let a draft obey the request's grammar from here on; masks fit vocabularies of the same size only."""
        matcher = request.row.matcher
        if matcher is not None and self._decoder.vocab_size == self._vocab_size:
            self._followers[request].row.matcher = matcher.fork()

    def forget(self, request: Followed) -> None:
        """A request is over: what was computed may serve the next one that begins alike."""
        own = self._followers.pop(request, None)
        if own is not None:
            own.sequence.publish()
            own.sequence.close()

    def _step(self, own: Sequence[_Follower]) -> list[int]:
        """The next token of each; none if there is no room or nothing to choose."""
        sequences = [one.sequence for one in own]
        rows = sum(map(_lag, own))
        began = time.perf_counter()
        try:
            logits: list[Logits] = compute(self._decoder, sequences)
            sampled = self._sampler.sample(stacked([one[-1] for one in logits]), [one.row for one in own])
            self.costs.note(rows, rows, time.perf_counter() - began)  # a device may have computed until now
        except CacheCapacityError:
            _refuse(own)
            return []
        except (SamplingError, GrammarError):
            return []  # the other model says what is wrong, if it finds the same
        tokens: list[int] = sampled.tokens.tolist()
        return tokens

    def _follow(self, request: Followed) -> _Follower:
        """Let the draft's sequence have the request's tokens; what it drafted otherwise goes."""
        begins = request not in self._followers
        if begins:
            self._followers[request] = self._begin(request)
        own = self._followers[request]
        if own.refused:
            return own
        have, want = own.sequence.tokens, request.sequence.tokens
        same = _common(have, want)
        if same < len(have):
            own.sequence.rewind(same)
            own.row.rewind(same)
        if max(want[same:], default=0) >= self._decoder.vocab_size or len(want) >= self._context_size:
            _refuse([own])
        else:
            own.sequence.append(want[same:])
            if begins:
                own.sequence.reuse()
        return own

    def _begin(self, request: Followed) -> _Follower:
        """What follows a request, without its tokens."""
        sequence, plan = self._decoder.open(), _narrowed(request.row.plan, self._decoder.vocab_size)
        row = RowSampler(
            plan, sequence.tokens, seed=request.row.seed, row=request.row.row, prompt_length=request.row.prompt_length
        )
        return _Follower(sequence, row, plan.params.top_k > self._decoder.vocab_size)


def _lag(own: _Follower) -> int:
    """How many tokens it has not computed."""
    return len(own.sequence.tokens) - int(own.sequence.num_computed)


def _refuse(followers: Sequence[_Follower]) -> None:
    for own in followers:
        own.refused = True
        own.sequence.truncate()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the start are the same."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def _narrowed(plan: SamplingPlan, vocab_size: int) -> SamplingPlan:
    """A request's plan for a draft: without functions over logits, whose owner expects each token once."""
    known = plan.edit_ids < vocab_size
    return replace(
        plan,
        matcher=None,
        params=plan.params.replace(logits_processors=(), logprobs=None, prompt_logprobs=None),
        edit_ids=plan.edit_ids[known],
        edit_values=plan.edit_values[known],
        held_back=plan.held_back[plan.held_back < vocab_size],
    )
