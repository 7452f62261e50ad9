"""Norms over the last axis, alone or of a sum with the residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cpu.rowwise.norm import layer_norm, rms_norm
from ..cpu.tape.program import Call, Rows
from ..registry import NodeSpec
from .base import RowNode, ValueType, row_input, rule
from .nodes import RowCall

MS = "com.microsoft"


def _vector(spec: NodeSpec, index: int) -> NDArray[np.float32] | None:
    return np.ascontiguousarray(spec.constant(index), np.float32).reshape(-1) if spec.has(index) else None


@rule("SimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization")
def norm(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """Each run of the last axis alone: a row, or the heads of one."""
    x = row_input(types, 0)
    if x is None or int(spec.attributes.get("axis", -1)) not in (-1, len(x.shape) - 1) or any(spec.outputs[1:]):
        return None
    weight, bias = _vector(spec, 1), _vector(spec, 2)
    centred, epsilon = spec.op_type == "LayerNormalization", float(spec.attributes.get("epsilon", 1e-5))
    if weight is None or weight.size != x.last or (bias is not None and not centred):
        return None
    scale, groups = weight, x.width // x.last

    def make(sources: Sequence[Rows], targets: Sequence[Rows]) -> Call:
        if centred:
            return layer_norm(sources[0], scale, bias, epsilon, targets[0], groups=groups)
        return rms_norm(sources[0], scale, epsilon, targets[0], groups=groups)

    return RowCall((spec.inputs[0],), {spec.outputs[0]: x}, make)


@rule("SkipSimplifiedLayerNormalization", "SkipLayerNormalization", domain=MS)
def skip_norm(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """The norm of x + skip (+ bias), and the sum itself as output 3."""
    x, skip = row_input(types, 0), row_input(types, 1)
    if x is None or x != skip or x.last != x.width or any(spec.outputs[1:3]):
        return None
    centred = spec.op_type == "SkipLayerNormalization"
    weight, shift = _vector(spec, 2), _vector(spec, 3) if centred else None
    input_bias = _vector(spec, 4 if centred else 3)
    if weight is None:
        return None
    outputs = {spec.outputs[0]: x} if spec.outputs[0] else {}
    has_sum = len(spec.outputs) > 3 and bool(spec.outputs[3])
    if has_sum:
        outputs[spec.outputs[3]] = x
    return RowCall((spec.inputs[0], spec.inputs[1]), outputs, _skip_call(spec, weight, shift, input_bias, has_sum))


def _skip_call(spec: NodeSpec, weight: Any, shift: Any, input_bias: Any, has_sum: bool) -> Any:
    epsilon, centred = float(spec.attributes.get("epsilon", 1e-12)), spec.op_type == "SkipLayerNormalization"

    def make(sources: Sequence[Rows], targets: Sequence[Rows]) -> Call:
        left = list(targets)
        out = left.pop(0) if spec.outputs[0] else None
        total = left.pop(0) if has_sum else None
        if centred:
            return layer_norm(
                sources[0], weight, shift, epsilon, out, skip=sources[1], input_bias=input_bias, total=total
            )
        return rms_norm(sources[0], weight, epsilon, out, skip=sources[1], input_bias=input_bias, total=total)

    return make
