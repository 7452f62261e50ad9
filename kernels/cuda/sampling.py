"""Sampling on a GPU: one upload says what is to be done, the kernels of sampling.cu do it, the outcomes come back.

How many launches a call needs follows from the steps that its rows ask for, never from numbers on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import check
from ..cpu.sampling import CpuSampler
from ..host.arrays import Threads
from ..sampling import FINE, MAX_STEPS, ROW, SamplingBatch, Setting, Span, Step, check_row_numbers, mask_words
from .driver import Driver
from .graphs import GraphCache
from .launches import Functions, bind
from .logits import DeviceLogits
from .sources import CudaKernel, structs

PART = 2048
"""Tokens of a row that a block takes; the longest list of candidates and of likely tokens. See sampling_row.cuh."""
# Steps that are no option: log(sum(exp)), and the ids of what is left in order.
_NORMALIZE, _LIST = MAX_STEPS + 1, MAX_STEPS + 2
_THREADS, _ALIGNMENT = 256, 16
# A search splits the places of floats into sixteen, after a first guess.
_SEARCH = 1 + 8
_LAUNCHES = {
    Step.PENALTIES: 2, Step.DRY: 2, Step.TOP_N_SIGMA: 1, Step.TOP_K: _SEARCH, Step.TYPICAL_P: 1 + _SEARCH + 1,
    Step.TOP_P: _SEARCH, Step.MIN_P: 1, Step.XTC: 3, Step.TEMPERATURE: 0, Step.MIROSTAT: 1, _NORMALIZE: 1, _LIST: 1,
}  # fmt: skip
# Rows that are sampled at the same time: their logits, and what a history says of tokens, take at most so much each.
_MOST_BYTES, _MOST_ROWS = 64 << 20, 256

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


def sampling_kernel(greedy: bool) -> CudaKernel:
    """The kernel for all steps, or for rows that want nothing but their most likely token."""
    function = f"sampling::sample_rows<{str(greedy).lower()}>"
    return CudaKernel("sampling.cu", function, "SamplingArguments", _THREADS)


SAMPLING_KERNELS = tuple(sampling_kernel(greedy) for greedy in (False, True))


def launches_of(steps: list[int], settings: NDArray[np.float64], *, parts: int, distributions: bool) -> int:
    """How many launches take a row to its end at most."""
    if parts == 1:
        return 1
    found = 1 + int(settings[Setting.NO_REPEAT_NGRAM_SIZE] > 0)
    taken = steps[: steps.index(Step.END)] if Step.END in steps else steps
    for step in taken:
        found += _LAUNCHES[step]
        if step == Step.TOP_K and settings[Setting.TOP_K] <= PART:
            return found + 1  # few are left: they become a list, and the block that makes it takes the row to its end
    if _NORMALIZE in taken:
        return found
    # The last launch draws; or it makes a list of what is left, whenever that is short, and does the rest. Neither is
    # needed for the most likely token of rows that nothing but their history changed.
    ends_at_once = settings[Setting.TEMPERATURE] == 0 and {Step.PENALTIES, Step.DRY}.issuperset(taken)
    return found + int(not ends_at_once) + int(distributions)


@dataclass(frozen=True)
class _Capacity:
    """What the memory of a sampler is made for: rows, and whether they have histories, lists, distributions."""

    rows: int = 0
    marks: bool = False
    distributions: bool = False

    def grown(self, rows: int, *, marks: bool, distributions: bool) -> _Capacity:
        found = max(self.rows, 1)
        while found < rows:
            found *= 2
        return _Capacity(found, self.marks or marks, self.distributions or distributions)


class CudaSampler:
    """See `kernels.executor.Sampler`. Logits of the device are read where they lie; those of the host are uploaded.

    More than 2,048 likely tokens of a row (`log_normalizers`) are found on the host.

    Args:
        functions: SAMPLING_KERNELS, loaded. threads: of the host.
    """

    def __init__(self, driver: Driver, functions: Functions, vocab_size: int, threads: Threads) -> None:
        self._driver, self._vocab_size, self._threads = driver, vocab_size, threads
        self._parts = -(-vocab_size // PART)
        self._most_rows = max(1, min(_MOST_ROWS, _MOST_BYTES // (4 * PART * self._parts)))
        self._functions = functions
        self._header = structs("sampling.cu")["SamplingTable"]
        self._outcome = structs("sampling.cu")["SamplingOutcome"]
        self._capacity, self._memory = _Capacity(), dict[str, Any]()
        self._table, self._host_table = driver.zeros(_ALIGNMENT), driver.host_memory(_ALIGNMENT)
        self._forget_places()

    def sample(
        self, logits: Any, batch: SamplingBatch, distributions: Float64 | None = None
    ) -> tuple[Int64, Float64, Int64]:
        size, count = self._vocab_size, len(batch.rows)
        _check_logits(logits, size)
        batch.check(len(logits), size)
        if distributions is not None:
            check("distributions", distributions, (count, size), np.dtype(np.float64))
        outcomes = np.empty(count, self._outcome)
        for first in range(0, count, self._most_rows):
            part = slice(first, min(first + self._most_rows, count))
            wanted = None if distributions is None else distributions[part]
            outcomes[part] = self._run(logits, batch, batch.rows[part], wanted)
        tokens, status = (outcomes[name].astype(np.int64) for name in ("token", "status"))
        return tokens, outcomes["probability"].copy(), status

    def log_normalizers(self, logits: Any, rows: Int64, top: int) -> tuple[Float64, Int64]:
        _check_logits(logits, self._vocab_size)
        check_row_numbers(rows, len(logits), top, self._vocab_size)
        if top > PART:
            own, numbers = np.asarray(logits[rows]), np.arange(len(rows))
            return CpuSampler(self._threads, self._vocab_size).log_normalizers(own, numbers, top)
        normalizers, likely = np.full(len(rows), np.nan), np.full((len(rows), top), -1)
        batch = _normalizer_batch(rows, top, self._vocab_size)
        for first in range(0, len(rows), self._most_rows):
            part = slice(first, min(first + self._most_rows, len(rows)))
            outcomes = self._run(logits, batch, batch.rows[part], None, top=top)
            fine = outcomes["status"] == FINE
            normalizers[part][fine] = outcomes["probability"][fine]
            if top:
                lists = self._driver.download(self._memory["lists"][: len(outcomes), :top])
                likely[part][fine] = lists[fine]
        return normalizers, likely

    def _run(
        self, logits: Any, batch: SamplingBatch, rows: NDArray[np.void], distributions: Float64 | None, top: int = 0
    ) -> NDArray[np.void]:
        """Outcomes of some of a batch's rows."""
        count, wants = len(rows), distributions is not None
        launches, greedy, marks = self._plan(rows, wants)
        capacity = self._capacity.grown(count, marks=marks, distributions=wants)
        if capacity != self._capacity:
            self._allocate(capacity)
        kernel = sampling_kernel(greedy)
        with _held(logits, self._driver) as addresses:
            self._write(*_sources(logits, addresses, batch, rows), batch, rows, top)
            # Nothing that a launch is given depends on the batch: the same number of rows is the same graph.
            self._graphs.start(
                (kernel, launches, count, wants), lambda: self._launch(kernel, launches, count, distributions=wants)
            )
        found = self._driver.download(self._memory["outcomes"][: self._outcome.itemsize * count]).view(self._outcome)
        if (found["status"] < FINE).any():
            raise AssertionError(f"a row was not done after {launches} launches")
        if distributions is not None:
            distributions[...] = self._driver.download(self._memory["distributions"][:count])
        return found

    def _launch(self, kernel: CudaKernel, launches: int, count: int, *, distributions: bool) -> None:
        for launch in range(launches):
            arguments = self._arguments(kernel, is_first=launch == 0, distributions=distributions)
            self._driver.launch(self._functions[kernel], kernel, (self._parts, count, 1), arguments)

    def _plan(self, rows: NDArray[np.void], distributions: bool) -> tuple[int, bool, bool]:
        """Launches; whether all rows want their most likely token alone; whether any looks at its history."""
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
        """Memory for larger batches."""
        self._memory.clear()
        self._forget_places()
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
            "outcomes": (np.uint8, (rows * self._outcome.itemsize,)),
            "distributions": (doubles, (rows, size if capacity.distributions else 0)),
        }
        for name, (dtype, shape) in wanted.items():
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self._memory[name] = self._driver.zeros(nbytes).view(dtype).reshape(shape)
        self._capacity = capacity

    def _forget_places(self) -> None:
        """Memory moved: arguments, and graphs that were captured with them, are made anew."""
        self._bound: dict[tuple[CudaKernel, bool, bool], NDArray[np.void]] = {}
        self._graphs = GraphCache(self._driver)

    def _arguments(self, kernel: CudaKernel, *, is_first: bool, distributions: bool) -> NDArray[np.void]:
        """What a launch is given: the same in every call, as long as no memory moves."""
        key = kernel, is_first, distributions
        if key not in self._bound:
            places = {name: self._driver.address(array) for name, array in self._memory.items()}
            if not distributions:
                places["distributions"] = 0
            self._bound[key] = bind(
                kernel, table=self._driver.address(self._table), **places, vocab_size=self._vocab_size,
                parts=self._parts, is_first=int(is_first),
            )  # fmt: skip
        return self._bound[key]

    def _write(
        self, sources: Int64, uploaded: NDArray[np.float32], batch: SamplingBatch, rows: NDArray[np.void], top: int
    ) -> None:
        """Bring a batch into device memory, in one block; the first two are those of `_sources`."""
        sections: dict[str, NDArray[Any]] = {
            "rows": rows, "sources": sources, "edit_ids": batch.edit_ids, "edit_values": batch.edit_values,
            "tokens": batch.tokens, "masks": batch.masks, "logits": uploaded,
        }  # fmt: skip
        places, end = {}, self._header.itemsize
        for name, array in sections.items():
            places[name] = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = places[name] + array.nbytes
        if end > len(self._host_table):
            self._table, self._host_table = self._driver.zeros(2 * end), self._driver.host_memory(2 * end)
            self._forget_places()
        base = self._driver.address(self._table) + places["logits"]
        along = sources < 0
        sources[along] = base + 4 * self._vocab_size * (-1 - sources[along])
        header = np.zeros((), self._header)
        for name in self._header.names or ():
            header[name] = places.get(name, 0)
        header["count"], header["list_width"] = len(rows), top
        self._host_table[: header.nbytes] = np.frombuffer(header.tobytes(), np.uint8)
        for name, array in sections.items():
            self._host_table[places[name] : places[name] + array.nbytes] = (
                np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            )
        self._driver.write(self._table[:end], self._host_table[:end])


