"""Sampling on a GPU: one upload describes the work, sampling.cu's kernels run, and the outcomes are copied back.

The number of launches of a call depends only on the sampling steps of its rows, never on numbers on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import check
from ..cpu.program.thread_pool import Threads
from ..cpu.sampling.sampler import CpuSampler
from ..sampling import (
    ASKED,
    FINE,
    MAX_STEPS,
    ROW,
    SamplingBatch,
    Setting,
    Span,
    Step,
    check_row_numbers,
    mask_words,
)  # fmt: skip
from .driver import Driver, Event
from .graphs import GraphCache
from .launches import Functions, bind
from .logits import DeviceLogits
from .sources import CudaKernel, structs
from .staging import Staging

PART = 2048
"""The number of a row's tokens per block; also the maximum length of lists of tokens. See sampling_row.cuh."""
# Steps that are not options: log(sum(exp)), and a list of the ids of the remaining tokens in order.
_NORMALIZE, _LIST = MAX_STEPS + 1, MAX_STEPS + 2
_THREADS, _ALIGNMENT = 256, 16
# A search makes a first guess, then splits the range of the floats' sort keys into sixteen parts, eight times.
_SEARCH = 1 + 8
_LAUNCHES = {
    Step.PENALTIES: 2, Step.DRY: 2, Step.TOP_N_SIGMA: 1, Step.TOP_K: _SEARCH, Step.TYPICAL_P: 1 + _SEARCH + 1,
    Step.TOP_P: _SEARCH, Step.MIN_P: 1, Step.XTC: 3, Step.TEMPERATURE: 0, Step.MIROSTAT: 1, _NORMALIZE: 1, _LIST: 1,
}  # fmt: skip
# Maximum bytes of the logits, and of the history marks, of rows that are sampled together; maximum number of such rows.
_MOST_BYTES, _MOST_ROWS = 64 << 20, 256

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


def sampling_kernel(greedy: bool) -> CudaKernel:
    """Return the kernel for all steps, or (`greedy`) for rows that only need their most likely token."""
    function = f"sampling::sample_rows<{str(greedy).lower()}>"
    return CudaKernel("sampling.cu", function, "SamplingArguments", _THREADS)


SAMPLING_KERNELS = tuple(sampling_kernel(greedy) for greedy in (False, True))


def launches_of(steps: list[int], settings: NDArray[np.float64], *, parts: int, distributions: bool) -> int:
    """Return the maximum number of launches that a row needs."""
    if parts == 1:
        return 1
    found = 1 + int(settings[Setting.NO_REPEAT_NGRAM_SIZE] > 0)
    taken = steps[: steps.index(Step.END)] if Step.END in steps else steps
    for step in taken:
        found += _LAUNCHES[step]
        if step == Step.TOP_K and settings[Setting.TOP_K] <= PART:
            return found + 1  # the few remaining tokens become a list, and the block that lists them finishes the row
    if _NORMALIZE in taken:
        return found
    # The last launch draws a token, or, if few candidates remain, it lists them and executes the remaining steps. This
    # launch is not needed for the most likely token of rows that have only history steps.
    ends_at_once = settings[Setting.TEMPERATURE] == 0 and {Step.PENALTIES, Step.DRY}.issuperset(taken)
    return found + int(not ends_at_once) + int(distributions)


@dataclass(frozen=True)
class _Capacity:
    """The sizes that a sampler's memory is allocated for: rows, and flags for history marks and distributions."""

    rows: int = 0
    marks: bool = False
    distributions: bool = False

    def grown(self, rows: int, *, marks: bool, distributions: bool) -> _Capacity:
        found = max(self.rows, 1)
        while found < rows:
            found *= 2
        return _Capacity(found, self.marks or marks, self.distributions or distributions)


@dataclass(eq=False)
class _Outcomes:
    """Memory for the outcomes of a call.

    Attributes:
        memory: device memory.
        address: address of `memory`.
        host: host memory to which `memory` is copied.
        event: recorded after the copy.
        owner: the choice that uses the memory, until that choice has been waited for or deleted.
    """

    memory: Any
    address: int
    host: NDArray[np.uint8]
    event: Event
    owner: weakref.ref[CudaChoice] | None = None


