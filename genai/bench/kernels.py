"""A model's matrix products, measured one kind at a time: seconds and shares of the bandwidth by number of rows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from genai.kernels import ir as op_types
from genai.kernels.device import Executor, PageTables, StepContext, StepFunction
from genai.kernels.ir import Linear, OpProgram, projections

from ..engine.paged import PagedDecoder
from ..errors import UnsupportedModelError
from ..lora.targets import without_targets
from ..models.model import Model
from .ceilings import measure_of, share_of

BenchRow = dict[str, Any]


def bench_kernels(model: Model, *, rows: Sequence[int], repeat: int = 5) -> Iterator[BenchRow]:
    """Yield one row per kind of product (shape, weight format), number of rows and numerics, with time and shares.

    All matrices of a kind are multiplied in sequence, so that no cache still holds a matrix from the previous run.
    Mixtures of experts are left out, because the number of bytes that they read depends on the experts that the rows
    select.

    Args:
        rows: numbers of rows. Each number is measured with decode numerics, and also with prefill numerics if the
            device has separate kernels for them.

    Raises:
        UnsupportedModelError: none of the model's products is an op.
    """
    decoder = model.decoder
    program = without_targets(decoder.program) if isinstance(decoder, PagedDecoder) else None
    work = _work(program) if program is not None else []
    if program is None or not work:
        raise UnsupportedModelError(
            "the matmuls of this model cannot be measured individually",
            "none of these matmuls is part of an op program",
            "run `genai bench decode` and `genai bench prefill` instead",
        )
    executor = decoder.executor
    kinds: dict[str, list[_Work]] = {}
    for item in work:
        kinds.setdefault(_kind(item, executor, program.constants), []).append(item)
    measure = measure_of(executor, "bandwidth")
    read = None if measure is None else measure()
    for kind, alike in kinds.items():
        step = _Step(alike, program, executor)
        for count in rows:
            for prefill in (False, True):
                if not prefill or step.has_prefill:
                    yield _row(kind, step, count, prefill, step.seconds(count, prefill, repeat), read)


@dataclass(frozen=True)
class _Work:
    """The ops that are measured as one product: a single matrix product or a gated pair of products.

    Attributes:
        ops: the ops in order; the last one produces the result.
        gate: name of the gate's activation; "" = a single product.
    """

    ops: tuple[op_types.Op, ...]
    gate: str = ""

    @property
    def weights(self) -> tuple[op_types.Weight, ...]:
        return tuple(projection.weight for op in self.ops for projection in projections(op))


def _work(program: OpProgram) -> list[_Work]:
    """Return a program's products in order; two products that only one gate reads count as one product."""
    ops = program.ops
    makers = {op.out: op for op in ops if isinstance(op, Linear)}
    uses = Counter([*(name for part in program.parts for name in part.inputs), *program.outputs])
    work: dict[str, _Work] = {}
    for op in ops:
        if isinstance(op, Linear):
            work[op.out] = _Work((op,))
        elif isinstance(op, op_types.GatedLinear):
            work[op.out] = _Work((op,), op.activation)
        elif isinstance(op, op_types.Gate) and uses[op.gate] == uses[op.up] == 1:
            gate, up = makers.get(op.gate), makers.get(op.up)
            if gate is not None and up is not None and gate.x == up.x:
                work[op.out] = _Work((gate, up, op), op.activation)
                del work[gate.out], work[up.out]
    return list(work.values())


def _kind(work: _Work, executor: Executor, constants: op_types.Constants) -> str:
    weight = work.weights[0]
    if isinstance(weight, op_types.BlockWeight):
        weight_format = f"int{weight.bits} by {weight.block_size}" if weight.is_uniform else str(weight.format)
    else:
        weight_format = f"floats in {executor.packed_bytes(weight, constants)} bytes"
    gate = f", {work.gate} of two" if work.gate else ""
    return f"{weight.rows} x {weight.columns} {weight_format}{gate}"


