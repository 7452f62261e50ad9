"""Which tokens are computed in the next step: pure policy, no arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# As fast as longer steps for short prompts and faster for long ones, because the rows stay in the second-level cache;
# and what a step needs of memory grows with it.
DEFAULT_TOKEN_BUDGET = 256


class Run(NamedTuple):
    """A sequence's next pending tokens that are computed in the same way: how many, and whether as MANY rows."""

    num_tokens: int
    many: bool


class Part(NamedTuple):
    """What a step takes of a sequence: its index, the number of its next pending tokens, whether as MANY rows."""

    sequence: int
    num_tokens: int
    many: bool


Step = list[Part]
"""A part per sequence that takes part, FEW rows first."""


def plan_step(pending: Sequence[Run], token_budget: int) -> Step:
    """The next step: at most `token_budget` of the tokens that are not computed yet.

    Sequences with one pending token (decode) go first, so that a long prompt does not hold them up; short chunks and
    then prompts follow in order, and the last one is cut into a chunk where the budget ends. Repeated until nothing is
    pending, every token is computed once, in its sequence's order.

    Args:
        pending: tokens not yet computed, per sequence.
        token_budget: most tokens in a step, at least 1.

    Returns:
        The step; empty if nothing is pending.
    """
    waiting = [(index, run) for index, run in enumerate(pending) if run.num_tokens]
    step: Step = []
    room = token_budget
    for index, run in sorted(waiting, key=lambda one: (one[1].many, one[1].num_tokens > 1, one[0])):
        if not room:
            break
        part = Part(index, min(run.num_tokens, room), run.many)
        step.append(part)
        room -= part.num_tokens
    return step