class CudaChoice:
    """Tokens that are being sampled; see `genai.kernels.device.TokenChoice`."""

    def __init__(self, driver: Driver, outcomes: _Outcomes, layout: np.dtype[np.void], count: int) -> None:
        self.driver, self._outcomes, self._layout, self._count = driver, outcomes, layout, count
        outcomes.owner = weakref.ref(self)

    def addresses(self, rows: Int64) -> NDArray[np.uint64]:
        """Return the device addresses to which the tokens of rows are written, as int32; -1 means no token.

        Work that reads the tokens must be started before `wait` is called.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self._count:
            raise ValueError(f"rows range from {rows.min()} to {rows.max()}, but only {self._count} tokens are sampled")
        first = self._outcomes.address + self._layout.fields["token"][1]  # type: ignore[index]
        return (first + self._layout.itemsize * rows).astype(np.uint64)

    def outcomes(self) -> NDArray[np.void]:
        """Wait for all outcomes and return them."""
        own = self._outcomes
        own.event.wait()
        found: NDArray[np.void] = own.host[: self._layout.itemsize * self._count].view(self._layout).copy()
        own.owner = None
        if (found["status"] < FINE).any():
            raise AssertionError("a row was not finished after all launches")
        return found

    def wait(self) -> tuple[Int64, Float64, Int64]:
        """See `genai.kernels.device.Sampler.sample`."""
        found = self.outcomes()
        return found["token"].astype(np.int64), found["probability"].copy(), found["status"].astype(np.int64)


class CudaSampler:
    """See `genai.kernels.device.Sampler`. Logits on the device are read in place; logits on the host are uploaded.

    If `log_normalizers` is called for more than 2,048 likely tokens of a row, the host finds them.

    Args:
        driver: the GPU.
        functions: the loaded SAMPLING_KERNELS.
        vocab_size: number of logits of a row.
        threads: the threads of the host.

    Attributes:
        most_begun: see `genai.kernels.device.Sampler`.
    """

    def __init__(self, driver: Driver, functions: Functions, vocab_size: int, threads: Threads) -> None:
        self._driver, self._vocab_size, self._threads = driver, vocab_size, threads
        self._parts = -(-vocab_size // PART)
        self.most_begun = max(1, min(_MOST_ROWS, _MOST_BYTES // (4 * PART * self._parts)))
        self._functions = functions
        self._header = structs("sampling.cu")["SamplingTable"]
        self._outcome = structs("sampling.cu")["SamplingOutcome"]
        self._capacity, self._memory = _Capacity(), dict[str, Any]()
        self._outcomes: list[_Outcomes] = []
        self._planned: tuple[tuple[bytes, bool], tuple[int, bool, bool]] | None = None
        self._table = _Table(driver, self._header, 1 << 12)
        self._forget_addresses()

    def sample(
        self, logits: Any, batch: SamplingBatch, distributions: Float64 | None = None
    ) -> tuple[Int64, Float64, Int64]:
        count = len(batch.rows)
        if distributions is None and 0 < count <= self.most_begun:
            return self.begin(logits, batch).wait()
        self._check(logits, batch)
        if distributions is not None:
            check("distributions", distributions, (count, self._vocab_size), np.dtype(np.float64))
        found = [(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64))]
        for first in range(0, count, self.most_begun):
            part = slice(first, min(first + self.most_begun, count))
            own = None if distributions is None else distributions[part]
            found.append(self._start(logits, batch, batch.rows[part], wants=own is not None).wait())
            if own is not None:
                own[...] = self._driver.download(self._memory["distributions"][: len(own)])
        tokens, probabilities, status = (np.concatenate(column) for column in zip(*found, strict=True))
        return tokens, probabilities, status

    def begin(self, logits: Any, batch: SamplingBatch) -> CudaChoice:
        """See `genai.kernels.device.Sampler`."""
        self._check(logits, batch)
        if not 0 < len(batch.rows) <= self.most_begun:
            raise ValueError(
                f"the batch has {len(batch.rows)} rows, but only 1 to {self.most_begun} rows can be sampled at a time"
            )
        return self._start(logits, batch, batch.rows)

    def _check(self, logits: Any, batch: SamplingBatch) -> None:
        _check_logits(logits, self._vocab_size)
        batch.check(len(logits), self._vocab_size)

    def log_normalizers(self, logits: Any, rows: Int64, top: int) -> tuple[Float64, Int64]:
        _check_logits(logits, self._vocab_size)
        check_row_numbers(rows, len(logits), top, self._vocab_size)
        if top > PART:
            own, numbers = np.asarray(logits[rows]), np.arange(len(rows))
            return CpuSampler(self._threads, self._vocab_size).log_normalizers(own, numbers, top)
        normalizers, likely = np.full(len(rows), np.nan), np.full((len(rows), top), -1)
        batch = _normalizer_batch(rows, top, self._vocab_size)
        for first in range(0, len(rows), self.most_begun):
            part = slice(first, min(first + self.most_begun, len(rows)))
            outcomes = self._start(logits, batch, batch.rows[part], top=top).outcomes()
            fine = outcomes["status"] == FINE
            normalizers[part][fine] = outcomes["probability"][fine]
            if top:
                lists = self._driver.download(self._memory["lists"][: len(outcomes), :top])
                likely[part][fine] = lists[fine]
        return normalizers, likely

    def _start(
        self, logits: Any, batch: SamplingBatch, rows: NDArray[np.void], *, wants: bool = False, top: int = 0
    ) -> CudaChoice:
        """Start sampling some of a batch's rows. `wants`: True to also return distributions."""
        count = len(rows)
        launches, greedy, marks = self._plan(rows, wants)
        capacity = self._capacity.grown(count, marks=marks, distributions=wants)
        if capacity != self._capacity:
            self._allocate(capacity)
        kernel, outcomes = sampling_kernel(greedy), self._free_outcomes()
        with _held(logits, self._driver) as addresses:
            self._write(*_sources(logits, addresses, batch, rows), batch, rows, top, outcomes)
            # The arguments of launches do not depend on the batch, so batches with the same number of rows use the same
            # graph.
            self._graphs.start(
                (kernel, launches, count, wants), lambda: self._launch(kernel, launches, count, distributions=wants)
            )
        size = self._outcome.itemsize * count
        self._driver.read(outcomes.memory[:size], outcomes.host[:size])
        outcomes.event.record()
        return CudaChoice(self._driver, outcomes, self._outcome, count)

    def _free_outcomes(self) -> _Outcomes:
        """Return memory that no caller waits for and that no copy is still writing."""
        for one in self._outcomes:
            if one.owner is None or one.owner() is None:
                one.event.wait()
                return one
        size = self._outcome.itemsize * self._capacity.rows
        memory, host = self._driver.zeros(size), self._driver.host_memory(size)
        made = _Outcomes(memory, self._driver.address(memory), host, self._driver.event())
        self._outcomes.append(made)
        return made

    def _launch(self, kernel: CudaKernel, launches: int, count: int, *, distributions: bool) -> None:
        for launch in range(launches):
            arguments = self._arguments(kernel, is_first=launch == 0, distributions=distributions)
            self._driver.launch(self._functions[kernel], kernel, (self._parts, count, 1), arguments)

    def _plan(self, rows: NDArray[np.void], distributions: bool) -> tuple[int, bool, bool]:
        """Return the number of launches, True if all rows are greedy, and True if any row reads its history."""
        asked = (
            np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)[:, : ASKED.size].tobytes(),
            distributions,
        )
        if self._planned is None or self._planned[0] != asked:
            self._planned = asked, self._plan_anew(rows, distributions)
        return self._planned[1]

    def _plan_anew(self, rows: NDArray[np.void], distributions: bool) -> tuple[int, bool, bool]:
        launches, greedy, marks = 0, not distributions, False
        known: dict[bytes, int] = {}
        for row in rows:
            steps, settings = row["steps"], row["settings"]
            key = steps.tobytes() + settings.tobytes()
            if key not in known:
                known[key] = launches_of(steps.tolist(), settings, parts=self._parts, distributions=distributions)
                histories = {Step.PENALTIES, Step.DRY} & set(steps.tolist())
                marks = marks or bool(histories) or settings[Setting.NO_REPEAT_NGRAM_SIZE] > 0
                is_simple = settings[Setting.TEMPERATURE] == 0 and steps[0] == Step.END
                greedy = greedy and is_simple and not settings[Setting.NO_REPEAT_NGRAM_SIZE]
            launches = max(launches, known[key])
        return launches, greedy, bool(marks)

    def _allocate(self, capacity: _Capacity) -> None:
        """Allocate memory for larger batches."""
        self._driver.synchronize()  # copies may still write to the old memory
        self._memory.clear()
        self._forget_addresses()
        rows, parts, size = capacity.rows, self._parts, self._vocab_size
        layouts = structs("sampling.cu")
        floats, integers, doubles = np.float32, np.int32, np.float64
        wanted: Mapping[str, tuple[Any, tuple[int, ...]]] = {
            "states": (np.uint8, (rows * layouts["SamplingState"].itemsize,)),
            "results": (np.uint8, (rows * parts * layouts["SamplingPart"].itemsize,)),
            "own": (floats, (rows, parts * PART if parts > 1 else 0)),
            "marks": (integers, (rows, size if capacity.marks else 0)),
            "list_values": (floats, (rows, PART)),
            "list_ids": (integers, (rows, PART)),
            "offsets": (integers, (rows, parts)),
            "tickets": (integers, (rows,)),
            "lists": (integers, (rows, PART)),
            "distributions": (doubles, (rows, size if capacity.distributions else 0)),
        }
        for name, (dtype, shape) in wanted.items():
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self._memory[name] = self._driver.zeros(nbytes).view(dtype).reshape(shape)
        self._capacity, self._outcomes = capacity, []

    def _forget_addresses(self) -> None:
        """Drop the arguments and the captured graphs, because memory was moved."""
        self._bound: dict[tuple[CudaKernel, bool, bool], NDArray[np.void]] = {}
        self._graphs = GraphCache(self._driver)

    def _arguments(self, kernel: CudaKernel, *, is_first: bool, distributions: bool) -> NDArray[np.void]:
        """Return the arguments of a launch, which stay the same in every call until memory is moved."""
        key = kernel, is_first, distributions
        if key not in self._bound:
            addresses = {name: self._driver.address(array) for name, array in self._memory.items()}
            if not distributions:
                addresses["distributions"] = 0
            self._bound[key] = bind(
                kernel, table=self._table.address(), **addresses, vocab_size=self._vocab_size,
                parts=self._parts, is_first=int(is_first),
            )  # fmt: skip
        return self._bound[key]

    def _write(
        self, sources: Int64, uploaded: NDArray[np.float32], batch: SamplingBatch, rows: NDArray[np.void], top: int,
        outcomes: _Outcomes,
    ) -> None:  # fmt: skip
        """Copy a batch to device memory in one block; the first two arguments are the results of `_sources`."""
        sections: tuple[NDArray[Any], ...] = (
            rows, sources, batch.edit_ids, batch.edit_values, batch.tokens, batch.masks, uploaded,
        )  # fmt: skip
        if self._table.lay_out(tuple(array.nbytes for array in sections)):
            self._forget_addresses()
        if len(uploaded):
            along, first = sources < 0, self._table.address() + self._table.offsets[_SECTIONS.index("logits")]
            sources[along] = first + 4 * self._vocab_size * (-1 - sources[along])
        self._table.write(sections, {"count": len(rows), "list_width": top, "outcomes": outcomes.address})


