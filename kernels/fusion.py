"""Fusions of ops, for devices whose kernels do the work of several ops.

- The two linear layers of a gate become one op if one kernel can multiply by both weights.
- A linear layer and a function of its result become one op if a kernel computes the function of its sums. The function
  can also be a gate: half of the result, activated, times the other half.
- Additions move into linear layers, and norms move after the selection of rows, for devices on which a linear layer
  adds its addend to its sums. Numbers are added in the order that the ops define, so float32 sums stay bit-identical.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import ir
from .ir import RowsType


def fuse_gated_linears(
    parts: Sequence[Any], keep: Collection[str], alike: Callable[[ir.Weight, ir.Weight], bool]
) -> list[Any]:
    """Return the parts of a program (ops and host nodes) with the two linear layers of each gate fused into one op.

    Args:
        keep: values that are read elsewhere and so must be computed.
        alike: function that returns True if one call can multiply by both weights.
    """
    uses = Counter(name for op in parts for name in op.inputs)
    uses.update(list(keep))
    makers = {name: op for op in parts for name in op.outputs}
    fused: dict[int, ir.Op] = {}
    gone: set[int] = set()
    for op in parts:
        if isinstance(op, ir.Gate) and uses[op.gate] == uses[op.up] == 1:
            gate, up = makers.get(op.gate), makers.get(op.up)
            if not (isinstance(gate, ir.Linear) and isinstance(up, ir.Linear)) or gate.x != up.x:
                continue
            if gate.exact == up.exact and alike(gate.projection.weight, up.projection.weight):
                fused[id(op)] = ir.GatedLinear(
                    gate.x, gate.projection, up.projection, op.activation, op.out, gate.exact, op_type=op.op_type
                )
                gone |= {id(gate), id(up)}
    return [fused.get(id(op), op) for op in parts if id(op) not in gone]


def fuse_activations(parts: Sequence[Any], keep: Collection[str], fits: Callable[[ir.Linear], bool]) -> list[Any]:
    """Return the parts of a program with functions without parameters fused into the linear layers before them.

    Args:
        keep: values that are read elsewhere and so must be computed.
        fits: function that returns True if the device has a kernel for a linear layer with an activation.
    """
    uses = Counter(name for part in parts for name in part.inputs)
    uses.update(list(keep))
    makers = {part.out: part for part in parts if isinstance(part, ir.Linear)}
    fused, gone = dict[int, ir.Linear](), set[int]()
    for part in parts:
        if isinstance(part, ir.Unary) and uses[part.x] == 1 and not part.parameters and part.x in makers:
            linear = makers[part.x]
            if not linear.activation and fits(linear):
                fused[id(part)] = replace(linear, out=part.out, activation=part.function)
                gone.add(id(linear))
    return [fused.get(id(part), part) for part in parts if id(part) not in gone]


def fuse_halves(
    parts: Sequence[Any], keep: Collection[str], types: Mapping[str, RowsType], fits: Callable[[ir.Linear], bool]
) -> list[Any]:
    """Return the parts of a program with gates fused into the linear layers that compute the gate and the gated values.

    Args:
        keep: values that are read elsewhere and so must be computed.
        types: types of the values.
        fits: function that returns True if the device has a kernel for a linear layer with such a gate.
    """
    uses = Counter(name for part in parts for name in part.inputs)
    uses.update(list(keep))
    makers = {name: part for part in parts for name in part.outputs}
    fused, gone = dict[int, ir.Linear](), set[int]()
    for part in parts:
        if not (isinstance(part, ir.Binary) and part.function == "multiply" and part.a and part.b):
            continue
        for active, other in ((part.a, part.b), (part.b, part.a)):
            found = _activated(active, makers, uses)
            if found is None or uses[active] != 1 or uses[other] != 1:
                continue
            function, gate, functions = found
            halves: list[Any] = [makers.get(gate), makers.get(other)]
            linear = _halved(halves, makers, uses, types)
            if linear is not None and not linear.activation and fits(linear):
                half = "first" if halves[0].first == 0 else "second"
                fused[id(part)] = replace(linear, out=part.out, activation=function, gate=half)
                gone |= {id(linear), *map(id, halves), *map(id, functions)}
                break
    return [fused.get(id(part), part) for part in parts if id(part) not in gone]


def _activated(name: str, makers: Mapping[str, Any], uses: Mapping[str, int]) -> tuple[str, str, list[Any]] | None:
    """Return the function that makes a value, the function's argument and the ops; None if no other op reads them."""
    maker = makers.get(name)
    if isinstance(maker, ir.Unary) and not maker.parameters and uses[maker.x] == 1:
        return maker.function, maker.x, [maker]
    if not isinstance(maker, ir.Binary) or maker.function != "multiply":
        return None
    for argument, squashed in ((maker.a, maker.b), (maker.b, maker.a)):  # SiLU is x * sigmoid(x)
        sigmoid = makers.get(squashed)
        if isinstance(sigmoid, ir.Unary) and (sigmoid.function, sigmoid.x) == ("sigmoid", argument):
            return ("silu", argument, [maker, sigmoid]) if (uses[argument], uses[squashed]) == (2, 1) else None
    return None


