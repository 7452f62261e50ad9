"""The main decoder: a flattened graph over a paged cache, many sequences in one step."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.paged.steps import prepare_context
from genai.kernels.cpu.tape.context import ContextTable, Word
from genai.kernels.cpu.team import Team
from genai.kernels.formats import PagedLayer
from genai.kernels.step import StepContext
from genai.kvcache.pool import BlockPool, CacheFull
from genai.kvcache.prefix import PrefixCache, PrefixOrigin
from genai.kvcache.storage import PagedStorage
from genai.kvcache.table import BlockTable

from ..errors import CacheCapacityError, ConfigError, StateError
from ..runtime.plan import Plan
from ..runtime.python_loop import run
from ..runtime.segments import TapeStep
from .decoder import Logits
from .scheduler import DEFAULT_TOKEN_BUDGET, Run, Step, plan_step

# Tokens that are appended together in at least this number are computed as MANY rows.
MANY_TOKENS = 32


class PagedSequence:
    """Tokens, the block table that holds their keys and values, and the RoPE table these were rotated with.

    Long prompts are computed by other kernels (MANY rows) than single tokens and short ones (FEW rows), which round
    differently. Which of the two a token belongs to is settled when it is appended: however it is computed then, in
    chunks, in company, again after its cache was taken back, its bits are the same.
    """

    def __init__(self, table: BlockTable) -> None:
        self.tokens: list[int] = []
        self.table = table
        self.rope_table = 0
        self._many = bytearray()  # per token

    def append(self, tokens: Sequence[int], *, together: int = 0) -> None:
        """See DecoderSequence."""
        self.tokens.extend(tokens)
        self._many.extend([max(together, len(tokens)) >= MANY_TOKENS] * len(tokens))

    def pending(self) -> Run:
        """The next tokens that are not computed yet and go together."""
        first, total = self.table.length, len(self.tokens)
        if first == total:
            return Run(0, False)
        many = self._many[first]
        end = self._many.find(1 - many, first)
        return Run((total if end < 0 else end) - first, bool(many))

    def fork(self) -> PagedSequence:
        """The same tokens over shared blocks."""
        other = PagedSequence(self.table.fork())
        other.tokens, other._many = list(self.tokens), self._many[:]
        other.rope_table = self.rope_table
        return other

    @property
    def num_computed(self) -> int:
        return self.table.length

    def rewind(self, length: int) -> None:
        del self.tokens[length:], self._many[length:]
        self.table.truncate(min(self.table.length, max(length - 1, 0)))

    def drop_cache(self) -> None:
        self.table.release()

    def close(self) -> None:
        self.table.release()


@dataclass
class PagedDecoder:
    """Runs a flattened plan over a block pool.

    Attributes:
        plan: takes the tokens [1, T] (and positions, where the graph wants them), gives logits for wanted rows.
        input_ids, position_ids: names of those inputs; position_ids None if the graph has none.
        pool, storage: the blocks, and the memory behind them.
        rope_threshold: total length above which the long RoPE tables apply (None = one table).
    """

    plan: Plan
    input_ids: str
    position_ids: str | None
    input_dtype: np.dtype[np.signedinteger]
    vocab_size: int
    pool: BlockPool
    storage: PagedStorage
    team: Team
    rope_threshold: int | None = None
    token_budget: int = DEFAULT_TOKEN_BUDGET

    def __post_init__(self) -> None:
        self._layers = tuple(cache and PagedLayer(cache.keys, cache.values) for cache in self.storage.layers)
        self._table = ContextTable()
        self._floats_per_split = max((getattr(step.kernel, "partial_floats", 0) for step in self.plan.steps), default=0)
        self._partials = np.empty(0, np.float32)
        self._turn = threading.Lock()  # the plan's tapes have one memory for their values
        self._running: set[int] = set()  # ids of the sequences of the step in progress
        self._running_lock = threading.Lock()
        self.closed = False
        self.prefixes = PrefixCache(self.pool, self.storage.layout.block_size)

    def prepare(self) -> None:
        """Do what the first step would wait for: make the tapes, compile their kernels."""
        for step in self.plan.steps:
            if isinstance(step.kernel, TapeStep):
                step.kernel.prepare(self._layers)

    def open(self) -> PagedSequence:
        """A new empty sequence."""
        return PagedSequence(BlockTable(self.pool, self.storage.layout.block_size))

    def fork(self, sequence: PagedSequence) -> PagedSequence:
        """See Decoder.fork: the blocks are shared until one of the two writes into them."""
        return sequence.fork()

    def step(
        self, sequences: Sequence[PagedSequence], *, all_rows: Collection[int] = (), token_budget: int | None = None
    ) -> list[Logits | None]:
        """See Decoder.step."""
        self._check_open()
        for sequence in sequences:
            self._choose_rope_table(sequence)
        pending = [sequence.pending() for sequence in sequences]
        results: list[Logits | None] = [None] * len(sequences)
        if step := plan_step(pending, token_budget or self.token_budget):
            for index, logits in self._run_step(sequences, step, all_rows):
                results[index] = logits
        return results

    def reuse(self, sequence: PagedSequence) -> int:
        """See Decoder.reuse; whole blocks are found by the tokens up to their end."""
        self._choose_rope_table(sequence)
        return self.prefixes.attach(sequence.table, sequence.tokens, self._origin(sequence)) if sequence.tokens else 0

    def publish(self, sequence: PagedSequence) -> None:
        """See Decoder.publish."""
        self.prefixes.publish(sequence.table, sequence.tokens, self._origin(sequence))

    def _origin(self, sequence: PagedSequence) -> PrefixOrigin:
        # The pool belongs to one loaded model, so weights and format need no name of their own.
        return PrefixOrigin(model="", kv_format="", rope_table=sequence.rope_table)

    def _choose_rope_table(self, sequence: PagedSequence) -> None:
        """Keys are stored rotated, so a sequence that crosses the threshold is computed anew with the other table."""
        if self.rope_threshold is None:
            return
        wanted = int(len(sequence.tokens) > self.rope_threshold)
        if wanted != sequence.rope_table:
            sequence.table.truncate(0)
            sequence.rope_table = wanted

    def _run_step(
        self, sequences: Sequence[PagedSequence], step: Step, all_rows: Collection[int]
    ) -> Iterator[tuple[int, Logits]]:
        with self._reserved(sequences, step) as slots:
            context, tokens, owners = self._context(sequences, step, slots, all_rows)
            feeds = {self.input_ids: tokens[None, :].astype(self.input_dtype, copy=False)}
            if self.position_ids is not None:
                feeds[self.position_ids] = context.positions[None, :]
            with self._turn, self._interruptible(sequences[part.sequence] for part in step):
                self._fill_table(context, tokens)
                (logits,) = run(self.plan, feeds, context).values()
            self._check_open()  # closed meanwhile, it has read pages that were given back
        logits = np.asarray(logits, np.float32).reshape(len(context.wanted_rows), logits.shape[-1])
        if logits.shape[1] != self.vocab_size:
            raise ConfigError(
                f"the model gives {logits.shape[1]} logits, genai_config.json says vocab_size {self.vocab_size}",
                "both must agree",
                f"set model.vocab_size to {logits.shape[1]}",
            )
        for index, first, last in owners:
            if last > first:
                yield index, logits[first:last]

    @contextmanager
    def _interruptible(self, sequences: Iterable[PagedSequence]) -> Iterator[None]:
        with self._running_lock:
            self._table.count(Word.CANCEL, 0)
            self._running = {id(sequence) for sequence in sequences}
        try:
            yield
        finally:
            with self._running_lock:
                self._running = set()

    def interrupt(self, sequences: Collection[PagedSequence]) -> None:
        """See Decoder.interrupt."""
        with self._running_lock:
            if self._running and self._running <= {id(sequence) for sequence in sequences}:
                self._table.count(Word.CANCEL, 1)

    @contextmanager
    def _reserved(self, sequences: Sequence[PagedSequence], step: Step) -> Iterator[list[int]]:
        """Slots for the step's tokens; taken back if the step fails."""
        taken: list[tuple[BlockTable, int]] = []
        slots: list[int] = []
        try:
            for index, count, _ in step:
                table = sequences[index].table
                taken.append((table, table.length))
                slots.extend(self._append(table, count))
            yield slots
        except BaseException:
            for table, length in taken:
                table.truncate(length)
            raise

    def _append(self, table: BlockTable, count: int) -> Sequence[int]:
        try:
            slots, copies = table.append(count)
        except CacheFull as error:
            raise CacheCapacityError(
                f"the KV cache has no room for {count} more tokens",
                f"{error}; other sequences of this model hold the rest",
                "close generators that are done, shorten the prompt, or give the model a larger cache (cache_bytes=…)",
            ) from error
        for source, destination in copies:
            self.storage.copy_block(source, destination)
        return slots

    def _context(
        self, sequences: Sequence[PagedSequence], step: Step, slots: list[int], all_rows: Collection[int]
    ) -> tuple[StepContext, np.ndarray, list[tuple[int, int, int]]]:
        """The step as arrays; `owners` says which rows of the logits belong to which sequence."""
        counts = [part.num_tokens for part in step]
        query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        tables = [sequences[part.sequence].table for part in step]
        tokens, positions = [], []
        wanted: list[int] = []
        owners: list[tuple[int, int, int]] = []
        for (index, count, _), table, start in zip(step, tables, query_start, strict=False):
            first = table.length - count
            tokens.append(np.asarray(sequences[index].tokens[first : table.length], np.int64))
            positions.append(np.arange(first, table.length, dtype=np.int64))
            finished = table.length == len(sequences[index].tokens)
            num_rows = count if index in all_rows else int(finished)
            rows = range(start + count - num_rows, start + count)
            owners.append((index, len(wanted), len(wanted) + len(rows)))
            wanted.extend(rows)
        context = StepContext(
            positions=np.concatenate(positions),
            query_start=query_start,
            few_sequences=sum(not part.many for part in step),
            context_lengths=np.asarray([table.length for table in tables], np.int32),
            block_tables=_block_tables(tables),
            slots=np.asarray(slots, np.int64),
            wanted_rows=np.asarray(wanted, np.int64),
            rope_table=np.asarray([sequences[part.sequence].rope_table for part in step], np.int32),
            layers=self._layers,
            team=self.team,
            table=self._table,
        )
        return context, np.concatenate(tokens), owners

    def _fill_table(self, context: StepContext, tokens: NDArray[np.int64]) -> None:
        fill_table(self._table, context, tokens)
        prepare_context(
            self._table,
            positions=context.positions,
            query_start=context.query_start,
            few_sequences=context.few_sequences,
            room=self._room,
            floats_per_split=self._floats_per_split,
        )

    def _room(self, count: int) -> NDArray[np.float32]:
        if count > self._partials.size:
            self._partials = np.empty(2 * count, np.float32)
        return self._partials

    def _check_open(self) -> None:
        if self.closed:
            raise StateError("the model is closed", "close() gave its memory back", "load the model again")

    def close(self) -> None:
        """Give the cache's memory and the threads back."""
        self.closed = True
        self._layers = ()
        self.storage.close()
        self.team.close()


