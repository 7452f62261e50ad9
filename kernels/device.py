"""The interface of a device: it compiles programs of ops, owns the cache and the logits, and samples.

A step (`StepContext`) holds the tokens to compute, their positions, the cache blocks that they see, and the rows whose
logits are requested. The step is a flat batch of T tokens from S sequences, in which decode rows and prefill chunks mix
freely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .cache_layout import CacheLayer, PagedLayer
from .errors import (
    DeviceFailed as DeviceFailed,
    StepCancelled as StepCancelled,
    StepError as StepError,
    UnsupportedOp as UnsupportedOp,
)
from .ir import Constants, Ids, Op, OpProgram, Weight
from .sampling import SamplingBatch


class TokenChoice(Protocol):
    """A choice of tokens that is in progress (see `Sampler.begin`)."""

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Wait, then return what `Sampler.sample` returns, or raise the same errors. To be called only once."""


class DeviceAdapter(Protocol):
    """An adapter in a device's memory. The memory is freed when the last reference to the adapter is dropped.

    Attributes:
        nbytes: size in bytes.
    """

    @property
    def nbytes(self) -> int:
        """The size in bytes."""


class AdapterRows(NamedTuple):
    """The adapters that the rows of a step use, for S sequences with E entries in total.

    Attributes:
        adapters: return values of `Executor.load_adapter`, without duplicates.
        offsets: int32 [S + 1]; the rows of sequence s use the entries offsets[s]:offsets[s + 1].
        ids: int32 [E], indices into `adapters`.
        weights: float32 [E], factors on the terms that the adapters add.
    """

    adapters: Sequence[DeviceAdapter]
    offsets: NDArray[np.int32]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


NO_ADAPTERS = AdapterRows((), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
"""The `AdapterRows` of a step without adapters."""


@dataclass(frozen=True)
class PageTables:
    """The location of the keys and values of a cache group's layers, for S sequences and T new tokens.

    Attributes:
        block_tables: int32 [S, max_blocks], block ids of each sequence, in order.
        slot_mapping: int64 [T], slot that each token's key and value are written to: block * block_size + offset.
    """

    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]


@dataclass(frozen=True)
class StateSlots:
    """The location of the states of recurrent layers, for S sequences in a step of T rows.

    Attributes:
        reads: int32 [S], slot of the state that each sequence starts from; -1 = a state of zeros.
        writes: int32 [T], slot that receives the state after each row; -1 = the state is not stored. No slot is both
            read and written.
    """

    reads: NDArray[np.int32]
    writes: NDArray[np.int32]


@dataclass(frozen=True)
class StepContext:
    """One step over a flat batch.

    Attributes:
        tokens: int64 [T], token ids.
        positions: int64 [T], index of each token in its sequence.
        cu_seqlens_q: int32 [S + 1]; sequence s owns the rows cu_seqlens_q[s]:cu_seqlens_q[s + 1].
        context_lens: int32 [S], number of tokens visible to the last row of each sequence, including this step's.
        groups: per cache group, the location of its layers' state (see `PagedLayer.group`, `StateLayer.group`).
        num_decode_sequences: number of leading sequences whose rows are computed with decode numerics. The rows of the
            remaining sequences are computed with prefill numerics.
        logits_indices: int64 [R], rows whose logits are requested.
        rope_table: int32 [S], RoPE table of each sequence (0 = short, 1 = long).
        choice: choice in progress whose tokens replace `tokens`; only for programs with `takes_choices`.
        chosen: int64 [T], row of `choice` that holds each token.
        adapter_rows: adapters that the rows use.
        token_types: int64 [T], token types of encoders, such as 0 for a query and 1 for a document; None = zeros.
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
    token_types: NDArray[np.int64] | None = None

    def integers(self, ids: Ids) -> NDArray[np.int64]:
        """Return the integers of one kind, [T]."""
        match ids:
            case Ids.TOKENS:
                return self.tokens
            case Ids.POSITIONS:
                return self.positions
            case Ids.TYPES:
                return np.zeros_like(self.tokens) if self.token_types is None else self.token_types

    def check_whole_sequences(self) -> None:
        """Raise StepError unless the step contains whole sequences, all of them with prefill numerics."""
        lengths = np.diff(self.cu_seqlens_q)
        if self.num_decode_sequences or not np.array_equal(lengths, self.context_lens):
            raise StepError(
                "attention to later tokens needs whole sequences with prefill numerics, but "
                f"{self.num_decode_sequences} sequences have decode numerics, and the sequences of "
                f"{self.context_lens.tolist()} tokens have {lengths.tolist()} rows"
            )

    @property
    def page_tables(self) -> list[PageTables]:
        """The tables of the groups that keep rows in pages; these groups come first."""
        return [group for group in self.groups if isinstance(group, PageTables)]

    @property
    def state_slots(self) -> StateSlots | None:
        """The slots of the group that keeps states, or None if there is no such group."""
        last = self.groups[-1] if self.groups else None
        return last if isinstance(last, StateSlots) else None


@dataclass(frozen=True)
class Factors:
    """The two factors of the term x @ a.T @ b.T that an adapter adds to some columns of a linear layer's result.

    Attributes:
        first: first column of the result that the term changes.
        a: float32 or float16 [rank, columns of x].
        b: the same type as `a`, [columns of the result that change, rank].
    """

    first: int
    a: NDArray[Any]
    b: NDArray[Any]

    @property
    def rank(self) -> int:
        """The inner dimension of the two factors."""
        return len(self.a)


class KeyRotation(NamedTuple):
    """A rotation of keys. The columns of a head from column 2 * pairs onwards are unchanged.

    Attributes:
        cosine, sine: float64 [pairs].
        interleaved: True if a pair is two neighbouring columns; otherwise a pair is column i and column i + pairs.
    """

    cosine: NDArray[np.float64]
    sine: NDArray[np.float64]
    interleaved: bool


DeviceArray: TypeAlias = Any
"""An array in a device's memory. The array can be sliced, viewed as another type, reshaped, and copied to the host with
np.asarray.

