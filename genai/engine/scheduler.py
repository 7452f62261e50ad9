"""Scheduling policy: which requests run, and which tokens the next step computes. No arrays.

A request is admitted if the cache can hold all running requests at their expected final sizes, so that preemption is
rare. The simulation of future steps is an idea from tokasaurus.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from genai.kvcache.pool import BlockPool

# Requests are assumed to use token limits up to this number fully. Most requests use only part of a larger limit.
_SHORT_LIMIT = 256
# The expected used fraction of a larger limit before any request has ended, and the weight of each ended request.
_FIRST_SHARE, _SHARE_WEIGHT = 0.25, 0.1

# The minimum share of time spent on prompts.
_LEAST_SHARE = 1 / 3
# There are 21 steps without prompt tokens per step with prompt tokens. The 95th percentile of the time between two
# tokens is therefore the duration of a step without prompt tokens.
_QUIET_STEPS = 21
# The duration of a step with prompt tokens, as a multiple of the duration of a step without them.
_LONGER = _QUIET_STEPS * _LEAST_SHARE / (1 - _LEAST_SHARE)
# The initial number of prompt tokens per step, and the minimum, which ensures that prompts make progress.
_FIRST_TOKENS, _LEAST_TOKENS = 32, 8
# The number of recent steps of which the fastest is used. Slower steps may include kernel compilation or another
# program's work.
_REMEMBERED = 8


class Pending(NamedTuple):
    """A run of a sequence's next pending tokens with the same numerics: its length; True for prefill numerics."""

    num_tokens: int
    prefill: bool


_ONE_MORE = Pending(1, False)


class Chunk(NamedTuple):
    """A sequence's part of a step: its index; the number of its next pending tokens; True for prefill numerics."""

    sequence: int
    num_tokens: int
    prefill: bool


StepPlan = list[Chunk]
"""One chunk per participating sequence, decode numerics first."""


def plan_step(pending: Sequence[Pending], token_budget: int, prefill_budget: int = sys.maxsize) -> StepPlan:
    """Plan the next step with at most `token_budget` of the pending tokens.

    Sequences with one pending token (decode) come first, so that a long prompt does not delay them. Short chunks follow
    in order, and the last chunk is cut to the budget. Prompts share the rest: the first gets half of it, so that it
    always makes progress, and the others get their tokens in the order of their lengths, so that a short prompt does
    not wait for a long one. If steps are repeated until no token is pending, every token is computed once, in the order
    of its sequence.

    Args:
        pending: the pending tokens of each sequence.
        token_budget: maximum number of tokens in a step, at least 1.
        prefill_budget: maximum number of tokens with prefill numerics; 0 postpones all of these to a later step.

    Returns:
        The step; empty if no token is pending.
    """
    if len(pending) <= token_budget and all(run == _ONE_MORE for run in pending):
        return [Chunk(index, 1, False) for index in range(len(pending))]
    step: StepPlan = []
    room = token_budget
    decoding = [(index, run.num_tokens) for index, run in enumerate(pending) if run.num_tokens and not run.prefill]
    for index, num_tokens in sorted(decoding, key=lambda one: (one[1] > 1, one[0])):
        if not room:
            break
        step.append(Chunk(index, min(num_tokens, room), False))
        room -= step[-1].num_tokens
    prompts = {index: run.num_tokens for index, run in enumerate(pending) if run.num_tokens and run.prefill}
    shares = _share(prompts, min(room, prefill_budget))
    return step + [Chunk(index, num_tokens, True) for index, num_tokens in shares.items() if num_tokens]