def fill_table(table: ContextTable, context: StepContext, tokens: NDArray[np.int64]) -> None:
    """Write a step into the table that its tapes read."""
    lengths = np.diff(context.query_start)
    few = int(context.query_start[context.few_sequences])
    counts = {
        Word.TOKENS: len(tokens),
        Word.FEW: few,
        Word.MANY: len(tokens) - few,
        Word.WANTED: len(context.wanted_rows),
        Word.SEQUENCES: len(lengths),
        Word.FEW_SEQUENCES: context.few_sequences,
        Word.TABLE_WIDTH: context.block_tables.shape[1],
    }
    for word, count in counts.items():
        table.count(word, count)
    arrays: dict[Word, NDArray[Any]] = {
        Word.TOKEN_IDS: tokens,
        Word.POSITIONS: context.positions,
        Word.QUERY_START: context.query_start,
        Word.CONTEXT_LENGTHS: context.context_lengths,
        Word.BLOCK_TABLES: context.block_tables,
        Word.SLOTS: context.slots,
        Word.WANTED_ROWS: context.wanted_rows,
        Word.ROPE_TABLE: context.rope_table,
        Word.SEQUENCE_OF_ROW: np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
    }
    for word, array in arrays.items():
        table.array(word, array)


def _block_tables(tables: Sequence[BlockTable]) -> np.ndarray:
    width = max(len(table.blocks) for table in tables)
    result = np.zeros((len(tables), width), np.int32)
    for row, table in zip(result, tables, strict=True):
        row[: len(table.blocks)] = table.blocks
    return result
