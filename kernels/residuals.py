"""Records in another order, for devices where a product adds what it is given to its sums, and norms do nothing else.

Numbers are added in the order in which the records say: where sums are float32, every bit stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import records
from .records import RowsType


def add_early(parts: Sequence[Any], keep: Collection[str]) -> list[Any]:
    """Parts of a program, where a product that only a norm reads, which adds it to something, adds that itself.

    Args:
        keep: values that are read elsewhere, so that they must exist.
    """
    uses = Counter(name for part in parts for name in part.inputs)
    uses.update(list(keep))
    made = {name: place for place, part in enumerate(parts) for name in part.outputs}
    found = list(parts)
    for place, part in enumerate(parts):
        if not isinstance(part, records.Norm) or not part.skip or part.input_bias:
            continue
        maker = made.get(part.skip, -1)
        product = found[maker] if maker >= 0 else None
        if not isinstance(product, records.Product) or uses[part.skip] != 1 or made.get(part.x, -1) >= maker:
            continue
        branch = product.branch
        if branch.addend or branch.delta is not None:
            continue
        total = part.total or part.skip
        found[maker] = replace(product, branch=replace(branch, addend=part.x), out=total)
        found[place] = replace(part, x=total, skip="", total="")
    return found


def norm_late(
    parts: Sequence[Any], keep: Collection[str], types: Mapping[str, RowsType]
) -> tuple[list[Any], dict[str, RowsType]]:
    """Parts where the rows that logits are made of are normed once they are taken, and the types of their values."""
    uses = Counter(name for part in parts for name in part.inputs)
    uses.update(list(keep))
    makers = {part.out: part for part in parts if isinstance(part, records.Norm)}
    found, known, gone = list[Any](), dict(types), set[str]()
    for part in parts:
        norm = makers.get(part.x) if isinstance(part, records.LogitsRows) else None
        if norm is None or norm.skip or norm.total or uses[norm.out] != 1:
            found.append(part)
            continue
        known[norm.out] = known[part.out]
        found += [replace(part, x=norm.x, out=norm.out), replace(norm, x=norm.out, out=part.out)]
        gone.add(norm.out)
    return [one for one in found if not (isinstance(one, records.Norm) and one.out in gone)], known
