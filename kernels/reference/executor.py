"""The reference device, which walks over the ops of a program and computes each one directly by its definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import ir
from ..cache_layout import CacheLayer, PagedLayer, StateLayer
from ..device import DeviceArray, Factors, StepCancelled, StepContext, UnsupportedOp
from ..host_memory import HostMemory, TimedByHost
from ..ir import Constants, HostNode, Op, OpProgram, Projection, Weight, constant_names
from .attention import attention, within
from .functions import BINARY, UNARY, Array, Float64, norm
from .lora import ReferenceAdapter, lora_shrink
from .recurrence import causal_conv, linear_attention, linear_recurrence
from .sampling import ReferenceSampler
from .weights import ReferenceWeights, mixture

KNOWN = (
    ir.Attention, ir.Binary, ir.CausalConv, ir.SliceColumns, ir.MoE, ir.Gate, ir.GatedLinear, ir.JoinColumns,
    ir.LinearAttention, ir.LinearRecurrence, ir.LogitsRows, ir.Embedding, ir.LoraShrink, ir.Norm, ir.Linear,
    ir.SelectColumns, ir.Unary,
)  # fmt: skip


class ReferenceExecutor(HostMemory):
    """See `genai.kernels.device.Executor`. NumPy determines the number of threads of a matmul."""

    name = device = "reference"
    threads = 1
    host_threads = None

    def __init__(self, threads: int | None = None) -> None:
        self._weights: dict[Constants, ReferenceWeights] = {}

    def compile(self, program: OpProgram, layers: Sequence[CacheLayer | None] = ()) -> ReferenceStep:
        unknown = sorted({type(op).__name__ for op in program.ops if not isinstance(op, KNOWN)})
        if unknown:
            raise UnsupportedOp(f"the reference device does not support these ops: {', '.join(unknown)}")
        return ReferenceStep(program, layers, self._weights_of(program.constants).hold(program.ops))

    def _weights_of(self, constants: Constants) -> ReferenceWeights:
        return self._weights.setdefault(constants, ReferenceWeights(constants))

    def sampler(self, vocab_size: int) -> ReferenceSampler:
        return ReferenceSampler(vocab_size)

    def array_function(self, op: Op, constants: Constants) -> Callable[..., Any]:
        if not isinstance(op, ir.MoE):
            raise UnsupportedOp(f"the reference device has no array function for {type(op).__name__}")
        product = self._weights_of(constants).hold([op]).product
        return lambda x, scores: mixture(op, x, scores, product).astype(np.float32)

    def load_adapter(self, factors: Sequence[Sequence[Factors]]) -> ReferenceAdapter:
        return ReferenceAdapter(factors)

    def packed_bytes(self, weight: Weight, constants: Constants) -> int:
        """See `Executor.packed_bytes`. Weights are read in the form in which they are stored."""
        return sum(constants.array(name).nbytes for name in constant_names(weight))

    def arithmetic(self, op: Op, constants: Constants, *, prefill: bool) -> str | None:
        return None if prefill else "fp32"

    def ceiling(self, what: str) -> float | None:
        return None

    def close(self) -> None:
        self._weights.clear()


class ReferenceStep(TimedByHost):
    """See `genai.kernels.device.StepFunction`.

    Values of a step are stored as float32 in the shapes of the graph, and read and written as float64 [T, width].
    """

    takes_choices = False

    def __init__(self, program: OpProgram, layers: Sequence[CacheLayer | None], weights: ReferenceWeights) -> None:
        self._program, self._layers, self._weights = program, layers, weights
        self._values: dict[str, Any] = {}
        self._cancelled = False

    def run(self, step: StepContext, given: Mapping[str, DeviceArray] | None = None) -> dict[str, Array]:
        self._values = dict(given or {})
        for name, (ids, dtype) in self._program.ids.items():
            self._values[name] = step.integers(ids)[None].astype(dtype)
        with np.errstate(all="ignore"):
            for part in self._program.parts:
                if self._cancelled:
                    raise StepCancelled
                if isinstance(part, HostNode):
                    self._values.update(part.call(self._values))
                else:
                    self._compute(part, step)
        return {name: self._values[name] for name in self._program.outputs}

    def cancel(self) -> None:
        self._cancelled = True

    def resume(self) -> None:
        self._cancelled = False

    def __getitem__(self, name: str) -> Any:
        """The rows of a value, or 0 if the name is empty."""
        if not name:
            return 0.0
        return np.asarray(self._values[name], np.float64).reshape(-1, self._program.types[name].width)

    def __setitem__(self, name: str, rows: Float64) -> None:
        if name:
            self._values[name] = np.ascontiguousarray(rows, np.float32).reshape(self._program.types[name].shape)

    def _vector(self, name: str) -> Any:
        """Return a constant as float64 [n], or 0 if the name is empty."""
        array = self._weights.array(name)
        return 0.0 if array is None else array.reshape(-1).astype(np.float64)

    def _linear(self, x: str, projection: Projection) -> Any:
        out = self._weights.product(self[x], projection) + self[projection.addend]
        for rows, columns, added in self._values[projection.delta.hidden] if projection.delta else ():
            out[rows, columns] += added
        return out

    def _states(self, layer: int) -> StateLayer:
        states = self._layers[layer]
        assert isinstance(states, StateLayer)
        return states

    def _compute(self, op: Op, step: StepContext) -> None:
        """Compute the op by its definition."""
        types = self._program.types
        match op:
            case ir.Embedding(table, ids, out):
                wanted = step.integers(ids)
                within(wanted, table.rows, "index outside its table")
                self[out] = self._weights.rows(table, wanted)
            case ir.SliceColumns(x, first, out):
                self[out] = self[x][:, first : first + types[out].width]
            case ir.SelectColumns(x, order, out):
                self[out] = self[x][:, self._weights.array(order)]
            case ir.JoinColumns(joined, out):
                self[out] = np.concatenate([self[name] for name in joined], axis=1)
            case ir.LogitsRows(x, out):
                within(step.logits_indices, len(step.tokens), "row of logits outside the step")
                self[out] = self[x][step.logits_indices]
            case ir.LoraShrink(x, target, out):
                self._values[out] = list(lora_shrink(self[x], target, step))
            case ir.Linear(x, projection, out):
                self[out] = self._linear(x, projection)
            case ir.GatedLinear(x, gate, up, activation, out):
                self[out] = UNARY[activation](self._linear(x, gate)) * self._linear(x, up)
            case ir.Norm(x, weight, epsilon, out, centred, bias, skip, input_bias, total):
                scale, summed = self._vector(weight), self[x] + self[skip] + self._vector(input_bias)
                self[total] = summed
                self[out] = norm(summed.reshape(-1, scale.size), scale, epsilon, self._vector(bias), centred)
            case ir.Unary(function, x, out, parameters):
                self[out] = UNARY[function](self[x], *parameters)
            case ir.Binary(function, a, b, out, a_constant, b_constant):
                left = self[a] if a else np.resize(self._vector(a_constant), types[out].width)
                right = self[b] if b else np.resize(self._vector(b_constant), types[out].width)
                self[out] = BINARY[function](left, right)
            case ir.Gate(activation, gate, up, out):
                self[out] = UNARY[activation](self[gate]) * self[up]
            case ir.Attention(query, key, value, out, layer):
                pages, rows = self._layers[layer], [self[name] if name else None for name in (query, key, value)]
                assert isinstance(pages, PagedLayer)
                self[out] = attention(op, rows, pages, step, self._weights.array)
            case ir.LinearRecurrence(x, decay, out, layer):
                self[out] = linear_recurrence(self[x], self[decay], self._states(layer), step)
            case ir.CausalConv(x, weight, out, layer, bias):
                taps = self._weights.array(weight)
                self[out] = causal_conv(op, self[x], taps, self._vector(bias), self._states(layer), step)
            case ir.LinearAttention(out=out, layer=layer):
                values = {name: self[name] for name in op.inputs}
                self[out] = linear_attention(op, values, self._states(layer), step)
            case ir.MoE(x, scores, out):
                self[out] = mixture(op, self[x], self[scores], self._weights.product)
