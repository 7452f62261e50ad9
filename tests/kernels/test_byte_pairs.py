"""Sums and products of 8-bit numbers against the definition in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.byte_functions import QParams, combined_bytes
from genai.kernels.cpu.program.thread_pool import Threads

TYPES = [np.int8, np.uint8]
SHAPES = [
    ((1,), (1,)),
    ((3, 17), (3, 17)),
    ((70, 90), (90,)),
    ((40, 500), ()),
    ((5, 4097), (1, 4097)),
]


@pytest.fixture(params=[1, 2])
def threads(request):
    return Threads(request.param)


def draw(rng, dtype, shape):
    info = np.iinfo(dtype)
    return np.asarray(rng.integers(info.min, info.max + 1, shape)).astype(dtype)


@pytest.mark.parametrize("name", ["Add", "Mul"])
@pytest.mark.parametrize(("a_type", "b_type", "dtype"), [(a, b, c) for a in TYPES for b in TYPES for c in TYPES])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("shapes", SHAPES)
def test_equals_the_definition(threads, rng, name, a_type, b_type, dtype, swapped, shapes):
    a, b = (draw(rng, kind, shape) for kind, shape in zip((a_type, b_type), shapes, strict=True))
    a_form, b_form, form = QParams(0.1, 3), QParams(0.07, -4), QParams(0.05 if name == "Add" else 0.4, 11)
    if swapped:
        a, b, a_form, b_form = b, a, b_form, a_form
    found = combined_bytes(threads, name, a, a_form, b, b_form, form, dtype)
    values = [(x.astype(np.float32) - np.float32(f.point)) * np.float32(f.scale) for x, f in ((a, a_form), (b, b_form))]
    total = values[0] + values[1] if name == "Add" else values[0] * values[1]
    info = np.iinfo(dtype)
    expected = np.clip(np.rint(total / np.float32(form.scale)) + form.point, info.min, info.max)
    np.testing.assert_array_equal(found, expected.astype(dtype))


def test_shapes_that_are_left_to_others(threads, rng):
    a, form = draw(rng, np.int8, (4, 5)), QParams(1.0, 0)
    assert combined_bytes(threads, "Add", a, form, draw(rng, np.int8, (4, 1)), form, form, np.int8) is None
    assert combined_bytes(threads, "Add", a, form, np.zeros(5, np.int16), form, form, np.int8) is None
    assert combined_bytes(threads, "Add", a[:0], form, a[:0], form, form, np.int8) is None
