"""An NVIDIA GPU as a device, on which ops become kernel launches in one stream.

Logits stay in the memory that a step writes them to, and are sampled there. Callers that need logits on the host copy
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import ir
from ..cache_layout import CacheLayer, PagedLayer, StateLayer
from ..cpu.program.thread_pool import Threads
from ..device import (
    DeviceAdapter,
    DeviceArray,
    Factors,
    KeyRotation,
    StepCancelled,
    StepContext,
    StepError,
    StepSizes,
    UnsupportedOp,
)
from ..fusion import add_early, fuse_gated_linears, norm_late
from ..ir import Constants, HostNode, Op, OpProgram, Per, RowsType, Weight, weights_of
from .adapters import StepAdapters, load_adapter
from .attention import check_attention, tile_rows
from .decode import can_gate, room_of
from .decode_lanes import lanes
from .driver import CudaError, Driver
from .graphs import GraphCache
from .grouped import wanted_of
from .host_nodes import HostPart, known_of, parts_of
from .launches import Counts, Functions, Launch, Start, bind
from .logits import DeviceLogits, LogitsBlock, LogitsMemory
from .lora import Deltas
from .lowering import UNARY, knows, lower
from .lowering_context import CudaLowering
from .memory import DeviceBytes, Values, as_float32
from .moe import check_experts
from .norms import left_to_products, read_by
from .rotate_keys import KeyRotator
from .sampling import SAMPLING_KERNELS, CudaChoice, CudaSampler
from .sources import CudaKernel
from .speeds import measured
from .step import SPLIT_TOKENS, Capacity, Limits, StepTable
from .weights import DeviceWeights, check_weight

# Maximum number of rows of a step that is captured as a graph.
_CAPTURED_TOKENS = 64
# Number of prompt tokens per multiprocessor with which tensor core matmuls come close to their maximum rate: on the 132
# multiprocessors of an H200, 2,048 tokens reached 95% of cuBLAS's rate and 512 tokens reached 62%. The second number
# is the minimum number of tokens in total.
_TOKENS_EACH, _FEWEST = 16, 256
# Maximum number of tokens of a step: the numbers of tokens and expert groups are grid dimensions, and grid dimensions
# are limited to MOST_IN_GRID.
_MOST_TOKENS = 8192
TAKE_CHOSEN = CudaKernel("chosen.cu", "take_chosen", "ChosenArguments", 64)


class CudaExecutor:
    """See `genai.kernels.device.Executor`.

    Args:
        driver: the GPU.
        threads: number of host threads for sampling; None = the number of available physical cores.
        device: name of the GPU, as users write the name.
    """

    name = "cuda"
    reads_values_from_keys = False

    def __init__(self, driver: Driver, threads: int | None = None, device: str = "cuda") -> None:
        self.driver, self.device = driver, device
        self.host_threads = Threads(threads)
        self.threads: int = self.host_threads.count
        self._weights = DeviceWeights(driver)
        self._logits = LogitsMemory(driver)
        self._sampling: Functions | None = None
        self._keys = KeyRotator(driver)
        fast = max(_FEWEST, _TOKENS_EACH * driver.multiprocessors)
        self.step_sizes = StepSizes(1 << fast.bit_length() - 1, _MOST_TOKENS)

    def free_bytes(self) -> int:
        return self.driver.free_bytes()

    def wait(self) -> None:
        self.driver.synchronize()

    def allocate(self, nbytes: int) -> DeviceBytes:
        return DeviceBytes(self.driver.zeros(nbytes))

    def read_block(self, blocks: DeviceArray, index: int) -> NDArray[np.uint8]:
        return self.driver.download(blocks[index])

    def write_block(self, blocks: DeviceArray, index: int, content: NDArray[np.uint8]) -> None:
        self.driver.write(blocks[index], content)

    def copy_blocks(self, blocks: DeviceArray, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            self.driver.copy_row(blocks, source, destination)

    def rotate_keys(self, blocks: Sequence[int], rotations: Sequence[tuple[PagedLayer, KeyRotation]]) -> None:
        self._keys.rotate(blocks, rotations)

    def compile(self, program: OpProgram, layers: Sequence[CacheLayer | None] = ()) -> CudaStep:
        for part in program.parts:
            check_part(part, layers, program.constants)
        return CudaStep(program, layers, self._weights, self.driver, self._logits)

    def sampler(self, vocab_size: int) -> CudaSampler:
        if self._sampling is None:
            self._sampling = self.driver.load(SAMPLING_KERNELS)
        return CudaSampler(self.driver, self._sampling, vocab_size, self.host_threads)

    def host(self, rows: DeviceArray) -> NDArray[np.float32]:
        return np.asarray(rows) if isinstance(rows, np.ndarray | DeviceLogits) else self.driver.download(rows)

    def array_function(self, op: Op, constants: Constants) -> Callable[..., Any]:
        raise UnsupportedOp(f"CUDA has no array function for {type(op).__name__}")

    def load_adapter(self, factors: Sequence[Sequence[Factors]]) -> DeviceAdapter:
        return load_adapter(self.driver, factors)

    def packed_bytes(self, weight: Weight, constants: Constants) -> int:
        return self._weights.matrix(weight, constants).nbytes

    def arithmetic(self, op: Op, constants: Constants, *, prefill: bool) -> str | None:
        if not isinstance(op, ir.Linear | ir.GatedLinear | ir.MoE) or op.exact:
            return None if prefill else "fp32"
        if prefill:
            return "mma bf16"
        if not self._weights.matrix(weights_of(op)[0], constants).bits:
            return "fp32"
        return "dp4a int8" if isinstance(op, ir.MoE) else "mma int8"

    def ceiling(self, what: str) -> float | None:
        return measured(self.driver, what)

    def close(self) -> None:
        with suppress(CudaError):  # a lost device cannot be synchronised
            self.driver.synchronize()
        self._weights = DeviceWeights(self.driver)


def check_part(part: Op | HostNode, layers: Sequence[CacheLayer | None], constants: Constants | None = None) -> None:
    """Raise UnsupportedOp if there are no kernels for a part of a program; the message names what is missing."""
    if isinstance(part, HostNode):
        return
    if not knows(part):
        raise UnsupportedOp(f"CUDA has no kernels for {type(part).__name__} ops")
    for weight in weights_of(part):
        check_weight(weight, constants)
    if isinstance(part, ir.Attention):
        check_attention(part, layers[part.layer])
    if isinstance(part, ir.MoE):
        check_experts(part, UNARY)


class CudaStep:
    """A program of ops, ready to run; see `genai.kernels.device.StepFunction`."""

    def __init__(
        self, program: OpProgram, layers: Sequence[CacheLayer | None], weights: DeviceWeights, driver: Driver,
        logits: LogitsMemory,
    ) -> None:  # fmt: skip
        self._program, self._layers, self._weights, self._driver = program, layers, weights, driver
        self._limits, self._adapters = _limits(program, layers), StepAdapters.of(program)
        self._logits, self._handed_out = logits, list[weakref.ref[LogitsBlock]]()
        self._tile_rows = _tile_rows(program, layers)
        self._num_groups = 1 + max((layer.group for layer in layers if isinstance(layer, PagedLayer)), default=0)
        self._has_host_nodes = any(isinstance(part, HostNode) for part in program.parts)
        self._cancelled = False
        self._counts: Counts = {}
        self._known: dict[str, DeviceArray] = {}
        self._lower(Capacity())

    @property
    def takes_choices(self) -> bool:
        """See StepFunction. False if there are host nodes, or if an embedding table has no row for some tokens."""
        rows = [rows for ids, rows in self._limits.rows_of_tables if ids is ir.Ids.TOKENS]
        width = self._program.types[self._program.outputs[0]].width
        return not self._has_host_nodes and min(rows, default=0) >= width

    def run(self, step: StepContext, given: Mapping[str, DeviceArray] | None = None) -> dict[str, DeviceArray]:
        counts = self.prepare(step, given)
        self.start(counts)
        return {name: self._result(name, counts) for name in self._program.outputs}

    def seconds(self, step: StepContext, given: Mapping[str, DeviceArray] | None = None) -> float:
        counts = self.prepare(step, given)
        return self._driver.seconds(lambda: self.start(counts))

    def prepare(self, step: StepContext, given: Mapping[str, DeviceArray] | None = None) -> Counts:
        """Copy a step to device memory and return the counts for `start`. The arguments are the same as for `run`."""
        self._limits.check(step)
        chosen = None
        if step.choice is not None and step.chosen is not None:
            if not isinstance(step.choice, CudaChoice) or step.choice.driver is not self._driver:
                raise StepError(f"{step.choice!r:.80} is not a choice made on this device")
            chosen = step.choice.addresses(step.chosen)
        adapters = self._adapters.tables(step)
        capacity = (self._capacity or Capacity()).grown(step, adapters)
        if capacity != self._capacity:
            self._lower(capacity)
        counts = {"tokens": len(step.tokens), "logits_rows": len(step.logits_indices)}
        counts["chosen"] = 0 if chosen is None else len(chosen)
        counts["decode_rows"] = decode_rows = int(step.cu_seqlens_q[step.num_decode_sequences])
        if self._limits.num_slots:
            counts["sequences"] = len(step.context_lens)
        counts["apart"] = int(len(step.cu_seqlens_q) - 1 == len(step.tokens))
        counts["splits"] = _splits(step.positions, capacity)
        all_decode = decode_rows == counts["tokens"]
        counts["decode_splits"] = counts["splits"] if all_decode else _splits(step.positions[:decode_rows], capacity)
        counts |= adapters.counts
        counts |= self._table.write(step, adapters, chosen)
        if self._has_host_nodes:
            self._known.clear()
            self._known |= known_of(self._program, step, given or {})
        for name in self._program.given:
            if name not in self._values.buffers:  # only host nodes read the value
                continue
            rows = self._values.buffers[name]
            values = as_float32(np.asarray((given or {})[name]).reshape(-1, rows.width))
            self._driver.write(rows.view(len(values)), values)
        return counts

    def start(self, counts: Counts) -> None:
        """Launch all kernels of the most recently prepared step, without waiting for them.

        Steps that consist of decode rows recur with the same counts, so they are captured as graphs, unless the program
        has host nodes.
        """
        self._counts = counts
        with self._logits.lock:
            for reference in self._handed_out:
                if (block := reference()) is not None:
                    block.keep()
            self._handed_out.clear()
        if not self._has_host_nodes and counts["tokens"] == counts["decode_rows"] <= _CAPTURED_TOKENS:
            self._check_cancelled()
            self._graphs.start(tuple(counts.values()), lambda: self._start_each(counts, int))
        else:
            self._start_each(counts, self._check_cancelled)

    def launched(self) -> tuple[Driver, Sequence[Start], Functions, Counts]:
        """Return the launches of the last step, for measurements."""
        return self._driver, self._starts, self._functions, self._counts

    def _start_each(self, counts: Counts, before: Callable[[], object]) -> None:
        for start in self._starts:
            before()
            start.start(self._driver, self._functions, counts)

    def _check_cancelled(self) -> None:
        if self._cancelled:
            self._driver.synchronize()
            raise StepCancelled

    def cancel(self) -> None:
        self._cancelled = True

    def resume(self) -> None:
        self._cancelled = False

    def _result(self, name: str, counts: Mapping[str, int]) -> DeviceArray:
        """Return an output: rows per token are copied to the host, and rows of logits stay in place."""
        if name not in self._values.buffers:
            return self._known[name]
        type_ = self._program.types[name]
        if type_.per is Per.TOKEN:
            rows = self._values.buffers[name].view(counts["tokens"])
            return self._driver.download(rows).reshape(type_.shape)
        key = name, counts["logits_rows"]
        if key not in self._views:
            self._views[key] = self._values.buffers[name].view(key[1])
        block = LogitsBlock(self._logits, self._views[key])
        self._handed_out.append(weakref.ref(block))
        return DeviceLogits.of(block)

    def _are_alike(self, gate: Weight, up: Weight) -> bool:
        return can_gate(*(self._weights.matrix(weight, self._program.constants) for weight in (gate, up)))

    def _takes_norms(self, part: ir.Linear | ir.GatedLinear) -> bool:
        matrices = [self._weights.matrix(weight, self._program.constants) for weight in weights_of(part)]
        room = room_of(self._driver)
        return all(lanes(matrix, room, gated=len(matrices) > 1) for matrix in matrices)

    def _arranged(self) -> tuple[list[Any], dict[str, RowsType]]:
        """Return the program's parts, fused into as few kernels as possible, and the types of their values."""
        program = self._program
        parts = fuse_gated_linears(list(parts_of(program)), program.outputs, self._are_alike)
        return norm_late(add_early(parts, program.outputs), program.outputs, program.types)

    def _lower(self, capacity: Capacity) -> None:
        """Create all launches for steps of at most `capacity`.

        If this fails, for example for lack of memory, the next step starts from the smallest capacity.
        """
        program, driver = self._program, self._driver
        # Free the old memory first, when no copy reads it any more.
        driver.synchronize()
        self._capacity: Capacity | None = None
        self._starts: list[Start] = []
        self._functions: Functions = {}
        self._views: dict[tuple[str, int], DeviceArray] = {}
        self._graphs, self._held = GraphCache(driver), list[Any]()
        rows = {Per.TOKEN: capacity.tokens, Per.LOGITS: capacity.logits_rows}
        parts, types = self._arranged()
        left = left_to_products(parts, program.outputs, program.constants, self._takes_norms)
        self._values = Values(driver, types, rows)
        self._table = StepTable(
            driver, capacity, self._tile_rows, self._num_groups, has_states=self._limits.num_slots > 0
        )
        lowering = CudaLowering(
            driver, self._values, program.constants, self._weights, self._layers, self._table, capacity,
            wanted_of(parts), Deltas(), left,
        )  # fmt: skip
        chosen, tokens = self._table.address("chosen"), self._table.address("tokens")
        arguments = bind(TAKE_CHOSEN, addresses=chosen, tokens=tokens, count=0)
        lowering.starts.append(Launch(TAKE_CHOSEN, arguments, {"count": "chosen"}, _chosen_grid))
        self._values.expect(name for part in parts for name in read_by(part, left))
        self._values.expect((*program.outputs, *program.given))
        for name in program.given:
            if name in program.types:
                self._values.make(name)
        for part in parts:
            lowering.deltas.before(lowering, part.inputs)
            if isinstance(part, HostPart):
                lowering.starts.append(part.lower(self._values, self._known))
            else:
                lower(part, lowering)
            self._values.done(read_by(part, left), part.outputs)
        lowering.deltas.settle(lowering)
        self._starts, self._held = lowering.starts, lowering.held
        self._functions = driver.load({kernel for start in self._starts for kernel in start.kernels})
        self._capacity = capacity


