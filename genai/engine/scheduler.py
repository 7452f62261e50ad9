"""Which tokens are computed together: pure policy, no arrays."""

from __future__ import annotations

from collections.abc import Sequence

Step = list[tuple[int, int]]
"""(sequence index, number of its pending tokens) per sequence that takes part."""


def plan_steps(pending: Sequence[int], token_budget: int) -> list[Step]:
    """Split pending tokens into steps of at most `token_budget` tokens.

    Sequences with one pending token (decode) go first, so that a long prompt does not hold them up within a step;
    prompts follow in order and are cut into chunks where the budget ends.

    Args:
        pending: tokens not yet computed, per sequence.
        token_budget: most tokens in a step, at least 1.

    Returns:
        Steps in order. Every pending token appears exactly once, in its sequence's order.
    """
    order = sorted((i for i, count in enumerate(pending) if count), key=lambda i: (pending[i] > 1, i))
    steps: list[Step] = []
    current: Step = []
    room = token_budget
    for index in order:
        left = pending[index]
        while left:
            take = min(left, room)
            current.append((index, take))
            left -= take
            room -= take
            if room == 0:
                steps.append(current)
                current, room = [], token_budget
    if current:
        steps.append(current)
    return steps
