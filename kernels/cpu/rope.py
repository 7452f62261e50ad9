"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import Float32, check, check_rows
from .jit import kernel
from .team import Team, run

_INT64 = np.dtype(np.int64)
_NANOSECONDS_PER_PAIR = 1.5


@kernel("void(float32[:,:,:], int64[::1], float32[:,::1], float32[:,::1], boolean, int64, int64)")
def rotate(x: Any, positions: Any, cosines: Any, sines: Any, interleaved: bool, begin: int, end: int) -> None:
    """Turn the pairs of every head of tokens [begin, end), in place."""
    half = cosines.shape[1]
    step, distance = (2, 1) if interleaved else (1, half)
    for token in range(begin, end):
        position = positions[token]
        if position < 0 or position >= cosines.shape[0]:
            raise IndexError("position outside the rotary tables")
        for head in range(x.shape[1]):
            for i in range(half):
                cosine, sine = cosines[position, i], sines[position, i]
                first, second = x[token, head, i * step], x[token, head, i * step + distance]
                x[token, head, i * step] = first * cosine - second * sine
                x[token, head, i * step + distance] = second * cosine + first * sine


def rope(
    x: Float32,
    positions: NDArray[np.int64],
    cos: Float32,
    sin: Float32,
    interleaved: bool = False,
    *,
    team: Team | None = None,
) -> Float32:
    """Rotate the first rotary_dim elements of every head, in place.

    Args:
        x: float32 [T, heads, head_size]; each token's heads must be contiguous, so a slice of packed QKV will do.
        positions: int64 [T].
        cos, sin: float32 [P, rotary_dim / 2], rotary_dim <= head_size.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...

    Returns:
        x.

    Raises:
        ValueError: a shape or type does not fit.
        IndexError: a position is not below P; tokens before it may have been rotated.
    """
    check_rows("x", x, (None, None, None))
    check("positions", positions, (x.shape[0],), _INT64)
    check("cos", cos, (None, None))
    check("sin", sin, cos.shape)
    if 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(f"cos has {cos.shape[1]} columns, expected at most half of the head size {x.shape[2]}")
    if not x.flags.writeable:
        raise ValueError("x is read-only, but is rotated in place")
    work = x.shape[0] * x.shape[1] * cos.shape[1] * _NANOSECONDS_PER_PAIR
    run(team, rotate, (x, positions, cos, sin, interleaved), x.shape[0], work=work)
    return x
