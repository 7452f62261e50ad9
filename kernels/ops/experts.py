"""Mixtures of experts (com.microsoft::MoE and QMoE); weights of experts that no token is sent to are not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_matrix import BlockMatrix
from ..formats import BLOCK_SIZES
from ..registry import Kernel, KernelError, NodeSpec, register

MS = "com.microsoft"
Float32 = NDArray[np.float32]
# One layer of one expert: rows [tokens, inputs] and the expert's number to [tokens, outputs].
Layer = Callable[[Float32, int], Float32]
# accuracy_level that allows activations rounded to int8.
_INT8_LEVEL = 4


@register("MoE", domain=MS)
def moe(spec: NodeSpec) -> Kernel:
    """Inputs: x [..., H], scores [tokens, E], fc1 [E, F, H] and bias [E, F], fc2 [E, H, I] and bias [E, H]."""
    if spec.has(6):
        raise KernelError("MoE with a third matrix (fc3) is not supported: gate and up are to be one matrix")
    normalized = bool(spec.attributes.get("normalize_routing_weights", 0))
    return _kernel(spec, _float_layer(spec, 2, 3), _float_layer(spec, 4, 5), normalized=normalized)


@register("QMoE", domain=MS)
def qmoe(spec: NodeSpec) -> Kernel:
    """As MoE, with integers, scales and bias per layer: inputs 2, 3, 4 and 5, 6, 7; zero points 11 and 12.

    As onnxruntime's CPU kernel does, the chosen experts' weights always sum to 1.
    """
    if spec.has(8):
        raise KernelError("QMoE with a third matrix (fc3) is not supported: gate and up are to be one matrix")
    if any(spec.has(index) for index in range(14, 21)):
        raise KernelError("QMoE with router weights of their own, or scales of activations, is not supported")
    if spec.attributes.get("quant_type", "int") != "int" or int(spec.attributes.get("weights_prepacked", 0)) > 0:
        raise KernelError("QMoE with floating-point codes or weights prepacked for another runtime is not supported")
    gated = spec.attributes.get("activation_type", "relu") == "swiglu"
    inputs, width = spec.constant(5).shape[1], spec.constant(2).shape[1] // (2 if gated else 1)
    first, second = _quantized_layer(spec, 2, 11, inputs, 1), _quantized_layer(spec, 5, 12, width, 2)
    return _kernel(spec, first, second, normalized=True)


def _kernel(spec: NodeSpec, first: Layer, second: Layer, *, normalized: bool) -> Kernel:
    if int(spec.attributes.get("use_sparse_mixer", 0)):
        raise KernelError(f"{spec.op_type} with use_sparse_mixer is not supported")
    per_token, activate = int(spec.attributes.get("k", 1)), _activation(spec)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, scores = inputs[:2]
        rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
        chosen, weights = route(np.asarray(scores, np.float32), per_token, normalized=normalized)
        out = np.zeros_like(rows)
        # Experts in order of their number, so that a token's sum does not depend on its neighbours.
        for expert in np.unique(chosen).tolist():
            tokens, ranks = np.nonzero(chosen == expert)
            result = second(activate(first(np.ascontiguousarray(rows[tokens]), expert)), expert)
            out[tokens] += weights[tokens, ranks][:, None] * result
        return (out.reshape(x.shape),)

    return kernel


def route(scores: Float32, per_token: int, *, normalized: bool) -> tuple[NDArray[np.int64], Float32]:
    """The best experts of each token and their weights, both [tokens, per_token]; of equal scores the first wins.

    normalized: softmax over the chosen experts' scores; otherwise over all.
    """
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :per_token]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    best = np.take_along_axis(powers, chosen, axis=1)
    weights: Float32 = best / (best if normalized else powers).sum(axis=1, keepdims=True)
    return chosen, weights


def _activation(spec: NodeSpec) -> Callable[[Float32], Float32]:
    """What lies between the layers: SwiGLU over alternating rows of gate and up, or an activation without a gate."""
    kind, attributes = spec.attributes.get("activation_type", "relu"), spec.attributes
    if kind == "swiglu" and int(attributes.get("swiglu_fusion", 0)) == 1:
        alpha, beta = (
            np.float32(attributes.get("activation_alpha", 1.0)),
            np.float32(attributes.get("activation_beta", 0)),
        )
        limit = attributes.get("swiglu_limit")
        return lambda hidden: _swiglu(hidden[:, 0::2], hidden[:, 1::2], alpha, beta, limit)
    if kind == "silu":
        return lambda hidden: hidden * _sigmoid(hidden)
    if kind == "relu":
        return lambda hidden: np.maximum(hidden, np.float32(0))
    if kind == "identity":
        return lambda hidden: hidden
    raise KernelError(f"{spec.op_type} with activation {kind!r} is not supported; known are swiglu (1), silu, relu")


def _swiglu(gate: Float32, up: Float32, alpha: np.float32, beta: np.float32, limit: float | None) -> Float32:
    if limit is not None and np.isfinite(limit):
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    result: Float32 = gate * _sigmoid(alpha * gate) * (up + beta)
    return result


def _sigmoid(x: Float32) -> Float32:
    decay = np.exp(-np.abs(x))
    result: Float32 = np.where(x >= 0, np.float32(1), decay) / (1 + decay)
    return result


def _bias(spec: NodeSpec, index: int) -> Float32 | None:
    return np.ascontiguousarray(spec.constant(index), np.float32) if spec.has(index) else None


def _float_layer(spec: NodeSpec, weight: int, bias: int) -> Layer:
    from ..cpu.matmul import matmul_f32

    matrices, offsets = np.asarray(spec.constant(weight), np.float32), _bias(spec, bias)

    def layer(rows: Float32, expert: int) -> Float32:
        offset = None if offsets is None else offsets[expert]
        return matmul_f32(np.ascontiguousarray(rows), matrices[expert], layout="NK", bias=offset)

    return layer


def _quantized_layer(spec: NodeSpec, data: int, points: int, columns: int, number: int) -> Layer:
    from ..cpu.matmul import matmul_nbits

    bits = int(spec.attributes.get(f"fc{number}_expert_weight_bits", spec.attributes.get("expert_weight_bits", 4)))
    matrices: list[BlockMatrix] = spec.pack(
        (data, data + 1, points), f"experts:{bits}", lambda: _packed_experts(spec, data, points, columns, bits)
    )
    offsets, team = _bias(spec, data + 2), spec.options.get("team")
    exact = spec.options.get("accuracy") == "fp32" or int(spec.attributes.get("accuracy_level", 0)) != _INT8_LEVEL

    def layer(rows: Float32, expert: int) -> Float32:
        offset = None if offsets is None else offsets[expert]
        return matmul_nbits(rows, matrices[expert], bias=offset, activations="fp32" if exact else "int8", team=team)

    return layer


def _packed_experts(spec: NodeSpec, data: int, points: int, columns: int, bits: int) -> list[BlockMatrix]:
    """Each expert's matrix packed by itself, so that an expert is one run of memory."""
    from ..cpu.products.packing import pack_matrix

    weights, scales = spec.constant(data), spec.constant(data + 1)
    zeros = spec.constant(points) if spec.has(points) else None
    count, rows = weights.shape[:2]
    block = int(spec.attributes.get("block_size", 0))
    if not block:  # one scale per row
        block = next((size for size in reversed(BLOCK_SIZES) if columns % size == 0), 0)
        if not block or zeros is not None:
            raise KernelError(f"{spec.op_type} without blocks over {columns} columns is not supported")
        scales = np.repeat(scales.reshape(count, rows, 1), columns // block, axis=2)
    return [
        pack_matrix(
            weights[e],
            scales[e],
            None if zeros is None else zeros[e],
            n=rows,
            k=columns,
            bits=bits,
            block_size=block,
            walkers=spec.options.get("walkers"),
            arena=spec.options.get("arena"),
        )
        for e in range(count)
    ]
