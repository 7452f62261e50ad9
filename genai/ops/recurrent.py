"""LSTM, GRU and RNN: directions are computed in turn, float32 in kernels, other types with one matmul per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays import recurrent as kernels
from genai.kernels.cpu.arrays.copying import operand
from genai.kernels.cpu.arrays.gemm.linear import DenseLinear
from genai.kernels.cpu.arrays.gemm.packing import pack_weight
from genai.kernels.cpu.program.thread_pool import fixed_address, temporary

from .activations import sigmoid, softplus
from .registry import KernelError, NodeSpec, register
from .support import optional, widened

Activation = Callable[[Any], Any]
# Name -> (function of x, alpha and beta; defaults of alpha and beta, None if unused), as the operators define them.
_FUNCTIONS: dict[str, tuple[Callable[[Any, Any, Any], Any], float | None, float | None]] = {
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "elu": (lambda x, a, b: np.where(x < 0, a * np.expm1(np.minimum(x, 0)), x), 1.0, None),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "leakyrelu": (lambda x, a, b: np.where(x < 0, a * x, x), 0.01, None),
    "relu": (lambda x, a, b: np.maximum(x, 0), None, None),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), 1.0, 1.0),
    "sigmoid": (lambda x, a, b: sigmoid(x), None, None),
    "softplus": (lambda x, a, b: softplus(x), None, None),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)), None, None),
    "tanh": (lambda x, a, b: np.tanh(x), None, None),
    "thresholdedrelu": (lambda x, a, b: np.where(x > a, x, 0), 1.0, None),
}

# The numbers of optional inputs.
_LENGTHS, _PEEPHOLES = 4, 7


@dataclass(frozen=True)
class Direction:
    """The weights of one direction: inputs [I, gates H] and states [H, gates H], both transposed; biases; peepholes."""

    inputs: Any
    states: Any
    input_bias: Any
    state_bias: Any
    peepholes: Any


class _Recurrent:
    """The base of the three operators: directions, sequence lengths, layout, activations."""

    layer: kernels.Layer = "RNN"
    gates = 1
    functions: tuple[str, ...] = ("Tanh",)  # default activations of one direction
    has_cell = False

    def __init__(self, spec: NodeSpec) -> None:
        attributes = spec.attributes
        self.op_type = spec.op_type
        direction = str(attributes.get("direction", "forward"))
        if direction not in ("forward", "reverse", "bidirectional"):
            raise KernelError(f"{spec.op_type}: direction {direction!r} is unknown")
        self.backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
        self.batch_first = bool(attributes.get("layout", 0))
        self.clip = float(attributes.get("clip", np.inf))
        # The functions of each direction, and their names and parameters for kernels.
        self.attributes = attributes
        self.activations: list[list[Activation]] = []
        self._kinds: list[tuple[kernels.Steps, tuple[float, ...]]] = []
        self._read_activations(spec)
        self._threads = spec.options.get("threads")
        # The weights of each direction as kernels read them, if the inputs are constants.
        known = [value is not None for value in spec.constants[1:4]]
        self._packs = len(known) > 1 and all(known[:2]) and (not spec.has(3) or all(known))
        self._packed: list[tuple[Callable[[Any], Any], kernels.Direction]] = []

    def step(self, x: Any, state: Any, cell: Any, weights: Direction, functions: Sequence[Activation]) -> Any:
        """Return the next (state, cell) of some rows; `x` is already multiplied by the input weights."""
        raise NotImplementedError

    def _read_activations(self, spec: NodeSpec) -> None:
        count = len(self.functions)
        names = list(spec.attributes.get("activations") or self.functions * len(self.backwards))
        alphas = list(spec.attributes.get("activation_alpha") or ())
        betas = list(spec.attributes.get("activation_beta") or ())
        if len(names) != count * len(self.backwards):
            raise KernelError(
                f"{spec.op_type}: the node has {len(names)} activations, but it needs {count * len(self.backwards)}"
            )
        activations: list[Activation] = []
        parameters: list[float] = []
        for name in names:
            if name.lower() not in _FUNCTIONS:
                raise KernelError(f"{spec.op_type}: activation {name!r} is unknown")
            function, alpha, beta = _FUNCTIONS[name.lower()]
            # The attributes list alpha and beta only for the functions that use them, in the order of the functions.
            alpha = float(alphas.pop(0)) if alphas and alpha is not None else alpha
            beta = float(betas.pop(0)) if betas and beta is not None else beta
            # As in onnxruntime, `clip` applies to the gates, but not to the cell, the input of an LSTM's last function.
            shows_cell = self.has_cell and len(activations) % count == count - 1
            activations.append(_bound(function, alpha, beta, np.inf if shows_cell else self.clip))
            parameters += alpha or 0.0, beta or 0.0
        for first in range(0, len(activations), count):
            kind = kernels.Steps(
                self.layer, tuple(name.lower() for name in names[first : first + count]),
                couples=self.has_cell and bool(self.attributes.get("input_forget", 0)),
                has_peepholes=self.has_cell and spec.has(_PEEPHOLES),
                resets_product=self.layer != "GRU" or bool(self.attributes.get("linear_before_reset", 0)),
            )  # fmt: skip
            self.activations.append(activations[first : first + count])
            self._kinds.append((kind, tuple(parameters[2 * first : 2 * (first + count)])))

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        given, dtype = widened(inputs[0]), inputs[0].dtype
        x = np.swapaxes(given, 0, 1) if self.batch_first else given
        hidden = self._check_shapes(x, inputs)
        lengths = optional(inputs, _LENGTHS)
        if lengths is not None and (np.shape(lengths) != x.shape[1:2] or np.any((lengths < 0) | (lengths > len(x)))):
            raise KernelError(f"{self.op_type}: sequence_lens must have one length from 0 to {len(x)} per sequence")
        if self._has_kernels(given, hidden, inputs):
            return tuple([value.astype(dtype, copy=False) for value in self._compiled(given, hidden, inputs)])
        directions = self._directions(inputs)
        directions_done = []
        for index, weights in enumerate(directions):
            state, cell = (self._initial(optional(inputs, 5 + i), index, x, hidden) for i in (0, 1))
            directions_done.append(self._walk(x, weights, state, cell, lengths, index))
        outputs, states, cells = zip(*directions_done, strict=True)
        if len(directions_done) == 1:
            result = outputs[0][:, None], states[0][None], cells[0][None]
        else:
            result = np.stack(outputs, axis=1), np.stack(states), np.stack(cells)
        if self.batch_first:
            result = result[0].transpose(2, 0, 1, 3), np.swapaxes(result[1], 0, 1), np.swapaxes(result[2], 0, 1)
        return tuple(np.ascontiguousarray(value).astype(dtype, copy=False) for value in result[: 2 + self.has_cell])

    def _check_shapes(self, x: Any, inputs: Sequence[Any]) -> int:
        """Return the hidden size. Raises KernelError if an input has a shape that the operator does not allow."""
        weight, recurrence = inputs[1], inputs[2]
        if x.ndim != 3 or weight.ndim != 3 or recurrence.ndim != 3:
            raise KernelError(
                f"{self.op_type}: X, W and R must have 3 axes each, but they have {x.ndim}, {weight.ndim} and "
                f"{recurrence.ndim}"
            )
        hidden = int(self.attributes.get("hidden_size", recurrence.shape[-1]))
        count, rows = len(self.backwards), self.gates * hidden
        state = (x.shape[1], count, hidden) if self.batch_first else (count, x.shape[1], hidden)
        fitting: dict[str, tuple[int, tuple[int, ...]]] = {
            "W": (1, (count, rows, x.shape[2])), "R": (2, (count, rows, hidden)), "B": (3, (count, 2 * rows)),
            "initial_h": (5, state),
        }  # fmt: skip
        if self.has_cell:
            fitting |= {"initial_c": (6, state), "P": (7, (count, 3 * hidden))}
        for name, (index, shape) in fitting.items():
            array = optional(inputs, index)
            if array is not None and array.shape != shape:
                raise KernelError(
                    f"{self.op_type}: {name} has shape {list(array.shape)}, but it must have shape {list(shape)}, "
                    f"because num_directions is {count}, hidden_size is {hidden} and the input has shape "
                    f"{list(x.shape)}"
                )
        return hidden

    def _initial(self, initial: Any, index: int, x: Any, hidden: int) -> Any:
        if initial is None:
            return np.zeros((x.shape[1], hidden), x.dtype)
        return widened(initial[:, index] if self.batch_first else initial[index]).astype(x.dtype, copy=False)

    def _directions(self, inputs: Sequence[Any]) -> list[Direction]:
        weight, recurrence, bias = widened(inputs[1]), widened(inputs[2]), optional(inputs, 3)
        peepholes = optional(inputs, _PEEPHOLES) if self.has_cell else None
        hidden = recurrence.shape[-1]
        width = self.gates * hidden
        directions = []
        for index in range(len(self.backwards)):
            biases = np.zeros(2 * width, weight.dtype) if bias is None else widened(bias[index])
            peephole = None if peepholes is None else widened(peepholes[index]).reshape(3, hidden)
            directions.append(Direction(weight[index].T, recurrence[index].T, biases[:width], biases[width:], peephole))
        return directions

    def _walk(self, x: Any, weights: Direction, state: Any, cell: Any, lengths: Any, index: int) -> Any:
        """Run all steps of one direction; return outputs [steps, batch, hidden], the last state and the last cell."""
        steps, batch = x.shape[:2]
        projected = x @ weights.inputs + weights.input_bias
        outputs = np.zeros((steps, batch, state.shape[-1]), x.dtype)
        ends = (np.full(batch, steps) if lengths is None else np.asarray(lengths))[:, None]
        state, cell = (np.where(ends > 0, start, 0) for start in (state, cell))  # length 0 gives 0, as in onnxruntime
        ragged = bool(np.any(ends != steps))
        for step in range(steps - 1, -1, -1) if self.backwards[index] else range(steps):
            new_state, new_cell = self.step(projected[step], state, cell, weights, self.activations[index])
            alive = step < ends
            np.copyto(outputs[step], new_state, where=alive)
            if ragged:
                new_state, new_cell = np.where(alive, new_state, state), np.where(alive, new_cell, cell)
            state, cell = new_state, new_cell
        return outputs, state, cell

    def _has_kernels(self, x: Any, hidden: int, inputs: Sequence[Any]) -> bool:
        """Return True if kernels compute the layer for these inputs."""
        others = [value for number, value in enumerate(inputs) if value is not None and number != _LENGTHS]
        is_same = all(value.dtype == inputs[0].dtype for value in others)
        return isinstance(x, np.ndarray) and x.dtype == np.float32 and is_same and x.size > 0 and hidden > 0

    def _compiled(self, x: Any, hidden: int, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return all results, computed in kernels."""
        steps, batch = x.shape[1::-1] if self.batch_first else x.shape[:2]
        count = len(self.backwards)
        state = (batch, count, hidden) if self.batch_first else (count, batch, hidden)
        out = (batch, steps, count, hidden) if self.batch_first else (steps, count, batch, hidden)
        results = [np.empty(shape, np.float32) for shape in (out, state, *([state] if self.has_cell else []))]
        lengths = optional(inputs, _LENGTHS)
        others = (_contiguous(optional(inputs, number)) for number in (5, *((6, _PEEPHOLES) if self.has_cell else ())))
        initial, cells, peepholes = (*others, None, None)[:3]
        arrays = kernels.States(
            results[0], results[1], results[2] if self.has_cell else None, initial, cells, peepholes,
            None if lengths is None else np.ascontiguousarray(lengths, np.int32),
        )  # fmt: skip
        packed = self._packed or [self._pack(weights, index) for index, weights in enumerate(self._directions(inputs))]
        if self._packs:
            self._packed = packed
        rows = operand(x).reshape(-1, x.shape[-1])
        directions = [direction for _, direction in packed]
        # One matmul for all steps; NumPy multiplies the steps of [steps, batch, width] one after another.
        xs = [temporary(project(rows)).reshape(*x.shape[:2], -1) for project, _ in packed]
        for direction in directions if self._packs else ():
            for weights in (direction.recurrence, direction.last, direction.bias):
                if weights is not None:
                    fixed_address(weights)
        kernels.run_steps(directions, xs, arrays, batch_first=self.batch_first, threads=self._threads)
        return tuple(results)

    def _pack(self, weights: Direction, index: int) -> tuple[Callable[[Any], Any], kernels.Direction]:
        """Return the linear layer of the inputs, and what the steps need."""
        kind, parameters = self._kinds[index]
        hidden = len(weights.states)
        inner = hidden * (self.gates - 1 if self.layer == "GRU" and kind.resets_product else self.gates)
        bias = weights.input_bias.copy()
        bias[:inner] += weights.state_bias[:inner]
        bias, inputs = (kernels.padded_gates(part, self.gates) for part in (bias, weights.inputs))

        def multiply(x: Any) -> Any:
            return np.matmul(x, inputs) + bias

        layer: Callable[[Any], Any] = multiply
        if self._packs and self._threads is not None:
            layer = DenseLinear(self._threads, pack_weight(self._threads, inputs), bias)
        states, last, last_bias = weights.states, None, None
        if kind.is_two_products:
            states, last = states[:, :-hidden], kernels.packed(states[:, -hidden:], 1)
        elif self.layer == "GRU":
            last_bias = kernels.padded_gates(np.ascontiguousarray(weights.state_bias[-hidden:]), 1)
        return layer, kernels.Direction(
            kind, kernels.packed(states, states.shape[1] // hidden), last, last_bias, self.backwards[index], self.clip,
            parameters,
        )  # fmt: skip


def _contiguous(array: Any) -> Any:
    return None if array is None else np.ascontiguousarray(widened(array))


def _bound(function: Callable[[Any, Any, Any], Any], alpha: Any, beta: Any, limit: float) -> Activation:
    return lambda x: function(np.clip(x, -limit, limit), alpha, beta)


@register("RNN", since_version=7)
class _Rnn(_Recurrent):
    """The Elman network."""

    def step(self, x: Any, state: Any, cell: Any, weights: Direction, functions: Sequence[Activation]) -> Any:
        return functions[0](x + state @ weights.states + weights.state_bias), cell


@register("GRU", since_version=7)
class _Gru(_Recurrent):
    """Gated recurrent units (Cho et al. 2014): gates z, r, h in the weights."""

    layer = "GRU"
    gates = 3
    functions = ("Sigmoid", "Tanh")

    def step(self, x: Any, state: Any, cell: Any, weights: Direction, functions: Sequence[Activation]) -> Any:
        squash, activate = functions
        hidden = state.shape[-1]
        both = 2 * hidden
        gates = squash(x[:, :both] + state @ weights.states[:, :both] + weights.state_bias[:both])
        update, reset = gates[:, :hidden], gates[:, hidden:]
        if self.attributes.get("linear_before_reset", 0):
            recalled = reset * (state @ weights.states[:, both:] + weights.state_bias[both:])
        else:
            recalled = (reset * state) @ weights.states[:, both:] + weights.state_bias[both:]
        return (1 - update) * activate(x[:, both:] + recalled) + update * state, cell


@register("LSTM", since_version=7)
class Lstm(_Recurrent):
    """Long short-term memory (Hochreiter & Schmidhuber 1997): gates i, o, f, c in the weights; peepholes i, o, f."""

    layer = "LSTM"
    gates = 4
    functions = ("Sigmoid", "Tanh", "Tanh")
    has_cell = True

    def step(self, x: Any, state: Any, cell: Any, weights: Direction, functions: Sequence[Activation]) -> Any:
        squash, activate, show = functions
        gates = x + state @ weights.states + weights.state_bias
        admit, expose, forget, candidate = np.split(gates, 4, axis=-1)
        peephole = weights.peepholes
        if peephole is not None:
            admit, forget = admit + peephole[0] * cell, forget + peephole[2] * cell
        admit = squash(admit)
        forget = 1 - admit if self.attributes.get("input_forget", 0) else squash(forget)
        new_cell = forget * cell + admit * activate(candidate)
        if peephole is not None:
            expose = expose + peephole[1] * new_cell
        return squash(expose) * show(new_cell), new_cell
