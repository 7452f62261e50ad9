"""The main decoder: it runs a flattened graph over a paged cache, with many sequences in one step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from genai.common.forks import renew_locks
from genai.common.interrupts import ThreadsRefused
from genai.kernels.device import DeviceFailed, Executor, StepCancelled, StepContext, StepFunction, TokenChoice
from genai.kernels.ir import OpProgram
from genai.kvcache.disk import BlockDirectory, DirectoryError
from genai.kvcache.pool import BlockPool, CacheFull
from genai.kvcache.sequence_cache import SequenceCache
from genai.kvcache.storage import PagedStorage
from genai.kvcache.table import GONE

from ..errors import CacheCapacityError, OptionError, StateError, StepInterrupted, no_threads
from ..onnx.external_data import MappedFile, check_unchanged
from .adapter_mix import AdapterMix
from .context_shift import key_rotator
from .decoder import Decoder, check_width
from .paged_sequence import PagedSequence, device_error, device_errors
from .scheduler import Chunk, StepPlan
from .sequence import ContextShift, DecoderSequence, Logits, StepAhead
from .step_context import StepContextBuilder, StepSlots
from .stored import StoredArray, StoredTokens


class PagedDecoder(Decoder):
    """Runs a compiled program over a block pool.

    Args:
        executor: the device.
        program: the compiled graph, which computes logits for selected rows.
        vocab_size: width of the logits.
        pool, storage: the blocks and their memory.
        state_pool: the slots of states, if the program has recurrent layers.
        rope_threshold: length above which the long RoPE tables apply; None = a single table.
        files: memory-mapped files that constants may be views of.
        output_names: the graph's names for the program's outputs: the logits first, then others.
        token_rows: the program's last output if it has hidden states for all tokens of a step, for an MTP head.
    """

    pool: BlockPool
    has_numerics = True
    verifies = True

    def __init__(
        self,
        executor: Executor,
        program: OpProgram,
        *,
        vocab_size: int,
        pool: BlockPool,
        storage: PagedStorage,
        state_pool: BlockPool | None = None,
        rope_threshold: int | None = None,
        files: Sequence[MappedFile] = (),
        output_names: Sequence[str],
        token_rows: str = "",
    ) -> None:
        self.executor, self.program, self.vocab_size = executor, program, vocab_size
        self.token_budget, self.most_tokens = executor.step_sizes
        self.pool, self.storage, self.block_size = pool, storage, storage.layout.block_size
        self.groups, self.state_pool = storage.layout.groups, state_pool
        self.page_groups, self.num_groups = storage.layout.page_groups, max(len(storage.layout.page_groups), 1)
        self._has_windows = any(group.is_bounded for group in self.groups)
        # Windows only slide between steps, and the number of blocks was planned for steps of the most efficient size.
        if self._has_windows:
            self.most_tokens = self.token_budget
        self.rope_threshold, self._files, self.output_names = rope_threshold, files, tuple(output_names)
        self.token_rows = token_rows
        outputs = program.outputs[:-1] if token_rows else program.outputs
        self._values = dict(zip(self.output_names, outputs, strict=True))
        self.run = executor.compile(program, storage.layers)
        self._contexts = StepContextBuilder()
        self._step_lock = threading.Lock()  # the program's values use a single memory area
        self._threads: set[int] = set()  # threads that run a step or wait for one
        self._running: set[int] = set()  # ids of the sequences in the current step
        self._running_lock = threading.RLock()  # reentrant: a signal handler may run while its thread holds the lock
        self.closed = self.was_forked = False
        renew_locks(self, "_step_lock", "_running_lock", flag="was_forked")

    @property
    def pools(self) -> Sequence[BlockPool]:
        return [self.pool] if self.state_pool is None else [self.pool, self.state_pool]

    def open(self) -> PagedSequence:
        return PagedSequence(self, SequenceCache(self.pool, self.block_size, self.groups, self.state_pool))

    def step(
        self, sequences: Sequence[DecoderSequence], step: StepPlan, *, all_rows: Collection[int] = (), output: str = ""
    ) -> list[Logits | None]:
        own = _paged(sequences)
        self.check_open()
        check_unchanged(self._files)
        self._settle_caches(own, step)
        with self._reserved(own, step) as slots:
            context, owners = self._contexts.make(own, step, slots, all_rows)
            logits = self._run(own, step, context, output)
        results: list[Logits | None] = [None] * len(own)
        for index, first, last in owners:
            if last > first:
                results[index] = logits[first:last]
        self._settle_caches(own, step)
        return results

    @property
    def runs_ahead(self) -> bool:  # type: ignore[override]
        """See Decoder."""
        run = getattr(self, "run", None)  # deleted when the model is closed, on any thread
        return run is not None and run.takes_choices

    def step_ahead(self, sequences: Sequence[DecoderSequence], choice: TokenChoice, rows: Sequence[int]) -> bool:
        own = _paged(sequences)
        if len(own) > self.token_budget or not all(sequence.can_go_ahead for sequence in own):
            return False
        step = [Chunk(index, 1, False) for index in range(len(own))]
        try:
            self.check_open()
            check_unchanged(self._files)
            self._settle_caches(own, step)
            with self._reserved(own, step) as slots:
                context = self._contexts.make_ahead(own, slots, choice, rows)
                logits = self._run(own, step, context)
                for row, sequence in enumerate(own):
                    sequence.ahead = StepAhead(len(sequence.tokens), logits, row)
        except BaseException as error:
            for sequence in own:
                sequence.ahead = None
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def _settle_caches(self, sequences: Sequence[PagedSequence], step: StepPlan) -> None:
        """Return blocks that left a window, and publish snapshots of states; called before and after each step."""
        for chunk in step if self._has_windows or self.state_pool is not None else ():
            sequences[chunk.sequence].settle_cache()

    def replace_program(self, program: OpProgram) -> None:
        """Continue with another program over the same values, such as one with LoRA targets; call only between steps.

        Weights that were packed for the old program are not packed again.
        """
        run = self.executor.compile(program, self.storage.layers)
        with self._interruptible(()):  # no step is in progress
            self.program, self.run = program, run

    def keep_blocks_in(self, folder: Path, max_bytes: int, identity: bytes) -> None:
        """Also store published blocks in a folder, and reuse blocks from it.

        Args:
            folder: the folder.
            max_bytes: maximum number of bytes in the folder.
            identity: a value that identifies everything that blocks depend on except tokens, numerics and adapters.

        Raises:
            OptionError: the folder cannot be used, or blocks are already stored in another folder.
        """
        before = self.pool.backing
        if isinstance(before, BlockDirectory) and before.folder.resolve() == folder.resolve():
            before.max_bytes = max_bytes
            return
        if before is not None:
            raise OptionError(
                f"prefix cache {folder} cannot be added",
                "the model already stores blocks in another folder",
                "use the same folder, or omit the folder",
            )
        try:
            self.pool.backing = BlockDirectory(
                folder, identity, max_bytes, self.storage.blocks, self.executor, note_size=self.block_size
            )
            if self.state_pool is not None:
                self.state_pool.backing = BlockDirectory(
                    folder, identity, max_bytes, self.storage.slots, self.executor, note_size=self.block_size
                )
        except DirectoryError as error:
            raise OptionError(
                f"prefix cache {folder}: the folder cannot be used",
                str(error),
                "use a folder that only you can write to",
            ) from error

    def key_rotator(self) -> Callable[[Sequence[Sequence[int]], int], None]:
        """Return a function that moves cached keys to earlier positions; see `context_shift.key_rotator`."""
        return key_rotator(self.executor, self.program, self.rope_threshold, self.storage.layers)

    def check_shift(self, shift: ContextShift) -> None:
        move_keys = self.key_rotator()
        least = (-(-shift.keep // self.block_size) + 2) * self.block_size
        if shift.size < least:
            raise OptionError(
                f"ctx_shift keeps {shift.keep} tokens of a context of {shift.size} tokens",
                f"blocks of {self.block_size} tokens are kept or dropped as a whole, so the context must have at least "
                f"{least} tokens",
                "keep fewer tokens, or load the model with a larger context",
            )
        with device_errors("preparing to move keys"):
            move_keys([() for _ in self.page_groups], 1)

    def arrays_for(self, num_stored: int) -> list[StoredArray]:
        num_blocks = num_stored // self.block_size
        names = [f"blocks of group {number}" for number in range(len(self.page_groups))]
        if len(self.groups) == 1 and names:  # the name that earlier versions used
            names = ["blocks"]
        arrays = [
            StoredArray(name, "uint8", (num_blocks - self._first_block(group, num_stored), self._group_bytes(group)))
            for group, name in enumerate(names)
        ]
        if self.state_pool is not None:
            arrays.append(StoredArray("states", "uint8", (int(num_stored > 0), self.storage.layout.bytes_per_state)))
        return arrays

    def earlier_arrays_for(self, num_stored: int) -> list[StoredArray]:
        """Return the arrays of files saved before cache groups existed, when a block held all layers."""
        if self.state_pool is not None:
            return self.arrays_for(num_stored)
        whole = sum(end - start for start, end in self.storage.parts.values())
        return [StoredArray("blocks", "uint8", (num_stored // self.block_size, whole))]

    def _first_block(self, group: int, num_stored: int) -> int:
        """Return the index of the first block that a token after `num_stored` tokens attends to."""
        return self.groups[group].first_visible(num_stored) // self.block_size

    def _group_bytes(self, group: int) -> int:
        """Return the number of bytes that the layers of a group use in a block."""
        return max((self.storage.parts[layer][1] for layer in self.groups[group].layers), default=0)

    def stored_blocks(self, cache: SequenceCache, num_stored: int, group: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of each block of a group, in the order of `arrays_for`."""
        for block in cache.tables[group].blocks[self._first_block(group, num_stored) : num_stored // self.block_size]:
            with device_errors("copying keys and values to the host"):
                yield self.executor.read_block(self.storage.blocks, block)[: self._group_bytes(group)]

    def stored_state(self, slot: int) -> NDArray[np.uint8]:
        """Return the bytes of the state in a slot."""
        with device_errors("copying states to the host"):
            return self.executor.read_block(self.storage.slots, slot)

    def restore(
        self,
        stored: StoredTokens,
        read: Callable[[memoryview], None],
        adapters: AdapterMix | None = None,
        *,
        earlier: bool = False,
    ) -> PagedSequence:
        self.check_open()
        sequence = self.open()
        sequence.adapt(adapters)
        sequence.resume(stored)
        try:
            with self._room_for(stored.num_stored):
                sequence.cache.allocate(stored.num_stored)
            (self._read_earlier if earlier else self._read_groups)(sequence.cache, stored.num_stored, read)
        except BaseException:
            sequence.close()
            raise
        return sequence

    def _read_groups(self, cache: SequenceCache, num_stored: int, read: Callable[[memoryview], None]) -> None:
        """Fill blocks with the arrays that `arrays_for` lists."""
        piece = np.zeros(self.storage.block_bytes, np.uint8)
        for number, table in enumerate(cache.tables):
            for block in table.blocks[self._first_block(number, num_stored) :]:
                read(piece[: self._group_bytes(number)].data)
                self._write_block(block, piece)
        for slot in cache.states.slots.values() if cache.states is not None else ():
            state = np.empty(self.storage.layout.bytes_per_state, np.uint8)
            read(state.data)
            with device_errors("copying states to the device"):
                self.executor.write_block(self.storage.slots, slot, state)

    def _read_earlier(self, cache: SequenceCache, num_stored: int, read: Callable[[memoryview], None]) -> None:
        """Fill blocks with the array that `earlier_arrays_for` lists, which holds the parts of all layers in order."""
        (array,) = self.earlier_arrays_for(num_stored)
        whole, starts, start = np.zeros(array.shape[1], np.uint8), {}, 0
        for layer, (first, end) in sorted(self.storage.parts.items()):
            starts[layer], start = start, start + end - first
        piece = np.zeros(self.storage.block_bytes, np.uint8)
        for index in range(array.shape[0]):
            read(whole.data)
            for group, table in zip(self.groups, cache.tables, strict=True):
                for layer in group.layers:
                    first, end = self.storage.parts[layer]
                    piece[first:end] = whole[starts[layer] : starts[layer] + end - first]
                self._write_block(table.blocks[index], piece)

    def _write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        if block != GONE:
            with device_errors("copying keys and values to the device"):
                self.executor.write_block(self.storage.blocks, block, content)

    def _run(
        self, sequences: Sequence[PagedSequence], step: StepPlan, context: StepContext, output: str = ""
    ) -> Logits:
        """Run the program and return the rows that the step selects, [rows, width]."""
        wanted = output or self.output_names[0]
        with self._interruptible(sequences[chunk.sequence] for chunk in step) as run:
            try:
                values = run.run(context, self.given(sequences, step))
            except StepCancelled:
                self.check_open()  # close() also cancels the step
                raise StepInterrupted(
                    "the step was cancelled", "all sequences of the step were cancelled", "submit the request again"
                ) from None
            except ThreadsRefused as error:
                self.check_open()  # a signal handler may have forked this process in the meantime
                raise no_threads(error) from error
            except (MemoryError, DeviceFailed) as error:
                raise device_error(error, f"computing a step of {len(context.tokens)} tokens") from error
            logits = values[self._values[wanted]]
            if self.token_rows:
                _hand_over(sequences, step, context, values[self.token_rows])
            # Other outputs are in memory that the next step overwrites, so they are copied.
            logits = np.array(logits, np.float32) if output else logits
        self.check_open()  # if the model was closed in the meantime, the step has read released pages
        if wanted == self.output_names[0] and logits.shape[-1] != self.vocab_size:
            check_width(logits, self.vocab_size)
        return logits.reshape(len(context.logits_indices), logits.shape[-1])

    def given(self, sequences: Sequence[PagedSequence], step: StepPlan) -> Mapping[str, Logits] | None:
        """Return the rows of the inputs that are neither tokens nor state; None if there are no such inputs."""
        return None

    @contextmanager
    def _interruptible(self, sequences: Iterable[PagedSequence]) -> Iterator[StepFunction]:
        thread = threading.get_ident()
        if thread in self._threads:
            raise StateError(
                "a signal handler started a step of a model during another step of the same model",
                "the handler would wait for the step that it interrupted",
                "set a flag in the handler and compute later, or use an LLM, which computes on a separate thread",
            )
        try:
            self._threads.add(thread)
            with self._step_lock:
                try:
                    with self._running_lock:
                        self.check_open()
                        run = self.run
                        run.resume()
                        self._running = {id(sequence) for sequence in sequences}
                    yield run
                finally:
                    with self._running_lock:
                        self._running = set()
        finally:
            self._threads.discard(thread)

    def interrupt(self, sequences: Collection[DecoderSequence]) -> None:
        with self._running_lock:
            if self._running and self._running <= {id(sequence) for sequence in sequences}:
                self.run.cancel()

    @contextmanager
    def _reserved(self, sequences: Sequence[PagedSequence], step: StepPlan) -> Iterator[StepSlots]:
        """Reserve slots for the step's tokens and states; the reservation is undone if the step fails."""
        taken: list[tuple[SequenceCache, int]] = []
        slots = StepSlots([[] for _ in self.page_groups], [])
        try:
            for index, count, _ in step:
                cache = sequences[index].cache
                taken.append((cache, cache.length))
                if cache.states is not None:
                    with self._room_for(count):
                        slots.states.append(cache.append_states(count, sequences[index].certain_length))
                for every, own in zip(slots.tokens, self._append(cache, count, sequences), strict=True):
                    every += own
            yield slots
        except BaseException:
            for cache, length in taken:
                cache.undo(length)
            raise

    def _append(
        self, cache: SequenceCache, count: int, beside: Sequence[PagedSequence] = ()
    ) -> Sequence[Sequence[int]]:
        try:
            slots, copies = cache.append(count)
        except CacheFull:
            for one in beside:
                one.cache.settle()  # forks hold references to blocks they copied; the last owner needs no copy
            with self._room_for(count):
                slots, copies = cache.append(count)
        if copies:
            with device_errors("copying blocks"):
                self.executor.copy_blocks(self.storage.blocks, copies)
        return slots

    @contextmanager
    def _room_for(self, count: int) -> Iterator[None]:
        """Convert CacheFull to CacheCapacityError."""
        try:
            yield
        except CacheFull as error:
            groups = f" (each for {self.block_size} tokens of one of {self.num_groups} cache groups)"
            raise CacheCapacityError(
                f"the KV cache is too small for {count} more tokens",
                f"{error}{groups if self.num_groups > 1 else ''}; other sequences of this model use the rest",
                "close unused generators, shorten the prompt, or load the model with a larger cache (cache_bytes=…)",
            ) from error

    def check_open(self) -> None:
        """Raise StateError if the model is closed, or if this process was forked while the model computed."""
        if self.was_forked or self.pool.was_forked:
            raise StateError(
                "this process was forked while the model computed a step",
                "a fork does not copy the thread that computes the step",
                "load the model in the child process, or use the start method 'spawn'",
            )
        if self.closed:
            raise StateError("the model is closed", "close() released its memory", "load the model again")

    def close(self) -> None:
        kept: list[object] = []
        with self._running_lock:
            if not self.closed:
                self.run.cancel()
                self.closed, self._running = True, set()
                kept += self.run, self.program
                del self.run, self.program  # frees the weights, even if a caller still holds this decoder
        for pool in self.pools:
            if pool.backing is not None:
                pool.backing.close()
        self.executor.close()  # waits for steps in progress, which read the program's data and write the cache
        kept.clear()
        self.storage.close()


def _hand_over(sequences: Sequence[PagedSequence], step: StepPlan, context: StepContext, rows: Logits) -> None:
    """Give each sequence that collects hidden states the rows of its tokens.

    Args:
        sequences: the sequences.
        step: the plan of the step.
        context: the arrays of the step.
        rows: float32 [1, tokens, columns] or [tokens, columns].
    """
    rows = rows.reshape(-1, rows.shape[-1])
    for chunk, first in zip(step, context.cu_seqlens_q.tolist(), strict=False):
        sequence = sequences[chunk.sequence]
        if sequence.hidden is not None:
            sequence.hidden.put(sequence.computed_end() - chunk.num_tokens, rows[first : first + chunk.num_tokens])


def _paged(sequences: Sequence[DecoderSequence]) -> list[PagedSequence]:
    """Return the sequences as PagedSequence.

    Raises:
        TypeError: another kind of decoder opened at least one of the sequences.
    """
    own = [sequence for sequence in sequences if isinstance(sequence, PagedSequence)]
    if len(own) != len(sequences):
        raise TypeError("the sequence belongs to another kind of decoder")
    return own
