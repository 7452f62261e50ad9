"""The numbers of a step in device memory, in one block of int32 that is written once before the step starts.

The parts of the block keep their addresses for as long as steps fit, so the launches that read the parts are created
only once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache_layout import PAGE_TOKENS
from ..device import StepContext, StepError
from ..ir import Ids
from .adapters import NO_ADAPTERS, AdapterTables
from .driver import Driver
from .staging import Staging

SPLIT_TOKENS = 128
"""The number of a sequence's tokens that one block of attention processes; see attention_rows.cu."""
_TILE_FIELDS = 3
# For arrays of up to this length, checking the numbers one by one is faster.
_SHORT = 16
_PER_TOKEN = ("tokens", "positions", "sequence_of", "long_rows")


@dataclass(frozen=True)
class Capacity:
    """The largest step that a program's memory is allocated for."""

    tokens: int = 16
    logits_rows: int = 4
    sequences: int = 4
    blocks: int = 8
    adapter_numbers: int = 64
    hidden: int = 256

    def grown(self, step: StepContext, adapters: AdapterTables = NO_ADAPTERS) -> Capacity:
        """Return this capacity, or a larger one if the step needs it: numbers are doubled as often as necessary."""
        sequences, blocks = len(step.context_lens), _table_width(step)
        if (
            len(step.tokens) <= self.tokens and len(step.logits_indices) <= self.logits_rows
            and sequences <= self.sequences and blocks <= self.blocks
            and len(adapters.numbers) <= self.adapter_numbers and adapters.hidden <= self.hidden
        ):  # fmt: skip
            return self
        needed = {"tokens": len(step.tokens), "logits_rows": len(step.logits_indices)}
        needed |= {"sequences": sequences, "blocks": blocks}
        needed |= {"adapter_numbers": len(adapters.numbers), "hidden": adapters.hidden}
        sizes = {}
        for name, count in needed.items():
            sizes[name] = getattr(self, name)
            while sizes[name] < count:
                sizes[name] *= 2
        return Capacity(**sizes)

    @property
    def splits(self) -> int:
        """The number of splits of the longest sequence."""
        return -(-self.blocks * PAGE_TOKENS // SPLIT_TOKENS)


@dataclass(frozen=True)
class Limits:
    """The ranges of the numbers of a step.

    Attributes:
        rows_of_tables: number of rows of embedding tables, with the ids that index each table.
        positions: number of rows of the rotary tables; 0 = there are no rotary tables.
        num_blocks: number of blocks of the cache; 0 = there are no blocks.
        num_slots: number of state slots of the cache; 0 = there are no slots.
    """

    rows_of_tables: tuple[tuple[Ids, int], ...] = ()
    positions: int = 0
    num_blocks: int = 0
    num_slots: int = 0
    _tables_seen: list[NDArray[np.int32]] = field(default_factory=list, compare=False, repr=False)

    def check(self, step: StepContext) -> None:
        """Raise StepError for a number that is outside its table."""
        if not self._is_fine(step):
            self._refuse(step)

    def _is_fine(self, step: StepContext) -> bool:
        """Return True if a few quick checks show that all numbers are in range; False if some may be out of range."""
        for ids, rows in self.rows_of_tables:
            if not _all_within(step.integers(ids), rows):
                return False
        if not _all_within(step.logits_indices, len(step.tokens)):
            return False
        if self.positions and not _all_within(step.positions, self.positions):
            return False
        if self.num_slots and not all(_all_within(slots + 1, self.num_slots + 1) for slots in _state_slots(step)):
            return False
        if not self.num_blocks:
            return True
        lengths = step.context_lens
        if not _all_within(lengths - 1, min(one.block_tables.shape[1] for one in step.page_tables) * PAGE_TOKENS):
            return False
        if len(lengths) != len(step.positions) or (len(lengths) > 1 and not _is_single(step)):
            lengths = np.repeat(lengths, np.diff(step.cu_seqlens_q))
        if not (step.positions.astype(np.uint64) < lengths.astype(np.uint64)).all():
            return False
        seen, tables = self._tables_seen, [group.block_tables for group in step.page_tables]
        if not all(_all_within(group.slot_mapping, self.num_blocks * PAGE_TOKENS) for group in step.page_tables):
            return False
        if len(seen) == len(tables) and all(map(is_, seen, tables)):
            return True
        is_fine = all(_all_within(one, self.num_blocks) for one in tables)
        # A table that can still be written to may have changed by the next step.
        seen[:] = tables if is_fine and not any(one.flags.writeable for one in tables) else []
        return is_fine

    def _refuse(self, step: StepContext) -> None:
        """Check number by number and raise StepError. Only the entries of block tables that are used are checked."""
        for ids, rows in self.rows_of_tables:
            _within(step.integers(ids), rows, "index outside its table")
        _within(step.logits_indices, len(step.tokens), "row of logits outside the step")
        if self.positions:
            _within(step.positions, self.positions, "position outside the rotary tables")
        for slots in _state_slots(step) if self.num_slots else ():
            _within(slots[slots != -1], self.num_slots, "slot outside the states")
        if not self.num_blocks:
            return
        for group in step.page_tables:
            _within(group.slot_mapping, self.num_blocks * PAGE_TOKENS, "slot outside the cache")
        lengths = np.repeat(step.context_lens, np.diff(step.cu_seqlens_q))
        bad = np.flatnonzero((step.positions < 0) | (step.positions >= lengths))
        if bad.size:
            position, length = int(step.positions[bad[0]]), int(lengths[bad[0]])
            raise StepError(f"position outside its sequence: {position} is not in the range 0 to {length - 1}")
        pages = -(-step.context_lens // PAGE_TOKENS)
        for tables in (group.block_tables for group in step.page_tables):
            _within(pages - 1, tables.shape[1], "context longer than its block table")
            used = np.arange(tables.shape[1]) < pages[:, None]
            _within(tables[used], self.num_blocks, "block table entry outside the cache")


class StepTable:
    """Memory for the numbers of a step.

    Args:
        driver: the GPU.
        capacity: the largest step.
        tile_rows: sizes of the tiles into which rows with prefill numerics are split; each size has a separate table.
        groups: number of cache groups with pages.
        has_states: True if there is a cache group with states.
    """

    def __init__(
        self, driver: Driver, capacity: Capacity, tile_rows: Collection[int] = (), groups: int = 1,
        *, has_states: bool = False,
    ) -> None:  # fmt: skip
        self._capacity, self._tile_rows, self._groups = capacity, tuple(tile_rows), groups
        # The address of a token that is being sampled occupies two numbers.
        self._first = {"chosen": 0, "adapters": 2 * capacity.tokens}
        total = 2 * capacity.tokens + capacity.adapter_numbers
        for name in _PER_TOKEN:
            self._first[name], total = total, total + capacity.tokens
        self._first["slots"], total = total, total + groups * capacity.tokens
        if has_states:
            self._first["starts"], total = total, total + capacity.sequences + 1
            self._first["state_reads"], total = total, total + capacity.sequences
            self._first["state_writes"], total = total, total + capacity.tokens
        self._first["logits_rows"], total = total, total + capacity.logits_rows
        for rows in self._tile_rows:
            most = -(-capacity.tokens // rows) + capacity.sequences
            self._first[tiles_name(rows)], total = total, total + _TILE_FIELDS * most
        self._first["tables"], total = total, total + capacity.sequences * groups * capacity.blocks
        self._staging = Staging(driver, 4 * total)
        self._hosts, self._filled = self._staging.view(np.int32), [_Filled(), _Filled()]

    def address(self, name: str) -> int:
        """Return the address of a part."""
        return self._staging.address() + 4 * self._first[name]

    def rows(self, group: int) -> dict[str, int]:
        """Return the fields of `StepRows` in pages.cuh for a cache group's layers. A sequence's tables are adjacent."""
        capacity, fields = self._capacity, {name: self.address(name) for name in ("sequence_of", "positions")}
        fields["slots"] = self.address("slots") + 4 * group * capacity.tokens
        fields["tables"] = self.address("tables") + 4 * group * capacity.blocks
        return fields | {"table_stride": self._groups * capacity.blocks}

    def write(
        self, step: StepContext, adapters: AdapterTables = NO_ADAPTERS, addresses: NDArray[np.uint64] | None = None
    ) -> dict[str, int]:
        """Copy the numbers of a step to device memory; return the number of tiles by the name of their table.

        Args:
            step: the step.
            adapters: the adapter tables of the step.
            addresses: addresses of the tokens, if the tokens are not yet on the host.
        """
        self._staging.next()
        host, filled = self._hosts[self._staging.half], self._filled[self._staging.half]
        count, is_single = len(step.tokens), _is_single(step)

        def put(name: str, numbers: NDArray[Any]) -> None:
            first = self._first[name]
            host[first : first + len(numbers)] = numbers

        put("tokens", step.tokens)
        if addresses is not None:
            put("chosen", addresses.view(np.int32))
        put("positions", step.positions)
        if step.state_slots is not None and "starts" in self._first:
            put("starts", step.cu_seqlens_q)
            put("state_reads", step.state_slots.reads)
            put("state_writes", step.state_slots.writes)
        for number, group in enumerate(step.page_tables[: self._groups]):
            start = self._first["slots"] + number * self._capacity.tokens
            host[start : start + count] = group.slot_mapping
        put("logits_rows", step.logits_indices)
        if len(adapters.numbers):
            put("adapters", adapters.numbers)
        if is_single:
            rows_of_rope = step.rope_table
            if filled.counted < count:
                put("sequence_of", np.arange(count))
                filled.counted = count
        else:
            sequence_of = np.repeat(np.arange(len(step.context_lens)), np.diff(step.cu_seqlens_q))
            put("sequence_of", sequence_of)
            filled.counted = 0
            rows_of_rope = step.rope_table[sequence_of] if len(step.rope_table) else step.rope_table
        put("long_rows", rows_of_rope)
        counts = self._put_tiles(step, host, filled)
        first, sequences = self._first["tables"], len(step.context_lens)
        end = first + sequences * self._groups * self._capacity.blocks
        room = host[first:end].reshape(sequences, self._groups, self._capacity.blocks)
        for number, tables in enumerate(group.block_tables for group in step.page_tables[: self._groups]):
            if filled.tables.get(number) is not tables:
                room[:, number, : tables.shape[1]] = tables
                filled.tables.pop(number, None)
                if not tables.flags.writeable:
                    filled.tables[number] = tables
        self._staging.send(4 * end)
        return counts

    def _put_tiles(self, step: StepContext, host: NDArray[np.int32], filled: _Filled) -> dict[str, int]:
        """Write the tiles and return their counts. The rest is 0, because launches may cover more tiles."""
        has_tiles = step.num_decode_sequences < len(step.context_lens)
        tiles = {tiles_name(rows): row_tiles(step, rows) if has_tiles else _NO_TILES for rows in self._tile_rows}
        if tiles and (has_tiles or filled.has_tiles):
            host[min(self._first[name] for name in tiles) : self._first["tables"]] = 0
        for name, numbers in tiles.items() if has_tiles else ():
            host[self._first[name] : self._first[name] + numbers.size] = numbers.ravel()
        filled.has_tiles = has_tiles
        return {name: len(numbers) for name, numbers in tiles.items()}


@dataclass
class _Filled:
    """The content of a host buffer, except the numbers that every step writes.

    Attributes:
        counted: number of leading rows that the buffer already assigns to one sequence each, in order.
        has_tiles: True if the buffer holds tiles.
        tables: the block tables, by cache group, unless they can still be written to.
    """

    counted: int = 0
    has_tiles: bool = False
    tables: dict[int, NDArray[np.int32]] = field(default_factory=dict)


_NO_TILES = np.zeros((0, _TILE_FIELDS), np.int32)


def tiles_name(rows: int) -> str:
    """Return the name of the table for tiles of `rows` rows. The count of these tiles has the same name."""
    return f"tiles_{rows}"


def row_tiles(step: StepContext, rows: int) -> NDArray[np.int32]:
    """Split the rows with prefill numerics into tiles of one sequence each.

    Returns int32 [tiles, 3]: the sequence, the first row, and the number of rows. Tiles that attend to the most tokens
    come first, so that no long tile is left to the end.
    """
    starts = step.cu_seqlens_q[step.num_decode_sequences :].astype(np.int64)
    counts = -(-np.diff(starts) // rows)
    sequences = np.repeat(np.arange(len(counts)), counts)
    first = starts[sequences] + (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
    last = np.minimum(first + rows, starts[sequences + 1])
    tiles = np.stack([sequences + step.num_decode_sequences, first, last - first], axis=1)
    order = np.argsort(-step.positions[last - 1], kind="stable")
    return tiles[order].astype(np.int32)


def _state_slots(step: StepContext) -> list[NDArray[np.int32]]:
    slots = step.state_slots
    return [] if slots is None else [slots.reads, slots.writes]


def _table_width(step: StepContext) -> int:
    return max((group.block_tables.shape[1] for group in step.page_tables), default=0)


def _is_single(step: StepContext) -> bool:
    """Return True if every sequence has one row."""
    count = len(step.context_lens)
    return len(step.tokens) == count and (count == 1 or bool((np.diff(step.cu_seqlens_q) == 1).all()))


def _all_within(numbers: NDArray[Any], limit: int) -> bool:
    if numbers.size <= _SHORT:
        values = numbers.ravel().tolist()
        return not values or (min(values) >= 0 and max(values) < limit)
    return bool(np.maximum.reduce(numbers.astype(np.uint64), axis=None) < limit)  # negative numbers become the largest


def _within(numbers: np.ndarray, limit: int, refusal: str) -> None:
    bad = np.flatnonzero((numbers < 0) | (numbers >= limit))
    if bad.size:
        raise StepError(f"{refusal}: {int(np.ravel(numbers)[bad[0]])} is not in the range 0 to {limit - 1}")
