"""Rotation of cached keys to other positions. Rotations by rotary tables add up, so keys are not recomputed.

When the middle of a sequence is dropped, the rest moves to earlier positions in this way. The idea is from llama.cpp's
context shift and from StreamingLLM (G. Xiao et al. 2023), which also retains the first tokens ("attention sinks").
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.device import KeyRotation

_TOLERANCE = 2e-3  # the rounding error of float16 tables is smaller


def rotate_back(cos: NDArray[Any], sin: NDArray[Any], interleaved: bool, distance: int) -> KeyRotation:
    """Return the rotation of keys to positions lower by `distance`, from rotary tables [positions, pairs].

    Raises:
        ValueError: rotations by these tables do not add up.
    """
    last = len(cos) - 1
    for first in {1, min(distance, last // 2), last // 2}:
        _check_sum(cos, sin, first, last - first)
    cosine, sine = _unit(cos, sin, distance)
    return KeyRotation(cosine, -sine, interleaved)


def _unit(cos: NDArray[Any], sin: NDArray[Any], position: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a row of the tables, without the scaling factor that some tables include."""
    cosine, sine = cos[position].astype(np.float64), sin[position].astype(np.float64)
    size = np.hypot(cosine, sine)
    return cosine / size, sine / size


def _check_sum(cos: NDArray[Any], sin: NDArray[Any], first: int, second: int) -> None:
    (a, b), (c, d), (e, f) = (_unit(cos, sin, position) for position in (first, second, first + second))
    if not (np.allclose(a * c - b * d, e, atol=_TOLERANCE) and np.allclose(b * c + a * d, f, atol=_TOLERANCE)):
        raise ValueError(
            f"the rotations of positions {first} and {second} do not add up to that of position {first + second}"
        )