def _halved(
    halves: Sequence[Any], makers: Mapping[str, Any], uses: Mapping[str, int], types: Mapping[str, RowsType]
) -> ir.Linear | None:
    """Return the linear layer whose columns two slices divide in two halves, if no other op reads them."""
    if not all(isinstance(half, ir.SliceColumns) for half in halves) or halves[0].x != halves[1].x:
        return None
    linear, width = makers.get(halves[0].x), types[halves[0].out].width
    if not isinstance(linear, ir.Linear) or uses[linear.out] != 2 or types[halves[1].out].width != width:
        return None
    starts = sorted(half.first for half in halves)
    return linear if starts == [0, width] and types[linear.out].width == 2 * width else None


def add_early(parts: Sequence[Any], keep: Collection[str]) -> list[Any]:
    """Return the parts of a program with additions moved from norms into the preceding linear layers.

    An addition moves if the linear layer's result is read only by the norm, which adds this result to its input.

    Args:
        keep: values that are read elsewhere and so must be computed.
    """
    uses = Counter(name for part in parts for name in part.inputs)
    uses.update(list(keep))
    made = {name: index for index, part in enumerate(parts) for name in part.outputs}
    found = list(parts)
    for index, part in enumerate(parts):
        if not isinstance(part, ir.Norm) or not part.skip or part.input_bias:
            continue
        maker = made.get(part.skip, -1)
        linear = found[maker] if maker >= 0 else None
        if not isinstance(linear, ir.Linear) or uses[part.skip] != 1 or made.get(part.x, -1) >= maker:
            continue
        projection = linear.projection
        if projection.addend or projection.delta is not None:
            continue
        total = part.total or part.skip
        found[maker] = replace(linear, projection=replace(projection, addend=part.x), out=total)
        found[index] = replace(part, x=total, skip="", total="")
    return found


def norm_late(
    parts: Sequence[Any], keep: Collection[str], types: Mapping[str, RowsType]
) -> tuple[list[Any], dict[str, RowsType]]:
    """Return the parts with rows of logits normalised after they are selected, and the types of the parts' values."""
    uses = Counter(name for part in parts for name in part.inputs)
    uses.update(list(keep))
    makers = {part.out: part for part in parts if isinstance(part, ir.Norm)}
    found, known, gone = list[Any](), dict(types), set[str]()
    for part in parts:
        norm = makers.get(part.x) if isinstance(part, ir.LogitsRows) else None
        if norm is None or norm.skip or norm.total or uses[norm.out] != 1:
            found.append(part)
            continue
        known[norm.out] = known[part.out]
        found += [replace(part, x=norm.x, out=norm.out), replace(norm, x=norm.out, out=part.out)]
        gone.add(norm.out)
    return [one for one in found if not (isinstance(one, ir.Norm) and one.out in gone)], known
