"""Nearest elements of Resize: places computed with fractions, because a float32 scale would decide ties."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import genai

ROUNDED = {
    "round_prefer_floor": lambda at: math.ceil(at - Fraction(1, 2)),
    "round_prefer_ceil": lambda at: math.floor(at + Fraction(1, 2)),
    "floor": math.floor,
    "ceil": math.ceil,
}
COORDINATES = {
    "align_corners": lambda k, before, after: Fraction(k * (before - 1), after - 1) if after > 1 else Fraction(0),
    "asymmetric": lambda k, before, after: Fraction(k * before, after),
    "half_pixel": lambda k, before, after: Fraction((2 * k + 1) * before, 2 * after) - Fraction(1, 2),
    "half_pixel_symmetric": lambda k, before, after: Fraction((2 * k + 1) * before, 2 * after) - Fraction(1, 2),
    "pytorch_half_pixel": lambda k, before, after: (
        Fraction((2 * k + 1) * before, 2 * after) - Fraction(1, 2) if after > 1 else Fraction(0)
    ),
    "tf_half_pixel_for_nn": lambda k, before, after: Fraction((2 * k + 1) * before, 2 * after),
}


@pytest.mark.parametrize("rounding", ROUNDED)
@pytest.mark.parametrize("where", COORDINATES)
def test_nearest_elements_of_resized_lines(one_node, where, rounding):
    """Sizes define an exact scale, so that ties are decided by the rounding and not by a float32 scale."""
    version = 11 if where == "tf_half_pixel_for_nn" else 19
    attributes = {"mode": "nearest", "coordinate_transformation_mode": where, "nearest_mode": rounding}
    for before in (1, 2, 3, 7, 26, 50, 99):
        for after in (1, 2, 5, 7, 21, 64, 98, 100):
            x = np.arange(before, dtype=np.float32)
            inputs = {"x": x, "r": None, "s": None, "n": np.array([after])}
            model = one_node("Resize", inputs, version=version, **attributes)
            feed = {"x": x, "n": inputs["n"]}
            places = [ROUNDED[rounding](COORDINATES[where](k, before, after)) for k in range(after)]
            expected = x if before == after else np.clip(places, 0, before - 1)
            assert genai.InferenceSession(model).run(None, feed)[0].tolist() == expected.tolist(), (before, after)


@pytest.mark.parametrize(("policy", "sizes"), [("not_larger", (6, 64)), ("not_smaller", (64, 6))])
def test_nearest_elements_with_one_scale_for_all_axes(one_node, policy, sizes):
    x = np.arange(26 * 26, dtype=np.float32).reshape(26, 26)
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    inputs = {"x": x, "r": None, "s": None, "n": np.array(sizes)}
    model = one_node("Resize", inputs, version=19, keep_aspect_ratio_policy=policy, **attributes)
    feed = {"x": x, "n": inputs["n"]}
    after = min(sizes) if policy == "not_larger" else max(sizes)
    places = [k * 26 // after for k in range(after)]
    assert genai.InferenceSession(model).run(None, feed)[0].tolist() == x[np.ix_(places, places)].tolist()
