"""Trees walked in compiled code against a plain walk, and two classes from one score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from genai.kernels.cpu.arrays.trees import (
    CLASSES,
    COMPLEMENT,
    LEAF,
    LEQ,
    LOGISTIC,
    LT,
    MAX,
    MIN,
    NEGATED,
    SIGMOID,
    SOFTMAX,
    SUM,
    VALUES,
    Forest,
    Scores,
    run_forest,
    score_forest,
)
from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.thread_pool import Threads
from genai.ops.trees import _NodeIndex


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
    with pytest.raises(ValueError, match="not the column 1"):
        score_forest(np.zeros((2, 9)), made, Scores(NEGATED, names=np.arange(2), column=1))
    with pytest.raises(ValueError, match="base is float64"):
        score_forest(np.zeros((2, 9)), made, Scores(VALUES, base=np.zeros(3)))


@pytest.mark.parametrize("form", [NEGATED, COMPLEMENT, LOGISTIC])
def test_two_classes(rng, form):
    made = forest(rng, 9, 4, 3, 2)
    x = rng.standard_normal((33, 5))
    scores = Scores(form, base=np.array([0.5, 0.25, 0.0]), names=np.array([7, -3]), column=1, threshold=0.5)
    pair, labels = score_forest(x, made, scores)
    score = (walked(x, made, SUM)[:, 1] + 0.25).astype(np.float32)
    np.testing.assert_array_equal(labels, np.where(score > 0.5, -3, 7))
    expected = {
        NEGATED: (-score, score),
        COMPLEMENT: (1 - score, score),
        LOGISTIC: (1 / (1 + np.exp(score)), 1 / (1 + np.exp(-score))),
    }[form]
    np.testing.assert_allclose(pair, np.stack(expected, 1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [CLASSES, SOFTMAX, SIGMOID])
def test_several_classes(rng, kind):
    made = forest(rng, 9, 4, 19, 2)  # more targets than a vector has lanes
    x, base = rng.standard_normal((33, 5)), rng.standard_normal(19)
    found, labels = score_forest(x, made, Scores(kind, base=base, names=np.arange(19) * 3))
    scores = (walked(x, made, SUM) + base).astype(np.float32)
    np.testing.assert_array_equal(labels, scores.argmax(1) * 3)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = {CLASSES: scores, SOFTMAX: weights / weights.sum(1, keepdims=True), SIGMOID: 1 / (1 + np.exp(-scores))}
    np.testing.assert_allclose(found, expected[kind], rtol=2e-6, atol=1e-7)
    if kind == CLASSES:
        np.testing.assert_array_equal(found, scores)


def test_the_label_is_that_of_the_first_largest_score_or_of_nan(rng):
    made = forest(rng, 4, 3, 4, 1)
    for base, label in (([5, 90, 90, 0], 1), ([0, np.nan, 90, np.nan], 1), ([-np.inf] * 4, 0)):
        ties = replace(made, weights=np.zeros_like(made.weights))
        _, labels = score_forest(np.zeros((1, 5)), ties, Scores(CLASSES, base=np.float64(base), names=np.arange(4)))
        assert labels is not None and labels.tolist() == [label]


@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize("aggregate", [SUM, MIN, MAX])
def test_values_of_targets(rng, aggregate, is_double):
    made = forest(rng, 9, 4, 3, 1)
    x, base = rng.standard_normal((9, 5)), rng.standard_normal(3)
    found, labels = score_forest(x, made, Scores(VALUES, aggregate, 9, base, is_double=is_double))
    expected = (walked(x, made, aggregate) / 9 + base).astype(np.float64 if is_double else np.float32)
    assert labels is None and found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", [LOGISTIC, CLASSES, SOFTMAX, SIGMOID])
def test_bits_of_a_row_do_not_depend_on_other_rows_or_threads(monkeypatch, rng, kind):
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)
    made = forest(rng, 9, 4, 3, 1)
    x, scores = rng.standard_normal((40, 5)), Scores(kind, names=np.arange(3))
    found, labels = score_forest(x, made, scores, threads=Threads(2))
    for row in range(len(x)):
        one, label = score_forest(x[row : row + 1], made, scores)
        assert one.tobytes() == found[row].tobytes() and label.tobytes() == labels[row].tobytes()


def test_a_forest_walks_rows_of_several_widths_and_types(rng):
    made = forest(rng, 5, 4, 2, 1)
    rows = rng.standard_normal((3, 9)).astype(np.float32)
    expected = run_forest(rows, made)
    for other in (rows.astype(np.float64), np.ascontiguousarray(rows[:, :5]), rows):
        np.testing.assert_array_equal(run_forest(other, made), expected)


@pytest.mark.parametrize("step", [1, 3], ids=["dense ids", "ids with gaps"])
def test_positions_of_nodes(step):
    rng = np.random.default_rng(4)
    pairs = rng.permutation([(5 + step * tree, step * node - 2) for tree in range(7) for node in range(20)])
    index = _NodeIndex(pairs[:, 0], pairs[:, 1])
    wanted = rng.permutation(len(pairs))
    np.testing.assert_array_equal(index.positions(*pairs[wanted].T), wanted)
    for missing in [(4, 0), (5 + 7 * step, -2), (5, 20 * step - 2), (5, -3), (5, 2**62), (-(2**63), -2)]:
        with pytest.raises(KeyError):
            index.positions(np.array([5, missing[0]]), np.array([-2, missing[1]]))
