"""Where adapters can change a program: a place beside each product that a checkpoint would call a projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from genai.kernels.ir import (
    Attention,
    BlockWeight,
    Branch,
    Delta,
    GatedProduct,
    LowRank,
    Per,
    Product,
    Record,
    Reordered,
    RowProgram,
    branches,
)

from .names import FUSED, REORDERED, Module, module_of

# A product of fewer columns is no place: kernels read so many numbers at once.
_LEAST_COLUMNS = 16


@dataclass(frozen=True)
class AdapterPlace:
    """A product that adapters can change: x [T, columns] to [T, rows]."""

    number: int
    module: Module
    rows: int
    columns: int


@dataclass(frozen=True)
class PlaceColumns:
    """Columns [first, first + width) of the result of a place."""

    place: AdapterPlace
    first: int
    width: int


@dataclass(frozen=True)
class Places:
    """The places of a program.

    Attributes:
        parts: per projection the columns that are its own, in order: of a fused one in the graph a part of a place,
            of a fused one in an adapter several.
        count: of places. rounds: whether any of the products rounds its activations.
    """

    parts: Mapping[Module, tuple[PlaceColumns, ...]]
    count: int
    rounds: bool

    @property
    def names(self) -> list[str]:
        """Names of the projections."""
        return [str(module) for module in self.parts]


def with_places(program: RowProgram) -> tuple[RowProgram, Places]:
    """A program whose products have places, and what they are; values and constants stay the same."""
    found: dict[Module, AdapterPlace] = {}
    # Adapters know the columns of x in the order that they have before a quantised matrix has them put in its own.
    origins = {record.out: record.x for record in program.records
               if isinstance(record, Reordered) and REORDERED in record.out}  # fmt: skip
    parts: list[Any] = []
    for is_host, run in groupby(program.parts, lambda part: not isinstance(part, Record)):
        some: list[Any] = list(run)
        parts += some if is_host else _changed(some, program, found, origins)
    sizes = {
        record.layer: (record.heads * record.head_size, *(record.kv_heads * size for size in
                       (record.head_size, record.v_head_size)))
        for record in program.records if isinstance(record, Attention)
    }  # fmt: skip
    products = [record for record in program.records if isinstance(record, Product | GatedProduct)]
    rounds = any(not record.exact and isinstance(branches(record)[0].weight, BlockWeight) for record in products)
    return replace(program, parts=tuple(parts)), Places(_parts(found, sizes), len(found), rounds)


def without_places(program: RowProgram) -> RowProgram:
    """The program that has no places, of which each record can be run alone."""
    parts = [_bare(part) for part in program.parts if not isinstance(part, LowRank)]
    return replace(program, parts=tuple(parts))


def _bare(part: Any) -> Any:
    if isinstance(part, Product):
        return replace(part, branch=replace(part.branch, delta=None))
    if isinstance(part, GatedProduct):
        return replace(part, gate=replace(part.gate, delta=None), up=replace(part.up, delta=None))
    return part


def _changed(
    records: Sequence[Record], program: RowProgram, found: dict[Module, AdapterPlace], origins: Mapping[str, str]
) -> list[Record]:
    """Records in order; what adapters make of a product's input comes before the first product that reads it."""
    made: list[Record] = []
    shrinks: dict[str, list[Record]] = {}
    for record in records:
        if isinstance(record, Product | GatedProduct) and program.types[record.x].per is Per.TOKEN:
            origin = origins.get(record.x, record.x)
            record = _adapted(record, found, shrinks.setdefault(record.x, []), origin)
        made.append(record)
    result: list[Record] = []
    for record in made:
        if isinstance(record, Product | GatedProduct):
            result += shrinks.pop(record.x, [])
        result.append(record)
    return result


def _adapted(
    record: Product | GatedProduct, found: dict[Module, AdapterPlace], shrinks: list[Record], origin: str
) -> Record:
    """A product with its places; those of its branches are added to `found`, and what they read to `shrinks`."""
    changes: dict[str, Branch] = {}
    for name in ("branch",) if isinstance(record, Product) else ("gate", "up"):
        branch: Branch = getattr(record, name)
        module = _module(record, branch)
        if module is None or module in found or branch.weight.columns < _LEAST_COLUMNS:
            continue
        place = AdapterPlace(len(found), module, branch.weight.rows, branch.weight.columns)
        found[module] = place
        hidden = f"adapters of {module}"
        shrinks.append(LowRank(origin, place.number, hidden, op_type="LowRank"))
        changes[name] = replace(branch, delta=Delta(hidden, place.number))
    return replace(record, **changes)  # type: ignore[arg-type]


def _module(record: Product | GatedProduct, branch: Branch) -> Module | None:
    """By the name of the result, which is the node's own; weights of the same bytes have one name between them."""
    names = (record.out, branch.weight.data) if isinstance(record, Product) else (branch.weight.data,)
    return next((module for name in names if (module := module_of(name)) is not None), None)


def _parts(
    found: Mapping[Module, AdapterPlace], sizes: Mapping[int, Sequence[int]]
) -> dict[Module, tuple[PlaceColumns, ...]]:
    parts: dict[Module, tuple[PlaceColumns, ...]] = {
        module: (PlaceColumns(place, 0, place.rows),) for module, place in found.items()
    }
    for module, place in found.items():
        layer, kind = module
        widths = sizes.get(layer, ()) if kind == "qkv_proj" else (place.rows // 2,) * 2
        inner = FUSED.get(kind, ())
        if inner and sum(widths) == place.rows:
            for index, name in enumerate(inner):
                parts.setdefault(Module(layer, name), (PlaceColumns(place, sum(widths[:index]), widths[index]),))
    for layer in {module.layer for module in found}:
        for kind, inner in FUSED.items():
            own = [found.get(Module(layer, name)) for name in inner]
            if Module(layer, kind) not in found and all(own):
                parts[Module(layer, kind)] = tuple(
                    PlaceColumns(place, 0, place.rows) for place in own if place is not None
                )
    return parts
