"""Control flow and sequences. Subgraphs are compiled; their captured values follow the node's own inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, count, pairwise
from typing import Any

import numpy as np

from .registry import Kernel, KernelError, NodeSpec, Subgraph, operator, register, scalar
from .support import ARRAY_BYTES, MAX_VALUE_BYTES, checked_axis, checked_shape


@register("If")
class If:
    """The kernel that runs one of two subgraphs."""

    def __init__(self, spec: NodeSpec) -> None:
        self._then, self._else = spec.subgraphs["then_branch"], spec.subgraphs["else_branch"]

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return self.branch(inputs[0])(context, inputs[1:])

    def branch(self, condition: Any) -> Subgraph:
        """Return the subgraph for a condition, a single boolean."""
        return self._then if scalar(condition) else self._else


@register("Loop")
def loop(spec: NodeSpec) -> Kernel:
    """Run the body at most M times, while the condition holds; return carried values, then stacked outputs."""
    body = spec.subgraphs["body"]
    num_inputs = len(spec.inputs)
    num_carried = num_inputs - 2
    num_stacked = len(body.outputs) - 1 - num_carried
    if num_carried < 0 or num_stacked < 0:
        raise KernelError("Loop: the body must output the condition, then every carried value, then the stacked values")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        limit = None if inputs[0] is None else int(scalar(inputs[0]))
        going = inputs[1] is None or bool(scalar(inputs[1]))
        carried, captured = list(inputs[2:num_inputs]), inputs[num_inputs:]
        stacked: list[list[Any]] = [[] for _ in range(num_stacked)]
        room = _ResultBudget(spec)
        for step in count():
            if not going or (limit is not None and step >= limit):
                break
            results = body(context, [np.asarray(step, np.int64), np.asarray(going), *carried, *captured])
            going = bool(scalar(results[0]))
            carried = list(results[1 : 1 + num_carried])
            for values, value in zip(stacked, results[1 + num_carried :], strict=True):
                values.append(value)
                room.take(value)
        return *carried, *(_stacked(values, body, 1 + num_carried + i) for i, values in enumerate(stacked))

    return kernel


class _ResultBudget:
    """The limit on the total memory of the values collected over all iterations; it equals the limit of one value."""

    def __init__(self, spec: NodeSpec) -> None:
        self._op_type, self._left, self._held = (
            spec.op_type,
            int(spec.options.get("max_value_bytes", MAX_VALUE_BYTES)),
            0,
        )

    def take(self, value: Any) -> None:
        """Count a collected value. Raises KernelError if the limit is exceeded."""
        self._held += 1
        self._left -= getattr(value, "nbytes", 0) + ARRAY_BYTES
        if self._left < 0:
            raise KernelError(
                f"{self._op_type}: the {self._held} values collected over the iterations exceed the size limit of "
                "a single value"
            )


def _stacked(values: list[Any], body: Subgraph, output: int, axis: int = 0) -> Any:
    """Stack values along a new axis; if there are no values, return an empty array of the declared type."""
    if values:
        return np.stack([np.asarray(value) for value in values], axis=axis)
    dtype, shape = body.outputs[output]
    sizes = [0 if size is None else size for size in shape or ()]
    return np.empty((*sizes[:axis], 0, *sizes[axis:]), np.float32 if dtype is None else dtype)


@register("Scan", since_version=9)
def scan(spec: NodeSpec) -> Kernel:
    """Run the body once per slice of the scan inputs, carrying states from one slice to the next."""
    walk = _Scan(spec)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        values = inputs[: len(spec.inputs)]
        return walk(context, values[: walk.num_states], values[walk.num_states :], inputs[len(spec.inputs) :])

    return kernel


@register("Scan", since_version=8)
def scan_of_batches(spec: NodeSpec) -> Kernel:
    """Scan of operator set 8. Input 0 contains sequence lengths; axis 0 of all others is a batch, axis 1 is scanned."""
    walk = _Scan(spec, first=1)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        lengths, scan_inputs, captured = inputs[0], inputs[1 : len(spec.inputs)], inputs[len(spec.inputs) :]
        rows = []
        for row in range(len(scan_inputs[0])):
            length = None if lengths is None else int(lengths[row])
            states = [value[row] for value in scan_inputs[: walk.num_states]]
            scanned = [value[row][:length] for value in scan_inputs[walk.num_states :]]
            rows.append(walk(context, states, scanned, captured))
        return tuple(_padded(values) for values in zip(*rows, strict=True))

    return kernel


class _Scan:
    """The loop of a Scan node; `first` is the number of inputs before the states."""

    def __init__(self, spec: NodeSpec, first: int = 0) -> None:
        attributes = spec.attributes
        self._spec = spec
        self.body = spec.subgraphs["body"]
        self.num_scanned = int(attributes["num_scan_inputs"])
        self.num_states = len(spec.inputs) - first - self.num_scanned
        self.num_stacked = len(self.body.outputs) - self.num_states
        if self.num_scanned < 1 or self.num_states < 0 or self.num_stacked < 0:
            raise KernelError("Scan: num_scan_inputs does not match the node's inputs and the body's outputs")
        directions = "directions" if first else "scan_input_directions"
        self.input_axes = self._numbers(attributes.get("scan_input_axes"), self.num_scanned)
        self.input_backwards = self._numbers(attributes.get(directions), self.num_scanned)
        self.output_axes = self._numbers(attributes.get("scan_output_axes"), self.num_stacked)
        self.output_backwards = self._numbers(attributes.get("scan_output_directions"), self.num_stacked)

    def _numbers(self, values: Any, count: int) -> list[int]:
        numbers = [0] * count if values is None else [int(number) for number in values]
        if len(numbers) != count:
            raise KernelError(
                f"Scan: {len(numbers)} axes or directions are given for {count} scanned values; one per value is needed"
            )
        return numbers

    def __call__(self, context: Any, states: Sequence[Any], scanned: Sequence[Any], captured: Any) -> tuple[Any, ...]:
        carried = list(states)
        slices = [
            np.moveaxis(value, axis, 0)[:: -1 if backwards else 1]
            for value, axis, backwards in zip(scanned, self.input_axes, self.input_backwards, strict=True)
        ]
        lengths = {len(value) for value in slices}
        if len(lengths) != 1:
            raise KernelError(
                f"Scan: all scanned inputs must have the same length, but their lengths are {sorted(lengths)}"
            )
        stacked: list[list[Any]] = [[] for _ in range(self.num_stacked)]
        room = _ResultBudget(self._spec)
        for step in range(lengths.pop()):
            results = self.body(context, [*carried, *(value[step] for value in slices), *captured])
            carried = list(results[: self.num_states])
            for values, value in zip(stacked, results[self.num_states :], strict=True):
                values.append(value)
                room.take(value)
        return *carried, *(self._joined(values, index) for index, values in enumerate(stacked))

    def _joined(self, values: list[Any], index: int) -> Any:
        rank = values[0].ndim + 1 if values else len(self.body.outputs[self.num_states + index][1] or ()) + 1
        axis = self.output_axes[index] % max(rank, 1)
        return _stacked(
            values[::-1] if self.output_backwards[index] else values, self.body, self.num_states + index, axis
        )


def _padded(values: Sequence[Any]) -> Any:
    """Stack rows, padding shorter ones with zeros at the end of axis 0."""
    longest = max((len(value) if value.ndim else 0) for value in values)
    if all(value.ndim == 0 or len(value) == longest for value in values):
        return np.stack(values)
    return np.stack([np.pad(v, [(0, longest - len(v)), *[(0, 0)] * (v.ndim - 1)]) for v in values])


@register("SequenceMap")
def sequence_map(spec: NodeSpec) -> Kernel:
    """Run the body once per index of the first sequence, with that element of each sequence, and with whole tensors."""
    body = spec.subgraphs["body"]
    num_inputs = len(spec.inputs)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        captured = inputs[num_inputs:]
        outputs: list[list[Any]] = [[] for _ in body.outputs]
        room = _ResultBudget(spec)
        for index in range(len(inputs[0])):
            items = [value[index] if isinstance(value, list) else value for value in inputs[:num_inputs]]
            for values, value in zip(outputs, body(context, [*items, *captured]), strict=True):
                values.append(value)
                room.take(value)
        return tuple(outputs)

    return kernel


def _position(values: list[Any], index: Any, *, end: int = 0) -> int:
    """Return an index into a list; negative indices count from the end, and `end` 1 allows the index len(values)."""
    position = int(scalar(index))
    if not -len(values) <= position < len(values) + end:
        raise IndexError(f"position {position} is out of range for a sequence of {len(values)} elements")
    return position


@operator("SequenceErase", since_version=11)
def _erase(values: list[Any], index: Any = None) -> list[Any]:
    rest = list(values)
    del rest[-1 if index is None else _position(values, index)]
    return rest


@operator("SequenceInsert", since_version=11)
def _insert(values: list[Any], value: Any, index: Any = None) -> list[Any]:
    longer = list(values)
    longer.insert(len(values) if index is None else _position(values, index, end=1), value)
    return longer


operator("SequenceAt", since_version=11)(lambda values, index: values[_position(values, index)])
operator("SequenceConstruct", since_version=11)(lambda *values: list(values))
operator("SequenceEmpty", since_version=11)(list)
operator("SequenceLength", since_version=11)(lambda values: np.asarray(len(values), np.int64))
operator("OptionalHasElement", since_version=15)(lambda value=None: np.asarray(value is not None))
operator("Optional", since_version=15)(lambda value=None: value)


@operator("OptionalGetElement", since_version=15)
def optional_get_element(value: Any) -> Any:
    """Return the value of an optional; KernelError if it is empty."""
    if value is None:
        raise KernelError("OptionalGetElement: the optional is empty")
    return value


@operator("ConcatFromSequence", since_version=11)
def concat_from_sequence(values: Any, *, axis: int, new_axis: bool = False) -> Any:
    """Join the elements along an axis, or along a new axis."""
    return np.stack(values, axis=axis) if new_axis else np.concatenate(values, axis=axis)


@operator("SplitToSequence", since_version=11)
def split_to_sequence(x: Any, sizes: Any = None, *, axis: int = 0, keepdims: bool = True, spec: NodeSpec) -> Any:
    """Split into pieces of given sizes, pieces of one size, or single slices with or without the split axis."""
    along = checked_axis(axis, x.ndim)
    extent = x.shape[along]
    if sizes is None:
        checked_shape(spec, (extent,), ARRAY_BYTES)
        return _slices(x, along, keepdims=keepdims)
    if np.ndim(sizes) == 0:
        size = int(sizes)
        if size < 1:
            raise KernelError(f"SplitToSequence: the size of a piece is {size}, but it must be at least 1")
        checked_shape(spec, (-(-extent // size),), ARRAY_BYTES)
        return _pieces(x, [*range(size, extent, size), extent] if extent else [], along)
    lengths = [int(size) for size in np.asarray(sizes).tolist()]
    if sum(lengths) != extent or min(lengths, default=0) < 0:
        raise KernelError(
            f"SplitToSequence: the sizes {lengths!s:.200} do not add up to {extent}, the length of the axis"
        )
    return _pieces(x, accumulate(lengths), along)


def _pieces(x: Any, ends: Iterable[int], along: int) -> list[Any]:
    """Return views of x between consecutive ends; np.split is several times slower."""
    before = (slice(None),) * along
    return [x[(*before, slice(begin, end))] for begin, end in pairwise((0, *ends))]


def _slices(x: Any, along: int, *, keepdims: bool) -> list[Any]:
    """Return a view of each position of an axis, with or without that axis."""
    moved = np.moveaxis(x, along, 0)
    if keepdims:
        return list(np.expand_dims(moved, along + 1))
    # Iterating over a vector would yield its elements, not arrays.
    return list(moved) if moved.ndim > 1 else [moved[i, ...] for i in range(len(moved))]
