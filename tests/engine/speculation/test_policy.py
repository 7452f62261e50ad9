"""The number of draft tokens for given costs and acceptance rates, and the measurement of both."""

from __future__ import annotations

import itertools
import random

import pytest

from genai.engine.speculation.policy import Acceptance, Account, Prospect, StepCosts, choose_depths


def learnt(sequences: int, times: dict[int, float]) -> StepCosts:
    """Costs learnt from steps of `sequences` sequences, by number of rows; the first entry has no draft tokens."""
    costs = StepCosts()
    for rows, seconds in times.items():
        costs.note(sequences, rows, 100.0)  # the first of a kind does not count
        costs.note(sequences, rows, seconds)
    return costs


def test_costs_are_those_of_a_plain_step_and_of_each_row_more() -> None:
    costs = learnt(1, {1: 1.0, 2: 1.3, 9: 1.8})
    assert costs.plain(1) == costs.seconds(1, 1) == 1.0
    assert costs.seconds(1, 2) == pytest.approx(1.3)
    assert costs.seconds(1, 9) == pytest.approx(1.8) and costs.seconds(1, 12) == pytest.approx(2.1)
    assert costs.seconds(1, 3) == pytest.approx(1.6)  # as a step of two
    assert costs.knows(1) and not costs.knows(2)


def test_what_a_row_adds_is_known_for_other_numbers_of_sequences() -> None:
    costs = learnt(1, {1: 1.0, 2: 1.2})
    for _ in range(2):
        costs.note(4, 4, 3.0)
    assert costs.seconds(4, 5) == pytest.approx(3.2)


def test_costs_of_what_was_never_measured() -> None:
    assert StepCosts().plain(1) == 0 and not StepCosts().knows(1)
    costs = learnt(2, {2: 1.0})
    assert costs.plain(1) == 1.0 and 1.0 < costs.seconds(2, 4) < 2.0


def test_a_cost_is_a_median_and_never_less_for_more_rows() -> None:
    costs = learnt(1, {1: 1.0, 2: 0.5})
    for seconds in (1.0, 50.0, 1.0, 1.0):
        costs.note(1, 1, seconds)
    assert costs.plain(1) == 1.0 == costs.seconds(1, 2) == costs.seconds(1, 9)


def test_costs_that_were_not_seen_for_long_are_measured_again() -> None:
    costs = learnt(1, {1: 1.0, 9: 77.0})
    assert costs.seconds(1, 9) == 77.0
    for _ in range(200):
        costs.note(1, 1, 1.0)
    assert costs.seconds(1, 9) < 2.0 and costs.knows(1)
    for _ in range(100):
        costs.note(1, 5, 1.4)
    assert not costs.knows(1) and costs.plain(1) == 1.0


def expected_rate(prospects: list[Prospect], depths: tuple[int, ...], costs: StepCosts) -> float:
    tokens = sum(
        sum(one.chance**depth for depth in range(most + 1)) for one, most in zip(prospects, depths, strict=True)
    )
    return tokens / costs.seconds(len(prospects), len(prospects) + sum(depths))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_is_expected_to_be_much_faster(seed: int) -> None:
    """Tries all choices. A better one may gain at most the minimum gain that draft tokens must promise."""
    rng = random.Random(seed)
    prospects = [Prospect(rng.randint(0, 4), rng.random()) for _ in range(rng.randint(1, 3))]
    times = itertools.accumulate(rng.uniform(0.0, 0.4) for _ in range(14))
    costs = learnt(len(prospects), {rows: 1.0 + more for rows, more in enumerate(times, len(prospects))})
    chosen = tuple(choose_depths(prospects, 99, costs.seconds))
    every = itertools.product(*[range(one.most + 1) for one in prospects])
    best = max(expected_rate(prospects, depths, costs) for depths in every)
    assert expected_rate(prospects, chosen, costs) >= best / 1.021


def test_proposals_that_cannot_pay_are_not_made() -> None:
    costs = learnt(1, {1: 1.0, 2: 1.5, 5: 3.0})
    assert choose_depths([Prospect(4, 0.4)], 99, costs.seconds) == [0]
    assert choose_depths([Prospect(4, 0.0)], 99, costs.seconds) == [0]
    assert choose_depths([Prospect(4, 1.0)], 99, costs.seconds) == [4]
    assert choose_depths([Prospect(0, 1.0)], 99, costs.seconds) == [0]


def test_a_step_has_no_more_rows_than_it_may() -> None:
    costs = learnt(2, {2: 1.0, 20: 1.01})
    assert sum(choose_depths([Prospect(9, 0.9), Prospect(9, 0.8)], 7, costs.seconds)) == 5
    assert choose_depths([Prospect(9, 0.9), Prospect(9, 0.8)], 2, costs.seconds) == [0, 0]


def test_a_draft_is_paid_for_each_of_its_steps() -> None:
    costs = learnt(1, {1: 1.0, 9: 1.08})
    assert choose_depths([Prospect(8, 0.8, drafted=True)], 99, costs.seconds, lambda _: 0.0) == [8]
    few = choose_depths([Prospect(8, 0.8, drafted=True)], 99, costs.seconds, lambda _: 0.2)[0]
    assert 0 < few < 8
    assert choose_depths([Prospect(8, 0.8, drafted=True)], 99, costs.seconds, lambda _: 0.9) == [0]


def test_acceptance_follows_what_happened_and_forgets() -> None:
    everywhere = Acceptance(lambda kind, step: 0.5)
    own = Acceptance(everywhere)
    assert own.chance("3", 0) == 0.5
    for step in range(20):
        own.note("3", step, 0, rejected=True)
    assert own.chance("3", 20) < 0.1 and own.chance("9", 20) == 0.5
    assert own.chance("3", 1000) == pytest.approx(0.5, abs=0.01)  # it is tried again one day
    for step in range(20):
        own.note("9", step, 4, rejected=False)
    assert own.chance("9", 20) > 0.9


def test_an_account_lets_a_hundredth_be_lost() -> None:
    """Each attempt costs half a step, and the total loss stays below the limit."""
    account, lost, pause = Account(), 0.0, 0
    for _ in range(10_000):
        if pause:
            pause -= 1
            continue
        lost += 0.5
        account.settle(1.0, -0.5)
        pause = account.wait(1.0)
    assert 0.008 * 10_000 <= lost <= 0.0102 * 10_000


def test_what_was_saved_long_ago_is_no_reason_to_lose_now() -> None:
    account, tried = Account(), 0
    for _ in range(100):
        account.settle(1.0, 5.0)
        assert account.wait(1.0) == 0
    while not account.wait(1.0):
        account.settle(1.0, -0.5)
        tried += 1
    assert tried <= 5


def test_no_pause_is_so_long_that_a_change_is_missed() -> None:
    account = Account()
    account.settle(1.0, -100.0)
    assert account.wait(1.0) == 64 == account.wait(1.0)
