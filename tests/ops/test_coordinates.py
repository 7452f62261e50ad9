"""GatherND and ScatterND beside NumPy's indexing with one array per coordinate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.ops.indexing import gather_nd, scatter_nd


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("low", [0, -3])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, object])
def test_coordinates(depth: int, low: int, dtype: Any, rng: np.random.Generator) -> None:
    plain = rng.integers(0, 9, (5, 4, 3)).astype(dtype)
    for x in (plain, plain[::-1], plain.transpose(1, 0, 2), plain.copy(order="F")):
        indices = np.stack([rng.integers(max(low, -size), size, (2, 3)) for size in x.shape[:depth]], -1)
        index = tuple(np.moveaxis(indices, -1, 0))
        found = gather_nd(x, indices)
        assert found.dtype == x.dtype and found.tolist() == x[index].tolist()
        expected, updates = x.copy(), rng.integers(0, 9, x[index].shape).astype(dtype)
        for place in np.ndindex(2, 3):  # of equal coordinates, the last one counts
            expected[tuple(indices[place])] = updates[place]
        before = x.copy()
        assert scatter_nd(x, indices, updates).tolist() == expected.tolist()
        assert x.tolist() == before.tolist()


@pytest.mark.parametrize(("reduction", "function"), [("add", np.add), ("max", np.maximum), ("mul", np.multiply)])
def test_reductions_of_equal_coordinates(reduction: str, function: Any, rng: np.random.Generator) -> None:
    x, indices = rng.standard_normal((3, 2, 2)), rng.integers(0, 2, (20, 2))
    updates, expected = rng.standard_normal((20, 2)), x.copy()
    for place, update in zip(indices, updates, strict=True):
        expected[tuple(place)] = function(expected[tuple(place)], update)
    np.testing.assert_allclose(scatter_nd(x, indices, updates, reduction=reduction), expected)


@pytest.mark.parametrize("bad", [[[0, 2]], [[-4, 0]], [[9, 0]]])
def test_coordinates_out_of_range(bad: list[list[int]]) -> None:
    with pytest.raises(IndexError, match="must be within the inclusive range"):
        gather_nd(np.zeros((3, 2)), np.array(bad))
    with pytest.raises(IndexError, match="must be within the inclusive range"):
        scatter_nd(np.zeros((3, 2)), np.array(bad), np.zeros(1))


def test_one_coordinate_without_axes() -> None:
    found = gather_nd(np.arange(6.0).reshape(2, 3), np.array([1, 2]))
    assert found.shape == () and found == 5