class _Step:
    """All products of a kind as one program, ready to run.

    Attributes:
        sample: the first of the products, which are all of the same kind.
        has_prefill: True if the device has separate kernels for the rows of long prompts.
    """

    def __init__(self, alike: Sequence[_Work], program: OpProgram, executor: Executor) -> None:
        self.sample, self._count = alike[0], len(alike)
        self._program, self.executor = _alone(alike, program), executor
        self._function = executor.compile(self._program)
        per_token = program.types[self.sample.ops[-1].outputs[0]].per is op_types.Per.TOKEN
        self.has_prefill = per_token and self.arithmetic(prefill=True) is not None

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that one product reads."""
        return sum(self.executor.packed_bytes(weight, self._program.constants) for weight in self.sample.weights)

    def arithmetic(self, prefill: bool) -> str | None:
        """Return the name of the arithmetic; None if the device has no separate kernels for this kind of step."""
        return self.executor.arithmetic(self.sample.ops[0], self._program.constants, prefill=prefill)

    def seconds(self, count: int, prefill: bool, repeat: int) -> float:
        """Return the median time of one product."""
        types = self._program.types
        inputs = {name: np.zeros((count, types[name].width), np.float32) for name in self._program.given}
        return step_seconds(self._function, count, inputs, repeat, prefill=prefill) / self._count


def step_seconds(
    function: StepFunction, count: int, inputs: Mapping[str, Any], repeat: int, *, prefill: bool = False
) -> float:
    """Return the median time of a step of `count` rows, without the first run, which starts with cold memory."""
    step = _context(count, prefill)
    function.run(step, inputs)
    return statistics.median(function.seconds(step, inputs) for _ in range(repeat))


def _alone(alike: Sequence[_Work], program: OpProgram) -> OpProgram:
    """Return a program of these products. Inputs of equal width share one array, so that a step copies little data."""
    ops = [op for work in alike for op in work.ops]
    produced = {name for op in ops for name in op.outputs}
    read = dict.fromkeys(name for op in ops for name in op.inputs if name not in produced)
    inputs = {name: f"given {program.types[name].width} per {program.types[name].per.value}" for name in read}
    types = {name: program.types[name] for name in (*produced, *read)}
    types |= {
        shared: op_types.RowsType((1, -1, types[name].width), types[name].width, types[name].per)
        for name, shared in inputs.items()
    }
    copies = [op_types.SliceColumns(shared, 0, name) for name, shared in inputs.items()]
    return replace(
        program, parts=(*copies, *ops), types=types, outputs=(), ids={}, given=tuple(dict.fromkeys(inputs.values()))
    )


def _context(count: int, prefill: bool) -> StepContext:
    """Return the context of a step that computes one sequence of `count` tokens."""
    numbers = np.arange(count, dtype=np.int64)
    return StepContext(
        tokens=np.zeros(count, np.int64),
        positions=numbers,
        cu_seqlens_q=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        groups=(PageTables(np.zeros((1, 1), np.int32), numbers),),
        num_decode_sequences=0 if prefill else 1,
        logits_indices=numbers,
        rope_table=np.zeros(1, np.int32),
    )


def _row(kind: str, step: _Step, count: int, prefill: bool, seconds: float, read: float | None) -> BenchRow:
    numbers = sum(weight.rows * weight.columns for weight in step.sample.weights)
    operations = 2.0 * numbers * count / seconds
    measure = measure_of(step.executor, step.arithmetic(prefill) or "fp32")
    return {
        "product": kind,
        "rows": count,
        "numerics": "prefill" if prefill else "decode",
        "ms": 1e3 * seconds,
        "GB/s": step.weight_bytes / seconds / 1e9,
        "of bandwidth": step.weight_bytes / seconds / read if read else None,
        "TOP/s": operations / 1e12,
        "of products": share_of(measure, operations),
    }
