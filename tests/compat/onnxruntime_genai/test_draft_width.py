"""The width of rounds follows the measured speed; expected widths are computed by hand from the documented rules."""

from __future__ import annotations

import pytest

from genai.compat.onnxruntime_genai.draft_width import Cooldown, DraftWidth


def note(width: DraftWidth, rate: float, milliseconds: float, tokens: int | None = None) -> int:
    """A round at the current width, with a rate of accepted tokens; the width of the next round."""
    evaluated = 20
    shown = width.current + 1 if tokens is None else tokens
    accepted = round(rate * evaluated)
    width.note(width.current, evaluated=evaluated, accepted=accepted, tokens=shown, milliseconds=milliseconds)
    return width.current


def test_a_fixed_width_does_not_move() -> None:
    width = DraftWidth(4, 0)
    assert [note(width, rate, 1.0) for rate in (1, 1, 1, 0, 0, 0)] == [4] * 6
    assert (width.least, width.observations, width.probes, width.speed) == (4, 0, 0, 0.0)


def test_a_high_rate_tries_the_next_width_and_retains_it() -> None:
    """Two rounds at 2, two at 3 with the same speed, one round to wait, and then 4."""
    width = DraftWidth(9, 2)
    # At width w, w + 1 tokens take w + 1 milliseconds.
    found = [note(width, 1.0, width.current + 1.0) for _ in range(8)]
    assert found == [2, 3, 3, 3, 3, 4, 4, 4]
    assert (width.increases, width.decreases, width.probes, width.observations) == (2, 0, 2, 8)
    assert width.speed == pytest.approx(1.0)


def test_a_slower_width_is_given_up() -> None:
    """A loss of less than 3 % is not slower. A loss of more than 20 % ends the try after its first round."""
    for milliseconds, expected in ((4.1, [3, 3]), (4.2, [3, 2]), (5.1, [2, 2])):
        width = DraftWidth(9, 2)
        assert [note(width, 1.0, 3.0) for _ in range(2)] == [2, 3]
        assert [note(width, 1.0, milliseconds) for _ in range(1)] + [note(width, 1.0, milliseconds, 4)] == expected


def test_a_width_that_was_given_up_is_tried_again_after_six_rounds() -> None:
    width = DraftWidth(9, 2)
    assert [note(width, 1.0, 3.0) for _ in range(2)] == [2, 3]
    assert note(width, 1.0, 9.0) == 2
    assert [note(width, 1.0, 3.0) for _ in range(7)] == [2] * 6 + [3]
    assert (width.increases, width.decreases, width.probes) == (2, 1, 2)


def test_a_low_rate_tries_the_previous_width() -> None:
    width = DraftWidth(9, 2)
    assert [note(width, 1.0, width.current + 1.0) for _ in range(4)] == [2, 3, 3, 3]
    # At 3, the smoothed rate falls from 1 to 0.75, 0.56 and 0.42 in rounds without an accepted token.
    assert [note(width, 0.0, 4.0, 1) for _ in range(3)] == [3, 3, 2]
    assert width.decreases == 1
    # 2 is the least width.
    assert [note(width, 0.0, 1.0, 1) for _ in range(6)] == [2] * 6


def test_between_the_limits_the_width_stays() -> None:
    width = DraftWidth(9, 4)
    assert [note(width, 0.6, 1.0) for _ in range(20)] == [4] * 20
    assert width.observations == 20 and width.probes == 0


def test_the_width_stays_at_most_16() -> None:
    width = DraftWidth(1, 16)
    assert [note(width, 1.0, 1.0) for _ in range(5)] == [16] * 5 and width.probes == 0


def test_what_does_not_count() -> None:
    """Another width, rounds without evaluated or shown tokens, and times that are no times."""
    width = DraftWidth(9, 2)
    good = {"evaluated": 2, "accepted": 2, "tokens": 3, "milliseconds": 1.0}
    for wrong in ({"evaluated": 0}, {"tokens": 0}, {"milliseconds": 0.0}, {"milliseconds": float("inf")}):
        width.note(2, **{**good, **wrong})  # type: ignore[arg-type]
    width.note(3, **good)  # type: ignore[arg-type]
    assert width.observations == 0 and width.speed == 0.0
    width.note(2, **good)  # type: ignore[arg-type]
    assert width.observations == 1 and width.speed == 3.0


def test_a_new_round_has_a_weight_of_a_quarter() -> None:
    width = DraftWidth(9, 4)
    note(width, 0.6, 1.0, 5)
    note(width, 0.6, 5.0, 1)
    assert width.speed == pytest.approx((5 - 0.25 * 4) / (1 + 0.25 * 4))


def test_reset_keeps_the_counters() -> None:
    width = DraftWidth(9, 2)
    for _ in range(4):
        note(width, 1.0, 1.0)
    width.reset()
    assert (width.current, width.speed, width.observations, width.increases) == (2, 0.0, 4, 1)


def test_three_failures_in_a_row_pause_for_one_step() -> None:
    cooldown = Cooldown(True)
    found = []
    for is_least, accepted in ((True, 0), (True, 0), (True, 1), (True, 0), (False, 0), (True, 0), (True, 0), (True, 0)):
        cooldown.note(is_least=is_least, evaluated=2, accepted=accepted)
        found.append(cooldown.remaining)
    assert found == [0] * 7 + [1] and cooldown.entries == 1
    cooldown.note(is_least=True, evaluated=0, accepted=0)
    cooldown.complete_step()
    assert (cooldown.remaining, cooldown.steps, cooldown.entries) == (0, 1, 1)
    off = Cooldown(False)
    for _ in range(9):
        off.note(is_least=True, evaluated=2, accepted=0)
    assert (off.remaining, off.entries) == (0, 0)
