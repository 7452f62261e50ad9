"""Logic, comparisons, choices and lookups of recorded programs against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.elements import chosen, compared, converted, logical, picked_slices
from genai.kernels.cpu.program.recording import recorded

COMPARISONS = {
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
}
LOGIC = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}
SHAPES = [((), ()), ((7,), ()), ((3, 1, 5), (4, 1)), ((2, 1, 3, 1, 2), (3, 1, 2)), ((16, 17), (16, 17))]


def numbers(rng, dtype, shape, axes_reversed=False):
    """Random numbers, in an array whose axes are in another order in memory if `axes_reversed`."""
    shape = shape[::-1] if axes_reversed else shape
    found = rng.integers(-2, 3, shape).astype(dtype)
    if dtype == np.int64:
        found *= np.int64(1 << 40)
    return found.T if axes_reversed else found


def agree(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("axes_reversed", [False, True])
@pytest.mark.parametrize(("first", "second"), SHAPES)
@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.int64, np.float32])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(rng, name, dtype, first, second, axes_reversed):
    a, b = numbers(rng, dtype, first, axes_reversed), numbers(rng, dtype, second)
    with recorded() as recorder:
        agree(compared(name, a, b), np.asarray(COMPARISONS[name](a, b)))
    assert len(recorder.runs) == 1


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_of_special_floats(name):
    special = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, -2.5, 1e-45], np.float32)
    a, b = special[:, None], special
    with recorded():
        agree(compared(name, a, b), COMPARISONS[name](a, b))


@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_logic(rng, first, second):
    a, b = (numbers(rng, np.bool_, shape) for shape in (first, second))
    a = np.asarray(a.view(np.uint8) * np.uint8(2)).view(np.bool_)  # any byte but 0 is true
    with recorded():
        for name, function in LOGIC.items():
            agree(logical(name, a, b), np.asarray(function(a, b)))
        agree(logical("Not", a), np.asarray(np.logical_not(a)))


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.int64, np.float32])
@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_choices(rng, dtype, first, second):
    condition, x, y = numbers(rng, np.bool_, first), numbers(rng, dtype, second), numbers(rng, dtype, first)
    if dtype == np.float32:
        x, y = np.where(x > 1, np.float32(np.nan), x), np.where(y < 0, np.float32(-0.0), y)
    with recorded():
        agree(chosen(condition, x, y), np.asarray(np.where(condition, x, y)))


@pytest.mark.parametrize("to", [np.bool_, np.int32, np.int64, np.float32])
@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.int64])
def test_conversions(rng, dtype, to):
    x = numbers(rng, dtype, (5, 1, 7), axes_reversed=True)
    if dtype == np.int64:
        x = x + np.int64((1 << 24) + 1)  # not a float32
    with recorded():
        agree(converted(x, np.dtype(to)), np.ascontiguousarray(x.astype(to)))


def test_floats_to_bool():
    x = np.array([0.0, -0.0, 1e-45, np.nan, -np.inf, 2.0], np.float32)
    with recorded():
        agree(converted(x, np.dtype(np.bool_)), x != 0)
        assert converted(x, np.dtype(np.int64)) is None


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.int64, np.float32])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_lookups(rng, dtype, axis):
    x = numbers(rng, dtype, (3, 4, 5))
    with recorded() as recorder:
        for indices in (np.array([[2, -1], [0, -3]]), np.array([1], np.int32), np.array(2)):
            agree(picked_slices(x, indices, axis), np.take(x, indices, axis))
        assert len(recorder.fixed) == 3
        assert picked_slices(x, np.array([x.shape[axis]]), axis) is None
        assert picked_slices(x.T, np.array([0]), axis) is None


def test_what_numpy_computes(rng):
    x = numbers(rng, np.int64, (8,))
    assert compared("Equal", x, x) is None  # no program is recorded
    with recorded() as recorder:
        assert compared("Equal", x, x.astype(np.int32)) is None
        assert compared("Equal", x, numbers(rng, np.int64, (3,))) is None
        assert compared("Equal", x[::-1], x) is None
        assert compared("Equal", x[:0], x[:0]) is None
        assert compared("Less", *np.broadcast_arrays(x[:, None], np.zeros(1000, np.int64))) is None
        assert compared("Less", x.astype(np.float64), x.astype(np.float64)) is None
        assert logical("And", x, x) is None
        assert logical("Not", np.bool_(True)) is None
        assert chosen(x > 0, x, x.astype(np.float32)) is None
        assert converted(x, np.dtype(np.float64)) is None
        many = np.zeros((2, 2, 2, 2, 2, 4), np.int64)[..., ::2]
        assert compared("Less", many.transpose(4, 2, 0, 3, 1, 5), many) is None  # too many axes
    assert not recorder.runs
