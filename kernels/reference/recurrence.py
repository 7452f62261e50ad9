"""Recurrent layers: each sequence has a state, which each of its rows updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import ir
from ..cache_layout import StateLayer
from ..device import StepContext
from .attention import within
from .functions import Array, Float64


def linear_recurrence(x: Array, decay: Array, layer: StateLayer, step: StepContext) -> Float64:
    """Compute `ir.LinearRecurrence` for rows [T, size]. Each state is rounded to float32, as at the end of a step."""
    out = np.zeros(x.shape)
    for rows, state, keep in _sequences(layer, step):
        for row in rows:
            state[:] = out[row] = decay[row] * state + x[row]
            keep(row)
    return out


def causal_conv(op: ir.CausalConv, x: Array, weight: Any, bias: Any, layer: StateLayer, step: StepContext) -> Float64:
    """Compute `ir.CausalConv` for rows [T, channels]."""
    out, channels = np.zeros(x.shape), x.shape[1]
    taps = weight.reshape(channels, -1).T.astype(np.float64)
    for rows, state, keep in _sequences(layer, step):
        history = state.reshape(-1, channels)
        for row in rows:
            seen = np.concatenate([history, x[row][None]])
            out[row] = (taps * seen[:: op.dilation]).sum(axis=0)
            history[:] = seen[1:]
            keep(row)
    result: Float64 = out + bias
    return result


def linear_attention(op: ir.LinearAttention, values: dict[str, Array], layer: StateLayer, step: StepContext) -> Float64:
    """Compute `ir.LinearAttention` for its input values by name."""
    query, key, value = (
        values[name].reshape(len(values[name]), heads, -1)
        for name, heads in ((op.query, op.heads), (op.key, op.key_heads), (op.value, op.value_heads))
    )
    count = len(query)
    key = key.repeat(op.value_heads // op.key_heads, axis=1)
    query = query.repeat(op.out_heads // op.heads, axis=1)
    decay = np.exp(values[op.decay].astype(np.float64)).reshape(count, op.value_heads, -1) if op.decay else None
    beta = values[op.beta].reshape(count, -1, 1) if op.beta else None
    out = np.zeros((count, op.out_heads, op.v_head_size))
    for rows, state, keep in _sequences(layer, step):
        matrices = state.reshape(op.value_heads, op.head_size, op.v_head_size)
        for row in rows:
            new = matrices.astype(np.float64) * (1 if decay is None else decay[row][:, :, None])
            change = value[row].astype(np.float64)
            if beta is not None:
                change = beta[row] * (change - np.einsum("hk,hkv->hv", key[row], new))
            new += key[row][:, :, None] * change[:, None, :]
            matrices[:] = new
            read = matrices.repeat(op.out_heads // op.value_heads, axis=0)
            out[row] = op.scale * np.einsum("hk,hkv->hv", query[row], read)
            keep(row)
    return out.reshape(count, -1)


# A sequence's rows, its state (a copy), and a function that stores the state after a row if the step asks for it.
_Sequence = tuple[range, NDArray[np.float32], Callable[[int], None]]


def _sequences(layer: StateLayer, step: StepContext) -> Iterator[_Sequence]:
    """Yield each sequence of a step."""
    slots = step.state_slots
    assert slots is not None
    within(slots.reads[slots.reads != -1], layer.num_slots, "slot outside the states")
    within(slots.writes[slots.writes != -1], layer.num_slots, "slot outside the states")
    for sequence, read in enumerate(slots.reads):
        state = np.zeros(layer.size, np.float32) if read == -1 else layer.states[read].copy()

        def keep(row: int, state: NDArray[np.float32] = state) -> None:
            if slots.writes[row] != -1:
                layer.states[slots.writes[row]] = state

        yield range(*step.cu_seqlens_q[sequence : sequence + 2]), state, keep
