"""What a device is to the engine: it compiles programs of ops, owns the cache and the logits, and samples.

A step tells it which tokens to compute, where they stand, which blocks they see, which logits are wanted: a flat batch
of T tokens that belong to S sequences, in which decode rows and prefill chunks mix freely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .cache_layout import CacheLayer, PagedLayer
from .ir import Constants, Op, OpProgram, Weight
from .sampling import SamplingBatch


class TokenChoice(Protocol):
    """Tokens that are being chosen (`Sampler.begin`)."""

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """What `Sampler.sample` returns; to be called once. May raise what that may."""


class DeviceAdapter(Protocol):
    """An adapter in a device's memory, which goes back with the last reference to it.

    Attributes:
        nbytes: how much that is.
    """

    @property
    def nbytes(self) -> int:
        """See above."""


class AdapterRows(NamedTuple):
    """Which rows of a step go through which adapters, of S sequences with E entries in all.

    Attributes:
        adapters: what Executor.load_adapter returned, each once.
        offsets: int32 [S + 1], the rows of sequence s go through entries offsets[s]:offsets[s + 1].
        ids: int32 [E], indices into `adapters`. weights: float32 [E], factors on what they add.
    """

    adapters: Sequence[DeviceAdapter]
    offsets: NDArray[np.int32]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


NO_ADAPTERS = AdapterRows((), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
"""Of a step without adapters."""


@dataclass(frozen=True)
class PageTables:
    """Where the keys and values of a cache group's layers lie: those of S sequences, and of T new tokens.

    Attributes:
        block_tables: int32 [S, max_blocks], block ids of each sequence, in order.
        slot_mapping: int64 [T], where each token's key and value go: block * block_size + offset.
    """

    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]


@dataclass(frozen=True)
class StateSlots:
    """Where the states of recurrent layers are: those of S sequences, in a step of T rows.

    Attributes:
        reads: int32 [S], the slot of the state that a sequence begins from; -1 = of zeros.
        writes: int32 [T], the slot that the state behind a row goes to; -1 = it is not kept. No slot is read, too.
    """

    reads: NDArray[np.int32]
    writes: NDArray[np.int32]


@dataclass(frozen=True)
class StepContext:
    """One step over a flat batch.

    Attributes:
        tokens: int64 [T], token ids.
        positions: int64 [T], index of each token inside its sequence.
        cu_seqlens_q: int32 [S + 1], sequence s owns rows cu_seqlens_q[s]:cu_seqlens_q[s + 1].
        context_lens: int32 [S], tokens visible to the last row of each sequence, this step's included.
        groups: per cache group where its layers keep their state (`PagedLayer.group`, `StateLayer.group`).
        num_decode_sequences: so many sequences come first whose rows have decode numerics; those of the others have
            prefill numerics.
        logits_indices: int64 [R], rows whose logits are wanted.
        rope_table: int32 [S], which RoPE table a sequence uses (0 short, 1 long).
        choice, chosen: tokens that are still being chosen take the place of `tokens`: int64 [T], the row of the choice
            that each of them is. Only where the program `takes_choices`.
        adapter_rows: which rows go through which adapters.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    cu_seqlens_q: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    groups: tuple[PageTables | StateSlots, ...]
    num_decode_sequences: int
    logits_indices: NDArray[np.int64]
    rope_table: NDArray[np.int32]
    choice: TokenChoice | None = None
    chosen: NDArray[np.int64] | None = None
    adapter_rows: AdapterRows = NO_ADAPTERS

    @property
    def page_tables(self) -> list[PageTables]:
        """Those of the groups that keep rows in pages, which come first."""
        return [group for group in self.groups if isinstance(group, PageTables)]

    @property
    def state_slots(self) -> StateSlots | None:
        """Those of the group that keeps states, if there is one."""
        last = self.groups[-1] if self.groups else None
        return last if isinstance(last, StateSlots) else None


@dataclass(frozen=True)
class Factors:
    """The two factors of what an adapter adds to some columns of a product: x @ a.T @ b.T.

    Attributes:
        first: the first column of the result that they change.
        a: float32 or float16 [rank, columns of x]. b: of the same type [columns of the result that change, rank].
    """

    first: int
    a: NDArray[Any]
    b: NDArray[Any]

    @property
    def rank(self) -> int:
        """Numbers that lie between the two."""
        return len(self.a)


