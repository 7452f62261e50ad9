"""Mixtures of experts: routing, and the experts themselves, one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .quantized import dequantize_weight


def routing_weights(scores: NDArray[Any], k: int, *, normalized: bool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The k best experts of each token and their weights, both [tokens, k]; of equal scores the first wins.

    normalized: softmax over the chosen experts' scores; otherwise over all.
    """
    scores = np.asarray(scores, np.float64)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, chosen, axis=1)
    weights = np.exp(best - best.max(axis=1, keepdims=True))
    over = best if normalized else scores
    return chosen, weights / np.exp(over - best.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)


def moe(
    x: NDArray[Any],
    scores: NDArray[Any],
    fc1: NDArray[Any],
    fc1_bias: NDArray[Any] | None,
    fc2: NDArray[Any],
    fc2_bias: NDArray[Any] | None,
    *,
    k: int,
    normalize_routing_weights: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
) -> NDArray[Any]:
    """com.microsoft::MoE with interleaved SwiGLU: x [..., H], scores [tokens, E], fc1 [E, 2 I, H], fc2 [E, H, I]."""
    rows = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    chosen, weights = routing_weights(scores, k, normalized=bool(normalize_routing_weights))
    out = np.zeros((len(rows), fc2.shape[1]))
    for token, row in enumerate(rows):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            hidden = fc1[expert].astype(np.float64) @ row + (0 if fc1_bias is None else fc1_bias[expert])
            gate, up = hidden[0::2], hidden[1::2]
            hidden = gate / (1 + np.exp(-activation_alpha * gate)) * (up + activation_beta)
            out[token] += weight * (fc2[expert] @ hidden + (0 if fc2_bias is None else fc2_bias[expert]))
    return out.reshape(x.shape).astype(x.dtype)


def qmoe(
    x: NDArray[Any],
    scores: NDArray[Any],
    fc1: NDArray[np.uint8],
    fc1_scales: NDArray[Any],
    fc2: NDArray[np.uint8],
    fc2_scales: NDArray[Any],
    *,
    k: int,
    bits: int,
    block_size: int,
    fc1_points: NDArray[np.uint8] | None = None,
    fc2_points: NDArray[np.uint8] | None = None,
) -> NDArray[Any]:
    """com.microsoft::QMoE with interleaved SwiGLU and block-quantised experts."""
    hidden, width = x.shape[-1], fc1.shape[1] // 2
    wide = _dequantized(fc1, fc1_scales, fc1_points, hidden, bits, block_size)
    narrow = _dequantized(fc2, fc2_scales, fc2_points, width, bits, block_size)
    return moe(x, scores, wide, None, narrow, None, k=k, normalize_routing_weights=1)


def _dequantized(
    data: NDArray[np.uint8], scales: NDArray[Any], points: NDArray[np.uint8] | None, columns: int, bits: int, block: int
) -> NDArray[np.float64]:
    """All experts' matrices [experts, rows, columns]."""
    zeros: list[Any] = [None] * len(data) if points is None else list(points)
    parts = zip(data, scales, zeros, strict=True)
    size = {"n": data.shape[1], "k": columns, "bits": bits, "block_size": block}
    return np.stack([dequantize_weight(integers, scale, zero, **size) for integers, scale, zero in parts])
