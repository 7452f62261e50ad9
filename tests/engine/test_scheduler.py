from __future__ import annotations

import random

import pytest

from genai.engine.scheduler import Run, Step, plan_step


def plan_steps(pending: list[Run], budget: int) -> list[Step]:
    left, steps = list(pending), []
    while step := plan_step(left, budget):
        steps.append(step)
        for index, count, many in step:
            assert many == left[index].many
            left[index] = Run(left[index].num_tokens - count, many)
    return steps


@pytest.mark.parametrize("seed", range(50))
def test_every_pending_token_is_planned_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.choice([0, 1, 1, rng.randint(2, 40)]) for _ in range(rng.randint(1, 12))]
    pending = [Run(count, rng.random() < 0.5) for count in counts]
    budget = rng.randint(1, 24)
    steps = plan_steps(pending, budget)
    done = [0] * len(pending)
    for step in steps:
        assert 0 < sum(part.num_tokens for part in step) <= budget
        assert len({part.sequence for part in step}) == len(step)
        assert [part.many for part in step] == sorted(part.many for part in step)
        for index, count, _ in step:
            assert count > 0
            done[index] += count
    assert done == counts


def test_decode_goes_before_prefill() -> None:
    few = [Run(count, False) for count in (5, 1, 1)]
    assert plan_steps(few, 4) == [[(1, 1, False), (2, 1, False), (0, 2, False)], [(0, 3, False)]]


def test_few_rows_go_before_many() -> None:
    runs = [Run(40, True), Run(3, False), Run(1, True), Run(1, False)]
    (step,) = plan_steps(runs, 100)
    assert [part.sequence for part in step] == [3, 1, 2, 0]


def test_full_steps_are_as_few_as_the_budget_allows() -> None:
    assert len(plan_steps([Run(100, True), Run(28, False)], 32)) == 4


def test_nothing_pending_is_no_step() -> None:
    assert plan_steps([Run(0, True), Run(0, False)], 8) == []
