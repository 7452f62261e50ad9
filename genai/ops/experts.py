"""Mixtures of experts (com.microsoft::MoE and QMoE)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.ir import GATES, DenseWeight, MoE, Projection, Weight
from genai.kernels.weight_layout import BLOCK_SIZES

from ..onnx.node import MS
from .registry import KernelError, NodeSpec, operator
from .shape_rules import same_as_input, shape_rule
from .weights import check_stored, uniform_weight

_PLAIN = {"silu": "silu", "relu": "relu", "gelu": "gelu_tanh", "relu2": "relu_squared", "identity": "copy"}


def _compiled(spec: NodeSpec) -> Any:
    return spec.options["executor"]().array_function(moe_op(spec), _SpecConstants(spec))


@operator("MoE", "QMoE", domain=MS, mix=_compiled)
def experts_of_arrays(x: Any, scores: Any, *, mix: Any) -> Any:
    """Mix the experts for x [..., H] with router scores [tokens, E]; see `moe_op` for the weights."""
    rows, scores = (np.ascontiguousarray(value, np.float32) for value in (x, scores))
    out = mix(rows.reshape(-1, x.shape[-1]), scores).reshape(x.shape)
    return out.astype(x.dtype, copy=False)


class _SpecConstants:
    """The constants of one node."""

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec

    def array(self, name: str) -> NDArray[Any]:
        return self._spec.constant(self._spec.inputs.index(name))

    def packed(self, weight: Weight) -> None:
        """Do nothing: other nodes may read the original weight."""


def moe_op(spec: NodeSpec) -> MoE:
    """Return the MoE op of a node.

    The inputs of MoE are fc1 [E, F, H] and its bias at 2 and 3, and fc2 [E, H, I] and its bias at 4 and 5. The inputs
    of QMoE are the integers, scales and bias of each layer at 2, 3, 4 and 5, 6, 7, and zero points at 11 and 12. QMoE
    always normalises the weights of the selected experts to a sum of 1, as onnxruntime's CPU kernel does.
    """
    _refuse(spec)
    activation, parameters = _activation(spec)
    gated = activation in GATES
    attributes, quantised = spec.attributes, spec.op_type == "QMoE"
    if quantised:
        width = spec.constant(2).shape[1] // (2 if gated else 1)
        first = Projection(_blocks(spec, 2, 11, spec.constant(5).shape[1], 1, gated), spec.constant_name(4))
        second = Projection(_blocks(spec, 5, 12, width, 2, False), spec.constant_name(7))
        exact = spec.exact
    else:
        first = Projection(_dense(spec, 2, gated), spec.constant_name(3))
        second = Projection(_dense(spec, 4, False), spec.constant_name(5))
        exact = True
    per_token = int(attributes.get("k", 1))
    _check(spec, first, second, per_token)
    return MoE(
        spec.inputs[0], spec.inputs[1], spec.outputs[0], per_token=per_token,
        normalized=quantised or bool(attributes.get("normalize_routing_weights", 0)), first=first, second=second,
        activation=activation, exact=exact, parameters=parameters, op_type=spec.op_type,
    )  # fmt: skip


def _check(spec: NodeSpec, first: Projection, second: Projection, per_token: int) -> None:
    """Raise KernelError if the layers do not fit together, or k is not between 1 and the number of experts."""
    first_weight, second_weight = first.weight, second.weight
    sizes = [(weight.experts, weight.rows, weight.columns) for weight in (first_weight, second_weight)]
    expected = first_weight.experts, first_weight.columns, first_weight.rows
    if (
        not first_weight.experts
        or (second_weight.experts, second_weight.rows, second_weight.columns * (1 + first_weight.interleaved))
        != expected
    ):
        raise KernelError(
            f"{spec.op_type}: the sizes of the weights, as [experts, rows, columns], do not match each other: {sizes}"
        )
    if not 1 <= per_token <= first_weight.experts:
        raise KernelError(
            f"{spec.op_type}: k is {per_token}, but it must be from 1 to {first_weight.experts}, the number of experts"
        )
    for projection in (first, second):
        bias, count = projection.bias, projection.weight.experts * projection.weight.rows
        if bias and spec.constant(spec.inputs.index(bias)).size != count:
            raise KernelError(f"{spec.op_type}: the bias {bias!r} must have {count} values, one per expert and row")


def _refuse(spec: NodeSpec) -> None:
    quantised = spec.op_type == "QMoE"
    if spec.has(8 if quantised else 6):
        raise KernelError(
            f"{spec.op_type}: a third matrix (fc3) is not supported; the gate and up projections must be one matrix"
        )
    if int(spec.attributes.get("use_sparse_mixer", 0)):
        raise KernelError(f"{spec.op_type}: use_sparse_mixer is not supported")
    if quantised and any(spec.has(index) for index in range(14, 21)):
        raise KernelError("QMoE: separate router weights and activation scales are not supported")
    prepacked = int(spec.attributes.get("weights_prepacked", 0)) > 0
    if quantised and (spec.attributes.get("quant_type", "int") != "int" or prepacked):
        raise KernelError(
            "QMoE: floating-point codes and weights that are prepacked for another runtime are not supported"
        )


def _activation(spec: NodeSpec) -> tuple[str, tuple[float, ...]]:
    """Return the function between the layers: a gate over interleaved gate and up rows, or an ungated activation."""
    kind, attributes = spec.attributes.get("activation_type", "relu"), spec.attributes
    if kind == "swiglu" and int(attributes.get("swiglu_fusion", 0)) == 1:
        limit = float(attributes.get("swiglu_limit", "inf"))
        if not limit >= 0:
            raise KernelError(f"{spec.op_type}: swiglu_limit is {limit}, but it must be at least 0")
        numbers = (attributes.get("activation_alpha", 1.0), attributes.get("activation_beta", 0.0))
        return "swiglu", (*map(float, numbers), limit)
    if kind == "geglu" and int(attributes.get("swiglu_fusion", 0)) == 1:
        return "geglu", ()
    if kind in _PLAIN:
        return _PLAIN[kind], ()
    raise KernelError(
        f"{spec.op_type}: the activation {kind!r} is not supported; use swiglu or geglu with swiglu_fusion=1, or "
        f"{', '.join(_PLAIN)}"
    )


def _dense(spec: NodeSpec, index: int, interleaved: bool) -> Weight:
    count, rows, columns = spec.constant(index).shape
    return DenseWeight(spec.inputs[index], rows, columns, True, count, interleaved)


def _blocks(spec: NodeSpec, data: int, points: int, columns: int, number: int, interleaved: bool) -> Weight:
    bits = int(spec.attributes.get(f"fc{number}_expert_weight_bits", spec.attributes.get("expert_weight_bits", 4)))
    count, rows = spec.constant(data).shape[:2]
    block = int(spec.attributes.get("block_size", 0))
    by_row = not block
    if by_row:
        block = next((size for size in reversed(BLOCK_SIZES) if columns % size == 0), BLOCK_SIZES[-1])
        if spec.has(points):
            raise KernelError(f"{spec.op_type}: zero points are not supported without blocks")
    names = [spec.constant_name(index) for index in (data, data + 1, points)]
    weight = uniform_weight(names, rows, columns, bits, block, count, interleaved=interleaved)
    check_stored(weight, spec.constant(data), spec.constant(data + 1), int(by_row))
    return weight


shape_rule("MoE", "QMoE")(same_as_input)
