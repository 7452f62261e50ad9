"""Trees walked in compiled code against a plain walk, and two classes from one score."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.trees import (
    COMPLEMENT,
    LEAF,
    LEQ,
    LOGISTIC,
    LT,
    MAX,
    MIN,
    NEGATED,
    SUM,
    Forest,
    binary_scores,
    run_forest,
)
from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.thread_pool import Threads


def forest(rng: np.random.Generator, trees: int, depth: int, targets: int, weights_per_leaf: int) -> Forest:
    """Full trees of random tests; nodes of a tree lie one after the other, in the order of levels."""
    size, inner = 2**depth - 1, 2 ** (depth - 1) - 1
    place = np.tile(np.arange(size), trees)
    base = np.repeat(np.arange(trees) * size, size)
    is_inner = place < inner
    counts = np.where(is_inner, 0, weights_per_leaf)
    total = int(counts.sum())
    return Forest(
        (np.arange(trees) * size).astype(np.int32),
        rng.integers(0, 5, len(place)).astype(np.int32),
        np.where(is_inner, base + 2 * place + 1, 0).astype(np.int32),
        np.where(is_inner, base + 2 * place + 2, 0).astype(np.int32),
        rng.standard_normal(len(place)),
        np.where(is_inner, rng.choice([LEQ, LT], len(place)), LEAF).astype(np.uint8),
        rng.integers(0, 2, len(place)).astype(np.uint8),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        rng.integers(0, targets, total).astype(np.int32),
        rng.standard_normal(total),
        targets,
    )


def walked(x: np.ndarray, trees: Forest, aggregate: int) -> np.ndarray:
    combine = {SUM: np.add, MIN: np.minimum, MAX: np.maximum}[aggregate]
    out = np.full((len(x), trees.num_targets), {SUM: 0.0, MIN: np.inf, MAX: -np.inf}[aggregate])
    for row in range(len(x)):
        for node in trees.roots:
            while trees.modes[node] != LEAF:
                value, threshold = float(x[row, trees.features[node]]), trees.thresholds[node]
                goes = value <= threshold if trees.modes[node] == LEQ else value < threshold
                if np.isnan(value):
                    goes = bool(trees.missing_tracks_true[node])
                node = (trees.true_children if goes else trees.false_children)[node]
            for i in range(trees.leaf_starts[node], trees.leaf_starts[node + 1]):
                target = trees.targets[i]
                out[row, target] = combine(out[row, target], trees.weights[i])
    out[np.isinf(out)] = 0
    return out


@pytest.mark.parametrize("aggregate", [SUM, MIN, MAX])
@pytest.mark.parametrize(
    ("trees", "depth", "targets", "weights"), [(1, 1, 1, 1), (3, 2, 2, 1), (4, 3, 1, 2), (9, 5, 3, 1), (14, 4, 2, 0)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_a_plain_walk(monkeypatch, rng, aggregate, trees, depth, targets, weights, dtype):
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)
    made = forest(rng, trees, depth, targets, weights)
    made.check_integrity()
    x = rng.standard_normal((20, 5)).astype(dtype)
    x[3, 2] = np.nan
    for threads in (None, Threads(2)):
        np.testing.assert_array_equal(run_forest(x, made, aggregate, threads=threads), walked(x, made, aggregate))
    np.testing.assert_array_equal(run_forest(x[:7], made, aggregate), walked(x[:7], made, aggregate))


def test_what_does_not_fit(rng):
    made = forest(rng, 2, 4, 1, 1)
    with pytest.raises(ValueError, match="features"):
        run_forest(np.zeros((2, made.num_features - 1)), made)
    with pytest.raises(ValueError, match="expected C-contiguous"):
        run_forest(np.zeros((2, 9), np.int64), made)
    with pytest.raises(ValueError, match="column 1"):
        binary_scores(np.zeros((2, 1)), 1, 0.0, 0.0, NEGATED)


@pytest.mark.parametrize("form", [NEGATED, COMPLEMENT, LOGISTIC])
def test_two_classes(rng, form):
    scores = np.ascontiguousarray(rng.standard_normal((33, 3)) * 4)
    chosen, pair = binary_scores(scores, 1, 0.25, 0.5, form)
    score = (scores[:, 1] + 0.25).astype(np.float32)
    np.testing.assert_array_equal(chosen, score > 0.5)
    expected = {
        NEGATED: (-score, score),
        COMPLEMENT: (1 - score, score),
        LOGISTIC: (1 / (1 + np.exp(score)), 1 / (1 + np.exp(-score))),
    }[form]
    np.testing.assert_allclose(pair, np.stack(expected, 1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", [NEGATED, COMPLEMENT, LOGISTIC])
def test_two_classes_of_one_row_have_the_same_bits(rng, form):
    scores = np.ascontiguousarray(rng.standard_normal((40, 2)) * 4)
    chosen, pairs = binary_scores(scores, 1, 0.1, 0.0, form)
    for row in range(len(scores)):
        one, pair = binary_scores(scores[row : row + 1], 1, 0.1, 0.0, form)
        assert (one.dtype, pair.dtype) == (chosen.dtype, pairs.dtype)
        assert one.tolist() == [chosen[row]] and pair.tobytes() == pairs[row].tobytes()


def test_a_forest_walks_rows_of_several_widths_and_types(rng):
    made = forest(rng, 5, 4, 2, 1)
    rows = rng.standard_normal((3, 9)).astype(np.float32)
    expected = run_forest(rows, made)
    for other in (rows.astype(np.float64), np.ascontiguousarray(rows[:, :5]), rows):
        np.testing.assert_array_equal(run_forest(other, made), expected)
