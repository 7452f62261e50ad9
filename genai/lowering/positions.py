"""Replaces values that a graph computes from positions and lengths by constants and by tables of positions.

Exporters write rotary tables, scales and masks with their own arithmetic, which changes between versions. This module
does not match that arithmetic. It evaluates the values for a few numbers of past and new tokens:

- A value that is equal for all of them is a constant.
- A value with one row per new token, whose row depends only on the token's position, is a table of positions.

Any other value raises `NotFlattenable`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set as AbstractSet
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..onnx.ir import Graph, Value, make_node
from ..onnx.types import DataType, TensorType
from .rows import NotFlattenable

Array = NDArray[Any]
Trial = tuple[int, int]
"""A number of past tokens and a number of new tokens."""
Evaluate = Callable[[Sequence[str], Trial], list[Array]]
"""Function that computes values of the graph for one sequence, whose new tokens follow its past tokens."""

_ONLY_SHAPES = ("Reshape", "Expand", "Slice", "Unsqueeze", "Squeeze", "Split", "Tile", "Pad", "ReduceSum", "ReduceMean")


def context_inputs(graph: Graph, content: AbstractSet[str], context: AbstractSet[str]) -> set[str]:
    """Return the values of `context` that are combined with values of `content`.

    Args:
        content: values that depend on tokens.
        context: values that depend only on lengths, positions and the attention mask.
    """
    found: set[str] = set()
    for node in graph.nodes:
        if content.isdisjoint(node.inputs) or node.op_type in ("Shape", "Size", "Equal"):
            continue
        used = node.inputs[:1] if node.op_type in _ONLY_SHAPES else node.inputs
        found.update(name for name in used if name in context)
    return found


def add_position_ids(graph: Graph, name: str, input_ids: str) -> str:
    """Add a graph input for positions, with the type of the token ids; return its name."""
    like = next(value for value in graph.inputs if value.name == input_ids)
    graph.inputs.append(Value(name, like.type))
    graph.invalidate()
    return name


def replace_constants(
    graph: Graph, names: Sequence[str], evaluate: Evaluate, trials: Sequence[Trial], more_trials: Sequence[Trial]
) -> None:
    """Replace each value that is equal for all trials by a constant.

    Args:
        more_trials: numbers of tokens for which only the values that are equal for `trials` are evaluated, because some
            masks cannot be computed for them.
    """
    constants: dict[str, Array] = {}
    for number, trial in enumerate((*trials, *more_trials)):
        kept = list(constants) if number else names
        found = dict(zip(kept, evaluate(kept, trial), strict=True)) if kept else {}
        constants = {name: array for name, array in found.items() if not number or _same(array, constants[name])}
    for name, array in constants.items():
        graph.replace_uses(name, graph.add_constant(f"{name}/constant", array))


def replace_tables(
    graph: Graph, names: Sequence[str], evaluate: Evaluate, trials: Sequence[Trial], max_tokens: int, position_ids: str
) -> None:
    """Replace values by constants, or by look-ups in tables of positions.

    Args:
        names: the values.
        trials: numbers of tokens for which the values are compared; they must have different numbers of new tokens.
        max_tokens: the number of positions of each table.
        position_ids: the graph input with the positions.
    """
    if not names:
        return
    found = [evaluate(names, trial) for trial in trials]
    arrays_of = {name: [arrays[index] for arrays in found] for index, name in enumerate(names)}
    axes: dict[str, int] = {}
    for name, arrays in arrays_of.items():
        axis = _token_axis(name, arrays, trials)
        if axis is None:
            graph.replace_uses(name, graph.add_constant(f"{name}/constant", arrays[0]))
        else:
            axes[name] = axis
    for name, array in zip(axes, evaluate(list(axes), (0, max_tokens)) if axes else [], strict=True):
        axis = axes[name]
        if array.ndim <= axis or array.shape[axis] != max_tokens:
            raise NotFlattenable(f"{name!r} has the shape {list(array.shape)} for {max_tokens} tokens")
        for (past, new), part in zip(trials, arrays_of[name], strict=True):
            if not _same(part, array.take(range(past, past + new), axis)):
                raise NotFlattenable(
                    f"{name!r} is not a table of positions, because it depends on more than the position"
                )
        graph.replace_uses(name, _table(graph, name, array, axis, position_ids))


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _token_axis(name: str, arrays: Sequence[Array], trials: Sequence[Trial]) -> int | None:
    """Return the axis with one entry per new token, or None if the value is equal for all trials.

    Raises:
        NotFlattenable: there is no such axis.
    """
    first = arrays[0]
    if all(_same(array, first) for array in arrays):
        return None
    if len({array.ndim for array in arrays}) == 1:
        axes = [
            axis
            for axis in range(first.ndim)
            if all(array.shape[axis] == new for array, (_, new) in zip(arrays, trials, strict=True))
        ]
        if len(axes) == 1 and all(size == 1 for size in first.shape[: axes[0]]):
            return axes[0]
    shapes = ", ".join(str(list(array.shape)) for array in arrays)
    numbers = ", ".join(str(new) for _, new in trials)
    raise NotFlattenable(f"{name!r} (shapes {shapes} for {numbers} tokens) is not a table of positions")


def _table(graph: Graph, name: str, array: Array, axis: int, position_ids: str) -> str:
    """Add a look-up of a table by position; return the name of its result, with the axes of `array`."""
    table = array.reshape(array.shape[axis:])
    if np.array_equal(table, np.broadcast_to(table[:1], table.shape)):  # the same for all positions
        return graph.add_constant(f"{name}/constant", array.take([0], axis))
    data, found = graph.add_constant(f"{name}/table", table), graph.fresh_name(f"{name}/rows")
    nodes = [make_node("Gather", [data, position_ids], [found], name=found, axis=0)]
    type_ = DataType.from_numpy(table.dtype)
    graph.values[found] = Value(found, TensorType(type_, (None, None, *table.shape[1:])))
    if axis > 1:
        unsqueezed = graph.fresh_name(f"{name}/axes")
        axes = graph.add_constant(f"{name}/new_axes", np.arange(1, axis))
        nodes.append(make_node("Unsqueeze", [found, axes], [unsqueezed], name=unsqueezed))
        found = unsqueezed
    graph.nodes[:0] = nodes
    graph.invalidate()
    return found
