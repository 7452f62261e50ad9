"""DynamicQuantizeLSTM of com.microsoft: an LSTM with 8-bit weights, which `quantize_dynamic` writes for every LSTM."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.gemm.linear import IntegerLinear
from genai.kernels.cpu.arrays.gemm.packing import pack_integer_weight
from genai.kernels.cpu.arrays.quantized_recurrent import QuantizedLstmSteps, is_supported
from genai.kernels.cpu.arrays.recurrent import USUAL_LSTM

from ..onnx.node import MS
from ..onnx.types import Dim, TensorType, Type
from .casting import dynamically_quantized
from .integer_products import exact_runs
from .matmul import MAX_BYTES
from .recurrent import Direction, Lstm
from .registry import KernelError, NodeSpec, register
from .shape_rules import NodeTypes, divided, shape_rule

_W, _R, _B, _P = 1, 2, 3, 7
# The input index of each matrix's scale; its zero point is the next input.
_SCALES = {_W: 8, _R: 10}
_NAMES = {_W: "W", _R: "R"}
_PRODUCT_AXES = 3


class _QuantizedMatrix:
    """A matrix of bytes as the right operand of `@`: the left operand is quantised to uint8, as one tensor.

    Args:
        sums: function of the left operand's bytes [M, K] and zero point that returns the integer sums [M, N].
        scales: the matrix's scale, one number or one per column.
        packed: the kernel for a constant matrix, None if there is none: the product for the input weights, and the
            steps for the recurrence.
    """

    # NumPy calls `__rmatmul__` instead of converting the matrix to an array.
    __array_ufunc__ = None

    def __init__(self, sums: Callable[[Any, int], Any], scales: Any, threads: Any, packed: Any = None) -> None:
        self._sums, self._scales, self._threads, self.packed = sums, scales, threads, packed

    def __rmatmul__(self, x: Any) -> Any:
        values, scale, point = dynamically_quantized(np.ascontiguousarray(x), threads=self._threads)
        sums = self._sums(values.reshape(math.prod(x.shape[:-1]), x.shape[-1]), int(point))
        return (sums * (scale * self._scales)).reshape(*x.shape[:-1], sums.shape[-1])

    def project(self, x: Any, bias: Any) -> Any:
        """Return x @ matrix + bias for float32 x [M, K], computed by `packed`."""
        values, scale, point = dynamically_quantized(x, threads=self._threads)
        scales = np.broadcast_to(np.asarray(scale * self._scales, np.float32), bias.shape)
        return self.packed.scaled(values, int(point), scales, bias)


@register("DynamicQuantizeLSTM", domain=MS)
class _DynamicQuantizeLstm(Lstm):
    """LSTM with W [directions, I, 4 H] and R [directions, H, 4 H] as int8 or uint8, and their scales and zero points.

    Each product quantises its left operand as one tensor: the inputs of all steps, and the states of one step.
    """

    def __init__(self, spec: NodeSpec) -> None:
        super().__init__(spec)
        if "hidden_size" not in spec.attributes:
            raise KernelError(f"{spec.op_type} needs the attribute 'hidden_size'")
        # True for each direction whose steps are computed by a kernel.
        self._has_usual_steps = [kind == USUAL_LSTM and self.clip == np.inf for kind, _ in self._kinds]
        self._constant = {index: self._prepared(spec, index) for index in (_W, _R)}

    def _prepared(self, spec: NodeSpec, index: int) -> list[_QuantizedMatrix] | None:
        """Return the packed matrix of each direction; None if a part is not constant, or if it cannot be packed."""
        parts = [spec.constants[i] if i < len(spec.constants) else None for i in (index, *self._parameters(index))]
        matrix = parts[0]
        if self._threads is None or any(part is None for part in parts):
            return None
        if matrix is None or matrix.ndim != _PRODUCT_AXES or not 0 < matrix.nbytes < MAX_BYTES:
            return None
        scales, point = self._quantization(index, *parts)
        matrices = []
        for direction in range(len(matrix)):
            layout = f"bytes in panels, direction {direction}"
            pack = partial(pack_integer_weight, self._threads, matrix[direction], spec.options.get("arena"))
            weight, zero = spec.pack((index,), layout, pack), np.asarray(point[direction])
            product = IntegerLinear(self._threads, weight, zero)
            steps = None
            if index == _R and is_supported(len(matrix[direction])):
                steps = QuantizedLstmSteps(self._threads, weight, zero, scales[direction])
            kernel = product if index == _W else steps
            matrices.append(_QuantizedMatrix(product.sums, scales[direction], self._threads, kernel))
        return matrices

    @staticmethod
    def _parameters(index: int) -> tuple[int, int]:
        return _SCALES[index], _SCALES[index] + 1

    def _quantization(self, index: int, matrix: Any, scale: Any, zero: Any) -> tuple[Any, Any]:
        """Return the scale, [directions] or [directions, 4 H], and one zero point per direction."""
        directions, columns = len(self.backwards), self.gates * int(self.attributes["hidden_size"])
        name = _NAMES[index]
        for label, array in (("scale", scale), ("zero_point", zero)):
            if array.shape not in ((directions,), (directions, columns)):
                raise KernelError(
                    f"{self.op_type}: {name}_{label} has shape {list(array.shape)}, expected {[directions]} or "
                    f"{[directions, columns]}"
                )
        if zero.dtype != matrix.dtype:
            raise KernelError(f"{self.op_type}: {name} is {matrix.dtype}, and its zero point is {zero.dtype}")
        points = zero.reshape(directions, -1)
        if np.any(points != points[:, :1]):
            raise KernelError(f"{self.op_type}: the zero points of {name} differ within a direction")
        return scale, points[:, 0]

    def _check_shapes(self, x: Any, inputs: Sequence[Any]) -> int:
        transposed = list(inputs)
        for index in (_W, _R):
            if inputs[index].ndim != _PRODUCT_AXES:
                raise KernelError(f"{self.op_type}: {_NAMES[index]} has shape {list(inputs[index].shape)}, not 3 axes")
            if any(inputs[i] is None for i in self._parameters(index)):
                raise KernelError(f"{self.op_type}: the scale or the zero point of {_NAMES[index]} is missing")
            transposed[index] = np.swapaxes(inputs[index], 1, 2)
        return super()._check_shapes(x, transposed)

    def _directions(self, inputs: Sequence[Any]) -> list[Direction]:
        count, hidden = len(self.backwards), int(self.attributes["hidden_size"])
        width = self.gates * hidden
        biases = np.zeros((count, 2 * width), np.float32) if inputs[_B] is None else inputs[_B]
        peepholes = [None] * count if inputs[_P] is None else [row.reshape(3, hidden) for row in inputs[_P]]
        inner, outer = (self._constant[index] or self._computed(index, inputs) for index in (_W, _R))
        return [Direction(inner[i], outer[i], biases[i, :width], biases[i, width:], peepholes[i]) for i in range(count)]

    def _has_kernels(self, x: Any, hidden: int, inputs: Sequence[Any]) -> bool:
        return False  # the kernels of float32 weights

    def _walk(self, x: Any, weights: Direction, state: Any, cell: Any, lengths: Any, index: int) -> Any:
        packed = weights.inputs.packed is not None and weights.states.packed is not None
        is_whole = lengths is None or bool((np.asarray(lengths) == len(x)).all())
        is_usual = self._has_usual_steps[index] and weights.peepholes is None
        if not (packed and is_whole and is_usual and x.size and x.dtype == np.float32):
            return super()._walk(x, weights, state, cell, lengths, index)
        bias = np.asarray(weights.input_bias + weights.state_bias, np.float32)
        projected = weights.inputs.project(np.ascontiguousarray(x).reshape(-1, x.shape[-1]), bias)
        state, cell = (np.ascontiguousarray(value, np.float32) for value in (state, cell))
        projected = projected.reshape(*x.shape[:2], -1)
        return weights.states.packed(projected, state, cell, backwards=self.backwards[index])

    def _computed(self, index: int, inputs: Sequence[Any]) -> list[_QuantizedMatrix]:
        matrix, *parameters = (inputs[i] for i in (index, *self._parameters(index)))
        scales, points = self._quantization(index, matrix, *parameters)
        return [
            _QuantizedMatrix(partial(_sums, part.astype(np.float32) - np.float32(point)), scale, self._threads)
            for part, point, scale in zip(matrix, points, scales, strict=True)
        ]


def _sums(right: Any, values: Any, point: int) -> Any:
    """Return exact integer sums, in float64."""
    left = values.astype(np.float32) - np.float32(point)
    total = np.zeros((len(left), right.shape[1]))
    for run in exact_runs(len(right)):
        total += left[:, run] @ right[run]
    return total.astype(np.float32)


@shape_rule("DynamicQuantizeLSTM")
def dynamic_quantize_lstm_types(types: NodeTypes) -> list[Type | None]:
    """Y [steps, directions, batch, H], Y_h and Y_c [directions, batch, H]."""
    source, shape = types.source, types.shape(0, rank=3)
    steps, batch = (None, None) if shape is None else shape[:2]
    directions = 2 if types.node.attribute("direction", "forward") == "bidirectional" else 1
    hidden: Dim = types.attribute("hidden_size", 0) or None
    if hidden is None and (weight := types.shape(_R, rank=3)) is not None:
        hidden = divided(weight[2], 4)
    state = TensorType(source.dtype, (directions, batch, hidden))
    return [TensorType(source.dtype, (steps, directions, batch, hidden)), state, state]
