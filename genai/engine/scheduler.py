"""Who runs, and which tokens are computed in the next step: pure policy, no arrays.

A request is admitted when the blocks of the cache will hold what all running requests are expected to grow to, so that
few are ever preempted. The idea of simulating the coming steps is that of tokasaurus.
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

# Limits up to this many tokens are taken at their word; of larger ones most requests use a part.
_SHORT_LIMIT = 256
# The part of a larger limit that requests are expected to use before any has ended, and the weight of each one that
# ends.
_FIRST_SHARE, _SHARE_WEIGHT = 0.25, 0.1

# Prompts get at least this part of the time.
_LEAST_SHARE = 1 / 3
# With that share, 21 steps without a prompt for one with: the 95th percentile of the time between two tokens is that of
# a step without.
_QUIET_STEPS = 21
# A step with prompts takes as long as so many without.
_LONGER = _QUIET_STEPS * _LEAST_SHARE / (1 - _LEAST_SHARE)
# Where nothing is known yet; and at least, so that prompts are read in the end.
_FIRST_TOKENS, _LEAST_TOKENS = 32, 8
# The fastest of the last few steps count: others held kernels being compiled, or another program's work.
_REMEMBERED = 8


class Pending(NamedTuple):
    """A sequence's next pending tokens of the same numerics: how many, and whether prefill's."""

    num_tokens: int
    prefill: bool


_ONE_MORE = Pending(1, False)


class Chunk(NamedTuple):
    """What a step takes of a sequence: its index, how many of its next pending tokens, whether of prefill numerics."""

    sequence: int
    num_tokens: int
    prefill: bool


StepPlan = list[Chunk]
"""A part per sequence that takes part, decode numerics first."""


def plan_step(pending: Sequence[Pending], token_budget: int, prefill_budget: int = sys.maxsize) -> StepPlan:
    """The next step: at most `token_budget` of the tokens that are not computed yet.

    Sequences with one pending token (decode) go first, so that a long prompt does not hold them up; short chunks and
    then prompts follow in order, and the last one is cut into a chunk where the budget ends. Repeated until nothing is
    pending, every token is computed once, in its sequence's order.

    Args:
        pending: tokens not yet computed, per sequence.
        token_budget: most tokens in a step, at least 1.
        prefill_budget: most of them of prefill numerics; 0 leaves those for a later step.

    Returns:
        The step; empty if nothing is pending.
    """
    if len(pending) <= token_budget and all(run == _ONE_MORE for run in pending):
        return [Chunk(index, 1, False) for index in range(len(pending))]
    waiting = [(index, run) for index, run in enumerate(pending) if run.num_tokens]
    step: StepPlan = []
    room = token_budget
    for index, run in sorted(waiting, key=lambda one: (one[1].prefill, one[1].num_tokens > 1, one[0])):
        if run.prefill:
            room = min(room, prefill_budget)
        if not room:
            break
        part = Chunk(index, min(run.num_tokens, room), run.prefill)
        step.append(part)
        room -= part.num_tokens
        prefill_budget -= part.num_tokens if run.prefill else 0
    return step


class GroupDemand(NamedTuple):
    """What a sequence holds of a cache group, and may ask of it.

    Attributes:
        blocks: those it holds and can go on with. own: of these, the ones that nobody else holds.
        most: most blocks that it holds at a time; None = as many as its tokens need.
        pool: number of the pool that the blocks are from.
        fixed: whether it needs `most` blocks however many tokens it has.
    """

    blocks: int = 0
    own: int = 0
    most: int | None = None
    pool: int = 0
    fixed: bool = False

    def grown(self, tokens: int, block_size: int) -> int:
        """Blocks that it will have taken once it has so many tokens."""
        needed = -(-tokens // block_size)
        if self.most is not None:
            needed = self.most if self.fixed else min(needed, self.most)
        return max(0, needed - self.blocks)


class CacheDemand(NamedTuple):
    """What a sequence holds of the cache, and may ask of it.

    Attributes:
        tokens: how many it has. prompt: so many of them were given. limit: most that it may have.
        groups: per cache group.
    """

    tokens: int
    prompt: int
    limit: int
    groups: tuple[GroupDemand, ...] = (GroupDemand(),)

    def own(self, pool: int) -> int:
        """Blocks of a pool that nobody else holds."""
        return sum(group.own for group in self.groups if group.pool == pool)

    def grown(self, steps: int, block_size: int, pool: int) -> int:
        """Blocks of a pool that it will have taken after so many more tokens."""
        return sum(group.grown(self.tokens + steps, block_size) for group in self.groups if group.pool == pool)


def peak_blocks(held: int, growing: Sequence[tuple[CacheDemand, int]], block_size: int, pool: int = 0) -> int:
    """The most blocks of a pool that are held at any time, if each sequence gets a token per step until it ends.

    Args:
        held: blocks that are held now.
        growing: sequences, and how many tokens each will still get.
    """
    ordered = sorted(growing, key=lambda one: one[1])
    most = held
    for index, (ending, steps) in enumerate(ordered):
        # They grow without pause, so the most is held just before one of them ends.
        grown = sum(one.grown(steps, block_size, pool) for one, _ in ordered[index:])
        most = max(most, held + grown)
        held -= ending.own(pool)
    return most


J = TypeVar("J")


class Scheduler(Generic[J]):
    """Owns who waits and who runs.

    Requests are admitted by priority, then in the order in which they came; none overtakes another of its priority. The
    last in this order is preempted first, and keeps its place.

    Args:
        pools: the blocks that sequences share; none = there is no bound.
        block_size: tokens in a block.
        max_sequences: requests that run side by side.
        demand: what a request that was started asks of the pools.

    Attributes:
        waiting: in the order in which they will be admitted. running: in the order in which they were.
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
        # What was refused is not asked about again until a request has left: else the two would take turns at
        # computing.
        self._is_full = False

    def submit(self, request: J, *, priority: int = 0) -> None:
        """Queue a request; a higher priority is admitted sooner."""
        self._order[request] = -priority, next(self._arrivals)
        self._wait(request)

    def candidate(self) -> J | None:
        """The request that may be admitted next, to be started by the caller: only then its demand is known."""
        if not self.waiting or len(self.running) >= self._max_sequences or (self._is_full and self.running):
            return None
        return self.waiting[0]

    def admit(self, request: J) -> bool:
        """Let a candidate run, if the pools will hold all that runs then; a request alone may always try."""
        self._is_full = bool(self.running) and not self._fits(request)
        if not self._is_full:
            self.waiting.remove(request)
            self.running.append(request)
        return not self._is_full

    def admit_copy(self, request: J, of: J) -> bool:
        """Let a request run that was started as the copy of a running one; else it waits behind that one."""
        self._order[request] = self._order[of]
        if len(self.running) < self._max_sequences and self._fits(request):
            self.running.append(request)
            return True
        self._wait(request)
        return False

    def preempt(self) -> J | None:
        """Take from the running requests the one that is worth least, when the pool is full; None = it runs alone."""
        if len(self.running) < 2:
            return None
        request = max(reversed(self.running), key=self._order.__getitem__)
        self.running.remove(request)
        self._wait(request)
        self._is_full = True
        return request

    def remove(self, request: J) -> None:
        """A request is over, or was given up."""
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
        """How many tokens a sequence will probably still get."""
        limit, done = demand.limit - demand.prompt, demand.tokens - demand.prompt
        probable = limit if limit <= _SHORT_LIMIT else max(_SHORT_LIMIT, math.ceil(self._used_share * limit))
        return max(probable - done, min(self._block_size, limit - done), 0)

    def _learn(self, demand: CacheDemand) -> None:
        limit = demand.limit - demand.prompt
        if limit > _SHORT_LIMIT:
            used = (demand.tokens - demand.prompt) / limit
            self._used_share += _SHARE_WEIGHT * (used - self._used_share)


