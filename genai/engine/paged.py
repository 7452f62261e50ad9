"""The main decoder: a flattened graph over a paged cache, many sequences in one step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.forks import renew_locks, was_busy
from genai.common.interrupts import ThreadsRefused
from genai.kernels.device import DeviceFailed, Executor, StepCancelled, StepContext, StepFunction, TokenChoice
from genai.kernels.ir import Attention, OpProgram
from genai.kvcache.disk import BlockDirectory, DirectoryError
from genai.kvcache.pool import BlockPool, CacheFull
from genai.kvcache.storage import PagedStorage
from genai.kvcache.table import GONE, BlockTable

from ..errors import CacheCapacityError, DeviceError, GenaiError, OptionError, StateError, StepInterrupted, no_threads
from ..onnx.external_data import MappedFile, check_unchanged
from .adapter_mix import AdapterMix
from .context_shift import key_rotator
from .decoder import ContextShift, Decoder, DecoderSequence, Logits, StepAhead, check_width
from .scheduler import Chunk, Pending, StepPlan
from .step_context import StepContextBuilder
from .stored import StoredArray, StoredTokens

# Tokens that are appended together in at least this number have prefill numerics.
MIN_PREFILL_TOKENS = 32
_ONE_TOKEN = Pending(1, False), Pending(1, True)


class PagedSequence(DecoderSequence):
    """Tokens, and the block table that holds their keys and values.

    Long prompts have prefill numerics, single tokens and short prompts decode numerics: they round differently. Which
    of the two a token has is settled when it is appended, or where it is found in the prefix cache, by what is there (a
    reply, part of the next prompt): however it is computed then, in chunks, in company, again after its cache was taken
    back, its bits are the same.
    """

    def __init__(
        self, table: BlockTable, rope_threshold: int | None, window: int | None = None, token_budget: int = sys.maxsize
    ) -> None:
        super().__init__()
        self.table, self._rope_threshold, self._window = table, rope_threshold, window
        self._token_budget = token_budget
        self._prefill = bytearray()  # per token
        # So many tokens were computed once, and stay as they were: blocks that others computed otherwise do not count.
        self._settled = 0
        # Whether its keys and values came from outside: others, who have the same tokens, are not given them.
        self.is_private = False
        # So many first tokens stay where tokens are forgotten.
        self._kept = 0

    # --- places: where in the table a token is ---------------------------------------------------------------------

    def _place(self, index: int) -> int:
        """The place of a token, or of the one behind it that is kept."""
        return index if index <= self._kept else max(self._kept, index - self.forgotten)

    def _index(self, place: int) -> int:
        """Which token is at a place."""
        return place if place < self._kept else place + self.forgotten

    def computed_end(self) -> int:
        """The index behind the last token of the table."""
        if not self.forgotten:
            return self.table.length
        return self._index(self.table.length - 1) + 1 if self.table.length else 0

    def note_forgotten(self, kept: int, count: int) -> None:
        """So many tokens behind the first `kept` ones were taken out of the table."""
        self._kept, self.forgotten = kept, self.forgotten + count

    def append(self, tokens: Sequence[int], *, together: int = 0) -> None:
        before = self.rope_table
        super().append(tokens, together=together)
        self._prefill.extend([max(together, len(tokens)) >= MIN_PREFILL_TOKENS] * len(tokens))
        if self.rope_table != before:
            self.drop_cache()

    @property
    def rope_table(self) -> int:
        """Keys are stored rotated, so a sequence that crosses the threshold is computed anew with the other table."""
        return int(self._rope_threshold is not None and len(self.tokens) > self._rope_threshold)

    def adapt(self, adapters: AdapterMix | None) -> None:
        """See Decoder.adapt."""
        before, origin = self.adapters, self._origin
        self.adapters = adapters
        if self._origin != origin or self.num_computed == 0:
            self.adapter_history.note(self.num_computed, before)

    @property
    def was_switched(self) -> bool:
        """Whether its adapters changed after tokens were computed, which stay as they are."""
        return bool(self.adapter_history)

    def adapters_of(self, index: int) -> AdapterMix | None:
        """What a token goes through, or went through when it was first computed."""
        mix: AdapterMix | None = self.adapter_history.of(index, self.adapters)
        return mix

    def resume(self, stored: StoredTokens) -> None:
        """Take tokens that were computed before, of which nothing is cached yet; how they round is settled."""
        self.tokens, self._prefill = list(stored.tokens), bytearray(stored.numerics)
        self._settled, self.is_private = len(self.tokens), True

    @property
    def numerics(self) -> bytes:
        """Per token 1 where it has prefill numerics, else 0."""
        return bytes(self._prefill)

    @property
    def _origin(self) -> tuple[int, bytes]:
        """What its keys and values depend on besides tokens and numerics."""
        return self.rope_table, b"" if self.adapters is None else self.adapters.key

    def pending(self) -> Pending:
        first, total = self.num_computed, len(self.tokens)
        if first >= total:
            return Pending(0, False)
        prefill = self._prefill[first]
        if first + 1 == total and not self.proposed:
            return _ONE_TOKEN[prefill]
        end = self._prefill.find(1 - prefill, first)
        if end < 0:
            end = total if prefill else total + len(self.proposed)
        if self.forgotten and first < self._kept:
            end = min(end, self._kept)
        return Pending(self.adapter_history.end_of(first, end) - first, bool(prefill))

    def propose(self, tokens: Sequence[int]) -> None:
        """See DecoderSequence.propose; what comes after a change of RoPE tables is computed anew, and not proposed."""
        super().propose(tokens)
        if self._rope_threshold is not None and not self.rope_table:
            del self.proposed[self._rope_threshold - len(self.tokens) :]

    def reuse(self) -> int:
        """See Decoder.reuse."""
        if self.forgotten:
            return 0
        return self.table.reuse(self.tokens, self._origin, self._prefill, self._settled)

    def leave_window(self) -> None:
        """Give back the blocks that no further token sees; published before, they may still be found.

        A block more stays, so that a few tokens can be taken back.
        """
        if self._window is None or self.table.length > self._place(len(self.tokens)):
            return  # of proposals it is not known yet which ones stay
        block = self.table.block_size
        first_seen = min(self.table.length, self._place(len(self.tokens))) - self._window
        num_left = first_seen // block - 1
        if num_left > self.table.num_gone:
            self.publish()
            self.table.leave_behind(num_left)

    def publish(self) -> None:
        """See Decoder.publish."""
        if self.is_private or self.forgotten or self.was_switched:
            return
        self.table.publish(self.tokens, self._origin, self._prefill)

    @property
    def num_computed(self) -> int:  # type: ignore[override]
        return self._index(self.table.length) if self.forgotten else self.table.length

    def blocks(self) -> tuple[int, int, int | None]:
        table = self.table
        if self._window is None:
            return table.usable_blocks, table.own_blocks, None
        # Of a window: what it holds, the tokens of a step, and the block that stays behind it.
        reading = min(len(self.tokens) - self.num_computed, self._token_budget)
        most = (self._window + reading) // table.block_size + 3
        return table.usable_blocks - table.num_gone, table.own_blocks, most

    @property
    def can_go_ahead(self) -> bool:
        """Whether its next token, whichever it is, needs nothing but to be computed."""
        length, threshold = len(self.tokens), self._rope_threshold
        is_full = self.shift is not None and length + 1 - self.forgotten > self.shift.size
        is_ready = self.num_computed == length and self.ahead is None and not self.proposed
        return is_ready and not is_full and length != threshold  # there the other RoPE table begins

    def rewind(self, length: int) -> None:
        before = self.rope_table
        if self.forgotten and length <= self._kept + self.forgotten:
            self.drop_cache(min(length, self._kept))
            self._kept = self.forgotten = 0
        super().rewind(length)
        del self._prefill[length:]
        self._settled = min(self._settled, length)
        if self.rope_table != before:
            self.drop_cache()

    def drop_cache(self, length: int = 0) -> None:
        self.proposed.clear()
        if self.ahead is not None:
            length, self.ahead = min(length, self.ahead.index), None
        self._settled = max(self._settled, min(self.num_computed, len(self.tokens)))
        place = min(self.table.length, self._place(length))
        # A token that is computed there must find its window.
        if self._window is not None and self.table.num_gone * self.table.block_size > place + 1 - self._window:
            place = 0
        self.table.truncate(place)
        self.is_private = self.is_private and self.table.length > 0


class PagedDecoder(Decoder):
    """Runs a program of ops over a block pool.

    Args:
        executor: the device.
        program: gives logits for the rows that are wanted.
        pool, storage: the blocks, and the memory behind them.
        files: those that constants may be views of.
        rope_threshold: total length above which the long RoPE tables apply (None = one table).
        output_names: the logits, and other outputs of the program, as the graph called them.
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
        rope_threshold: int | None = None,
        files: Sequence[MappedFile] = (),
        output_names: Sequence[str],
    ) -> None:
        self.executor, self.program, self.vocab_size = executor, program, vocab_size
        self.token_budget, self.most_tokens = executor.step_sizes
        self.pool, self.storage, self.block_size = pool, storage, storage.layout.block_size
        self.rope_threshold, self._files, self.output_names = rope_threshold, files, tuple(output_names)
        self._values = dict(zip(self.output_names, program.outputs, strict=True))
        self.run = executor.compile(program, storage.layers)
        self._window = _widest_window(program)
        self._contexts = StepContextBuilder()
        self._step_lock = threading.Lock()  # the program's values have one memory
        self._threads: set[int] = set()  # that have the turn, or wait for it
        self._running: set[int] = set()  # ids of the sequences of the step in progress
        self._running_lock = threading.RLock()  # a signal handler may come here while the same thread is here
        renew_locks(self, "_step_lock", "_running_lock")
        self.closed = False

    def open(self) -> PagedSequence:
        return self._with(BlockTable(self.pool, self.block_size))

    def _with(self, table: BlockTable) -> PagedSequence:
        sequence = PagedSequence(table, self.rope_threshold, self._window, self.token_budget)
        self.pool.release_after(sequence, table.release)
        return sequence

    def fork(self, sequence: PagedSequence) -> PagedSequence:
        if sequence.ahead is not None:
            sequence.take_back()
        other = self._with(sequence.table.fork())
        other.tokens, other._prefill, other._settled = [*sequence.tokens], sequence._prefill[:], len(sequence.tokens)
        other.adapters, other.adapter_history = sequence.adapters, sequence.adapter_history.copy()
        other.is_private = sequence.is_private
        other._kept, other.forgotten = sequence._kept, sequence.forgotten
        return other

    def step(
        self, sequences: Sequence[PagedSequence], step: StepPlan, *, all_rows: Collection[int] = (), output: str = ""
    ) -> list[Logits | None]:
        self._check_open()
        check_unchanged(self._files)
        self._leave_windows(sequences, step)
        results: list[Logits | None] = [None] * len(sequences)
        for index, logits in self._run_step(sequences, step, all_rows, output):
            results[index] = logits
        self._leave_windows(sequences, step)
        return results

    @property
    def runs_ahead(self) -> bool:  # type: ignore[override]
        """See Decoder."""
        run = getattr(self, "run", None)  # it goes when the model is closed, on any thread
        return run is not None and run.takes_choices

    def step_ahead(self, sequences: Sequence[PagedSequence], choice: TokenChoice, rows: Sequence[int]) -> bool:
        if len(sequences) > self.token_budget or not all(sequence.can_go_ahead for sequence in sequences):
            return False
        step = [Chunk(index, 1, False) for index in range(len(sequences))]
        try:
            self._check_open()
            check_unchanged(self._files)
            self._leave_windows(sequences, step)
            with self._reserved(sequences, step) as slots:
                context = self._contexts.make_ahead(sequences, slots, choice, rows)
                logits = self._logits(sequences, step, context)
                for row, sequence in enumerate(sequences):
                    sequence.ahead = StepAhead(len(sequence.tokens), logits, row)
        except BaseException as error:
            for sequence in sequences:
                sequence.ahead = None
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def _leave_windows(self, sequences: Sequence[PagedSequence], step: StepPlan) -> None:
        for part in step if self._window is not None else ():
            sequences[part.sequence].leave_window()

    def replace_program(self, program: OpProgram) -> None:
        """Go on with another program over the same values, such as one that has places of adapters: between two steps.

        Weights that were packed for the old one are not packed again.
        """
        run = self.executor.compile(program, self.storage.layers)
        with self._interruptible(()):  # no step is in progress
            self.program, self.run = program, run

    def keep_blocks_in(self, folder: Path, max_bytes: int, identity: bytes) -> None:
        """Let published blocks be kept in a folder, too, and found there.

        Args:
            max_bytes: most bytes of the folder. identity: what blocks depend on besides tokens, numerics and adapters.

        Raises:
            OptionError: the folder cannot be used, or blocks are kept in another one.
        """
        before = self.pool.backing
        if isinstance(before, BlockDirectory) and before.folder.resolve() == folder.resolve():
            before.max_bytes = max_bytes
            return
        if before is not None:
            raise OptionError(
                f"prefix cache {folder}", "the model keeps its blocks in another folder", "give the same one, or none"
            )
        try:
            self.pool.backing = BlockDirectory(folder, identity, max_bytes, self.storage, self.executor)
        except DirectoryError as error:
            raise OptionError(
                f"prefix cache {folder}: the folder cannot be used", str(error), "give a folder that only you can write"
            ) from error

    def adapt(self, sequence: PagedSequence, adapters: AdapterMix | None) -> None:
        sequence.adapt(adapters)

    def reuse(self, sequence: PagedSequence) -> int:
        with _told("bringing blocks of the prefix cache back"):
            return sequence.reuse()

    def publish(self, sequence: PagedSequence) -> None:
        sequence.publish()

    def _keys_turner(self) -> Callable[[Sequence[int], int], None]:
        return key_rotator(self.executor, self.program, self.rope_threshold, self.storage.layers)

    def check_shift(self, shift: ContextShift) -> None:
        turner = self._keys_turner()
        least = (-(-shift.keep // self.block_size) + 2) * self.block_size
        if shift.size < least:
            raise OptionError(
                f"ctx_shift keeps {shift.keep} tokens of a context of {shift.size}",
                f"whole blocks of {self.block_size} tokens are kept and forgotten: at least {least} tokens are needed",
                "keep fewer tokens, or load the model with a larger context",
            )
        with _told("making ready to move keys"):
            turner((), 1)

    def forget(self, sequence: PagedSequence) -> None:
        shift, table, size = sequence.shift, sequence.table, self.block_size
        if shift is None:
            raise StateError("the sequence keeps all its tokens", "it has no shift", "set one before it is full")
        turner = self._keys_turner()
        sequence.take_back()
        first = (sequence._kept if sequence.forgotten else -(-shift.keep // size) * size) // size
        # What was given back is computed again, without what is forgotten.
        held = table.length >= (first + 1) * size
        count = max(1, ((table.length if held else shift.size) // size - first) // 2)
        try:
            copies = table.forget(first, count) if held else []
        except CacheFull:
            copies, held = [], False
        if not held:
            sequence.drop_cache(first * size)
        else:
            try:
                self.executor.copy_blocks(self.storage.blocks, copies)
                turner(table.blocks[max(first, table.num_gone) :], count * size)
            except MemoryError:  # some keys may have moved, and others not
                sequence.drop_cache(first * size)
            except BaseException as error:
                sequence.drop_cache()
                if isinstance(error, DeviceFailed):
                    raise _of_device(error, "moving keys") from error
                raise
            finally:
                self.pool.release(source for source, _ in copies)
        sequence.note_forgotten(first * size, count * size)

    def arrays_for(self, num_stored: int) -> list[StoredArray]:
        return [StoredArray("blocks", "uint8", (num_stored // self.block_size, int(self.storage.blocks.shape[1])))]

    def stored_arrays(self, sequence: PagedSequence) -> list[tuple[StoredArray, Iterator[NDArray[np.uint8]]]]:
        """Whole blocks only: the rest of a block may hold what was another sequence's."""
        if sequence.forgotten:
            raise StateError(
                "this sequence forgot tokens when its context was full",
                "what is left of its keys and values is not that of its tokens",
                "save the state before the context is full, or generate without ctx_shift",
            )
        if sequence.was_switched:
            raise StateError(
                "the adapters of this sequence were changed after tokens were computed",
                "the rest of its last block is computed again from its tokens, which goes through one choice of them",
                "choose the adapters before the first token, or rewind to 0 after the change",
            )
        blocks = sequence.table.blocks[: sequence.num_computed // self.block_size]
        (array,) = self.arrays_for(len(blocks) * self.block_size)
        self._check_open()
        return [(array, map(self._content, blocks))]

    def _content(self, block: int) -> NDArray[np.uint8]:
        """The bytes of a block; zeros where nobody looks any more."""
        if block == GONE:
            return np.zeros(int(self.storage.blocks.shape[1]), np.uint8)
        with _told("copying keys and values to the host"):
            return self.executor.read_block(self.storage.blocks, block)

    def restore(
        self, stored: StoredTokens, read: Callable[[memoryview], None], adapters: AdapterMix | None = None
    ) -> PagedSequence:
        self._check_open()
        sequence = self.open()
        sequence.adapt(adapters)
        sequence.resume(stored)
        try:
            self._append(sequence.table, stored.num_stored)
            piece = np.empty(int(self.storage.blocks.shape[1]), np.uint8)
            for block in sequence.table.blocks:
                read(piece.data)
                with _told("copying keys and values to it"):
                    self.executor.write_block(self.storage.blocks, block, piece)
        except BaseException:
            sequence.close()
            raise
        return sequence

    def _run_step(
        self, sequences: Sequence[PagedSequence], step: StepPlan, all_rows: Collection[int], output: str
    ) -> Iterator[tuple[int, Logits]]:
        with self._reserved(sequences, step) as slots:
            context, owners = self._contexts.make(sequences, step, slots, all_rows)
            logits = self._logits(sequences, step, context, output)
        for index, first, last in owners:
            if last > first:
                yield index, logits[first:last]

    def _logits(
        self, sequences: Sequence[PagedSequence], step: StepPlan, context: StepContext, output: str = ""
    ) -> Logits:
        """The rows that a step wants, [rows, width]."""
        with self._interruptible(sequences[part.sequence] for part in step) as run:
            logits = self._compute(run, context)[self._values[output or self.output_names[0]]]
            # Other outputs stay in memory that the next step overwrites.
            logits = np.array(logits, np.float32) if output else logits
        self._check_open()  # closed meanwhile, it has read pages that were given back
        if not output or output == self.output_names[0]:
            check_width(logits, self.vocab_size)
        return logits.reshape(len(context.logits_indices), logits.shape[-1])

    def _compute(self, run: StepFunction, context: StepContext) -> dict[str, Any]:
        try:
            return run.run(context)
        except StepCancelled:
            self._check_open()  # close() cancels, too
            raise StepInterrupted("the step was given up", "its sequences were cancelled", "ask again") from None
        except ThreadsRefused as error:
            self._check_open()  # a signal handler may have forked this process meanwhile
            raise no_threads(error) from error
        except (MemoryError, DeviceFailed) as error:
            raise _of_device(error, f"a step of {len(context.tokens)} tokens") from error

    @contextmanager
    def _interruptible(self, sequences: Iterable[PagedSequence]) -> Iterator[StepFunction]:
        thread = threading.get_ident()
        if thread in self._threads:
            raise StateError(
                "a signal handler interrupted a step of this model, and wants another one",
                "it would wait for itself",
                "let the handler take note, and compute where it was noted; an LLM computes on a thread of its own",
            )
        try:
            self._threads.add(thread)
            with self._step_lock:
                try:
                    with self._running_lock:
                        self._check_open()
                        run = self.run
                        run.resume()
                        self._running = {id(sequence) for sequence in sequences}
                    yield run
                finally:
                    with self._running_lock:
                        self._running = set()
        finally:
            self._threads.discard(thread)

    def interrupt(self, sequences: Collection[PagedSequence]) -> None:
        with self._running_lock:
            if self._running and self._running <= {id(sequence) for sequence in sequences}:
                self.run.cancel()

    @contextmanager
    def _reserved(self, sequences: Sequence[PagedSequence], step: StepPlan) -> Iterator[list[int]]:
        """Slots for the step's tokens; taken back if the step fails."""
        taken: list[tuple[BlockTable, int]] = []
        slots: list[int] = []
        try:
            for index, count, _ in step:
                table = sequences[index].table
                taken.append((table, table.length))
                slots += self._append(table, count, sequences)
            yield slots
        except BaseException:
            for table, length in taken:
                table.truncate(length)
            raise

    def _append(self, table: BlockTable, count: int, beside: Sequence[PagedSequence] = ()) -> Sequence[int]:
        try:
            try:
                slots, copies = table.append(count)
            except CacheFull:
                for one in beside:
                    one.table.settle()  # forks hold what they were copied from; the last of its owners needs no copy
                slots, copies = table.append(count)
        except CacheFull as error:
            raise CacheCapacityError(
                f"the KV cache has no room for {count} more tokens",
                f"{error}; other sequences of this model hold the rest",
                "close generators that are done, shorten the prompt, or give the model a larger cache (cache_bytes=…)",
            ) from error
        if copies:
            with _told("copying blocks"):
                self.executor.copy_blocks(self.storage.blocks, copies)
        return slots

    def _check_open(self) -> None:
        if was_busy(self) or was_busy(self.pool):
            raise StateError(
                "the model computed a step when this process was forked",
                "a fork does not copy the thread that would end the step",
                "load the model in the child process, or start it by spawning",
            )
        if self.closed:
            raise StateError("the model is closed", "close() gave its memory back", "load the model again")

    def close(self) -> None:
        kept: list[object] = []
        with self._running_lock:
            if not self.closed:
                self.run.cancel()
                self.closed, self._running = True, set()
                kept += self.run, self.program
                del self.run, self.program  # with their weights, whoever still holds this decoder
        if self.pool.backing is not None:
            self.pool.backing.close()
        self.executor.close()  # which waits for what was started: it reads what the run keeps, and writes the cache
        kept.clear()
        self.storage.close()


def _of_device(error: MemoryError | DeviceFailed, work: str) -> GenaiError:
    """What a device says of its work, with a way out."""
    if isinstance(error, DeviceFailed):
        fix = "load the model again; genai doctor shows what is there"
        return DeviceError(f"the device failed in {work}", str(error), fix)
    return CacheCapacityError(
        f"the device has no memory left for {work}",
        str(error) or "it refused to give more",
        "compute fewer sequences at a time, or load the model with a smaller context_size or cache_bytes",
    )


def _widest_window(program: OpProgram) -> int | None:
    """The most tokens that a row of any layer sees; None where a layer sees all: a block holds all layers."""
    windows = [op.window for op in program.ops if isinstance(op, Attention)]
    return max(windows) if windows and min(windows) > 0 else None


@contextmanager
def _told(work: str) -> Iterator[None]:
    """That a device fails in some work is said as its other errors are."""
    try:
        yield
    except (MemoryError, DeviceFailed) as error:
        raise _of_device(error, work) from error