def _chosen_grid(counts: Counts) -> tuple[int, int, int]:
    return -(-counts["chosen"] // TAKE_CHOSEN.threads), 1, 1


def _splits(positions: NDArray[np.int64], capacity: Capacity) -> int:
    """Return the number of splits of the longest sequence among these rows.

    The number is a power of two, so that it seldom changes as the sequence grows.
    """
    splits = -(-(int(positions.max()) + 1) // SPLIT_TOKENS) if len(positions) else 1
    return min(1 << (splits - 1).bit_length(), capacity.splits)


def _tile_rows(program: OpProgram, layers: Sequence[CacheLayer | None]) -> list[int]:
    """Return the sizes of the tiles that attention splits rows into."""
    attention = [op for op in program.ops if isinstance(op, ir.Attention)]
    return sorted({tile_rows(op, layers[op.layer]) for op in attention} - {0})


def _limits(program: OpProgram, layers: Sequence[CacheLayer | None]) -> Limits:
    tables, positions, blocks, slots = set(), 0, 0, 0
    for op in program.ops:
        if isinstance(op, ir.Embedding):
            tables.add((op.ids, op.table.rows))
        if isinstance(op, ir.Attention):
            layer = layers[op.layer]
            assert isinstance(layer, PagedLayer)
            blocks = layer.num_blocks
            if op.rope:
                positions = len(program.constants.array(op.rope.cos))
        if isinstance(op, ir.CausalConv | ir.LinearAttention | ir.LinearRecurrence):
            states = layers[op.layer]
            assert isinstance(states, StateLayer)
            slots = states.num_slots
    return Limits(tuple(tables), positions, blocks, slots)
