"""A mixture of experts as phases of calls, and the memory that they use.

The phases select every token's experts and quantise its row to 8 bits (unless the mixture is exact), sort the tokens by
expert, copy the rows in this order, multiply each expert's rows by the first layer and apply its gate, quantise again
and multiply by the second layer, and add up each token's results in order of the experts' indices. A token's result is
bit-identical whatever other tokens are in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ir import GATES
from ...weight_layout import BlockMatrix
from ..jit.arguments import Binding
from ..jit.vector_math import UNARY
from ..linear.activations import Inputs, input_bytes, input_call, inputs_at, whole_rows, widen_call
from ..linear.calls import Affine, decode_call
from ..linear.decode import SWIGLU, SwigluArguments
from ..program.calls import Call, Items, Phases, Rows, check_rows
from ..rowwise.elementwise import unary
from .products import ExpertMatrices, experts_call
from .routing import SLOT_BYTES, OrderArguments, RouteArguments, combine_call, order_pairs, route

_LINE = 64
# The activation that returns its input unchanged.
IDENTITY = "copy"


@dataclass(frozen=True)
class ExpertLayer:
    """x @ matrix.T + bias for every expert.

    Attributes:
        matrices: packed weights.
        bias: float32 [experts, rows], in the model's order of rows: if there are two parts, their rows alternate.
    """

    matrices: ExpertMatrices
    bias: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        matrices = self.matrices
        expected = (matrices.experts, matrices.rows * len(matrices.parts))
        if self.bias is not None and (self.bias.shape != expected or self.bias.dtype != np.float32):
            raise ValueError(f"bias is {self.bias.dtype} {list(self.bias.shape)}, expected float32 {list(expected)}")


@dataclass(frozen=True)
class Mixture:
    """Two layers of experts with an activation between them, and the parameters that select and weight experts.

    Attributes:
        first, second: the layers.
        per_token: number of experts that each token is routed to.
        normalized: True if weights are a softmax over the selected experts' scores, not over all scores.
        activation: a key of UNARY without parameters, such as IDENTITY, or of GATES. If the first layer has two parts,
            the first part is a gate: activation(first) * second.
        swiglu: parameters of SWIGLU.
        exact: True if activations stay float32; otherwise they are quantised to 8 bits per block, as in dense layers.
    """

    first: ExpertLayer
    second: ExpertLayer
    per_token: int
    normalized: bool
    activation: str = "silu"
    swiglu: SwigluArguments = field(default_factory=SwigluArguments)
    exact: bool = False

    def __post_init__(self) -> None:
        first, second = self.first.matrices, self.second.matrices
        if second.columns != first.rows or second.experts != first.experts or len(second.parts) != 1:
            raise ValueError(
                f"the second layer has {second.experts} experts with {len(second.parts)} matrices of "
                f"{second.columns} columns, expected {first.experts} experts with one matrix of {first.rows} columns"
            )
        gated = len(first.parts) == 2
        plain = self.activation in UNARY and not UNARY[self.activation].parameters
        if not plain and not (gated and self.activation in GATES):
            raise ValueError(
                f"the activation of experts {'with' if gated else 'without'} gates cannot be {self.activation!r}"
            )
        dense = not isinstance(first.parts[0], BlockMatrix) or not isinstance(second.parts[0], BlockMatrix)
        if dense and not self.exact:
            raise ValueError("dense weights require exact=True, because they need activations that are not quantised")
        if not 1 <= self.per_token <= first.experts:
            raise ValueError(f"per_token is {self.per_token}, expected 1 to {first.experts}, the number of experts")


def mixture_size(mixture: Mixture, capacity: int) -> int:
    """Return the bytes of memory that a mixture uses for at most `capacity` tokens."""
    return _memory(mixture, capacity)["end"]


def mixture_phases(
    mixture: Mixture, x: Rows, scores: Rows, out: Rows, memory: int | Binding, *, capacity: int, held: Any = None
) -> Phases:
    """Return the calls of a mixture.

    Args:
        mixture: the experts.
        x: rows of inputs.
        scores: rows with one score per expert.
        out: rows of outputs; may be x itself.
        memory: address of `mixture_size` bytes for the capacity, on a cache line. The contents are not preserved. No
            other call may use this memory while these calls run.
        capacity: maximum number of tokens.
        held: object that keeps the memory alive.
    """
    first, second = mixture.first.matrices, mixture.second.matrices
    for name, rows, width in (("x", x, first.columns), ("scores", scores, first.experts), ("out", out, second.rows)):
        check_rows(name, rows, x.counted, width)
    offsets, k, counted = _memory(mixture, capacity), mixture.per_token, x.counted

    def at(name: str) -> int | Binding:
        return memory + offsets[name]

    def pairs(name: str, width: int) -> Rows:
        """Return memory for `per_token` rows per token."""
        return Rows(at(name), _lines(4 * width), width, counted, held)

    def inputs(name: str, matrices: ExpertMatrices) -> Inputs:
        """Return rows as inputs of these matrices."""
        return inputs_at(at(name), matrices.parts[0], counted, held, exact=mixture.exact)

    chosen, weights, order, slots = at("chosen"), at("weights"), at("positions"), at("slots")
    rounded, copied, again = inputs("rounded", first), inputs("copied", first), inputs("inputs", second)
    hidden, results = pairs("hidden", first.rows), pairs("results", second.rows)
    routing = RouteArguments(scores=scores, per_token=k, normalized=mixture.normalized, chosen=chosen, weights=weights)
    sorting = OrderArguments(
        rows_field=counted, chosen=chosen, per_token=k, experts=first.experts, slots=slots, sources=at("sources"),
        positions=order,
    )  # fmt: skip
    # Every token is quantised once, whatever the number of its experts, and is then copied in quantised form.
    rounding, source = ([], x) if mixture.exact else ([input_call(x, rounded)], whole_rows(rounded))
    return [
        [Call(route, routing, Items(counted)), *rounding],
        [Call(order_pairs, sorting, scratch=8 * first.experts)],
        [widen_call(source, whole_rows(copied), times=k, sources=at("sources"))],
        [_product(mixture, mixture.first, copied, hidden, slots)],
        *_activation(mixture, hidden),
        [input_call(hidden, again, times=k)],
        [_product(mixture, mixture.second, again, results, slots)],
        [combine_call(results, order, weights, out, per_token=k)],
    ]


def _activation(mixture: Mixture, hidden: Rows) -> Phases:
    """Return the call of an activation that is not a gate. It treats all hidden rows of a token as one wide row."""
    if len(mixture.first.matrices.parts) == 2 or mixture.activation == IDENTITY:
        return []
    stride = mixture.per_token * hidden.stride
    wide = Rows(hidden.address, stride, stride // 4, hidden.counted, hidden.held)
    return [[unary(mixture.activation, wide, wide)]]


def _product(mixture: Mixture, layer: ExpertLayer, x: Inputs, out: Rows, slots: int | Binding) -> Call:
    matrices, bias = layer.matrices, layer.bias
    parts = len(matrices.parts)
    if bias is not None:
        bias = np.ascontiguousarray(bias.reshape(matrices.experts, matrices.rows, parts).transpose(0, 2, 1))
    projections = [Affine(matrix, None if bias is None else bias[0, i]) for i, matrix in enumerate(matrices.parts)]
    gate, gated = (_gate(mixture), projections[1]) if parts == 2 else ("", None)
    call = decode_call(x, projections[0], out, gate=gate, gated=gated, swiglu=mixture.swiglu)
    stride = 0 if bias is None else bias.strides[0]
    return experts_call(call, slots, weight_stride=matrices.expert_bytes, bias_stride=stride)


def _gate(mixture: Mixture) -> str:
    """Return the gate. SWIGLU with the usual parameters equals the gate of dense layers."""
    swiglu = mixture.swiglu
    usual = (swiglu.alpha, swiglu.beta) == (1.0, 0.0) and not np.isfinite(swiglu.limit)
    if mixture.activation == SWIGLU:
        return "silu" if usual else SWIGLU
    return GATES.get(mixture.activation, mixture.activation)


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _memory(mixture: Mixture, capacity: int) -> dict[str, int]:
    """Return the offsets of the memory's parts, and its end.

    Results overwrite the copied and hidden rows, which are no longer needed by then.
    """
    first, second = mixture.first.matrices, mixture.second.matrices
    pairs = capacity * mixture.per_token
    sizes = dict.fromkeys(("chosen", "weights", "sources", "positions"), 4 * pairs) | {
        "slots": SLOT_BYTES * first.experts,
        "rounded": 0 if mixture.exact else input_bytes(first.parts[0], capacity, exact=False),
        "inputs": input_bytes(second.parts[0], pairs, exact=mixture.exact),
        "copied": input_bytes(first.parts[0], pairs, exact=mixture.exact),
        "hidden": pairs * _lines(4 * first.rows),
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name], end = end, end + _lines(size)
    return offsets | {
        "results": offsets["copied"],
        "end": max(end, offsets["copied"] + pairs * _lines(4 * second.rows)),
    }
