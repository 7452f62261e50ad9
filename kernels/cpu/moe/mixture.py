"""A mixture of experts as phases of calls, and the memory that they work in.

Phases: every token's experts are chosen, and its row is rounded to 8 bits (unless activations stay as they are); the
tokens are put in order of their experts; rows are copied into that order; every expert multiplies its rows, by the
first layer and its gate, then, rounded again, by the second; each token's results are added up, in order of the
experts' numbers. A token's result does not depend on the others, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
# The activation that leaves everything as it is.
IDENTITY = "copy"


@dataclass(frozen=True)
class ExpertLayer:
    """x @ matrix.T + bias for every expert.

    Attributes:
        bias: float32 [experts, rows], with the rows in the model's order: in turn those of the two parts, if two.
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
    """Two layers of experts with an activation between them, and how a token's experts are chosen and weighted.

    Attributes:
        per_token: experts that each token is sent to.
        normalized: weights are a softmax over the chosen experts' scores; otherwise over all.
        activation: a key of UNARY without parameters, such as IDENTITY, or SWIGLU. Where the first layer has two
            parts, the first is a gate: activation(first) * second.
        swiglu: the parameters of SWIGLU.
        exact: activations stay float32; otherwise they are rounded to 8 bits per block, as dense products do.
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
                f"{second.columns} columns, expected {first.experts} with one of {first.rows}, as the first layer gives"
            )
        gated = len(first.parts) == 2
        plain = self.activation in UNARY and not UNARY[self.activation].parameters
        if not plain and not (gated and self.activation == SWIGLU):
            raise ValueError(
                f"the activation of experts {'with' if gated else 'without'} gates cannot be {self.activation!r}"
            )
        dense = not isinstance(first.parts[0], BlockMatrix) or not isinstance(second.parts[0], BlockMatrix)
        if dense and not self.exact:
            raise ValueError("dense weights meet activations as they are: expected exact")
        if not 1 <= self.per_token <= first.experts:
            raise ValueError(f"per_token is {self.per_token}, expected 1 to {first.experts}, the number of experts")


def mixture_size(mixture: Mixture, capacity: int) -> int:
    """Bytes of memory that a mixture works in, for so many tokens or fewer."""
    return _memory(mixture, capacity)["end"]


def mixture_phases(
    mixture: Mixture, x: Rows, scores: Rows, out: Rows, memory: int | Binding, *, capacity: int, held: Any = None
) -> Phases:
    """The calls of a mixture.

    Args:
        x, scores: rows of its inputs and of a number per expert.
        out: rows of its outputs; may be x itself.
        memory: of `mixture_size` for the capacity, on a cache line. What is in it before and after does not matter, but
            no other call may use it meanwhile.
        capacity: the largest number of tokens.
        held: keeps the memory alive.
    """
    first, second = mixture.first.matrices, mixture.second.matrices
    for name, rows, width in (("x", x, first.columns), ("scores", scores, first.experts), ("out", out, second.rows)):
        check_rows(name, rows, x.counted, width)
    offsets, k, counted = _memory(mixture, capacity), mixture.per_token, x.counted

    def at(name: str) -> int | Binding:
        return memory + offsets[name]

    def pairs(name: str, width: int) -> Rows:
        """`per_token` times as many rows as there are tokens."""
        return Rows(at(name), _lines(4 * width), width, counted, held)

    def inputs(name: str, matrices: ExpertMatrices) -> Inputs:
        """Rows that such matrices multiply."""
        return inputs_at(at(name), matrices.parts[0], counted, held, exact=mixture.exact)

    chosen, weights, order, slots = at("chosen"), at("weights"), at("positions"), at("slots")
    rounded, copied, again = inputs("rounded", first), inputs("copied", first), inputs("inputs", second)
    hidden, results = pairs("hidden", first.rows), pairs("results", second.rows)
    routing = RouteArguments(scores=scores, per_token=k, normalized=mixture.normalized, chosen=chosen, weights=weights)
    sorting = OrderArguments(
        rows_field=counted, chosen=chosen, per_token=k, experts=first.experts, slots=slots, sources=at("sources"),
        positions=order,
    )  # fmt: skip
    # Every token is rounded once, however many experts it is sent to, and copied as it then lies in memory.
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
    """One that is no gate: of all hidden rows of a token as one wide row."""
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
    """SWIGLU with the usual parameters is the gate that dense layers have."""
    swiglu = mixture.swiglu
    usual = (swiglu.alpha, swiglu.beta) == (1.0, 0.0) and not np.isfinite(swiglu.limit)
    return "silu" if mixture.activation == SWIGLU and usual else mixture.activation


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _memory(mixture: Mixture, capacity: int) -> dict[str, int]:
    """Where things lie, from the start of the memory on, and its end.

    Results are written where copied rows and hidden ones were, which nothing reads by then.
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