def _check_logits(logits: Any, vocab_size: int) -> None:
    if not isinstance(logits, DeviceLogits):
        check("logits", logits, (None, vocab_size))
    elif logits.ndim != 2 or logits.width != vocab_size:
        raise ValueError(f"logits are {list(logits.shape)}, expected [any, {vocab_size}]")


def _held(logits: Any, driver: Driver) -> AbstractContextManager[NDArray[np.uint64] | None]:
    """Addresses of all rows, as long as the context lasts; None for those that go over the host."""
    return logits.held_for(driver) if isinstance(logits, DeviceLogits) else nullcontext()


def _sources(
    logits: Any, addresses: NDArray[np.uint64] | None, batch: SamplingBatch, rows: NDArray[np.void]
) -> tuple[Int64, NDArray[np.float32]]:
    """Addresses of the logits of each row, or minus one and their number among those that come along; these."""
    numbers: Int64 = rows["span"][:, Span.SOURCE].copy()
    given = np.flatnonzero(numbers >= 0)
    if addresses is not None:
        numbers[given] = addresses[numbers[given]].astype(np.int64)
        return numbers, batch.replaced
    own = np.asarray(logits[numbers[given]])
    first = len(batch.replaced)
    numbers[given] = -1 - np.arange(first, first + len(given))
    return numbers, np.concatenate([batch.replaced, own])


def _normalizer_batch(rows: Int64, top: int, vocab_size: int) -> SamplingBatch:
    """Rows that are summed up, and whose likeliest tokens are listed."""
    asked = np.zeros(len(rows), ROW)
    steps = [_NORMALIZE, Step.TOP_K, _LIST] if top else [_NORMALIZE]
    asked["steps"][:, : len(steps)] = steps
    asked["settings"][:, Setting.TEMPERATURE], asked["settings"][:, Setting.TOP_K] = 1.0, top
    asked["span"][:, Span.SOURCE] = rows
    integers, floats = np.empty(0, np.int32), np.empty((0, vocab_size), np.float32)
    masks = np.empty((0, mask_words(vocab_size)), np.uint32)
    return SamplingBatch(asked, False, floats, integers, floats.reshape(-1), integers, masks)
