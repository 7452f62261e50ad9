"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cpu.paged.phases import Rope, attention_phases
from ..cpu.paged.steps import partial_floats
from ..registry import NodeSpec
from .base import RowType, ValueType, row_input, rule
from .writer import Writer

OURS = "genai"


@dataclass(frozen=True)
class PagedAttention:
    """One layer. `query` holds keys and values too where `key` is empty; `options` are those of attention_phases."""

    query: str
    key: str
    value: str
    out: str
    type: RowType
    layer: int
    widths: tuple[int, int, int]
    options: Mapping[str, Any]

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name for name in (self.query, self.key, self.value) if name)

    @property
    def outputs(self) -> Mapping[str, RowType]:
        return {self.out: self.type}

    @property
    def partial_floats(self) -> int:
        """Numbers that it keeps in PARTIALS for a piece of context."""
        return partial_floats(self.options["heads"], self.type.width // self.options["heads"])

    def write(self, writer: Writer) -> None:
        query = writer.rows(self.query)
        if self.key:
            key, value = writer.rows(self.key), writer.rows(self.value)
        else:
            first, second = self.widths[0], self.widths[0] + self.widths[1]
            key, value = query.columns(first, self.widths[1]), query.columns(second, self.widths[2])
            query = query.columns(0, first)
        out = writer.make(self.out, self.type)
        phases = attention_phases(query, key, value, out, writer.layers[self.layer], **self.options)
        writer.run(phases, self.inputs, [self.out])


@rule("PagedAttention", domain=OURS)
def paged_attention(spec: NodeSpec, types: Sequence[ValueType]) -> PagedAttention | None:
    """Inputs: query (or packed QKV), key, value, cos, sin, long cos, long sin, head sink, q norm, k norm."""
    attributes, query = spec.attributes, row_input(types, 0)
    if query is None or any(spec.has(i) and row_input(types, i) is None for i in (1, 2)):
        return None
    heads, kv_heads = int(attributes["num_heads"]), int(attributes["kv_num_heads"])
    v_head_size = int(attributes["v_head_size"])
    packed = not spec.has(1)
    head_size = query.width // (heads + 2 * kv_heads) if packed else query.width // heads
    options = {
        "heads": heads,
        "scale": float(attributes.get("scale", 0.0)),
        "softcap": float(attributes.get("softcap", 0.0)),
        "window": int(attributes.get("window", -1)),
        "smooth_softmax": bool(attributes.get("smooth_softmax", 0)),
        "sinks": _vector(spec, 7),
        "q_norm": _vector(spec, 8),
        "k_norm": _vector(spec, 9),
        "epsilon": float(attributes.get("qk_norm_epsilon", 1e-6)),
        "rope": _rope(spec),
    }
    widths = (heads * head_size, kv_heads * head_size, kv_heads * v_head_size)
    key, value = ("", "") if packed else (spec.inputs[1], spec.inputs[2])
    shape = query.with_width(heads * v_head_size)
    return PagedAttention(spec.inputs[0], key, value, spec.outputs[0], shape, int(attributes["layer"]), widths, options)


def _rope(spec: NodeSpec) -> Rope | None:
    if not int(spec.attributes.get("do_rotary", 0)):
        return None
    cos, sin, long_cos, long_sin = (_matrix(spec, index) for index in (3, 4, 5, 6))
    if cos is None or sin is None:
        return None
    return Rope(cos, sin, long_cos, long_sin, bool(spec.attributes.get("rotary_interleaved", 0)))


def _matrix(spec: NodeSpec, index: int) -> NDArray[np.float32] | None:
    return np.ascontiguousarray(spec.constant(index), np.float32) if spec.has(index) else None


def _vector(spec: NodeSpec, index: int) -> NDArray[np.float32] | None:
    found = _matrix(spec, index)
    return None if found is None else found.reshape(-1)
