"""LoRA adapters in programs: against float64, alone and with other rows, with one and two threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels import ir
from genai.kernels.checks import FormatError
from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.cpu.linear.lora import pack_adapter, shrink_call
from genai.kernels.cpu.program.calls import Rows
from genai.kernels.cpu.program.step_table import StepField
from genai.kernels.device import AdapterRows, Factors, PageTables, StepContext
from genai.kernels.ir import DenseWeight, LoraDelta, LoraShrink, OpProgram, Projection, RowsType
from genai.kernels.reference.executor import ReferenceExecutor

from .test_lowering import Constants

K, N, M = 72, 80, 100
# Two matmuls of one input, the second of them gated, after one that has no adapters.
PLACES = {0: (K, N), 1: (K, M), 2: (K, M)}


def program(constants: Constants) -> OpProgram:
    def rows(width: int) -> RowsType:
        return RowsType((1, -1, width), width)

    plain, gate, up = (
        Projection(DenseWeight(name, height, K), delta=LoraDelta(f"h{target}", target))
        for target, (name, height) in enumerate((("w", N), ("g", M), ("u", M)))
    )
    parts = (
        *(LoraShrink("x", target, f"h{target}") for target in PLACES),
        ir.Linear("x", replace(plain, bias="b"), "y", exact=True),
        ir.GatedLinear("x", gate, up, "silu", "z", exact=True),
    )
    types = {"x": rows(K), "y": rows(N), "z": rows(M)}
    return OpProgram(parts, types, constants, ("y", "z"), given=("x",))


def adapter(rng: np.random.Generator, ranks: Sequence[int], dtype: Any = np.float32) -> list[list[Factors]]:
    """Factors of some rank per target (0 = none); those of target 0 change two ranges of columns, the last one open."""

    def make(first: int, last: int, rank: int) -> Factors:
        a, b = rng.standard_normal((rank, K)) * 0.2, rng.standard_normal((last - first, rank)) * 0.2
        return Factors(first, a.astype(dtype), b.astype(dtype))

    first = [make(0, 32, ranks[0]), make(48, N, ranks[0] + 1)] if ranks[0] else []
    return [first, *([make(0, M, rank)] if rank else [] for rank in ranks[1:])]


def step(lengths: Sequence[int], mixes: Sequence[Sequence[tuple[int, float]]], adapters: Sequence[Any]) -> StepContext:
    total, flat = sum(lengths), [one for mix in mixes for one in mix]
    return StepContext(
        tokens=np.zeros(total, np.int64),
        positions=np.arange(total),
        cu_seqlens_q=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array(lengths, np.int32),
        groups=(PageTables(np.zeros((len(lengths), 1), np.int32), np.arange(total)),),
        num_decode_sequences=len(lengths),
        logits_indices=np.zeros(1, np.int64),
        rope_table=np.zeros(len(lengths), np.int32),
        adapter_rows=AdapterRows(
            adapters,
            np.cumsum([0, *map(len, mixes)]).astype(np.int32),
            np.array([index for index, _ in flat], np.int32),
            np.array([weight for _, weight in flat], np.float32),
        ),
    )


@pytest.fixture
def constants(rng: np.random.Generator) -> Constants:
    values = {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in
              (("w", (K, N)), ("g", (K, M)), ("u", (K, M)), ("b", (N,)))}  # fmt: skip
    return Constants(values)


def expected(constants: Constants, x: np.ndarray, factors: Any, mix: Sequence[tuple[int, float]]) -> list[np.ndarray]:
    """The results of one sequence with merged weights, in float64."""
    merged = []
    for target, name in enumerate("wgu"):
        weight = constants[name].T.astype(np.float64)
        for index, scale in mix:
            for one in factors[index][target]:
                weight[one.first : one.first + len(one.b)] += scale * one.b.astype(np.float64) @ one.a
        merged.append(x @ weight.T)
    gate = merged[1]
    return [merged[0] + constants["b"], gate / (1 + np.exp(-gate)) * merged[2]]


LENGTHS = [1, 3, 1, 9, 2, 1, 4]
BOTH = [(1, 0.7), (2, -0.3)]
MIXES: list[list[tuple[int, float]]] = [[(0, 1.0)], [], BOTH, [(0, 2.0)], [(3, 1.0)], [(2, 1.0)], BOTH]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_adapters_are_what_merging_them_gives(
    constants: Constants, rng: np.random.Generator, threads: int, dtype: Any
) -> None:
    factors = [adapter(rng, ranks, dtype) for ranks in ((5, 3, 0), (0, 16, 4), (33, 1, 7), (8, 8, 8))]
    x = rng.standard_normal((sum(LENGTHS), K)).astype(np.float32)
    device = CpuExecutor(threads)
    run = device.compile(program(constants))
    loaded = [device.load_adapter(one) for one in factors]
    found = run.run(step(LENGTHS, MIXES, loaded), {"x": x})
    reference = ReferenceExecutor()
    slow = reference.compile(program(constants)).run(
        step(LENGTHS, MIXES, [reference.load_adapter(one) for one in factors]), {"x": x}
    )
    begin = 0
    for length, mix in zip(LENGTHS, MIXES, strict=True):
        rows = slice(begin, begin + length)
        wanted = expected(constants, x[rows].astype(np.float64), factors, mix)
        for name, values in zip(("y", "z"), wanted, strict=True):
            np.testing.assert_allclose(found[name][0, rows], values, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(slow[name][0, rows], values, rtol=1e-6, atol=1e-6)
        begin += length
    # Alone, or with the step's adapters in another order, a sequence gives the same bits.
    begin = 0
    for length, mix in zip(LENGTHS, MIXES, strict=True):
        used = sorted({index for index, _ in mix}, reverse=True)
        own = step([length], [[(used.index(i), w) for i, w in mix]], [loaded[i] for i in used])
        alone = run.run(own, {"x": x[begin : begin + length]})
        for name in ("y", "z"):
            np.testing.assert_array_equal(alone[name][0], found[name][0, begin : begin + length])
        begin += length


def test_rows_without_adapters_are_as_without_places(constants: Constants, rng: np.random.Generator) -> None:
    x = rng.standard_normal((sum(LENGTHS), K)).astype(np.float32)
    device = CpuExecutor(2)
    whole = program(constants)
    bare = [replace(r, projection=replace(r.projection, delta=None)) if isinstance(r, ir.Linear) else
            replace(r, gate=replace(r.gate, delta=None), up=replace(r.up, delta=None))  # type: ignore[attr-defined]
            for r in whole.ops if not isinstance(r, LoraShrink)]  # fmt: skip
    wanted = device.compile(replace(whole, parts=tuple(bare))).run(step(LENGTHS, [[]] * 7, []), {"x": x})
    run = device.compile(whole)
    loaded = device.load_adapter(adapter(rng, (4, 4, 4)))
    mixes: list[list[tuple[int, float]]] = [[(0, 1.0)] if index == 3 else [] for index in range(7)]
    for given, kept in (
        (step(LENGTHS, [[]] * 7, []), list(range(21))),
        (step(LENGTHS, mixes, [loaded]), [0, 1, 2, 20]),
    ):
        found = run.run(given, {"x": x})
        for name in ("y", "z"):
            np.testing.assert_array_equal(found[name][0, kept], wanted[name][0, kept])


def test_one_block_of_memory() -> None:
    factors = [[Factors(0, np.zeros((8, 64), np.float16), np.zeros((64, 8), np.float16))]] * 50
    packed = pack_adapter(factors)
    own = 50 * 2 * 8 * 64 * 2
    assert packed.rank == 8
    assert own <= packed.nbytes <= 1.06 * own
    assert pack_adapter([]).rank == 0


def test_what_does_not_fit_is_refused() -> None:
    def made(a: Any, b: Any, first: int = 0) -> list[list[Factors]]:
        return [[Factors(first, np.zeros(*a), np.zeros(*b))]]

    half, single = np.float16, np.float32
    for factors, message in (
        (made(((2, 32), half), ((16, 2), single)), "all float16 or all float32"),
        (made(((2, 32), np.float64), ((16, 2), np.float64)), "all float16 or all float32"),
        (made(((2, 32), single), ((16, 3), single)), "expected .rank"),
        (made(((2, 32), single), ((16, 2), single), 8), "multiple of 16"),
    ):
        with pytest.raises(FormatError, match=message):
            pack_adapter(factors)
    with pytest.raises(ValueError, match="16 or more"):
        shrink_call(Rows(None, 32, 8, StepField.TOKENS), 0)
