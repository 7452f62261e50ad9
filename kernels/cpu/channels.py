"""What ends a convolution: a bias per channel and limits, in one pass over its result."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from .checks import NO_VECTOR, Float32, check
from .jit import kernel
from .team import Team, run

Limits: TypeAlias = tuple[float, float]
NO_LIMITS: Limits = (-np.inf, np.inf)
_NANOSECONDS_PER_ELEMENT = 0.15


@kernel("void(float32[:,::1], float32[:], float32, float32, int64, int64)")
def finish_planes(values: Any, bias: Any, low: float, high: float, begin: int, end: int) -> None:
    """Planes [begin, end) in place: plus the bias of plane modulo channels, if there are any; NaN stay."""
    for plane in range(begin, end):
        addend = bias[plane % len(bias)] if len(bias) else np.float32(0)
        row = values[plane]
        for index in range(len(row)):
            value = row[index] + addend
            value = low if value < low else value
            row[index] = high if value > high else value


def finish_channels(
    values: Float32, bias: Float32 | None, limits: Limits = NO_LIMITS, *, team: Team | None = None
) -> None:
    """[N * C, elements] in place: plus the channel's bias [C], and kept within limits.

    Raises:
        ValueError: a shape or type does not fit.
    """
    check("values", values, (None, None))
    if bias is not None:
        check("bias", bias, (None,))
        if not len(bias) or len(values) % len(bias):
            raise ValueError(f"{len(values)} planes do not fit {len(bias)} channels")
    work = values.size * _NANOSECONDS_PER_ELEMENT
    run(team, finish_planes, (values, NO_VECTOR if bias is None else bias, *limits), len(values), work=work)