Each device has a separate array type. If the memory is not the host's, only the device's executor reads and writes it.
The alias is `Any` because a protocol cannot express that an executor accepts only the arrays that it created.
"""


class DeviceMemory(Protocol):
    """Device memory that its owner must close.

    Attributes:
        bytes: uint8 [n].
    """

    bytes: DeviceArray

    def close(self) -> None:
        """Free the memory."""


class StepFunction(Protocol):
    """A compiled program. One step runs at a time."""

    @property
    def takes_choices(self) -> bool:
        """True if `run` only starts a step and accepts tokens that are not known yet (`StepContext.choice`)."""

    def run(self, step: StepContext, given: Mapping[str, DeviceArray] | None = None) -> dict[str, DeviceArray]:
        """Compute the program's outputs, [T, width] each. The next step may overwrite them.

        Args:
            given: arrays for the program's `given`.

        Raises:
            StepCancelled: `cancel` was called during the run.
            StepError: an index of the step is outside its table.
            MemoryError: the device does not have enough memory for a step of this size; a smaller step may fit.
            DeviceFailed: the device failed, for example because a GPU was lost.
        """

    def seconds(self, step: StepContext, given: Mapping[str, DeviceArray] | None = None) -> float:
        """Run a step and return the seconds that the device took, by the device's own clock if there is one.

        Transfers to the device before the step and from the device afterwards are not counted.
        """

    def cancel(self) -> None:
        """End the current run early. Called from another thread."""

    def resume(self) -> None:
        """Clear a cancellation."""


class HostThreads(Protocol):
    """Threads of the host that share the work of array functions.

    Attributes:
        count: number of threads.
    """

    @property
    def count(self) -> int:
        """The number of threads."""


class Sampler(Protocol):
    """A sampler that selects tokens from rows of logits. One call runs at a time."""

    def sample(
        self, logits: DeviceArray, batch: SamplingBatch, distributions: NDArray[np.float64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Apply the sampling steps of each row of the batch and draw one token per row.

        Args:
            logits: float32 [B, V], not changed.
            distributions: float64 [A, V] or None: receives the distributions from which the tokens were drawn.

        Returns:
            int64 [A], the tokens.
            float64 [A], the probability of each token in the distribution that it was drawn from (1 if greedy).
            int64 [A], the status: FINE, or the reason that there is no token (the token is then -1): HAS_NAN,
            HAS_INFINITY, ALL_MASKED.
        """

    @property
    def most_begun(self) -> int:
        """The maximum number of rows that `begin` accepts; 0 = the device can only sample synchronously."""

    def begin(self, logits: DeviceArray, batch: SamplingBatch) -> TokenChoice:
        """Start `sample` without waiting for the tokens. Work that is started later cannot affect these logits."""

    def log_normalizers(
        self, logits: DeviceArray, rows: NDArray[np.int64], top: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the log-normalisers of some rows, which turn logits into log-probabilities, and the likeliest tokens.

        Args:
            logits: float32 [B, V].
            rows: int64 [A], 0 to B - 1.
            top: number of tokens to return per row, 0 to V.

        Returns:
            float64 [A], log(sum(exp(row))): a token's log-probability is its logit minus this number. It is NaN for a
            row that contains NaN or infinity, or that contains only -inf.
            int64 [A, top], ids of the largest logits, in descending order, lower ids first among equals. Masked tokens
            (-inf) are left out: a row with fewer than `top` other tokens is padded with -1.
        """


class StepSizes(NamedTuple):
    """Numbers of tokens per step: `fast` is the number that prefills fastest, and `most` is the maximum."""

    fast: int
    most: int


class Executor(Protocol):
    """A device that compiles and runs programs."""

    @property
    def step_sizes(self) -> StepSizes:
        """The recommended and the maximum number of tokens per step."""

    @property
    def name(self) -> str:
        """The kind of device, such as "cpu"."""

    @property
    def device(self) -> str:
        """The device as users name it, with its index if there is one: "cpu", "cuda", "cuda:1"."""

    @property
    def threads(self) -> int:
        """The number of host threads that the device uses."""

    @property
    def reads_values_from_keys(self) -> bool:
        """True if values need no pages in latent attention, whose keys are also the values."""

    @property
    def host_threads(self) -> HostThreads | None:
        """The `threads` argument of array functions; None = the functions run only on the caller's thread."""

    def free_bytes(self) -> int | None:
        """Return the number of bytes of device memory that are free now; None = the device uses the host's memory."""

    def wait(self) -> None:
        """Wait until the device has finished all submitted work."""

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Return zeroed memory for the cache. If the device can, it backs only the written parts with physical memory.

        Raises:
            MemoryError: there is not enough memory.
        """

    def read_block(self, blocks: DeviceArray, index: int) -> NDArray[np.uint8]:
        """Return a host copy of one row of the cache's memory, after all work that was submitted earlier.

        Raises:
            DeviceFailed: the device failed, for example because a GPU was lost.
        """

    def write_block(self, blocks: DeviceArray, index: int, content: NDArray[np.uint8]) -> None:
        """Copy host bytes to one row of the cache's memory, after all work that was submitted earlier.

        `content` has been read when the method returns.

        Raises:
            DeviceFailed: the device failed, for example because a GPU was lost.
        """

    def copy_blocks(self, blocks: DeviceArray, copies: Sequence[tuple[int, int]]) -> None:
        """Copy rows of the cache's memory [blocks, bytes]: one (source, destination) pair after another."""

    def rotate_keys(self, blocks: Sequence[int], rotations: Sequence[tuple[PagedLayer, KeyRotation]]) -> None:
        """Rotate all keys in some blocks of the cache in place, by one rotation per layer.

        The stored keys are converted to floats, rotated, and rounded back to the type that pages hold. If `blocks` is
        empty, the method only prepares what the device needs for these layers.

        Raises:
            MemoryError: the device does not have enough memory for the list of blocks.
            DeviceFailed: the device failed, as in a step.
        """

    def compile(self, program: OpProgram, layers: Sequence[CacheLayer | None] = ()) -> StepFunction:
        """Compile a program: pack its weights and compile its kernels.

        Args:
            layers: per cache layer, its pages or its states.

        Raises:
            UnsupportedOp: the device does not support an op.
        """

    def sampler(self, vocab_size: int) -> Sampler:
        """Return a sampler for rows of `vocab_size` logits."""

    def host(self, rows: DeviceArray) -> NDArray[np.float32]:
        """Return logits as a NumPy array."""

    def array_function(self, op: Op, constants: Constants) -> Callable[..., Any]:
        """Return an op as a function of arrays, which maps its input values in order to its outputs.

        Raises:
            UnsupportedOp: the device has no array function for the op.
        """

    def load_adapter(self, factors: Sequence[Sequence[Factors]]) -> DeviceAdapter:
        """Copy an adapter into the device's memory.

        Args:
            factors: per adapter target of the programs (see `ir.LoraDelta`), the factors for the target. All factors
                have the same type. If a target has several factors, each changes different columns.

        Raises:
            MemoryError: there is not enough memory.
        """

    def packed_bytes(self, weight: Weight, constants: Constants) -> int:
        """Return the number of bytes that a matmul with this weight reads."""

    def arithmetic(self, op: Op, constants: Constants, *, prefill: bool) -> str | None:
        """Return the name of the instructions that an op's matmuls use; None = prefill uses the numerics of decode."""

    def ceiling(self, what: str) -> float | None:
        """Measure and return the peak rate of the device, or None if the host computes or the rate cannot be measured.

        Args:
            what: "bandwidth", for bytes read per second; or an arithmetic that `arithmetic` returned, for operations
                per second.
        """

    def close(self) -> None:
        """Release packed weights. Compiled programs keep their weights for as long as the programs are referenced."""
