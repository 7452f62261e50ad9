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
        self.scale = float(attributes.get("scale", 0.0))
        self.softcap = float(attributes.get("softcap", 0.0))
        self.window = int(attributes.get("window", -1))
        self.smooth_softmax = bool(attributes.get("smooth_softmax", 0))
        self.rotary = bool(attributes.get("do_rotary", 0))
        self.interleaved = bool(attributes.get("rotary_interleaved", 0))
        self.norm_epsilon = float(attributes.get("qk_norm_epsilon", 1e-6))
        self.tables = self._tables(spec)
        self.sinks = _float_constant(spec, 7)
        self.q_norm, self.k_norm = _float_constant(spec, 8), _float_constant(spec, 9)

    def _tables(self, spec: NodeSpec) -> tuple[tuple[Any, Any], ...]:
        """(cos, sin) per RoPE table: one, or the short and the long ones."""
        if not self.rotary:
            return ()
        pairs = [(_float_constant(spec, i), _float_constant(spec, i + 1)) for i in (3, 5)]
        return tuple((cos, sin) for cos, sin in pairs if cos is not None)

    def __call__(self, context: StepContext, inputs: Sequence[Any]) -> tuple[Any, ...]:
        from ..cpu.attention import paged_attention as attend
        from ..cpu.kv import write_kv

        query, key, value = self._heads(inputs)
        self._rotate(query, key, context)
        layer = context.layers[self.layer]
        write_kv(layer, key, value, context.slots, team=context.team)
        out = attend(
            query,
            layer,
            query_start=context.query_start,
            context_lengths=context.context_lengths,
            positions=context.positions,
            block_tables=context.block_tables,
            scale=self.scale or query.shape[2] ** -0.5,
            softcap=self.softcap,
            window=self.window,
            sinks=self.sinks,
            smooth_softmax=self.smooth_softmax,
            team=context.team,
        )
        return (out.reshape(1, len(query), -1),)

    def _heads(self, inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Query, key and value as [T, heads, head_size], contiguous, normalised where the model does so."""
        given: list[Any] = [
            None if x is None else np.asarray(x, np.float32).reshape(x.shape[1], -1) for x in inputs[:3]
        ]
        query, key, value = given
        if key is None:
            head_size = query.shape[1] // (self.heads + 2 * self.kv_heads)
            ends = self.heads * head_size, (self.heads + self.kv_heads) * head_size
            query, key, value = np.split(query, ends, axis=1)
        tokens = len(query)
        query, key = query.reshape(tokens, self.heads, -1), key.reshape(tokens, self.kv_heads, -1)
        if self.q_norm is not None:
            query, key = self._normed(query, self.q_norm), self._normed(key, self.k_norm)
        # RoPE works in place, so query and key must be arrays of their own: views of a packed QKV would be fine, but
        # an unpacked one still belongs to the plan.
        return (
            np.array(query, np.float32, order="C"),
            np.array(key, np.float32, order="C"),
            np.ascontiguousarray(value).reshape(tokens, self.kv_heads, self.v_head_size),
        )

    def _normed(self, x: Any, weight: Any) -> Any:
        from ..cpu.normalization import rms_norm

        return rms_norm(np.ascontiguousarray(x).reshape(-1, x.shape[2]), weight, self.norm_epsilon).reshape(x.shape)

    def _rotate(self, query: Any, key: Any, context: StepContext) -> None:
        """Rotate in place, each sequence with the table that its length calls for."""
        from ..cpu.rope import rope

        if len(self.tables) < 2 or not context.rope_table.any():
            spans = [(0, len(query), 0)] if self.tables else []
        else:
            starts = context.query_start.tolist()
            spans = [(a, b, t) for a, b, t in zip(starts, starts[1:], context.rope_table.tolist(), strict=False)]
        for first, last, table in spans:
            cos, sin = self.tables[table]
            for x in (query, key):
                rope(x[first:last], context.positions[first:last], cos, sin, self.interleaved, team=context.team)


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
