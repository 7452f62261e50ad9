"""Softmax, reductions and top-k: what routers of experts are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.rowwise.binary import binary
from genai.kernels.cpu.rowwise.reduction import REDUCTIONS, reduce
from genai.kernels.cpu.rowwise.softmax import softmax
from genai.kernels.cpu.rowwise.top_k import top_k
from genai.kernels.cpu.tape.program import Rows

Walk = Callable[..., list[np.ndarray]]
Normal = Callable[..., np.ndarray]

any_width = pytest.mark.parametrize("width", [1, 15, 17, 31, 896])
any_groups = pytest.mark.parametrize("groups", [1, 3])
DEFINITIONS = {"max": np.max, "mean": np.mean, "min": np.min, "sum": np.sum}


@np.errstate(all="ignore")
def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@any_width
@any_groups
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e6])
def test_softmax_in_place(width: int, groups: int, scale: float, walk: Walk, normal: Normal) -> None:
    x = (normal(3, groups * width) * scale).astype(np.float32)
    (out,) = walk(lambda x: softmax(Rows.of(x), Rows.of(x), groups=groups), x)
    expected = _softmax(x.reshape(3, groups, width)).reshape(x.shape)
    # Far below the maximum the difference from it has an error of its own, of up to 4e-6.
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-44)


def test_softmax_of_infinities_and_nan(walk: Walk, normal: Normal) -> None:
    x = normal(5, 35)
    x[0, 34] = x[1, 3] = -np.inf
    x[2] = -np.inf
    x[3, 20] = np.inf
    x[4, 33] = np.nan
    _, out = walk(lambda x, out: softmax(Rows.of(x), Rows.of(out)), x, np.zeros_like(x))
    np.testing.assert_allclose(out, _softmax(x), rtol=3e-6)
    assert np.isnan(out[2:]).any(axis=1).all()


def test_every_reduction_has_a_definition() -> None:
    assert DEFINITIONS.keys() == REDUCTIONS.keys()


@any_width
@any_groups
@pytest.mark.parametrize("name", DEFINITIONS)
def test_reduction(name: str, width: int, groups: int, walk: Walk, normal: Normal) -> None:
    x = normal(4, groups * width)
    _, out = walk(lambda x, out: reduce(name, Rows.of(x), Rows.of(out), groups=groups), x, np.zeros((4, groups), "f4"))
    expected = DEFINITIONS[name](x.reshape(4, groups, width).astype(np.float64), axis=-1)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("column", [0, 20, 34])
def test_reduction_of_nan_is_nan(name: str, column: int, walk: Walk, normal: Normal) -> None:
    x = normal(2, 35)
    x[1, column] = np.nan
    _, out = walk(lambda x, out: reduce(name, Rows.of(x), Rows.of(out)), x, np.zeros((2, 1), np.float32))
    assert np.isfinite(out[0, 0])
    assert np.isnan(out[1, 0])


@pytest.mark.parametrize(("width", "k"), [(1, 1), (4, 4), (8, 2), (60, 4), (128, 8), (300, 1)])
@pytest.mark.parametrize("distinct", [3, 1000])
def test_top_k(width: int, k: int, distinct: int, walk: Walk, rng: np.random.Generator) -> None:
    # Few distinct values: many ties, of which the first comes first.
    x = rng.integers(-distinct, distinct, (5, width)).astype(np.float32)

    def build(x: np.ndarray, values: np.ndarray, indices: np.ndarray) -> Any:
        return top_k(Rows.of(x), Rows.of(values), Rows.of(indices.view(np.float32)))

    _, values, indices = walk(build, x, np.zeros((5, k), np.float32), np.full((5, k), -1, np.int32))
    expected = np.argsort(-x, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))


def test_top_k_puts_nan_first(walk: Walk) -> None:
    x = np.array([[1, np.nan, -np.inf, np.inf, np.nan, 2]], np.float32)

    def build(x: np.ndarray, values: np.ndarray, indices: np.ndarray) -> Any:
        return top_k(Rows.of(x), Rows.of(values), Rows.of(indices.view(np.float32)))

    _, values, indices = walk(build, x, np.zeros((1, 6), np.float32), np.zeros((1, 6), np.int32))
    np.testing.assert_array_equal(indices, [[1, 4, 3, 5, 0, 2]])
    np.testing.assert_array_equal(values, x[:, indices[0]])


def test_router_of_experts(walk: Walk, normal: Normal) -> None:
    logits = normal(9, 60)

    def build(logits: np.ndarray, indices: np.ndarray, weights: np.ndarray, total: np.ndarray) -> list[Any]:
        scores, chosen, sums = Rows.of(logits), Rows.of(weights), Rows.of(total)
        return [
            softmax(scores, scores),
            top_k(scores, chosen, Rows.of(indices.view(np.float32))),
            reduce("sum", chosen, sums),
            binary("divide", chosen, sums, chosen),
        ]

    empty = np.zeros((9, 4), np.float32)
    _, indices, weights, _ = walk(build, logits, empty.view(np.int32), empty, np.zeros((9, 1), np.float32))
    expected = np.argsort(-logits, axis=1)[:, :4]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_allclose(weights, _softmax(np.take_along_axis(logits, expected, 1)), rtol=1e-6)


def test_bad_arguments() -> None:
    x, narrow = Rows.of(np.zeros((2, 8), np.float32)), Rows.of(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match=r"x is \[TOKENS, 8\], expected \[TOKENS, 2\]"):
        softmax(x, narrow)
    with pytest.raises(ValueError, match=r"x is \[TOKENS, 8\], which has no 0 equal groups"):
        softmax(x, x, groups=0)
    with pytest.raises(ValueError, match="no reduction is named 'median'"):
        reduce("median", x, narrow)
    with pytest.raises(ValueError, match=r"out is \[TOKENS, 2\], expected \[TOKENS, 1\]"):
        reduce("sum", x, narrow)
    with pytest.raises(ValueError, match=r"values is \[TOKENS, 8\], but x has 2 numbers in a row"):
        top_k(narrow, x, x)
    with pytest.raises(ValueError, match=r"indices is \[TOKENS, 8\], expected \[TOKENS, 2\]"):
        top_k(x, narrow, x)