# The sections of a table, in order. The last section holds logits, and no field of the header refers to it.
_SECTIONS = ("rows", "sources", "edit_ids", "edit_values", "tokens", "masks", "logits")


class _Table:
    """`SamplingTable` and the sections that follow it, in device memory.

    Attributes:
        offsets: offsets of the sections, in bytes.
    """

    def __init__(self, driver: Driver, header: np.dtype[np.void], nbytes: int) -> None:
        self._driver, self._header = driver, header
        self._staging = Staging(driver, nbytes)
        self._sizes: tuple[int, ...] = ()
        self.offsets: list[int] = []
        self._end = 0
        # The sections that each of the two host buffers holds, for sections that never change.
        self._held: list[list[Any]] = [[], []]

    def address(self) -> int:
        """Return the address of the table."""
        return self._staging.address()

    def lay_out(self, sizes: tuple[int, ...]) -> bool:
        """Make room for sections of these sizes in bytes; return True if the table was moved."""
        if sizes == self._sizes:
            return False
        self._sizes, self.offsets, end = sizes, [], self._header.itemsize
        for size in sizes:
            self.offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = self.offsets[-1] + size
        self._end, self._held = end, [[], []]
        if end <= len(self._staging):
            return False
        self._staging.settle()
        self._staging = Staging(self._driver, 2 * end)
        return True

    def write(self, sections: tuple[NDArray[Any], ...], fields: Mapping[str, int]) -> None:
        """Copy sections of the sizes that were laid out, and these fields of the header, to device memory."""
        host = self._staging.next()
        held = self._held[self._staging.half]
        header = host[: self._header.itemsize].view(self._header)[0]
        if not held:
            held += [None] * len(sections)
            for name, offset in zip(_SECTIONS[:-1], self.offsets, strict=False):
                header[name] = offset
        for name, number in fields.items():
            header[name] = number
        for number, (array, offset) in enumerate(zip(sections, self.offsets, strict=True)):
            if array.nbytes and held[number] is not array:
                host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                held[number] = None if array.flags.writeable else array
        self._staging.send(self._end)