class KeyRotation(NamedTuple):
    """A rotation of keys.

    Attributes:
        cosine, sine: float64 [pairs]. interleaved: whether pairs are neighbours, or of the halves of 2 * pairs; what
            lies behind them in a head stays as it is.
    """

    cosine: NDArray[np.float64]
    sine: NDArray[np.float64]
    interleaved: bool


DeviceArray: TypeAlias = Any
"""An array in a device's memory: it can be cut, viewed as another type, reshaped, and brought to the host (np.asarray).

Each device has a type of its own, which only its executor reads and writes where the memory is not the host's. `Any`,
since a protocol cannot say that an executor takes the arrays that it made.
"""


class DeviceMemory(Protocol):
    """Memory that somebody owns.

    Attributes:
        bytes: uint8 [n].
    """

    bytes: DeviceArray

    def close(self) -> None:
        """Give it back."""


class StepCancelled(Exception):
    """The step was cancelled: what it computed is incomplete."""


class DeviceFailed(RuntimeError):
    """The device did not do what it was asked for; the message has its own words."""


class StepError(RuntimeError):
    """The step was refused: its tokens, positions or blocks lead outside their tables."""


class StepFunction(Protocol):
    """A program that is ready to run. One step runs at a time."""

    @property
    def takes_choices(self) -> bool:
        """Whether `run` only starts a step, and takes tokens that nobody knows yet (`StepContext.choice`)."""

    def run(self, step: StepContext, given: Mapping[str, DeviceArray] | None = None) -> dict[str, DeviceArray]:
        """Compute the program's outputs, [T, width] each, which the next step may overwrite.

        Args:
            given: arrays for the program's `given`.

        Raises:
            StepCancelled: `cancel` was called meanwhile.
            StepError: an index of the step leads outside its table.
            MemoryError: the device has no room for a step of this size; a smaller one can be run.
            DeviceFailed: such as a GPU that was lost.
        """

    def seconds(self, step: StepContext, given: Mapping[str, DeviceArray] | None = None) -> float:
        """Run a step, and say how long the device took for it, by its own clock where it has one: without what goes
        there before and comes back behind it."""

    def cancel(self) -> None:
        """End the run in progress early; called from another thread."""

    def resume(self) -> None:
        """Forget a cancellation."""


class HostThreads(Protocol):
    """Threads of the host that functions of arrays share their work among.

    Attributes:
        count: how many.
    """

    @property
    def count(self) -> int:
        """See above."""


