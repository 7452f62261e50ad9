from __future__ import annotations

import numpy as np
import pytest

from genai.engine.sampling.search import Sampling, sample


def logits(*rows: list[float]) -> np.ndarray:
    return np.asarray(rows, np.float32)


def draw_many(row: np.ndarray, count: int, **options: object) -> np.ndarray:
    """Tokens drawn for one distribution at `count` different positions."""
    sampling = Sampling(do_sample=True, **options)  # type: ignore[arg-type]
    histories = [[0] * position for position in range(count)]
    return sample(np.tile(row, (count, 1)), histories, [0] * count, sampling, ())


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample(logits([0, 3, 3], [5, 1, 2]), [[], []], [0, 1], Sampling(), ()).tolist() == [1, 0]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"temperature": 0.0}])
def test_top_1_and_temperature_0_are_greedy(options: dict[str, float]) -> None:
    sampling = Sampling(do_sample=True, **options)  # type: ignore[arg-type]
    assert sample(logits([0.0, 0.1, 0.05]), [[]], [0], sampling, ()).tolist() == [1]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(seed: int, temperature: float) -> None:
    row = np.array([2.0, 1.0, 0.0, -1.0, 0.5], np.float32)
    weights = np.exp(row.astype(np.float64) / temperature)
    expected = weights / weights.sum()
    count = 20000
    tokens = draw_many(row, count, top_k=0, temperature=temperature, seed=seed)
    observed = np.bincount(tokens, minlength=5)
    chi_squared = float(np.sum((observed - count * expected) ** 2 / (count * expected)))
    assert chi_squared < 23.5  # 4 degrees of freedom, p = 0.0001


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_top_k_keeps_exactly_the_k_best(seed: int) -> None:
    row = np.random.default_rng(seed).normal(size=50).astype(np.float32)
    tokens = draw_many(row, 3000, top_k=5, temperature=3.0, seed=seed)
    assert set(tokens.tolist()) == set(np.argsort(-row)[:5].tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert set(draw_many(row, 2000, top_k=0, top_p=0.8).tolist()) == {0, 1}
    assert set(draw_many(row, 2000, top_k=0, top_p=0.81).tolist()) == {0, 1, 2}
    assert set(draw_many(row, 2000, top_k=0, top_p=1e-6).tolist()) == {0}


def test_top_p_is_applied_inside_top_k() -> None:
    row = np.log(np.array([0.4, 0.4, 0.1, 0.1], np.float32))
    # Among the best two each has probability 0.5, so 0.5 is reached by the first alone.
    assert set(draw_many(row, 500, top_k=2, top_p=0.5).tolist()) == {0}


def test_draws_depend_on_seed_row_and_position_only() -> None:
    row = np.zeros(1000, np.float32)
    sampling = Sampling(do_sample=True, top_k=0, seed=7)
    alone = sample(row[None], [[1, 2, 3]], [4], sampling, ())
    beside = sample(np.tile(row, (3, 1)), [[9], [1, 2, 3], [5, 5]], [0, 4, 1], sampling, ())
    assert alone[0] == beside[1]
    other_seed = sample(row[None], [[1, 2, 3]], [4], Sampling(do_sample=True, top_k=0, seed=8), ())
    assert alone[0] != other_seed[0]


def test_minimum_length_holds_back_eos() -> None:
    sampling = Sampling(min_length=3)
    scores = logits([0, 9, 1], [0, 9, 1])
    assert sample(scores, [[0, 0], [0, 0, 0]], [0, 1], sampling, (1,)).tolist() == [2, 1]
    assert scores[0, 1] == 9, "the caller's logits must not change"


def test_repetition_penalty_divides_positive_and_multiplies_negative() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    assert sample(logits([3.0, 2.0, -1.0]), [[0]], [0], sampling, ()).tolist() == [1]
    assert sample(logits([-1.0, -1.5, -3.0]), [[0, 0]], [0], sampling, ()).tolist() == [1]
    # Seen twice counts once.
    assert sample(logits([5.0, 2.0]), [[0, 0, 0]], [0], sampling, ()).tolist() == [0]


def test_extreme_logits_do_not_overflow() -> None:
    row = np.array([1e30, -1e30, 0, -np.inf], np.float32)
    assert set(draw_many(row, 100, top_k=0, temperature=0.01).tolist()) == {0}
