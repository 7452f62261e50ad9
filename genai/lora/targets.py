"""LoRA targets of a program: the linear layers that adapters can change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from genai.kernels.ir import (
    Attention,
    BlockWeight,
    GatedLinear,
    Linear,
    LoraDelta,
    LoraShrink,
    Op,
    OpProgram,
    Per,
    Projection,
    SelectColumns,
    projections,
)

from .names import FUSED, REORDERED, Module, module_of

# Matrices with fewer columns are not targets, because kernels read this number of values at a time.
_LEAST_COLUMNS = 16


@dataclass(frozen=True)
class LoraTarget:
    """A linear layer that adapters can change; it maps x [T, columns] to [T, rows]."""

    number: int
    module: Module
    rows: int
    columns: int


@dataclass(frozen=True)
class TargetColumns:
    """Columns [first, first + width) of a target's output."""

    target: LoraTarget
    first: int
    width: int


@dataclass(frozen=True)
class LoraTargets:
    """The LoRA targets of a program.

    Attributes:
        parts: for each projection, the output columns that form it, in order. A projection that the graph fuses with
            others is a part of one target; a fused projection of an adapter may consist of several targets.
        count: number of targets.
        rounds: True if at least one of the linear layers rounds its activations.
    """

    parts: Mapping[Module, tuple[TargetColumns, ...]]
    count: int
    rounds: bool

    @property
    def names(self) -> list[str]:
        """The names of the projections."""
        return [str(module) for module in self.parts]


def with_targets(program: OpProgram) -> tuple[OpProgram, LoraTargets]:
    """Return the program with LoRA targets in its linear layers, and the targets; values and constants are the same."""
    targets: dict[Module, LoraTarget] = {}
    # Adapters expect the columns of x in their original order, before they are reordered for a quantised matrix.
    origins = {op.out: op.x for op in program.ops
               if isinstance(op, SelectColumns) and REORDERED in op.out}  # fmt: skip
    parts: list[Any] = []
    for is_host, run in groupby(program.parts, lambda part: not isinstance(part, Op)):
        some: list[Any] = list(run)
        parts += some if is_host else _changed(some, program, targets, origins)
    sizes = {
        op.layer: (op.heads * op.head_size, *(op.kv_heads * size for size in
                       (op.head_size, op.v_head_size)))
        for op in program.ops if isinstance(op, Attention)
    }  # fmt: skip
    products = [op for op in program.ops if isinstance(op, Linear | GatedLinear)]
    weights = [projections(op)[0].weight for op in products if not op.exact]
    rounds = any(isinstance(weight, BlockWeight) and weight.is_uniform for weight in weights)
    return replace(program, parts=tuple(parts)), LoraTargets(_parts(targets, sizes), len(targets), rounds)


def without_targets(program: OpProgram) -> OpProgram:
    """Return the program without LoRA targets, so that each op can run on its own."""
    parts = [_bare(part) for part in program.parts if not isinstance(part, LoraShrink)]
    return replace(program, parts=tuple(parts))


def _bare(part: Any) -> Any:
    if isinstance(part, Linear):
        return replace(part, projection=replace(part.projection, delta=None))
    if isinstance(part, GatedLinear):
        return replace(part, gate=replace(part.gate, delta=None), up=replace(part.up, delta=None))
    return part


def _changed(
    ops: Sequence[Op], program: OpProgram, targets: dict[Module, LoraTarget], origins: Mapping[str, str]
) -> list[Op]:
    """Add targets to ops. The adapters' op on an input precedes the first linear layer that reads this input."""
    changed: list[Op] = []
    shrinks: dict[str, list[Op]] = {}
    for op in ops:
        if isinstance(op, Linear | GatedLinear) and program.types[op.x].per is Per.TOKEN:
            origin = origins.get(op.x, op.x)
            op = _adapted(op, targets, shrinks.setdefault(op.x, []), origin)
        changed.append(op)
    result: list[Op] = []
    for op in changed:
        if isinstance(op, Linear | GatedLinear):
            result += shrinks.pop(op.x, [])
        result.append(op)
    return result


def _adapted(op: Linear | GatedLinear, targets: dict[Module, LoraTarget], shrinks: list[Op], origin: str) -> Op:
    """Return a linear layer with its targets. Also add them to `targets`, and the ops for factor A to `shrinks`."""
    changes: dict[str, Projection] = {}
    for name in ("projection",) if isinstance(op, Linear) else ("gate", "up"):
        projection: Projection = getattr(op, name)
        module = _module(op, projection)
        if module is None or module in targets or projection.weight.columns < _LEAST_COLUMNS:
            continue
        target = LoraTarget(len(targets), module, projection.weight.rows, projection.weight.columns)
        targets[module] = target
        hidden = f"adapters of {module}"
        shrinks.append(LoraShrink(origin, target.number, hidden, op_type="LoraShrink"))
        changes[name] = replace(projection, delta=LoraDelta(hidden, target.number))
    return replace(op, **changes)  # type: ignore[arg-type]


def _module(op: Linear | GatedLinear, projection: Projection) -> Module | None:
    """Find the module by the name of the node's output, because weights with equal bytes may share a name."""
    names = (op.out, projection.weight.data) if isinstance(op, Linear) else (projection.weight.data,)
    return next((module for name in names if (module := module_of(name)) is not None), None)


def _parts(
    targets: Mapping[Module, LoraTarget], sizes: Mapping[int, Sequence[int]]
) -> dict[Module, tuple[TargetColumns, ...]]:
    parts: dict[Module, tuple[TargetColumns, ...]] = {
        module: (TargetColumns(target, 0, target.rows),) for module, target in targets.items()
    }
    for module, target in targets.items():
        layer, kind = module
        widths = sizes.get(layer, ()) if kind == "qkv_proj" else (target.rows // 2,) * 2
        inner = FUSED.get(kind, ())
        if inner and sum(widths) == target.rows:
            for index, name in enumerate(inner):
                parts.setdefault(Module(layer, name), (TargetColumns(target, sum(widths[:index]), widths[index]),))
    for layer in {module.layer for module in targets}:
        for kind, inner in FUSED.items():
            inner_targets = [targets.get(Module(layer, name)) for name in inner]
            if Module(layer, kind) not in targets and all(inner_targets):
                parts[Module(layer, kind)] = tuple(
                    TargetColumns(target, 0, target.rows) for target in inner_targets if target is not None
                )
    return parts
