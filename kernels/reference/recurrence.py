"""Recurrent layers: each sequence has a state, which each of its rows updates."""

from __future__ import annotations

import numpy as np

from ..cache_layout import StateLayer
from ..device import StepContext
from .attention import within
from .functions import Array, Float64


def linear_recurrence(x: Array, decay: Array, layer: StateLayer, step: StepContext) -> Float64:
    """Compute `ir.LinearRecurrence` for rows [T, size]. Each state is rounded to float32, as at the end of a step."""
    slots, out = step.state_slots, np.zeros(x.shape)
    assert slots is not None
    within(slots.reads[slots.reads != -1], layer.num_slots, "slot outside the states")
    within(slots.writes[slots.writes != -1], layer.num_slots, "slot outside the states")
    for sequence, read in enumerate(slots.reads):
        state = np.zeros(layer.size, np.float32) if read == -1 else layer.states[read]
        for row in range(*step.cu_seqlens_q[sequence : sequence + 2]):
            out[row] = state = (decay[row] * state + x[row]).astype(np.float32)
            if slots.writes[row] != -1:
                layer.states[slots.writes[row]] = state
    return out
