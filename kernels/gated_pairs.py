"""Two products behind a gate as one record, for devices where one kernel multiplies with both weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from . import records


def fuse(
    parts: Sequence[Any], keep: Collection[str], alike: Callable[[records.Weight, records.Weight], bool]
) -> list[Any]:
    """Parts of a program (records, and what runs between them), with two products behind a gate made one.

    Args:
        keep: values that are read elsewhere, so that they must exist.
        alike: whether one call can multiply with both weights.
    """
    uses = Counter(name for record in parts for name in record.inputs)
    uses.update(list(keep))
    makers = {name: record for record in parts for name in record.outputs}
    fused: dict[int, records.Record] = {}
    gone: set[int] = set()
    for record in parts:
        if isinstance(record, records.Gate) and uses[record.gate] == uses[record.up] == 1:
            gate, up = makers.get(record.gate), makers.get(record.up)
            if not (isinstance(gate, records.Product) and isinstance(up, records.Product)) or gate.x != up.x:
                continue
            if gate.exact == up.exact and alike(gate.branch.weight, up.branch.weight):
                fused[id(record)] = records.GatedProduct(
                    gate.x, gate.branch, up.branch, record.activation, record.out, gate.exact, op_type=record.op_type
                )
                gone |= {id(gate), id(up)}
    return [fused.get(id(record), record) for record in parts if id(record) not in gone]
