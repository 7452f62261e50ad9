"""The compiled depthwise convolution against the tap-by-tap form."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.depthwise import depthwise
from genai.kernels.cpu.team import Team


@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (5, 2)])
@pytest.mark.parametrize("batch", [1, 2])
def test_equals_the_sum_of_taps(strides, kernel, batch):
    rng, channels = np.random.default_rng(5), 5
    x = rng.standard_normal((batch * channels, 11, 13)).astype(np.float32)
    weight = rng.standard_normal((channels, *kernel)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32)
    team = Team(3, min_work_per_part=1)
    found = depthwise(x, weight, bias, strides, team=team)
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel, axis=(1, 2))[:, :: strides[0], :: strides[1]]
    per_plane = np.tile(weight.astype(np.float64), (batch, 1, 1))
    expected = np.einsum("prcij,pij->prc", windows, per_plane) + np.tile(bias, batch)[:, None, None]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    team.close()


@pytest.mark.parametrize(
    ("planes", "kernels", "strides"),
    [((3, 5, 5), (2, 3, 3), (1, 1)), ((2, 2, 5), (2, 3, 3), (1, 1)), ((2, 5, 5), (2, 3, 3), (0, 1))],
)
def test_what_does_not_fit(planes, kernels, strides):
    with pytest.raises(ValueError, match="fit"):
        depthwise(
            np.zeros(planes, np.float32), np.zeros(kernels, np.float32), np.zeros(kernels[0], np.float32), strides
        )