def _share(prompts: dict[int, int], room: int) -> dict[int, int]:
    """Return the number of tokens that each prompt gets; see plan_step.

    Args:
        prompts: the number of pending tokens of each prompt.
        room: maximum number of tokens of all prompts.
    """
    if sum(prompts.values()) <= room:
        return prompts
    shares = dict.fromkeys(prompts, 0)
    first = next(iter(prompts))
    shares[first] = min(prompts[first], -(-room // 2))
    room -= shares[first]
    for index in sorted(prompts, key=lambda one: prompts[one]):
        more = min(prompts[index] - shares[index], room)
        shares[index] += more
        room -= more
    return shares


class GroupDemand(NamedTuple):
    """The blocks of a cache group that a sequence holds and may need.

    Attributes:
        blocks: number of blocks that the sequence holds and can continue with.
        own: number of these blocks that no other sequence holds.
        most: maximum number of blocks that the sequence holds at a time; None = as many as its tokens fill.
        pool: index of the pool that the blocks belong to.
        fixed: True if the sequence needs `most` blocks regardless of its number of tokens.
    """

    blocks: int = 0
    own: int = 0
    most: int | None = None
    pool: int = 0
    fixed: bool = False

    def grown(self, tokens: int, block_size: int) -> int:
        """Return the number of additional blocks that the sequence needs to reach `tokens` tokens."""
        needed = -(-tokens // block_size)
        if self.most is not None:
            needed = self.most if self.fixed else min(needed, self.most)
        return max(0, needed - self.blocks)


class CacheDemand(NamedTuple):
    """The cache blocks that a sequence holds and may need.

    Attributes:
        tokens: number of tokens in the sequence.
        prompt: number of prompt tokens among them.
        limit: maximum number of tokens in the sequence.
        groups: demand per cache group.
    """

    tokens: int
    prompt: int
    limit: int
    groups: tuple[GroupDemand, ...] = (GroupDemand(),)

    def own(self, pool: int) -> int:
        """Return the number of blocks of a pool that only this sequence holds."""
        return sum(group.own for group in self.groups if group.pool == pool)

    def grown(self, steps: int, block_size: int, pool: int) -> int:
        """Return the number of additional blocks of a pool that the sequence needs for `steps` more tokens."""
        return sum(group.grown(self.tokens + steps, block_size) for group in self.groups if group.pool == pool)


def peak_blocks(held: int, growing: Sequence[tuple[CacheDemand, int]], block_size: int, pool: int = 0) -> int:
    """Return the maximum number of blocks in use at any time if each sequence gets one token per step until it ends.

    Args:
        held: number of blocks in use now.
        growing: the sequences, each with the number of tokens that it has yet to get.
        block_size: tokens per block.
        pool: index of the pool.
    """
    ordered = sorted(growing, key=lambda one: one[1])
    most = held
    for index, (ending, steps) in enumerate(ordered):
        # All sequences grow in every step, so the maximum occurs just before one of them ends.
        grown = sum(one.grown(steps, block_size, pool) for one, _ in ordered[index:])
        most = max(most, held + grown)
        held -= ending.own(pool)
    return most


J = TypeVar("J")


class Scheduler(Generic[J]):
    """The queues of waiting and running requests.

    Requests are admitted by priority and, within a priority, by arrival. No request overtakes another of the same
    priority. The request that is last in this order is preempted first, and keeps its place in the order.

    Args:
        pools: the pools that the sequences share; empty = no limit.
        block_size: tokens per block.
        max_sequences: maximum number of requests that run at a time.
        demand: returns the cache demand of a started request.

    Attributes:
        waiting: waiting requests in the order of admission.
        running: running requests in the order in which they were admitted.
    """

    def __init__(
        self, pools: Sequence[BlockPool], block_size: int, max_sequences: int, demand: Callable[[J], CacheDemand]
    ) -> None:
        self._pools, self._block_size, self._max_sequences, self._demand = pools, block_size, max_sequences, demand
        self.waiting: list[J] = []
        self.running: list[J] = []
        self._order: dict[J, tuple[int, int]] = {}
        self._arrivals = count()
        self._used_share = _FIRST_SHARE
        # After a request was refused, no other request is considered until a request has ended. Otherwise two requests
        # could alternate and each process its prompt again every time.
        self._is_full = False

    def submit(self, request: J, *, priority: int = 0) -> None:
        """Queue a request; requests with a higher priority are admitted first."""
        self._order[request] = -priority, next(self._arrivals)
        self._wait(request)

    def candidate(self) -> J | None:
        """Return the request to admit next, if any. The caller starts it, because its demand is known only then."""
        if not self.waiting or len(self.running) >= self._max_sequences or (self._is_full and self.running):
            return None
        return self.waiting[0]

    def admit(self, request: J) -> bool:
        """Admit a candidate if the pools can hold all running requests; a lone request is always admitted."""
        self._is_full = bool(self.running) and not self._fits(request)
        if not self._is_full:
            self.waiting.remove(request)
            self.running.append(request)
        return not self._is_full

    def admit_copy(self, request: J, of: J) -> bool:
        """Admit a request that was started as a copy of a running request, or queue it after that request."""
        self._order[request] = self._order[of]
        if len(self.running) < self._max_sequences and self._fits(request):
            self.running.append(request)
            return True
        self._wait(request)
        return False

    def preempt(self) -> J | None:
        """Return the running request that is last in order to the queue because a pool is full; None if one runs."""
        if len(self.running) < 2:
            return None
        request = max(reversed(self.running), key=self._order.__getitem__)
        self.running.remove(request)
        self._wait(request)
        self._is_full = True
        return request

    def remove(self, request: J) -> None:
        """Remove a request that has ended or was cancelled."""
        if request in self.running:
            self._learn(self._demand(request))
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        del self._order[request]
        self._is_full = False

    def _wait(self, request: J) -> None:
        insort(self.waiting, request, key=self._order.__getitem__)

    def _fits(self, request: J) -> bool:
        if not self._pools:
            return True
        growing = [(demand, self._expected(demand)) for demand in map(self._demand, [*self.running, request])]
        return all(
            peak_blocks(pool.num_blocks - pool.num_free, growing, self._block_size, number) <= pool.num_blocks
            for number, pool in enumerate(self._pools)
        )

    def _expected(self, demand: CacheDemand) -> int:
        """Return the number of additional tokens that a sequence is expected to get."""
        limit, done = demand.limit - demand.prompt, demand.tokens - demand.prompt
        probable = limit if limit <= _SHORT_LIMIT else max(_SHORT_LIMIT, math.ceil(self._used_share * limit))
        return max(probable - done, min(self._block_size, limit - done), 0)

    def _learn(self, demand: CacheDemand) -> None:
        limit = demand.limit - demand.prompt
        if limit > _SHORT_LIMIT:
            used = (demand.tokens - demand.prompt) / limit
            self._used_share += _SHARE_WEIGHT * (used - self._used_share)


class PrefillBudget:
    """Measures the duration of steps and limits the number of prompt tokens in the next step.

    A step that includes prompt tokens takes longer, which appears as a pause in streamed replies. The length of such a
    step is therefore limited. A prompt that fits into one step starts at once: its reader waits for the first token,
    and one pause costs the other readers less than a wait costs this one. Longer prompts would cause many pauses, so
    they are computed in steps that are separated by enough steps without prompt tokens that fewer than 5% of the tokens
    are late, and prompts get a third of the time. If many prompts wait while few replies are streamed, prompts get a
    larger share: the steps become more frequent but not longer. In a batch no reply is streamed, so prompts are
    processed without a limit.
    """

    def __init__(self) -> None:
        self._steps = _QUIET_STEPS  # steps without prompt tokens since the last step with prompt tokens
        self._quiet: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._per_token: deque[float] = deque(maxlen=_REMEMBERED)

    def tokens(self, *, prompts: Sequence[int], watched: int) -> int:
        """Return the maximum number of prompt tokens in the next step.

        Args:
            prompts: the numbers of pending tokens of the sequences with a prompt in prefill.
            watched: number of decoding sequences whose tokens are streamed.
        """
        if not watched or not prompts:
            return sys.maxsize
        most = _FIRST_TOKENS
        if self._per_token and self._quiet:
            most = max(_LEAST_TOKENS, int(_LONGER * self._quiet_seconds / min(self._per_token)))
        share = max(_LEAST_SHARE, (len(prompts) - 1) / (len(prompts) - 1 + watched))
        if min(prompts) > most and self._steps < _LONGER * (1 - share) / share:
            return 0
        return most

    def note(self, prefill_tokens: int, seconds: float) -> None:
        """Record the duration of a step and its number of prompt tokens."""
        if not prefill_tokens:
            self._steps += 1
            self._quiet.append(seconds)
            return
        self._per_token.append(max(seconds - self._quiet_seconds, seconds / 2) / prefill_tokens)
        self._steps = 0

    @property
    def _quiet_seconds(self) -> float:
        return sum(self._quiet) / max(len(self._quiet), 1)
