"""Which tokens are computed in the next step: pure policy, no arrays."""

from __future__ import annotations

from collections.abc import Sequence

Step = list[tuple[int, int]]
"""(sequence index, number of its next pending tokens) per sequence that takes part."""


def plan_step(pending: Sequence[int], token_budget: int) -> Step:
    """The next step: at most `token_budget` of the tokens that are not computed yet.

    Sequences with one pending token (decode) go first, so that a long prompt does not hold them up; prompts follow in
    order, and the last one is cut into a chunk where the budget ends. Repeated until nothing is pending, every token is
    computed once, in its sequence's order.

    Args:
        pending: tokens not yet computed, per sequence.
        token_budget: most tokens in a step, at least 1.

    Returns:
        The step; empty if nothing is pending.
    """
    order = sorted((i for i, count in enumerate(pending) if count), key=lambda i: (pending[i] > 1, i))
    step: Step = []
    room = token_budget
    for index in order:
        if room == 0:
            break
        take = min(pending[index], room)
        step.append((index, take))
        room -= take
    return step
