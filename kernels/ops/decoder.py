"""Decoder operators: paged attention and wanted rows (ours, domain "genai"), and attention over dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from ..step import StepContext

OURS = "genai"
MS = "com.microsoft"


@register("WantedRows", domain=OURS)
def wanted_rows(spec: NodeSpec) -> Kernel:
    """[1, T, features] to the rows whose logits are wanted: [1, R, features], or [R, features] with squeeze."""
    squeeze = bool(spec.attributes.get("squeeze", 0))

    def kernel(context: StepContext, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        rows = x.reshape(-1, x.shape[-1])[context.wanted_rows]
        return (rows if squeeze else rows[None],)

    return kernel


@register("SwiGLU", domain=OURS)
def swiglu(spec: NodeSpec) -> Kernel:
    """gate * sigmoid(gate) * up (Shazeer 2020)."""
    from ..cpu.activations import swiglu as cpu_swiglu

    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        gate, up = (np.ascontiguousarray(x, np.float32) for x in inputs[:2])
        width = gate.shape[-1]
        return (cpu_swiglu(gate.reshape(-1, width), up.reshape(-1, width), team=team).reshape(gate.shape),)

    return kernel


@register("PagedAttention", domain=OURS)
def paged_attention(spec: NodeSpec) -> Kernel:
    """Rotate queries and keys, store keys and values in their slots, attend over each sequence's blocks.

    Inputs: query (or packed QKV) [1, T, features], key, value, cos, sin, long cos, long sin, head sink, q norm, k norm.
    """
    return _PagedAttention(spec)


class _PagedAttention:
    """One attention layer. Attributes as in GroupQueryAttention, and `layer`, `window`, `v_head_size`."""

    def __init__(self, spec: NodeSpec) -> None:
        attributes = spec.attributes
        self.layer = int(attributes["layer"])
        self.heads, self.kv_heads = int(attributes["num_heads"]), int(attributes["kv_num_heads"])
        self.v_head_size = int(attributes["v_head_size"])
        self.options = {
            "scale": float(attributes.get("scale", 0.0)),
            "softcap": float(attributes.get("softcap", 0.0)),
            "window": int(attributes.get("window", -1)),
            "smooth_softmax": bool(attributes.get("smooth_softmax", 0)),
            "epsilon": float(attributes.get("qk_norm_epsilon", 1e-6)),
            "rope": _rope(spec) if attributes.get("do_rotary", 0) else None,
            "sinks": _float_constant(spec, 7),
            "q_norm": _float_constant(spec, 8),
            "k_norm": _float_constant(spec, 9),
        }

    def __call__(self, context: StepContext, inputs: Sequence[Any]) -> tuple[Any, ...]:
        from ..cpu.paged.eager import paged_attention as attend

        rows: list[Any] = [None if x is None else np.asarray(x, np.float32).reshape(x.shape[1], -1) for x in inputs[:3]]
        query, key, value = rows
        if key is None:
            head_size = query.shape[1] // (self.heads + 2 * self.kv_heads)
            ends = self.heads * head_size, (self.heads + self.kv_heads) * head_size
            query, key, value = np.split(query, ends, axis=1)
        out = attend(query, key, value, context.layers[self.layer], context, heads=self.heads, **self.options)
        return (out[None],)


def _rope(spec: NodeSpec) -> Any:
    """The rotary tables; those for long sequences, if there are any."""
    from ..cpu.paged.phases import Rope

    cos, sin, long_cos, long_sin = (_float_constant(spec, i) for i in range(3, 7))
    interleaved = bool(spec.attributes.get("rotary_interleaved", 0))
    return None if cos is None else Rope(cos, sin, long_cos, long_sin, interleaved)


def _float_constant(spec: NodeSpec, index: int) -> Any:
    return np.ascontiguousarray(spec.constant(index), np.float32) if spec.has(index) else None


_GQA_ATTRIBUTES = (
    "num_heads kv_num_heads scale softcap local_window_size do_rotary rotary_interleaved smooth_softmax qk_norm_epsilon"
).split()


@register("GroupQueryAttention", domain=MS)
def group_query_attention(spec: NodeSpec) -> Kernel:
    """The contract on dense past and present tensors, by the NumPy reference: for graphs run as they are."""
    from ..reference.attention import group_query_attention as reference

    unsupported = [name for name in ("k_quant_type", "v_quant_type") if spec.attributes.get(name, "NONE") != "NONE"]
    if unsupported or spec.has(10) or any(spec.outputs[3:]):
        raise KernelError("GroupQueryAttention: quantised caches, attention bias and score outputs are not supported")
    attributes = {name: spec.attributes[name] for name in _GQA_ATTRIBUTES if name in spec.attributes}
    run: Callable[..., tuple[Any, ...]] = reference

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        given = list(inputs) + [None] * (16 - len(inputs))
        # Inputs 12 and 13 are scales of quantised caches, refused above.
        return run(*given[:12], given[14], given[15], **attributes)

    return kernel


@register("RotaryEmbedding", domain=MS)
def rotary_embedding(spec: NodeSpec) -> Kernel:
    """RoPE as its own operator, over [B, S, features] or [B, heads, S, head_size]."""
    from ..reference.rope import rotary_embedding as reference

    names = ["interleaved", "num_heads", "rotary_embedding_dim", "scale"]
    attributes = {name: spec.attributes[name] for name in names if name in spec.attributes}
    if spec.attributes.get("is_packed_batching", 0):
        raise KernelError("RotaryEmbedding with packed batching is not supported")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (reference(*inputs[:4], **attributes),)

    return kernel
