"""Conversion of steps to arrays for the device. Arrays that are the same in two steps are built once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genai.kernels.device import (
    NO_ADAPTERS,
    AdapterRows,
    DeviceAdapter,
    PageTables,
    StateSlots,
    StepContext,
    TokenChoice,
)
from genai.kvcache.sequence_cache import SequenceCache
from genai.kvcache.states import NO_STATE

from .adapter_mix import AdapterMix
from .scheduler import StepPlan

if TYPE_CHECKING:  # avoids an import cycle: sequences import their decoder, which builds contexts from them
    from .paged_sequence import PagedSequence


class StepSlots(NamedTuple):
    """The slots that a step writes to.

    Attributes:
        tokens: slots of the step's tokens, per cache group with pages.
        states: per part of the step, the slot of its initial state, and a mapping from token counts to the slots that
            store the states after these tokens; empty if the model has no states.
    """

    tokens: list[list[int]]
    states: list[tuple[int, dict[int, int]]]


class StepContextBuilder:
    """Builds step contexts. Several threads may use a builder at the same time: cached data is only replaced whole."""

    def __init__(self) -> None:
        # Per cache group, the versions of tables and the array that was built from them.
        self._known: dict[int, tuple[list[int], NDArray[np.int32]]] = {}

    def make_ahead(
        self,
        sequences: Sequence[PagedSequence],
        slots: StepSlots,
        choice: TokenChoice,
        rows: Sequence[int],
    ) -> StepContext:
        """Build the step for each sequence's next token; the tokens are the given rows of a choice in progress."""
        caches = [sequence.cache for sequence in sequences]
        count = len(sequences)
        lengths, each = np.array([cache.length for cache in caches], np.int32), np.arange(count)
        return StepContext(
            tokens=np.zeros(count, np.int64),
            positions=lengths.astype(np.int64) - 1,
            cu_seqlens_q=np.arange(count + 1, dtype=np.int32),
            context_lens=lengths,
            groups=self._groups(caches, slots, range(count + 1)),
            num_decode_sequences=count,
            logits_indices=each,
            rope_table=np.array([sequence.rope_table for sequence in sequences], np.int32),
            choice=choice,
            chosen=np.array(rows, np.int64),
            adapter_rows=_adapter_rows([sequence.adapters for sequence in sequences]),
        )

    def make(
        self,
        sequences: Sequence[PagedSequence],
        step: StepPlan,
        slots: StepSlots,
        all_rows: Collection[int],
    ) -> tuple[StepContext, list[tuple[int, int, int]]]:
        """Build the arrays of a step.

        Returns:
            The context, and `owners`: for each sequence (index, start, end) of its rows in the logits.
        """
        caches = [sequences[part.sequence].cache for part in step]
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        wanted: list[int] = []
        owners: list[tuple[int, int, int]] = []
        adapters: list[AdapterMix | None] = []
        for (index, count, _), cache in zip(step, caches, strict=True):
            sequence, length = sequences[index], len(sequences[index].tokens)
            end = sequence.computed_end()
            adapters.append(sequence.adapters_of(end - count))
            if count == 1 and end == length and index not in all_rows:  # a shortcut for the most common case
                owners.append((index, len(wanted), len(wanted) + 1))
                wanted.append(len(tokens))
                tokens.append(sequence.tokens[-1])
                positions.append(cache.length - 1)
                starts.append(len(tokens))
                continue
            tokens += sequence.tokens[end - count : end]
            tokens += sequence.proposed[: max(end - length, 0)]
            positions += range(cache.length - count, cache.length)
            starts.append(len(tokens))
            num_rows = count if index in all_rows else max(end - length + 1, 0)
            owners.append((index, len(wanted), len(wanted) + num_rows))
            wanted += range(len(tokens) - num_rows, len(tokens))
        context = StepContext(
            tokens=np.array(tokens, np.int64),
            positions=np.array(positions, np.int64),
            cu_seqlens_q=np.array(starts, np.int32),
            context_lens=np.array([cache.length for cache in caches], np.int32),
            groups=self._groups(caches, slots, starts),
            num_decode_sequences=sum(not part.prefill for part in step),
            logits_indices=np.array(wanted, np.int64),
            rope_table=np.array([sequences[part.sequence].rope_table for part in step], np.int32),
            adapter_rows=_adapter_rows(adapters),
        )
        return context, owners

    def _groups(
        self, caches: Sequence[SequenceCache], slots: StepSlots, starts: Sequence[int]
    ) -> tuple[PageTables | StateSlots, ...]:
        tables = [
            PageTables(self._block_tables(group, caches), np.array(own, np.int64))
            for group, own in enumerate(slots.tokens)
        ]
        return (*tables, _state_slots(caches, slots, starts)) if slots.states else (*tables,)

    def _block_tables(self, group: int, caches: Sequence[SequenceCache]) -> NDArray[np.int32]:
        """Return the caches' blocks, int32 [tables, max blocks].

        If nothing has changed, the same array is returned. Arrays are never modified, so a consumer can skip arrays
        that it has already read.
        """
        tables = [cache.tables[group] for cache in caches]
        before, known = self._known.get(group, _NOTHING)
        versions = [table.version for table in tables]
        if versions == before:
            return known
        width = max(len(table.blocks) for table in tables)
        if known.shape == (len(tables), width):
            made = known.copy()
        else:
            made, before = np.zeros((len(tables), width), np.int32), [-1] * len(tables)
        for row, table, version, old in zip(made, tables, versions, before, strict=True):
            if version != old:
                row[:] = 0
                row[table.num_gone : len(table.blocks)] = table.blocks[table.num_gone :]
        made.flags.writeable = False
        self._known[group] = versions, made
        return made


def _state_slots(caches: Sequence[SequenceCache], slots: StepSlots, starts: Sequence[int]) -> StateSlots:
    """Map states to the rows after which they are written; the state of `length` tokens belongs to row `length - 1`."""
    writes = np.full(starts[-1], NO_STATE, np.int32)
    for cache, (_, kept), end in zip(caches, slots.states, starts[1:], strict=True):
        for length, slot in kept.items():
            writes[end - 1 - (cache.length - length)] = slot
    return StateSlots(np.array([read for read, _ in slots.states], np.int32), writes)


_NOTHING: tuple[list[int], NDArray[np.int32]] = [], np.zeros((0, 0), np.int32)


def _adapter_rows(mixes: Sequence[AdapterMix | None]) -> AdapterRows:
    """Return the adapters that each sequence's rows are computed with."""
    if not any(mixes):
        return NO_ADAPTERS
    parts = [() if mix is None else mix.parts for mix in mixes]
    numbers: dict[int, int] = {}
    adapters: list[DeviceAdapter] = []
    for adapter, _ in (part for own in parts for part in own):
        if id(adapter) not in numbers:
            numbers[id(adapter)] = len(adapters)
            adapters.append(adapter)
    return AdapterRows(
        adapters,
        np.cumsum([0, *map(len, parts)]).astype(np.int32),
        np.array([numbers[id(adapter)] for own in parts for adapter, _ in own], np.int32),
        np.array([weight for own in parts for _, weight in own], np.float32),
    )
