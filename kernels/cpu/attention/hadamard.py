"""Multiplication of heads by the normalised Hadamard matrix, which spreads each column over all columns.

Dot products of transformed queries and keys equal the dot products of the original heads, and the transform is its own
inverse. It spreads single large columns over all columns, so a few bits represent a head more accurately (QuaRot,
Ashkboos et al. 2024).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from ..jit.dsl import FLOATS, inline, intrinsic
from ..jit.emit import FLOAT_VECTOR, LANES, Emitter
from ..jit.memory import load_float32, store_float32


@intrinsic(FLOATS, FLOATS)
def _transform_lanes(e: Emitter, vector: Any) -> Any:
    """Multiply a vector by the Sylvester matrix of its size: add and subtract lanes that are 1, 2, 4 and 8 apart."""
    step = 1
    while step < LANES:
        signs = ir.Constant(FLOAT_VECTOR, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
        other = e.shuffle(vector, vector, [lane ^ step for lane in range(LANES)])
        vector, step = e.builder.fadd(other, e.builder.fmul(vector, signs)), 2 * step
    return vector


@inline
def hadamard_transform(head: int, size: int) -> None:
    """Transform `size` float32 numbers at an address in place. The size is a power of two, and at least LANES."""
    factor = np.float32(1.0) / np.float32(math.sqrt(np.float32(size)))
    for i in range(0, size, LANES):
        store_float32(head + 4 * i, _transform_lanes(load_float32(head + 4 * i)) * factor)
    step = np.int64(LANES)
    while step < size:
        for first in range(0, size, 2 * step):
            for i in range(first, first + step, LANES):
                a, b = load_float32(head + 4 * i), load_float32(head + 4 * (i + step))
                store_float32(head + 4 * i, a + b)
                store_float32(head + 4 * (i + step), a - b)
        step *= 2