class PrefillBudget:
    """Learns from the steps what a prompt's token takes, and says how many of them the next step may compute.

    A step that reads part of a prompt takes longer, and who watches a reply sees it pause. Such steps are therefore
    kept apart by so many steps without a prompt that fewer than five in a hundred tokens come late, and they are only
    so long that prompts get a third of the time. Where many prompts wait beside few watched replies, they get more of
    it: the steps come closer together, and stay as long. Nobody watches a batch, so that its prompts are read at once.
    """

    def __init__(self) -> None:
        self._steps = _QUIET_STEPS  # without a prompt since the last one with
        self._quiet: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._per_token: deque[float] = deque(maxlen=_REMEMBERED)

    def tokens(self, *, reading: int, watched: int) -> int:
        """Most tokens of prompts in the next step.

        Args:
            reading: sequences whose prompt is being read. watched: those that generate while somebody watches.
        """
        if not watched or not reading:
            return sys.maxsize
        share = max(_LEAST_SHARE, (reading - 1) / (reading - 1 + watched))
        if self._steps < _LONGER * (1 - share) / share:
            return 0
        if not self._per_token or not self._quiet:
            return _FIRST_TOKENS
        return max(_LEAST_TOKENS, int(_LONGER * self._quiet_seconds / min(self._per_token)))

    def note(self, prefill_tokens: int, seconds: float) -> None:
        """A step was computed, with so many tokens of prompts."""
        if not prefill_tokens:
            self._steps += 1
            self._quiet.append(seconds)
            return
        self._per_token.append(max(seconds - self._quiet_seconds, seconds / 2) / prefill_tokens)
        self._steps = 0

    @property
    def _quiet_seconds(self) -> float:
        return sum(self._quiet) / max(len(self._quiet), 1)