def _check_logits(logits: Any, vocab_size: int) -> None:
    if not isinstance(logits, DeviceLogits):
        check("logits", logits, (None, vocab_size))
    elif logits.ndim != 2 or logits.width != vocab_size:
        raise ValueError(f"logits are {list(logits.shape)}, expected [any, {vocab_size}]")


def _held(logits: Any, driver: Driver) -> AbstractContextManager[NDArray[np.uint64] | None]:
    """Return a context with the addresses of all rows; None for logits that must be copied through the host."""
    return logits.held_for(driver) if isinstance(logits, DeviceLogits) else nullcontext()


def _sources(
    logits: Any, addresses: NDArray[np.uint64] | None, batch: SamplingBatch, rows: NDArray[np.void]
) -> tuple[Int64, NDArray[np.float32]]:
    """Return each row's address of logits, or -1 minus the row's index in uploaded logits; and the uploaded logits."""
    numbers: Int64 = rows["span"][:, Span.SOURCE].copy()
    given = np.flatnonzero(numbers >= 0)
    if addresses is not None:
        if len(given) == len(numbers):
            return addresses[numbers].astype(np.int64), batch.replaced
        numbers[given] = addresses[numbers[given]].astype(np.int64)
        return numbers, batch.replaced
    own = np.asarray(logits[numbers[given]])
    first = len(batch.replaced)
    numbers[given] = -1 - np.arange(first, first + len(given))
    return numbers, np.concatenate([batch.replaced, own])


def _normalizer_batch(rows: Int64, top: int, vocab_size: int) -> SamplingBatch:
    """Return a batch that computes rows' normalisers and lists their most likely tokens."""
    asked = np.zeros(len(rows), ROW)
    steps = [_NORMALIZE, Step.TOP_K, _LIST] if top else [_NORMALIZE]
    asked["steps"][:, : len(steps)] = steps
    asked["settings"][:, Setting.TEMPERATURE], asked["settings"][:, Setting.TOP_K] = 1.0, top
    asked["span"][:, Span.SOURCE] = rows
    integers, floats = np.empty(0, np.int32), np.empty((0, vocab_size), np.float32)
    masks = np.empty((0, mask_words(vocab_size)), np.uint32)
    return SamplingBatch(asked, False, floats, integers, floats.reshape(-1), integers, masks)
