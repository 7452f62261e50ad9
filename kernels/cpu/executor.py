"""The CPU as a device: ops are lowered to programs of native operators, which a thread pool runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache_layout import CacheLayer, PagedLayer
from ..device import DeviceArray, Factors, StepContext, UnsupportedOp
from ..fusion import fuse_activations, fuse_gated_linears, fuse_halves
from ..host_memory import HostMemory, TimedByHost
from ..ir import (
    Attention,
    Constants,
    DenseWeight,
    Embedding,
    GatedLinear,
    HostNode,
    Ids,
    Linear,
    LoraShrink,
    MoE,
    Op,
    OpProgram,
    Per,
    Weight,
    projections,
)
from .arrays.block_weights import MoEOfArrays
from .attention.decode import partial_floats
from .attention.pages import PAGE_KINDS
from .attention.phases import fill_table
from .jit.arguments import Binding
from .jit.isa import isa
from .jit.native import LIBRARY, Needed
from .linear.lora import CpuAdapter, fill_adapters, pack_adapter
from .program import thread_pool
from .program.bound_program import addresses_of
from .program.calls import Program, Rows
from .program.lower import can_halve, has_prefill_linear, knows, lower, splits
from .program.packed_weights import PackedWeights, WeightLayouts
from .program.step_table import ContextTable, StepField
from .program.value_memory import COUNTED, Lowering
from .sampling.sampler import CpuSampler, sample_slots

Array = NDArray[Any]
# The row counts that a program is first built for.
_FIRST_CAPACITY = {StepField.TOKENS: 16, StepField.LOGITS_ROWS: 4}
# Rough costs on one thread, from which the time of a step is estimated: per byte of weights, and per byte of weights
# and token. The minimum makes every step long enough to be shared among threads.
_NANOSECONDS_PER_BYTE, _NANOSECONDS_PER_PRODUCT = 0.1, 0.004
_LEAST_NANOSECONDS = 1e5


class CpuExecutor(HostMemory):
    """See `genai.kernels.device.Executor`.

    Args:
        threads: number of threads; None = all available physical cores.

    Raises:
        ValueError: threads is out of range.
    """

    name = device = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.host_threads = thread_pool.Threads(threads)  # array functions use these threads, too
        self._weights = PackedWeights(self.host_threads)
        self.threads = self.host_threads.count
        LIBRARY.expect([sample_slots])  # every request needs this kernel, so the first program compiles it

    def compile(self, program: OpProgram, layers: Sequence[CacheLayer | None] = ()) -> CpuStep:
        unknown = sorted({type(op).__name__ for op in program.ops if not knows(op)})
        if unknown:
            raise UnsupportedOp(f"the CPU does not support these ops: {', '.join(unknown)}")
        if kinds := sorted({layer.kind for layer in layers if isinstance(layer, PagedLayer)} - {*PAGE_KINDS}):
            raise UnsupportedOp(f"the CPU has no kernels for keys and values of {', '.join(kinds)}")
        with LIBRARY.foreseen(lambda: operators_of(program, layers, self.host_threads)):
            return CpuStep(program, layers, self._weights, self.host_threads)

    def sampler(self, vocab_size: int) -> CpuSampler:
        return CpuSampler(self.host_threads, vocab_size)

    def array_function(self, op: Op, constants: Constants) -> Callable[..., Any]:
        if isinstance(op, MoE):
            return MoEOfArrays(op, self._weights, constants, self.host_threads)
        raise UnsupportedOp(f"the CPU has no array function for {type(op).__name__}")

    def load_adapter(self, factors: Sequence[Sequence[Factors]]) -> CpuAdapter:
        return pack_adapter(factors)

    def packed_bytes(self, weight: Weight, constants: Constants) -> int:
        return self._weights.nbytes(weight, constants)

    def arithmetic(self, op: Op, constants: Constants, *, prefill: bool) -> str | None:
        if not isinstance(op, Linear | GatedLinear | MoE) or op.exact:
            return None if prefill else "fp32"
        weight = projections(op)[0].weight
        if not prefill:
            return "vnni int8" if not isinstance(weight, DenseWeight) and isa() in ("amx", "vnni") else "fp32"
        if isinstance(op, MoE):
            return None
        return "amx bf16" if has_prefill_linear(op, self._weights.matrix(weight, constants)) else None

    def ceiling(self, what: str) -> float | None:
        return None

    def close(self) -> None:
        self._weights = PackedWeights(self.host_threads)


class CpuStep(TimedByHost):
    """A compiled program of ops; see `genai.kernels.device.StepFunction`."""

    takes_choices = False

    def __init__(
        self,
        program: OpProgram,
        layers: Sequence[CacheLayer | None],
        weights: PackedWeights,
        threads: thread_pool.Threads,
    ) -> None:
        self._program = program
        self._table = ContextTable()
        self._parts = _parts(program, layers, weights, threads)
        for part in self._parts:
            if isinstance(part, _Segment):
                part.prepare()  # so that the first step does not have to wait for it
        self._floats_per_split = max(
            (partial_floats(r.heads, r.v_head_size) for r in program.ops if isinstance(r, Attention)), default=0
        )
        self._needs_whole_sequences = program.whole_sequences or any(
            isinstance(op, Attention) and not op.causal for op in program.ops
        )
        self._reads_types = any(isinstance(op, Embedding) and op.ids is Ids.TYPES for op in program.ops)
        self._num_targets = 1 + max((r.target for r in program.ops if isinstance(r, LoraShrink)), default=-1)

    def run(self, step: StepContext, given: Mapping[str, DeviceArray] | None = None) -> dict[str, Array]:
        if self._needs_whole_sequences:
            step.check_whole_sequences()
        values: dict[str, DeviceArray] = dict(given or {})
        for name, (ids, dtype) in self._program.ids.items():
            values[name] = step.integers(ids)[None].astype(dtype, copy=False)
        fill_table(self._table, step, self._floats_per_split)
        if self._reads_types:
            self._table.array(StepField.TOKEN_TYPES, step.integers(Ids.TYPES))
        if self._num_targets:
            fill_adapters(self._table, step, self._num_targets)
        counts = {StepField.TOKENS: len(step.positions), StepField.LOGITS_ROWS: len(step.logits_indices)}
        positions = int(step.context_lens.sum())
        for part in self._parts:
            if isinstance(part, HostNode):
                values.update(part.call(values))
                continue
            values.update(part.run(counts, positions, self._table, values))
        return {name: values[name] for name in self._program.outputs}

    def cancel(self) -> None:
        self._table.count(StepField.CANCEL, 1)

    def resume(self) -> None:
        self._table.count(StepField.CANCEL, 0)


def operators_of(program: OpProgram, layers: Sequence[CacheLayer | None], threads: thread_pool.Threads) -> Needed:
    """Return the operators of a program and of its weights' packing, without compiling or packing anything."""
    weights = WeightLayouts(threads)
    parts = _parts(program, layers, weights, threads)
    found = [part.lowered(_FIRST_CAPACITY).operators() for part in parts if isinstance(part, _Segment)]
    return weights.packers.union(*(now for now, _ in found)), set().union(*(later for _, later in found))


