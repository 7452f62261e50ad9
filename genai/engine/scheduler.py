"""Which tokens are computed in the next step: pure policy, no arrays."""

from __future__ import annotations

from collections.abc import Sequence

Step = list[tuple[int, int]]
"""(sequence index, number of its next pending tokens) per sequence that takes part, short chunks first."""

# Chunks of at least so many tokens may be computed by other kernels than shorter ones (see `LONG_CHUNK` in the step
# context): a prompt of that length is therefore never cut so that a piece falls below it.
LONG_CHUNK = 32


def plan_step(pending: Sequence[int], token_budget: int) -> Step:
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
    order = sorted((i for i, count in enumerate(pending) if count), key=lambda i: _turn(pending[i], i))
    step: Step = []
    room = token_budget
    for index in order:
        take = _chunk(pending[index], room, token_budget)
        if take:
            step.append((index, take))
        room -= take
    return step


def _turn(pending: int, index: int) -> tuple[bool, bool, int]:
    return pending >= LONG_CHUNK, pending > 1, index


def _chunk(pending: int, room: int, token_budget: int) -> int:
    """How many of a sequence's tokens to take where there is room for so many."""
    if pending <= room or pending < LONG_CHUNK or token_budget < 2 * LONG_CHUNK:
        return min(pending, room)
    if room < LONG_CHUNK:
        return 0
    if pending - room >= LONG_CHUNK:
        return room
    # The rest would be too short: it keeps so much that it is not, or the whole waits for the next step.
    return pending - LONG_CHUNK if pending >= 2 * LONG_CHUNK else 0
