"""Heads multiplied by the normalised Hadamard matrix: what one column of a head is becomes a part of all of them.

Products of such queries and keys are those of the heads as they were, and the transform is its own inverse. It spreads
single large columns, so that few bits hold a head better (QuaRot, Ashkboos et al. 2024).
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
    """A vector by Sylvester's matrix of its size: sums and differences of lanes that are 1, 2, 4 and 8 apart."""
    step = 1
    while step < LANES:
        signs = ir.Constant(FLOAT_VECTOR, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
        other = e.shuffle(vector, vector, [lane ^ step for lane in range(LANES)])
        vector, step = e.builder.fadd(other, e.builder.fmul(vector, signs)), 2 * step
    return vector


@inline
def hadamard_transform(head: int, size: int) -> None:
    """Transform the float32 numbers at an address, as many as a power of two of at least LANES, in place."""
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
