from __future__ import annotations

import random

import pytest

from genai.engine.scheduler import Step, plan_step


def plan_steps(pending: list[int], budget: int) -> list[Step]:
    left, steps = list(pending), []
    while step := plan_step(left, budget):
        steps.append(step)
        for index, count in step:
            left[index] -= count
    return steps


@pytest.mark.parametrize("seed", range(50))
def test_every_pending_token_is_planned_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    pending = [rng.choice([0, 1, 1, rng.randint(2, 40)]) for _ in range(rng.randint(1, 12))]
    budget = rng.randint(1, 24)
    steps = plan_steps(pending, budget)
    done = [0] * len(pending)
    for step in steps:
        assert 0 < sum(count for _, count in step) <= budget
        assert len({index for index, _ in step}) == len(step)
        for index, count in step:
            assert count > 0
            done[index] += count
    assert done == pending


def test_decode_goes_before_prefill() -> None:
    assert plan_steps([5, 1, 1], 4) == [[(1, 1), (2, 1), (0, 2)], [(0, 3)]]


def test_full_steps_are_as_few_as_the_budget_allows() -> None:
    assert len(plan_steps([100, 28], 32)) == 4


def test_nothing_pending_is_no_step() -> None:
    assert plan_steps([0, 0], 8) == []
