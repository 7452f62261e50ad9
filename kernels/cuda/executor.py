"""An NVIDIA GPU as a device: records become launches of kernels in one stream.

Logits are copied to the host at the end of a step, and sampled there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import records
from ..cpu.sampling import CpuSampler
from ..executor import DeviceAdapter, Factors, StepCancelled, StepContext, UnsupportedRecord
from ..formats import PagedLayer
from ..host.arrays import Threads
from ..records import Constants, HostNode, Per, Record, RowProgram, Weight, weights_of
from .attention import check_attention
from .driver import Driver
from .experts import check_experts
from .host_nodes import HostPart, known_of, parts_of
from .launches import Counts, Functions, Start
from .lowering import UNARY, CudaLowering, knows, lower
from .memory import DeviceBytes, Values, as_float32
from .step import SPLIT_TOKENS, Capacity, Limits, StepTable
from .weights import DeviceWeights, check_weight


class CudaExecutor:
    """See `genai.kernels.executor.Executor`.

    Args:
        driver: the GPU.
        threads: of the host, for sampling; None = the physical cores available.
    """

    name = "cuda"

    def __init__(self, driver: Driver, threads: int | None = None) -> None:
        self.driver = driver
        self.host_threads = Threads(threads)
        self.threads: int = self.host_threads.count
        self._weights = DeviceWeights(driver)

    def free_bytes(self) -> int:
        return self.driver.free_bytes()

    def allocate(self, nbytes: int) -> DeviceBytes:
        return DeviceBytes(self.driver.zeros(nbytes))

    def copy_blocks(self, blocks: Any, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            self.driver.copy_row(blocks, source, destination)

    def compile(self, program: RowProgram, layers: Sequence[PagedLayer | None] = ()) -> CudaStep:
        for part in program.parts:
            check_part(part, layers, program.constants)
        return CudaStep(program, layers, self._weights, self.driver)

    def sampler(self, vocab_size: int) -> CpuSampler:
        return CpuSampler(self.host_threads, vocab_size)

    def host(self, rows: Any) -> NDArray[np.float32]:
        return rows if isinstance(rows, np.ndarray) else self.driver.download(rows)

    def array_function(self, record: Record, constants: Constants) -> Callable[..., Any]:
        raise UnsupportedRecord(f"CUDA has no function of arrays for {type(record).__name__}")

    def load_adapter(self, factors: Sequence[Sequence[Factors]]) -> DeviceAdapter:
        raise UnsupportedRecord("CUDA has no kernels for adapters")

    def packed_bytes(self, weight: Weight, constants: Constants) -> int:
        return self._weights.matrix(weight, constants).nbytes

    def arithmetic(self, record: Record, constants: Constants, *, prefill: bool) -> str | None:
        if not isinstance(record, records.Product | records.GatedProduct | records.Experts) or record.exact:
            return None if prefill else "fp32"
        if prefill:
            return "mma bf16"
        return "dp4a int8" if self._weights.matrix(weights_of(record)[0], constants).bits else "fp32"

    def close(self) -> None:
        self._weights = DeviceWeights(self.driver)


def check_part(
    part: Record | HostNode, layers: Sequence[PagedLayer | None], constants: Constants | None = None
) -> None:
    """Raise UnsupportedRecord, which names what is missing, for a part of a program that there are no kernels for."""
    if isinstance(part, HostNode):
        return
    if not knows(part):
        raise UnsupportedRecord(f"CUDA does not know records of the kind {type(part).__name__}")
    for weight in weights_of(part):
        check_weight(weight, constants)
    if isinstance(part, records.Attention):
        check_attention(part, layers[part.layer])
    if isinstance(part, records.Experts):
        check_experts(part, UNARY)


class CudaStep:
    """A program of records, ready to run; see `genai.kernels.executor.StepFunction`."""

    def __init__(
        self, program: RowProgram, layers: Sequence[PagedLayer | None], weights: DeviceWeights, driver: Driver
    ) -> None:
        self._program, self._layers, self._weights, self._driver = program, layers, weights, driver
        self._limits = _limits(program, layers)
        self._cancelled = False
        self._known: dict[str, Any] = {}
        self._lower(Capacity())

    def run(self, step: StepContext, given: Mapping[str, Any] | None = None) -> dict[str, NDArray[np.float32]]:
        counts = self.prepare(step, given)
        self.start(counts)
        return {name: self._result(name, counts) for name in self._program.outputs}

    def prepare(self, step: StepContext, given: Mapping[str, Any] | None = None) -> Counts:
        """Bring a step into device memory; what `start` takes. The arguments are those of `run`."""
        self._limits.check(step)
        capacity = self._capacity.grown(step)
        if capacity != self._capacity:
            self._lower(capacity)
        counts = {"tokens": len(step.tokens), "logits_rows": len(step.logits_indices)}
        counts["decode_rows"] = int(step.cu_seqlens_q[step.num_decode_sequences])
        counts["splits"] = -(-int(step.positions.max(initial=0) + 1) // SPLIT_TOKENS)
        self._table.write(step)
        self._known.clear()
        self._known |= known_of(self._program, step, given or {})
        for name in self._program.given:
            if name not in self._values.places:  # only host nodes read it
                continue
            rows = self._values.places[name]
            values = as_float32(np.asarray((given or {})[name]).reshape(-1, rows.width))
            self._driver.write(rows.view(len(values)), values)
        return counts

    def start(self, counts: Counts) -> None:
        """Start all kernels over the step that was prepared last, without waiting for them."""
        for start in self._starts:
            if self._cancelled:
                self._driver.synchronize()
                raise StepCancelled
            start.start(self._driver, self._functions, counts)

    def cancel(self) -> None:
        self._cancelled = True

    def resume(self) -> None:
        self._cancelled = False

    def _result(self, name: str, counts: Mapping[str, int]) -> NDArray[np.float32]:
        if name not in self._values.places:
            found: NDArray[np.float32] = self._known[name]
            return found
        type_ = self._program.types[name]
        count = counts["tokens" if type_.per is Per.TOKEN else "logits_rows"]
        return self._driver.download(self._values.places[name].view(count)).reshape(type_.shape)

    def _lower(self, capacity: Capacity) -> None:
        """Make all launches for steps of at most this size."""
        program, driver = self._program, self._driver
        self._starts: list[Start] = []  # give the memory back first
        self._functions: Functions = {}
        self._capacity, self._table = capacity, StepTable(driver, capacity)
        rows = {Per.TOKEN: capacity.tokens, Per.LOGITS: capacity.logits_rows}
        self._values = Values(driver, program.types, rows)
        lowering = CudaLowering(
            driver, self._values, program.constants, self._weights, self._layers, self._table, capacity
        )
        parts = list(parts_of(program))
        self._values.expect(name for part in parts for name in part.inputs)
        self._values.expect((*program.outputs, *program.given))
        for name in program.given:
            if name in program.types:
                self._values.make(name)
        for part in parts:
            if isinstance(part, HostPart):
                lowering.starts.append(part.lower(self._values, self._known))
            else:
                lower(part, lowering)
            self._values.done(part.inputs, part.outputs)
        self._starts, self._held = lowering.starts, lowering.held
        self._functions = driver.load({kernel for start in self._starts for kernel in start.kernels})


def _limits(program: RowProgram, layers: Sequence[PagedLayer | None]) -> Limits:
    tables, positions, blocks = set(), 0, 0
    for record in program.records:
        if isinstance(record, records.Lookup):
            tables.add((record.ids, record.table.rows))
        if isinstance(record, records.Attention):
            layer = layers[record.layer]
            assert layer is not None
            blocks = layer.num_blocks
            if record.rope:
                positions = len(program.constants.array(record.rope.cos))
    return Limits(tuple(tables), positions, blocks)
