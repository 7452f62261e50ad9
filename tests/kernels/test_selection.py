"""Selection of the largest numbers and of boxes against sorts and a loop in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.selection import NearestElements, largest, picked, without_overlap
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.device import StepError


def sorted_indices(x, smallest):
    """All indices by a stable sort. NaN is the largest number."""
    if smallest:
        return np.argsort(x, axis=-1, kind="stable")
    return x.shape[-1] - 1 - np.argsort(x[:, ::-1], axis=-1, kind="stable")[:, ::-1]


@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("threads", [None, Threads(2)])
def test_largest(threads, dtype, smallest, rng):
    for rows, width in ((1, 1), (3, 17), (2, 300), (5, 1000)):
        x = (rng.standard_normal((rows, width)) * 9).astype(np.int32).astype(dtype)  # with many equal numbers
        if dtype == np.float32:
            x[:, ::3] = rng.standard_normal(x[:, ::3].shape)
            special = np.float32([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45])
            x[0, : min(8, width)] = special[:width]
        else:
            x[-1, -1] = np.iinfo(np.int32).min
        expected = sorted_indices(x, smallest)
        for count in {0, 1, width // 2, width}:
            np.testing.assert_array_equal(largest(x, count, smallest=smallest, threads=threads), expected[:, :count])


@pytest.mark.parametrize(
    ("x", "count"), [(np.zeros((2, 3)), 1), (np.zeros((2, 3), np.float32), 4), (np.zeros(3, np.float32), 1)]
)
def test_arguments_that_do_not_fit(x, count):
    with pytest.raises(ValueError, match="expected"):
        largest(x, count)


def selected(corners, scores, limit, threshold, least):
    """Select boxes of one class as the definition does, in float64."""
    corners, chosen = corners.astype(np.float64), []
    areas = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    for box in np.argsort(-scores, kind="stable"):
        sides = np.minimum(corners[box, 2:], corners[chosen, 2:]) - np.maximum(corners[box, :2], corners[chosen, :2])
        common = np.maximum(sides, 0).prod(axis=1)
        is_free = np.all(common <= threshold * (areas[box] + areas[chosen] - common))
        if scores[box] > least and is_free and len(chosen) < limit:
            chosen.append(int(box))
    return chosen


@pytest.mark.parametrize("threads", [None, Threads(2)])
@pytest.mark.parametrize(
    ("limit", "threshold", "least"), [(3, 0.5, 0.2), (100, 0.0, -np.inf), (100, 1.0, 0.5), (5, 0.3, 2.0)]
)
def test_boxes(threads, limit, threshold, least, rng):
    low = rng.uniform(0, 20, (2, 40, 2))
    corners = np.concatenate([low, low + rng.uniform(0, 9, (2, 40, 2))], axis=2).astype(np.float32)
    corners[1, 5, 2:] = corners[1, 5, :2]  # a box without area
    scores = rng.uniform(0, 1, (2, 3, 40)).round(1).astype(np.float32)  # with equal scores
    found, counts = without_overlap(corners, scores, limit, threshold, least, threads)
    for image, kind in np.ndindex(2, 3):
        expected = selected(corners[image], scores[image, kind], limit, threshold, least)
        assert found[image, kind, : counts[image, kind]].tolist() == expected


def test_forms_of_boxes(rng):
    """Corners in the other order, and centres with sizes; NaN and negative sizes overlap nothing."""
    low = rng.integers(0, 99, (1, 90, 2)).astype(np.float32)
    sizes = 2 * rng.integers(1, 20, low.shape).astype(np.float32)  # every number is exact
    scores = rng.uniform(0, 1, (1, 1, 90)).astype(np.float32)
    corners = np.concatenate([low, low + sizes], axis=2)
    expected, counts = without_overlap(corners, scores, 90, 0.2, 0.0)
    assert 32 < counts[0, 0] < 90
    turned = np.where(np.arange(90)[:, None] % 3 == 0, corners[..., [2, 1, 0, 3]], corners[..., [0, 3, 2, 1]])
    centred = np.concatenate([low + sizes / 2, sizes], axis=2)
    for boxes, is_centred in ((turned, False), (centred, True)):
        boxes = np.ascontiguousarray(boxes)
        found, found_counts = without_overlap(boxes, scores, 90, 0.2, 0.0, is_centred=is_centred)
        assert found_counts == counts
        np.testing.assert_array_equal(found[..., : counts[0, 0]], expected[..., : counts[0, 0]])
    centred[..., 2:] *= -1
    corners[:, ::2, 1] = np.nan
    for boxes, is_centred, least in ((centred, True, 90), (corners, False, 45)):
        assert without_overlap(boxes, scores, 90, 0.2, 0.0, is_centred=is_centred)[1] >= least


def test_no_boxes():
    found, counts = without_overlap(np.zeros((1, 0, 4), np.float32), np.zeros((1, 2, 0), np.float32), 5, 0.5, 0.0)
    assert found.shape == (1, 2, 0) and counts.tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float64])
@pytest.mark.parametrize("threads", [None, Threads(2)])
def test_picked(threads, dtype, rng):
    x, indices = (rng.standard_normal((5, 7)) * 9).astype(dtype), rng.integers(-7, 7, (5, 11))
    np.testing.assert_array_equal(picked(x, indices, threads=threads), np.take_along_axis(x, indices, 1))
    for bad in (-8, 7):
        indices[3, 2] = bad
        with pytest.raises(StepError, match="index outside its table"):
            picked(x, indices, threads=threads)
    with pytest.raises(ValueError, match="x is float16, expected numbers of 4 or 8 bytes"):
        picked(x.astype(np.float16), indices)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_nearest_elements(dtype, rng):
    """Rows and columns in any order, doubled ones (of whole vectors and less), and none. NaNs keep their bits."""
    for planes, rows, columns in ((1, 1, 1), (3, 5, 7), (2, 4, 16), (1, 3, 33), (0, 2, 2), (2, 9, 40)):
        x = rng.integers(0, 1 << 32, (planes, rows, columns)).astype(np.uint32).view(dtype)
        doubled = [np.arange(2 * size) // 2 for size in (rows, columns)]
        some = [rng.integers(0, size, 19) for size in (rows, columns)]
        none = np.zeros(0, np.int64)
        for y, z in (doubled, some, (doubled[0], some[1]), (some[0], doubled[1]), (none, some[1]), (some[0], none)):
            select = NearestElements(x.shape, y, z)
            expected = x[:, y][:, :, z].tobytes()
            assert [select(x).tobytes(), select(x, Threads(2)).tobytes()] == [expected, expected]


def test_nearest_elements_that_do_not_exist():
    with pytest.raises(IndexError, match="rows are from 0 to 2, expected 0 to 1"):
        NearestElements((1, 2, 3), np.array([0, 2]), np.array([0]))
    with pytest.raises(IndexError, match="columns are from -1 to 0, expected 0 to 2"):
        NearestElements((1, 2, 3), np.array([0]), np.array([0, -1]))
    select = NearestElements((1, 2, 3), np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match="x is float64, expected numbers of 4 bytes"):
        select(np.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match=r"x is float32 \[1, 2, 4\]"):
        select(np.zeros((1, 2, 4), np.float32))


@pytest.mark.parametrize("threads", [None, Threads(2)])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64, np.int64])
def test_picked_by_any_indices(threads, dtype, rng):
    for rows, width, count in ((1, 1, 1), (3, 5, 8), (40, 33, 100), (2, 9, 7)):
        x = (rng.standard_normal((rows, width)) * 99).astype(dtype)
        for low in (0, -width):  # without and with negative indices
            indices = rng.integers(low, width, (rows, count))
            np.testing.assert_array_equal(picked(x, indices, threads=threads), np.take_along_axis(x, indices, axis=1))
        for place in range(count):
            for outside in (width, -width - 1, 1 << 40, -(1 << 40)):
                indices[-1, place] = outside
                with pytest.raises(StepError):
                    picked(x, indices, threads=threads)
            indices[-1, place] = 0
