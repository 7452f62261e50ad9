"""What a step says, in device memory: one block of int32 that is written once before the step starts.

Its parts keep their places as long as steps fit, so launches that read them are made once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..executor import StepContext, StepError
from ..formats import PAGE_TOKENS
from ..records import Ids
from .adapters import NO_ADAPTERS, AdapterTables
from .driver import Driver

SPLIT_TOKENS = 128
"""Tokens of a sequence that one block of attention takes; see attention_rows.cu."""
_TILE_FIELDS = 3
_PER_TOKEN = ("tokens", "positions", "sequence_of", "slots", "long_rows")


@dataclass(frozen=True)
class Capacity:
    """The largest step that a program's memory is made for."""

    tokens: int = 16
    logits_rows: int = 4
    sequences: int = 4
    blocks: int = 8
    adapter_numbers: int = 64
    hidden: int = 256

    def grown(self, step: StepContext, adapters: AdapterTables = NO_ADAPTERS) -> Capacity:
        """This, or as much more as the step needs: every number doubled as often as it takes."""
        sequences, blocks = step.block_tables.shape
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
        """Parts that the longest sequence is split into."""
        return -(-self.blocks * PAGE_TOKENS // SPLIT_TOKENS)


@dataclass(frozen=True)
class Limits:
    """What the numbers of a step may be.

    Attributes:
        rows_of_tables: of tables that are looked up in, by what is looked up.
        positions: rows of the rotary tables; num_blocks: of the cache. 0 = there are none.
    """

    rows_of_tables: tuple[tuple[Ids, int], ...] = ()
    positions: int = 0
    num_blocks: int = 0

    def check(self, step: StepContext) -> None:
        """Raises StepError for a number that leads outside its table."""
        for ids, rows in self.rows_of_tables:
            _within(step.tokens if ids is Ids.TOKENS else step.positions, rows, "index outside its table")
        _within(step.logits_indices, len(step.tokens), "row of logits outside the step")
        if self.positions:
            _within(step.positions, self.positions, "position outside the rotary tables")
        if not self.num_blocks:
            return
        _within(step.slot_mapping, self.num_blocks * PAGE_TOKENS, "slot outside the cache")
        lengths = np.repeat(step.context_lens, np.diff(step.cu_seqlens_q))
        bad = np.flatnonzero((step.positions < 0) | (step.positions >= lengths))
        if bad.size:
            position, length = int(step.positions[bad[0]]), int(lengths[bad[0]])
            raise StepError(f"position outside its sequence: {position} is not 0 to {length - 1}")
        pages = -(-step.context_lens // PAGE_TOKENS)
        _within(pages - 1, step.block_tables.shape[1], "context longer than its block table")
        used = np.arange(step.block_tables.shape[1]) < pages[:, None]
        _within(step.block_tables[used], self.num_blocks, "block table entry outside the cache")


class StepTable:
    """Memory for the numbers of a step.

    Args:
        capacity: of the largest one.
        tile_rows: sizes of tiles that rows with prefill numerics are cut into, each a table of its own.
    """

    def __init__(self, driver: Driver, capacity: Capacity, tile_rows: Collection[int] = ()) -> None:
        self._driver, self._capacity, self._tile_rows = driver, capacity, tuple(tile_rows)
        self._first, total = {"adapters": 0}, capacity.adapter_numbers
        for name in _PER_TOKEN:
            self._first[name], total = total, total + capacity.tokens
        self._first["logits_rows"], total = total, total + capacity.logits_rows
        for rows in self._tile_rows:
            most = -(-capacity.tokens // rows) + capacity.sequences
            self._first[tiles_name(rows)], total = total, total + _TILE_FIELDS * most
        self._first["tables"], total = total, total + capacity.sequences * capacity.blocks
        self._host = driver.host_memory(4 * total).view(np.int32)
        self._memory = driver.zeros(4 * total).view(np.int32)

    def address(self, name: str) -> int:
        """Where a part begins."""
        return self._driver.address(self._memory) + 4 * self._first[name]

    @property
    def rows(self) -> dict[str, int]:
        """The fields of `StepRows` in pages.cuh."""
        names = ("tables", "sequence_of", "positions", "slots")
        return {name: self.address(name) for name in names} | {"table_stride": self._capacity.blocks}

    def write(self, step: StepContext, adapters: AdapterTables = NO_ADAPTERS) -> dict[str, int]:
        """Copy the numbers of a step into device memory; how many tiles there are, by the name of their table."""
        self._driver.synchronize()  # the numbers of the step before have been copied
        sequence_of = np.repeat(np.arange(len(step.context_lens)), np.diff(step.cu_seqlens_q))
        parts: dict[str, NDArray[Any]] = {
            "adapters": adapters.numbers,
            "tokens": step.tokens,
            "positions": step.positions,
            "sequence_of": sequence_of,
        }
        parts |= {"slots": step.slot_mapping, "logits_rows": step.logits_indices}
        if len(step.rope_table):
            parts["long_rows"] = step.rope_table[sequence_of]
        tiles = {tiles_name(rows): row_tiles(step, rows) for rows in self._tile_rows}
        parts |= {name: numbers.ravel() for name, numbers in tiles.items()}
        for name in tiles:  # behind the last tile there are none, for launches of as many as there can be
            self._host[self._first[name] : self._first["tables"]] = 0
        for name, numbers in parts.items():
            first = self._first[name]
            self._host[first : first + len(numbers)] = numbers
        first, (sequences, blocks) = self._first["tables"], step.block_tables.shape
        end = first + sequences * self._capacity.blocks
        self._host[first:end].reshape(sequences, -1)[:, :blocks] = step.block_tables
        self._driver.write(self._memory[:end], self._host[:end])
        return {name: len(numbers) for name, numbers in tiles.items()}


def tiles_name(rows: int) -> str:
    """What the table of tiles of so many rows is called, and the count of those in a step."""
    return f"tiles_{rows}"


def row_tiles(step: StepContext, rows: int) -> NDArray[np.int32]:
    """The rows with prefill numerics in tiles of one sequence's: int32 [tiles, 3], a sequence, its first row there, how
    many rows. Those that see most come first, so that the GPU is not left with a long one at the end.
    """
    starts = step.cu_seqlens_q[step.num_decode_sequences :].astype(np.int64)
    counts = -(-np.diff(starts) // rows)
    sequences = np.repeat(np.arange(len(counts)), counts)
    first = starts[sequences] + (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
    last = np.minimum(first + rows, starts[sequences + 1])
    tiles = np.stack([sequences + step.num_decode_sequences, first, last - first], axis=1)
    order = np.argsort(-step.positions[last - 1], kind="stable")
    return tiles[order].astype(np.int32)


def _within(numbers: np.ndarray, limit: int, refusal: str) -> None:
    bad = np.flatnonzero((numbers < 0) | (numbers >= limit))
    if bad.size:
        raise StepError(f"{refusal}: {int(np.ravel(numbers)[bad[0]])} is not 0 to {limit - 1}")