def _parts(
    program: OpProgram, layers: Sequence[CacheLayer | None], weights: PackedWeights, threads: thread_pool.Threads
) -> list[_Segment | HostNode]:
    """Return the host nodes of a program and the segments between them."""
    found: list[_Segment | HostNode] = []
    for is_host, parts in groupby(program.parts, lambda part: isinstance(part, HostNode)):
        gathered: list[Any] = list(parts)
        found += gathered if is_host else [_Segment(program, gathered, layers, weights, threads)]
    return found


def token_bytes(op: Op, weights: PackedWeights, constants: Constants) -> int:
    """Return the bytes of an op's weights that one token reads. Of a mixture, only the selected experts count."""
    total = sum(weights.nbytes(one.weight, constants) for one in projections(op))
    return total * op.per_token // projections(op)[0].weight.experts if isinstance(op, MoE) else total


def _bytes_per_position(layer: CacheLayer | None) -> int:
    """Return the bytes of keys and values that a token reads for each position of its sequence."""
    return layer.token_bytes if isinstance(layer, PagedLayer) else 0


class _Segment:
    """Consecutive ops, compiled into one program for the largest row counts needed so far.

    Args:
        program: program that contains the ops.
    """

    def __init__(
        self, program: OpProgram, ops: Sequence[Op], layers: Sequence[CacheLayer | None],
        weights: PackedWeights, threads: thread_pool.Threads,
    ) -> None:  # fmt: skip
        made = [name for op in ops for name in op.outputs]
        inside = {id(op) for op in ops}
        read = {name for part in program.parts if id(part) not in inside for name in part.inputs}
        self._made = [name for name in made if name in read or name in program.outputs]
        self._given = sorted({name for op in ops for name in op.inputs if name not in made})
        # Logits outlive the step, so each step writes them to new memory, which saves a copy. Other outputs are copied.
        self._kept = {name for name in made if name in program.outputs}
        self._fresh = [name for name in made if name in self._kept and program.types[name].per is Per.LOGITS]
        self._source, self._layers, self._weights, self._threads = program, layers, weights, threads
        gated = fuse_gated_linears(ops, self._made, lambda a, b: weights.alike(a, b, program.constants))
        gated = fuse_halves(gated, self._made, program.types, self._fits_gate)
        self._ops = fuse_activations(gated, self._made, self._fits_activation)
        self._split = self._split_values()
        self._bytes = sum(token_bytes(op, weights, program.constants) for op in self._ops)
        self._cache_bytes = sum(_bytes_per_position(layers[r.layer]) for r in ops if isinstance(r, Attention))
        self._capacity = dict.fromkeys(_FIRST_CAPACITY, 0)
        self._program: Program | None = None
        self._bound: Program | None = None
        self._buffers: dict[str, Rows] = {}

    def _fits_activation(self, linear: Linear) -> bool:
        """Return True if the kernel of a linear layer can apply a function to its sums."""
        source = self._source
        if not source.whole_sequences or source.types[linear.x].per is not Per.TOKEN:
            return False
        return self._splits(linear)

    def _fits_gate(self, linear: Linear) -> bool:
        """Return True if the kernel of a linear layer can multiply one half of the columns by the other."""
        return can_halve(linear) and self._fits_activation(linear)

    def _split_values(self) -> set[str]:
        """Return the results of activations that only matmuls of split weights of equal width read."""
        made = {op.out: op for op in self._ops if isinstance(op, Linear) and op.activation and not op.gate}
        found = {name for name in made if name not in self._made and self._fits_activation(made[name])}
        for op in self._ops:
            reads = set(op.inputs)
            if isinstance(op, Linear | GatedLinear) and self._splits(op):
                reads -= {op.x} - {projection.addend for projection in projections(op)}
            found -= reads
        return found

    def _splits(self, op: Linear | GatedLinear) -> bool:
        matrices = [self._weights.matrix(one.weight, self._source.constants) for one in projections(op)]
        return splits(op, matrices)

    def prepare(self) -> None:
        """Build the program for the first row counts."""
        self._program_for(_FIRST_CAPACITY)

    def run(
        self, counts: Mapping[StepField, int], positions: int, table: ContextTable, values: Mapping[str, DeviceArray]
    ) -> dict[str, Array]:
        """Compute the values that are read outside the segment.

        `positions` is the sum of the sequences' context lengths.
        """
        program, types = self._program_for(counts), self._source.types
        fresh = {name: np.empty((counts[StepField.LOGITS_ROWS], types[name].width), np.float32) for name in self._fresh}
        self._bound = program.bound(addresses_of(fresh), self._bound)
        for name in self._given:
            self._view(name, counts)[...] = np.asarray(values[name]).reshape(-1, types[name].width)
        tokens = counts[StepField.TOKENS]
        nanoseconds = self._bytes * (_NANOSECONDS_PER_BYTE + tokens * _NANOSECONDS_PER_PRODUCT)
        nanoseconds += positions * self._cache_bytes * _NANOSECONDS_PER_BYTE
        self._threads.run(self._bound, table, nanoseconds=max(nanoseconds, _LEAST_NANOSECONDS))
        return {name: self._result(name, counts, fresh) for name in self._made}

    def _program_for(self, counts: Mapping[StepField, int]) -> Program:
        if self._program is None or any(count > self._capacity[field] for field, count in counts.items()):
            for field, count in counts.items():
                while self._capacity[field] < count:
                    self._capacity[field] = max(_FIRST_CAPACITY[field], 2 * self._capacity[field])
            self._program, self._bound, self._buffers = None, None, {}  # free the memory first
            lowering = self.lowered(self._capacity)
            self._program, self._buffers = lowering.finish(), lowering.buffers
        return self._program

    def lowered(self, capacity: Mapping[StepField, int]) -> Lowering:
        """Return the calls of the ops, for these row counts."""
        source = self._source
        lowering = Lowering(
            capacity, source.types, source.constants, self._weights, self._layers, bound=self._fresh,
            whole_sequences=source.whole_sequences, split=self._split,
        )  # fmt: skip
        lowering.expect(name for op in self._ops for name in op.inputs)
        lowering.expect(self._made)
        for name in self._given:
            lowering.make(name)
        for op in self._ops:
            lower(op, lowering)
            lowering.done(op.inputs, op.outputs)
        return lowering

    def _view(self, name: str, counts: Mapping[StepField, int]) -> NDArray[np.float32]:
        rows, type_ = self._buffers[name], self._source.types[name]
        memory: NDArray[np.uint8] = rows.held
        assert isinstance(rows.address, int)
        first = rows.address - memory.ctypes.data
        return np.ndarray((counts[COUNTED[type_.per]], type_.width), np.float32, memory, first, (rows.stride, 4))

    def _result(
        self, name: str, counts: Mapping[StepField, int], fresh: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        shape = self._source.types[name].shape
        if isinstance(self._buffers[name].address, Binding):
            return fresh[name].reshape(shape)
        view = self._view(name, counts)
        return (view.copy() if name in self._kept else view).reshape(shape)
