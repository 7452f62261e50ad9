"""Stacked rows of logits: a view if they are adjacent in a step's memory, else a copy."""

import numpy as np
import pytest

from genai.engine.sampling.batch import stacked


@pytest.fixture
def step() -> np.ndarray:
    return np.arange(24, dtype=np.float32).reshape(6, 4)


def test_neighbours_share_the_steps_memory(step: np.ndarray) -> None:
    found = stacked([step[index] for index in (1, 2, 3)])
    np.testing.assert_array_equal(found, step[1:4])
    assert np.shares_memory(found, step) and found.flags.c_contiguous


def test_one_row(step: np.ndarray) -> None:
    np.testing.assert_array_equal(stacked([step[5]]), step[5:])


@pytest.mark.parametrize("order", [(2, 1), (0, 2), (3, 3)])
def test_rows_elsewhere_are_copied(step: np.ndarray, order: tuple[int, ...]) -> None:
    found = stacked([step[index] for index in order])
    np.testing.assert_array_equal(found, step[list(order)])
    assert not np.shares_memory(found, step)


def test_rows_of_different_steps(step: np.ndarray) -> None:
    other = step + 100
    np.testing.assert_array_equal(stacked([step[0], other[1]]), [step[0], other[1]])


def test_rows_that_own_their_memory() -> None:
    rows = [np.ones(3, np.float32), np.zeros(3, np.float32)]
    np.testing.assert_array_equal(stacked(rows), rows)
