"""LoRA adapters in device memory, and the adapter tables of a step. The structs are those of lora.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, ref

import numpy as np
from numpy.typing import NDArray

from ..checks import FormatError
from ..device import Factors, StepContext, StepError
from ..ir import GatedLinear, Linear, LoraShrink, OpProgram, projections
from .driver import Driver
from .sources import structs

_STRUCTS = structs("lora_expand.cu")
_TARGET, _SEGMENT = (_STRUCTS[name] for name in ("AdapterTarget", "AdapterSegment"))
_STEP, _TILE, _ROW, _ENTRY = (_STRUCTS[f"Adapter{name}"] for name in ("Step", "Tile", "Row", "Entry"))
# The ranks of a segment and the columns of A are padded to multiples of _RANKS and _COLUMNS. Factors start at multiples
# of _ALIGNED bytes, and their offsets are counted in units of _UNIT bytes.
_RANKS, _COLUMNS, _ALIGNED, _UNIT = 4, 32, 128, 16
# Numbers of rows in a tile: DECODE_TILE_ROWS and PREFILL_TILE_ROWS. The number of a tile's ranks that one block of the
# shrink kernels computes.
DECODE_TILE_ROWS, PREFILL_TILE_ROWS = 4, 16
DECODE_TILE_RANKS, PREFILL_TILE_RANKS = 4, 32


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetSize:
    """The sizes of an adapter at one target; all are 0 if the adapter does not change the target.

    Attributes:
        ranks: padded rank.
        columns: number of columns of x.
        end: end (exclusive) of the result columns that the adapter changes.
    """

    ranks: int = 0
    columns: int = 0
    end: int = 0


@dataclass(frozen=True, eq=False)
class CudaAdapter:
    """An adapter; see `genai.kernels.device.DeviceAdapter`.

    The memory is freed when the last reference to the adapter is dropped. This is safe, because data that reuses the
    memory is written later in the same stream.

    Attributes:
        memory: uint8, all data of the adapter.
        address: device address of `memory`.
        nbytes: size in bytes.
        targets: sizes, one per target of a program.
        ranks: maximum padded rank of a target.
    """

    memory: Any
    address: int
    nbytes: int
    targets: tuple[TargetSize, ...]
    ranks: int


def load_adapter(driver: Driver, factors: Sequence[Sequence[Factors]]) -> CudaAdapter:
    """Copy an adapter into device memory; see `genai.kernels.device.Executor.load_adapter`.

    Raises:
        MemoryError: if the device has too little memory.
        FormatError: if the kernels cannot read the factors.
    """
    _check(factors)
    image = _image(factors)
    memory = driver.upload(image)
    sizes = tuple(_size(target) for target in factors)
    most = max((size.ranks for size in sizes), default=0)
    return CudaAdapter(memory, driver.address(memory), image.nbytes, sizes, most)


def _check(factors: Sequence[Sequence[Factors]]) -> None:
    every = [one for target in factors for one in target]
    types = {array.dtype.name for one in every for array in (one.a, one.b)}
    if len(types) > 1 or not types <= {"float16", "float32"}:
        raise FormatError(f"factors are {' and '.join(sorted(types))}, expected all float16 or all float32")
    for one in every:
        if one.a.ndim != 2 or one.b.ndim != 2 or one.a.shape[0] != one.b.shape[1] or one.first % 2:
            raise FormatError(
                f"factors are {list(one.a.shape)} and {list(one.b.shape)}, for columns from {one.first}; expected "
                "[rank, columns] and [columns of the result, rank], starting at an even column"
            )
    for target in factors:
        if len({one.a.shape[1] for one in target}) > 1:
            raise FormatError(
                f"factors of one target have different numbers of columns: {sorted({one.a.shape[1] for one in target})}"
            )


def _size(target: Sequence[Factors]) -> TargetSize:
    if not target:
        return TargetSize()
    return TargetSize(
        sum(_filled(one.rank, _RANKS) for one in target), target[0].a.shape[1],
        max(one.first + len(one.b) for one in target),
    )  # fmt: skip


def _filled(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _image(factors: Sequence[Sequence[Factors]]) -> NDArray[np.uint8]:
    """Return all bytes of an adapter: the targets, the segments of each target except its first, and the factors."""
    targets = np.zeros(len(factors), _TARGET)
    arrays: list[tuple[int, NDArray[Any]]] = [(0, targets)]
    end = _filled(max(targets.nbytes, 1), _ALIGNED)

    def put(array: NDArray[Any]) -> int:
        nonlocal end
        arrays.append((end, array))
        begin, end = end, end + _filled(array.nbytes, _ALIGNED)
        return begin // _UNIT

    for target, own in zip(targets, factors, strict=True):
        if not own:
            continue
        segments = np.zeros(len(own), _SEGMENT)
        for segment, one in zip(segments, own, strict=True):
            segment["first"], segment["end"], segment["b"] = one.first, one.first + len(one.b), put(_tiled(one.b))
            segment["first_rank"], segment["ranks"] = target["ranks"], _filled(one.rank, _RANKS)
            target["ranks"] += segment["ranks"]
        target["a"], target["item_bytes"] = put(_stacked(own)), own[0].a.dtype.itemsize
        target["segment"], target["segments"], target["more"] = segments[0], len(own), put(segments[1:])
    image = np.zeros(end, np.uint8)
    for begin, array in arrays:
        image[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    return image


def _stacked(target: Sequence[Factors]) -> NDArray[Any]:
    """Stack the A factors of all segments of a target: [ranks, columns], padded with zeros."""
    size = _size(target)
    stacked = np.zeros((size.ranks, _filled(size.columns, _COLUMNS)), target[0].a.dtype)
    first = 0
    for one in target:
        stacked[first : first + one.rank, : size.columns] = one.a
        first += _filled(one.rank, _RANKS)
    return stacked


def _tiled(b: NDArray[Any]) -> NDArray[Any]:
    """Arrange a B factor as [ranks / 4, pairs of columns, 2, 4 ranks], padded with zeros."""
    columns, rank = b.shape
    padded = np.zeros((_filled(columns, 2), _filled(rank, _RANKS)), b.dtype)
    padded[:columns, :rank] = b
    tiles = padded.reshape(len(padded) // 2, 2, -1, _RANKS).transpose(2, 0, 1, 3)
    return np.ascontiguousarray(tiles)


# --- the step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AdapterTables:
    """The adapter tables of a step.

    Attributes:
        numbers: `AdapterStep` of lora.cuh, followed by the data that it refers to.
        hidden: number of values between the two factors, for all rows.
        counts: sizes of grids, rounded up to powers of two so that steps of similar size have the same grids:
            "few_tiles" is the number of tiles of rows with decode numerics, and "many_tiles" that of other rows;
            "few_ranks" and "many_ranks" are the maximum number of rank blocks of a tile.
    """

    numbers: NDArray[np.int32]
    hidden: int
    counts: dict[str, int]


_COUNTS = ("few_tiles", "many_tiles", "few_ranks", "many_ranks")
NO_ADAPTERS = AdapterTables(np.zeros(_STEP.itemsize // 4, np.int32), 0, dict.fromkeys(_COUNTS, 0))


@dataclass(eq=False)
class StepAdapters:
    """Builds the adapter tables of steps. Consecutive steps with the same rows and adapters share the tables."""

    _sizes: dict[int, tuple[int, int]]
    _fitting: WeakSet[CudaAdapter] = field(default_factory=WeakSet)
    _key: tuple[Any, ...] = ()
    _adapters: tuple[ref[Any], ...] = ()
    _tables: AdapterTables = NO_ADAPTERS

    @staticmethod
    def of(program: OpProgram) -> StepAdapters:
        """Create an object for the targets of a program."""
        columns = {one.target: program.types[one.x].width for one in program.ops if isinstance(one, LoraShrink)}
        products = [one for one in program.ops if isinstance(one, Linear | GatedLinear)]
        outputs = {
            one.delta.target: one.weight.rows for product in products for one in projections(product) if one.delta
        }
        return StepAdapters({target: (columns[target], outputs[target]) for target in outputs})

    def tables(self, step: StepContext) -> AdapterTables:
        """Return the adapter tables of a step.

        Raises:
            StepError: if an adapter is not in this device's memory, or was loaded for another program.
        """
        if not len(step.adapter_rows.ids) or not self._sizes:
            return NO_ADAPTERS
        arrays = step.cu_seqlens_q, step.adapter_rows.offsets, step.adapter_rows.ids, step.adapter_rows.weights
        key = step.num_decode_sequences, *(array.tobytes() for array in arrays)
        known = len(self._adapters) == len(step.adapter_rows.adapters) and all(
            one() is adapter for one, adapter in zip(self._adapters, step.adapter_rows.adapters, strict=True)
        )
        if not known or key != self._key:
            self._tables = _tables(step, [self._own(adapter) for adapter in step.adapter_rows.adapters])
            self._key, self._adapters = key, tuple(map(ref, step.adapter_rows.adapters))
        return self._tables

    def _own(self, adapter: object) -> CudaAdapter:
        if not isinstance(adapter, CudaAdapter):
            raise StepError(f"{adapter!r:.80} is not an adapter in the memory of this device")
        if adapter not in self._fitting:
            for target, (columns, outputs) in self._sizes.items():
                size = adapter.targets[target] if target < len(adapter.targets) else None
                if size is None or (size.ranks and (size.columns != columns or size.end > outputs)):
                    raise StepError(f"the adapter was prepared for another program: target {target} is {size}")
            self._fitting.add(adapter)
        return adapter


def _tables(step: StepContext, adapters: Sequence[CudaAdapter]) -> AdapterTables:
    starts, bounds, ids = step.cu_seqlens_q.tolist(), step.adapter_rows.offsets.tolist(), step.adapter_rows.ids.tolist()
    # Sequences grouped by the adapters that they use, sequences with decode numerics first.
    groups: tuple[dict[tuple[int, ...], list[int]], ...] = ({}, {})
    for sequence in range(len(starts) - 1):
        mix = tuple(ids[bounds[sequence] : bounds[sequence + 1]])
        if mix:
            groups[sequence >= step.num_decode_sequences].setdefault(mix, []).append(sequence)
    # Per tile: the address of its first adapter, and the fields from `rows` to `hidden_stride` except the weights.
    tiles: list[tuple[int, ...]] = []
    entries: list[tuple[int, ...]] = []
    order: list[int] = []
    counts, first, hidden = dict.fromkeys(_COUNTS, 0), 0, 0
    kinds = (("few", DECODE_TILE_ROWS, DECODE_TILE_RANKS), ("many", PREFILL_TILE_ROWS, PREFILL_TILE_RANKS))
    for (kind, most, ranks), mixes in zip(kinds, groups, strict=True):
        before = len(tiles)
        for mix, sequences in mixes.items():
            own, first_entry, stride = [adapters[one] for one in mix], len(entries), 0
            for adapter in own:
                entries.append((adapter.address, stride))
                stride += adapter.ranks
            order += sequences
            end = first + sum(starts[one + 1] - starts[one] for one in sequences)
            for row in range(first, end, most):
                count = min(most, end - row)
                tiles.append((own[0].address, count, row, len(mix), first_entry, hidden, stride))
                hidden += count * stride
            first = end
            blocks = sum(-(-adapter.ranks // ranks) for adapter in own)
            counts[f"{kind}_ranks"] = max(counts[f"{kind}_ranks"], blocks)
        counts[f"{kind}_tiles"] = len(tiles) - before
    head = np.zeros(1, _STEP)
    head["few"], head["many"] = counts["few_tiles"], counts["many_tiles"]
    tile_fields = ("adapter", "rows", "first_row", "entries", "first_entry", "first_hidden", "hidden_stride")
    numbers = _numbers(
        head, _filled_in(tiles, _TILE, tile_fields), _filled_in(entries, _ENTRY, ("adapter", "first")),
        _rows(step, order), step.adapter_rows.weights,
    )  # fmt: skip
    return AdapterTables(numbers, hidden, {name: _power_of_two(count) for name, count in counts.items()})


def _filled_in(numbers: list[tuple[int, ...]], dtype: np.dtype[np.void], names: Sequence[str]) -> NDArray[np.void]:
    """Create structs with some fields set."""
    table = np.zeros(len(numbers), dtype)
    for name, column in zip(names, np.array(numbers, np.uint64).T, strict=True):
        table[name] = column
    return table


def _rows(step: StepContext, order: Sequence[int]) -> NDArray[np.void]:
    """Return the rows of sequences, one sequence after another, with the offsets of their weights in the step."""
    sequences = np.array(order)
    starts, lengths = step.cu_seqlens_q[sequences], np.diff(step.cu_seqlens_q)[sequences]
    rows = np.zeros(lengths.sum(), _ROW)
    rows["row"] = np.arange(len(rows)) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    rows["weights"] = np.repeat(step.adapter_rows.offsets[sequences], lengths)
    return rows


def _numbers(
    head: NDArray[np.void], tiles: NDArray[np.void], entries: NDArray[np.void], rows: NDArray[np.void],
    weights: NDArray[np.float32],
) -> NDArray[np.int32]:  # fmt: skip
    """Concatenate all parts, and fill in the position of each part."""
    parts: list[NDArray[Any]] = [head, tiles, entries, rows, weights.astype(np.float32)]
    _, _, first_entry, first_row, first_weight, _ = np.cumsum([0, *(part.nbytes // 4 for part in parts)]).tolist()
    rows["weights"] += first_weight
    for name in ("row", "weights"):
        tiles[name] = rows[name][tiles["first_row"]]
    tiles["first_entry"] = first_entry + tiles["first_entry"] * (_ENTRY.itemsize // 4)
    tiles["first_row"] = first_row + tiles["first_row"] * (_ROW.itemsize // 4)
    return np.concatenate([part.view(np.int32) for part in parts])


def last_tile(numbers: int) -> int:
    """Return the index of the last tile that fits into step tables of `numbers` numbers."""
    return (4 * numbers - _STEP.itemsize) // _TILE.itemsize - 1


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