class Sampler(Protocol):
    """Chooses tokens from rows of logits. One call runs at a time."""

    def sample(
        self, logits: DeviceArray, batch: SamplingBatch, distributions: NDArray[np.float64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Take each row of the batch through its steps to a token.

        Args:
            logits: float32 [B, V], not changed.
            distributions: float64 [A, V] or None: receives the distributions from which the tokens were drawn.

        Returns:
            tokens int64 [A]; float64 [A], the probability of each in the distribution it was drawn from (1 if greedy);
            status int64 [A], FINE, or why there is no token: HAS_NAN, HAS_INFINITY, ALL_MASKED (then the token is -1).
        """

    @property
    def most_begun(self) -> int:
        """The most rows that `begin` takes; 0 = this device chooses while it is asked."""

    def begin(self, logits: DeviceArray, batch: SamplingBatch) -> TokenChoice:
        """As `sample`, without waiting for the tokens. The logits have been read by whatever is started later."""

    def log_normalizers(
        self, logits: DeviceArray, rows: NDArray[np.int64], top: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """What turns logits into log-probabilities, and the most likely tokens, of some rows.

        Args:
            logits: float32 [B, V]. rows: int64 [A], 0 to B - 1. top: how many tokens are wanted, 0 to V.

        Returns:
            float64 [A], log(sum(exp(row))): a token's log-probability is its logit less this. NaN for a row with NaN,
            with infinity, or with nothing but -inf.
            int64 [A, top], ids of the largest logits, the largest first, among equals the lowest id. Masked tokens
            (-inf) do not count: a row with fewer others ends in -1.
        """


class StepSizes(NamedTuple):
    """Of steps: with `fast` tokens prompts are read the fastest, `most` are the most that one may have."""

    fast: int
    most: int


class Executor(Protocol):
    """A device."""

    @property
    def step_sizes(self) -> StepSizes:
        """How many tokens to give it at a time."""

    @property
    def name(self) -> str:
        """Its kind, such as "cpu"."""

    @property
    def device(self) -> str:
        """Which one of its kind, too, as people ask for it: "cpu", "cuda", "cuda:1"."""

    @property
    def threads(self) -> int:
        """Threads of the host that it uses."""

    @property
    def host_threads(self) -> HostThreads | None:
        """What functions of arrays take as `threads`; None = the caller's alone."""

    def free_bytes(self) -> int | None:
        """Memory of the device that is free now; None = its memory is the host's."""

    def wait(self) -> None:
        """Until everything that was asked of the device is done."""

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Zeroed memory for the cache, which takes room only where it is written to if the device can do that.

        Raises:
            MemoryError: there is not so much.
        """

    def read_block(self, blocks: DeviceArray, index: int) -> NDArray[np.uint8]:
        """A copy of a row of the cache's memory on the host, behind everything that was asked for before.

        Raises:
            DeviceFailed: such as a GPU that was lost.
        """

    def write_block(self, blocks: DeviceArray, index: int, content: NDArray[np.uint8]) -> None:
        """Copy bytes of the host's into a row of the cache's memory, behind everything that was asked for before. They
        have been read on return.

        Raises:
            DeviceFailed: such as a GPU that was lost.
        """

    def copy_blocks(self, blocks: DeviceArray, copies: Sequence[tuple[int, int]]) -> None:
        """Copy rows of the cache's memory, seen as [blocks, bytes]: (source, destination) each, in order."""

    def rotate_keys(self, blocks: Sequence[int], rotations: Sequence[tuple[PagedLayer, KeyRotation]]) -> None:
        """Rotate all keys in some blocks of the cache, in place, those of each layer as is said for it.

        They are read as numbers and rounded to what pages hold once more. Where there are no blocks, what the device
        needs for these layers is made ready.

        Raises:
            MemoryError: the device has no room for the list of blocks.
            DeviceFailed: as a step does.
        """

    def compile(self, program: OpProgram, layers: Sequence[CacheLayer | None] = ()) -> StepFunction:
        """Make a program ready: pack its weights, compile its kernels.

        Args:
            layers: per cache layer its pages, or its states.

        Raises:
            UnsupportedOp: an op that this device does not know.
        """

    def sampler(self, vocab_size: int) -> Sampler:
        """A sampler of rows of so many logits."""

    def host(self, rows: DeviceArray) -> NDArray[np.float32]:
        """Logits as a NumPy array."""

    def array_function(self, op: Op, constants: Constants) -> Callable[..., Any]:
        """An op as a function of arrays: its values in order to its outputs.

        Raises:
            UnsupportedOp: there is none.
        """

    def load_adapter(self, factors: Sequence[Sequence[Factors]]) -> DeviceAdapter:
        """Copy an adapter into the device's memory.

        Args:
            factors: per target of the programs that it is for (see `ir.LoraDelta`), those that lie there, all of one
                type; where there are several, of different columns.

        Raises:
            MemoryError: there is not so much.
        """

    def packed_bytes(self, weight: Weight, constants: Constants) -> int:
        """Bytes that a product with this weight reads."""

    def arithmetic(self, op: Op, constants: Constants, *, prefill: bool) -> str | None:
        """The instructions that multiply in an op; None where it has no prefill numerics of its own."""

    def ceiling(self, what: str) -> float | None:
        """What the device can do at most, measured now: bytes that it reads per second ("bandwidth"), or operations per
        second in an arithmetic that `arithmetic` named. None = the host computes, or nobody measures it.
        """

    def close(self) -> None:
        """Give packed weights back; programs that were compiled keep theirs as long as somebody holds them."""


class UnsupportedOp(ValueError):
    """An op that a device cannot lower; the message names it."""
