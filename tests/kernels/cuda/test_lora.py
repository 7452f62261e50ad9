"""Low-rank adapters give the results of the reference, whatever else is in a step, and their memory is freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.checks import FormatError
from genai.kernels.cuda.adapters import DECODE_TILE_ROWS, PREFILL_TILE_ROWS, CudaAdapter, StepAdapters
from genai.kernels.cuda.executor import CudaExecutor, CudaStep, check_part
from genai.kernels.cuda.lora import ShrinkLaunch
from genai.kernels.cuda.step import Capacity
from genai.kernels.device import Factors, StepContext, StepError, UnsupportedOp
from genai.kernels.ir import (
    DenseWeight,
    GatedLinear,
    Linear,
    LoraDelta,
    LoraShrink,
    MoE,
    Norm,
    Op,
    OpProgram,
    Projection,
    SliceColumns,
    Unary,
)
from genai.kernels.reference.executor import ReferenceExecutor

from .host_driver import HostDriver
from .programs import MadeUpConstants, program, relative_error, step_of, with_adapters

pytestmark = pytest.mark.gpu

# Columns of x, of the first product and of the gated one: nothing is whole, and x has more columns than a pass takes.
K, N, M = 1100, 300, 70
SIZES = [(K, N), (K, M), (K, M), (M, N), (K, N), (K, N), (K, 33), (77, 20)]
Mix = Sequence[tuple[int, float]]


def adapted(rng: np.random.Generator) -> OpProgram:
    """Products with targets: of one input, of gates, of what another one made, and without a weight of their own."""
    arrays = {f"w{target}": (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
              for target, (columns, rows) in enumerate(SIZES)}  # fmt: skip
    arrays |= {"bias": rng.standard_normal(N).astype(np.float32), "norm": np.ones(N, np.float32)}

    def branch(target: int, **more: Any) -> Projection:
        columns, rows = SIZES[target]
        return Projection(DenseWeight(f"w{target}", rows, columns, True), delta=LoraDelta(f"h{target}", target), **more)

    ops: list[Op] = [
        *(LoraShrink("x", target, f"h{target}") for target in range(3)),
        Linear("x", branch(0, bias="bias", addend="added"), "a", True),
        GatedLinear("x", branch(1), branch(2), "silu", "b", True),
        LoraShrink("b", 3, "h3"),
        Linear("b", branch(3), "c", True),
        Norm("c", "norm", 1e-5, "d", skip="a", total="e"),
        # Five products, more than one launch adds to, whose results are read late, one of them in part.
        *(LoraShrink("x", target, f"h{target}") for target in (4, 5, 6)),
        *(Linear("x", branch(target), f"y{target}", True) for target in (4, 5, 6)),
        SliceColumns("y5", 8, "z"),
        Unary("tanh", "z", "t"),
        # Rows that begin anywhere.
        SliceColumns("x", 3, "u"),
        LoraShrink("u", 7, "h7"),
        Linear("u", branch(7), "v", True),
    ]
    widths = {"x": K, "added": N, "a": N, "b": M, "c": N, "d": N, "e": N, "y4": N, "y5": N, "y6": 33, "z": 9, "t": 9}
    widths |= {"u": 77, "v": 20}
    outputs = ["a", "b", "c", "d", "e", "y4", "y5", "y6", "t", "v"]
    return program(ops, widths, MadeUpConstants(arrays), outputs)


def factors_of(rng: np.random.Generator, ranks: Sequence[int], dtype: Any) -> list[list[Factors]]:
    """Factors of some rank per target (0 = none); those of target 0 and 5 change ranges of columns."""

    def make(target: int, first: int, end: int, rank: int) -> Factors:
        columns = SIZES[target][0]
        a, b = rng.standard_normal((rank, columns)) / columns**0.5, rng.standard_normal((end - first, rank)) / rank**0.5
        return Factors(first, a.astype(dtype), b.astype(dtype))

    found: list[list[Factors]] = []
    for target, rank in enumerate(ranks):
        ends = {0: [(0, 32), (48, 255), (256, N)], 5: [(16, 18)]}.get(target, [(0, SIZES[target][1])])
        found.append([make(target, *end, rank + more) for more, end in enumerate(ends)] if rank else [])
    return found


ADAPTERS: list[tuple[Sequence[int], Any]] = [
    ((16,) * 8, np.float16),
    ((3, 8, 0, 16, 1, 3, 64, 4), np.float32),
    ((64, 0, 3, 1, 0, 0, 40, 200), np.float16),
    ((0, 0, 0, 0, 0, 0, 5, 0), np.float32),
]


def step_with(mixes: Sequence[Mix], counts: Sequence[int], adapters: Sequence[Any], *, prefill: int = 0) -> StepContext:
    return with_adapters(step_of(counts, counts, prefill=prefill), adapters, mixes)


@dataclass
class Both:
    """A program with adapters on the GPU and on the reference."""

    driver: HostDriver
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.program = adapted(rng)
        self.factors = [factors_of(rng, *one) for one in ADAPTERS]
        self.executor, self.reference = CudaExecutor(self.driver, 1), ReferenceExecutor()
        self.ours, self.theirs = self.executor.compile(self.program), self.reference.compile(self.program)
        self.loaded = [self.executor.load_adapter(one) for one in self.factors]
        self.known = [self.reference.load_adapter(one) for one in self.factors]

    def rows(self, count: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(7)
        return {
            name: rng.standard_normal((64, width)).astype(np.float32)[:count]
            for name, width in (("x", K), ("added", N))
        }

    def run(self, mixes: Sequence[Mix], counts: Sequence[int], prefill: int = 0, only: Any = None) -> dict[str, Any]:
        """Of the GPU alone; `only`: which rows are given."""
        rows = self.rows(sum(counts)) if only is None else {name: array[only] for name, array in self.rows(64).items()}
        found = self.ours.run(step_with(mixes, counts, self.loaded, prefill=prefill), rows)
        self.driver.check()
        return {name: array.reshape(sum(counts), -1) for name, array in found.items()}

    def check(self, mixes: Sequence[Mix], counts: Sequence[int], prefill: int = 0) -> None:
        rows = self.rows(sum(counts))
        step = step_with(mixes, counts, self.known, prefill=prefill)
        wanted = self.theirs.run(step, {name: array[None] for name, array in rows.items()})
        plain = self.theirs.run(step_of(counts, counts), {name: array[None] for name, array in rows.items()})
        for name, ours in self.run(mixes, counts, prefill).items():
            theirs, without = (found[name].reshape(ours.shape) for found in (wanted, plain))
            if len(mixes) == len(MIXED) and name != "t":
                assert relative_error(theirs, without) > 1e-2, name  # there is something to be seen
            first = 0
            for mix, count in zip(mixes, counts, strict=True):
                part = slice(first, first + count)
                first += count
                assert relative_error(ours[part], theirs[part]) < 5e-6, (name, mix)


MIXED: list[Mix] = [
    [(0, 1.0)], [], [(1, -0.75), (0, 0.5), (2, 0.0)], [(0, 0.25)], [(2, 1.0)], [(0, 1.5), (1, 1.0), (2, -2.0)], [],
    [(1, 1.0)],
]  # fmt: skip


@pytest.mark.parametrize("order", [0, 1, 2])
def test_against_the_reference(driver: HostDriver, order: int) -> None:
    """Rows with one adapter, several, none; five rows that share one; prompts longer and shorter than a tile."""
    driver.order = order
    both = Both(driver, order)
    both.check(MIXED, [1, 1, 1, 4, 1, PREFILL_TILE_ROWS + 3, 2, 5], prefill=3)
    if order == 0:
        both.check([[(1, 1.0)]], [1])
        both.check([[(0, 1.0)], []], [5, 1])
        both.check([[], [(3, 1.0)]], [1, 2], prefill=1)
        both.check([[(0, 0.0)]], [2])


def test_bits_of_a_row_do_not_depend_on_company(driver: HostDriver) -> None:
    both = Both(driver)
    counts = [1, 1, 1, 4, 1, PREFILL_TILE_ROWS + 3, 2, 5]
    together, first = both.run(MIXED, counts, prefill=3), 0
    for number, (mix, count) in enumerate(zip(MIXED, counts, strict=True)):
        part = np.arange(first, first + count)
        first += count
        alone = both.run([mix], [count], prefill=int(number >= 5), only=part)
        for name, rows in alone.items():
            assert np.array_equal(rows, together[name][part]), (number, name)
    # A tile of a decoded row alone and of four, and rows of a prompt in other tiles.
    decode, prompt = [DECODE_TILE_ROWS + 1, DECODE_TILE_ROWS], [PREFILL_TILE_ROWS + 2, PREFILL_TILE_ROWS - 3]
    for prefill, some in ((0, decode), (1, prompt)):
        whole = both.run([[(1, 0.5), (0, 1.0)]], some[:1], prefill)
        rows = np.arange(some[0] - some[1], some[0])
        for name, array in both.run([[(1, 0.5), (0, 1.0)]], some[1:], prefill, only=rows).items():
            assert np.array_equal(array, whole[name][rows]), name
        for name, array in both.run([[(1, 0.5), (0, 1.0)]], [1], prefill, only=rows[-1:]).items():
            assert np.array_equal(array, whole[name][rows[-1:]]), name


@pytest.mark.parametrize("prefill", [0, 1])
def test_numbers_that_are_not_finite_stay_in_their_row(driver: HostDriver, prefill: int) -> None:
    both = Both(driver)
    mixes, counts = [[(0, 1.0), (1, 1.0)]], [DECODE_TILE_ROWS + 1]
    rows, step = both.rows(DECODE_TILE_ROWS + 1), step_with(mixes, counts, both.loaded, prefill=prefill)
    wanted = both.ours.run(step, rows)
    rows["x"][1, 5], rows["x"][3] = np.inf, np.nan
    others = [0, 2, 4]
    for name, found in both.ours.run(step, rows).items():
        found, fine = found[0], wanted[name][0]
        assert np.array_equal(found[others], fine[others]) and not np.isfinite(found[[1, 3]]).all(), name


def test_rows_without_adapters_have_the_bits_of_the_base(driver: HostDriver) -> None:
    both = Both(driver)
    mixes: list[Mix] = [[], [(0, 1.0)], []]
    mixed = both.run(mixes, [2, 1, 3])
    both.driver.launched.clear()
    base = both.run([[]] * 3, [2, 1, 3])
    assert not any("lora_" in name for name in both.driver.launched)
    for name, rows in base.items():
        assert np.array_equal(rows[[0, 1, 3, 4, 5]], mixed[name][[0, 1, 3, 4, 5]]), name
        if name != "t":
            assert not np.array_equal(rows[2], mixed[name][2]), name


def test_launches(driver: HostDriver) -> None:
    """Targets that read one value shrink together, and results are added to together, as late as they are read."""
    both = Both(driver)
    driver.launched.clear()
    both.run([[(0, 1.0)]], [1])
    order = [name.removeprefix("lora_") for name in driver.launched if "lora_" in name or "gemv" in name]
    order = ["product" if name.startswith("gemv") else name for name in order]
    shrink, expand = "shrink_shrink_few", "expand_expand_few"
    assert order == [
        shrink, "product", "product", "product", expand,  # a, gate, up
        shrink, "product", expand, shrink, "product", "product", "product", expand,
        shrink, "product", expand,
    ]  # fmt: skip
    driver.launched.clear()
    both.run([[(0, 1.0)]], [3], prefill=1)
    kinds = [name for name in driver.launched if "lora_" in name]
    assert len(kinds) == 8 and all("many" in name for name in kinds)


def test_rows_that_begin_anywhere_are_not_read_in_16_bytes(driver: HostDriver) -> None:
    starts = [one for one in Both(driver).ours._starts if isinstance(one, ShrinkLaunch)]
    assert [(one.x, int(one.arguments["aligned"])) for one in starts] == [("x", 1), ("b", 0), ("x", 1), ("u", 0)]


def test_launches_may_be_larger_than_the_step(driver: HostDriver) -> None:
    """As in a captured graph: what there is to do is read from the step's tables."""
    both = Both(driver)
    ours: CudaStep = both.ours
    rows = both.rows(3)
    for mixes in ([[(0, 1.0)], [(1, 1.0)], []], [[], [], []]):
        wanted = both.run(mixes, [1, 1, 1])
        counts = ours.prepare(step_with(mixes, [1, 1, 1], both.loaded), rows)
        ours.start({**counts, "few_tiles": 8, "many_tiles": 8, "few_ranks": 32, "many_ranks": 8})
        driver.check()
        for name, array in wanted.items():
            assert np.array_equal(ours._result(name, counts).reshape(array.shape), array), name


def test_captured_steps_take_other_adapters(driver: HostDriver) -> None:
    """A step that comes for the third time is a graph, whichever adapters its rows go through, or none."""
    both, mixes = Both(driver), [[[(0, 1.0)], []], [[(0, -2.0)], []], [[], [(0, 0.5)]], [[(0, 1.0)], []]]
    both.ours.run(step_with([[(0, 1.0), (1, 1.0)], [(0, 1.0)]], [1, 1], both.loaded), both.rows(2))  # large enough
    found = [both.run(mix, [1, 1]) for mix in mixes]
    assert len(both.ours._graphs.graphs) == 1
    alone = [both.run(mix, [1], only=np.array([row])) for mix, row in (([[(0, -2.0)]], 0), ([[(0, 0.5)]], 1))]
    for name, rows in found[0].items():
        assert np.array_equal(rows, found[3][name])
        assert np.array_equal(alone[0][name][0], found[1][name][0])
        assert np.array_equal(alone[1][name][0], found[2][name][1]), name


def test_tables_are_made_once_for_equal_steps(driver: HostDriver) -> None:
    both = Both(driver)
    tables = StepAdapters.of(both.program)
    step = step_with([[(0, 1.0)], []], [1, 1], both.loaded)
    first = tables.tables(step)
    assert tables.tables(replace(step, positions=step.positions + 1)) is first
    others = (
        step_with([[(0, 0.5)], []], [1, 1], both.loaded), step_with([[], [(0, 1.0)]], [1, 1], both.loaded),
        step_with([[(0, 1.0)], []], [1, 1], both.loaded[::-1]), step_with([[(0, 1.0)], []], [2, 1], both.loaded),
        step_with([[(0, 1.0)], []], [1, 1], both.loaded, prefill=2),
    )  # fmt: skip
    for other in others:
        assert tables.tables(other) is not first
        again = tables.tables(step)
        assert np.array_equal(again.numbers, first.numbers) and again.counts == first.counts
        first = again


def test_adapters_come_and_go_beside_a_compiled_program(driver: HostDriver) -> None:
    both = Both(driver)
    wanted = both.run([[(1, 1.0)]], [2])
    freed = weakref.ref(both.loaded[1])
    memory = weakref.ref(both.loaded[1].memory) if isinstance(driver, HostDriver) else lambda: None
    both.loaded[1] = both.executor.load_adapter(both.factors[1])
    gc.collect()
    assert freed() is None and memory() is None
    for name, rows in both.run([[(1, 1.0)]], [2]).items():
        assert np.array_equal(rows, wanted[name]), name
    assert both.loaded[1].nbytes >= sum(one.a.nbytes + one.b.nbytes for target in both.factors[1] for one in target)


def test_a_step_that_memory_does_not_suffice_for(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one that fits is computed as before."""
    both, zeros, sizes = Both(driver), driver.zeros, list[int]()

    def noted(nbytes: int) -> Any:
        sizes.append(nbytes)
        return zeros(nbytes)

    def full(nbytes: int) -> Any:
        if nbytes > max(sizes):
            raise MemoryError
        return zeros(nbytes)

    monkeypatch.setattr(driver, "zeros", noted)
    both.ours._lower(Capacity())
    wanted = both.run([[(0, 1.0)]], [1])
    monkeypatch.setattr(driver, "zeros", full)
    with pytest.raises(MemoryError):
        both.run([[(0, 1.0), (1, 1.0), (2, 1.0)]], [60])
    for name, rows in both.run([[(0, 1.0)]], [1]).items():
        assert np.array_equal(rows, wanted[name]), name


def test_an_adapter_of_something_else_is_refused(driver: HostDriver) -> None:
    both = Both(driver)
    rows = both.rows(1)
    few = both.executor.load_adapter(both.factors[0][:3])
    narrow = both.executor.load_adapter([[Factors(0, np.ones((1, 8), np.float32), np.ones((2, 1), np.float32))]] * 8)
    long = [[replace(one, first=300) for one in target] for target in both.factors[3]]
    driver.launched.clear()
    for other in (few, narrow, both.executor.load_adapter(long), both.known[0]):
        with pytest.raises(
            StepError,
            match="not an adapter in the memory of this device" if other is both.known[0] else "for another program",
        ):
            both.ours.run(step_with([[(0, 1.0)]], [1], [other]), rows)
    assert not driver.launched


def test_factors_that_cannot_be_read(driver: HostDriver) -> None:
    executor = CudaExecutor(driver, 1)
    a, b = np.ones((2, 32), np.float32), np.ones((4, 2), np.float32)
    for first, wrong, text in (
        (0, (a.astype(np.float64), b), "float32 and float64"), (0, (a, b.astype(np.float16)), "float16 and float32"),
        (3, (a, b), "columns from 3"), (0, (a, b.T), "expected"), (0, (a[0], b), "expected"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=text):
            executor.load_adapter([[Factors(first, *wrong)]])
    with pytest.raises(FormatError, match="factors of one target have different numbers"):
        executor.load_adapter([[Factors(0, a, b), Factors(4, a[:, :8], b)]])
    empty = executor.load_adapter([[], []])
    assert isinstance(empty, CudaAdapter) and empty.ranks == 0


def test_experts_have_no_places(driver: HostDriver) -> None:
    branch = Projection(DenseWeight("w", 4, 4), delta=LoraDelta("h", 0))
    op = MoE("x", "scores", "out", 1, True, branch, branch, "silu", True)
    with pytest.raises(UnsupportedOp, match="experts with addends or adapters"):
        check_part(op, [])


def test_weights_of_integers_and_prompts(driver: HostDriver) -> None:
    """Products that round activations: what adapters add is computed with floats all the same."""
    rng, constants = np.random.default_rng(3), MadeUpConstants()
    weight = constants.block_weight(rng, 70, 160)
    ops: list[Op] = [LoraShrink("x", 0, "h"), Linear("x", Projection(weight, delta=LoraDelta("h", 0)), "out", False)]
    whole = program(ops, {"x": 160, "out": 70}, constants, ["out"])
    factors = [[Factors(0, *((rng.standard_normal(shape)).astype(np.float16) for shape in ((8, 160), (70, 8))))]]
    executor = CudaExecutor(driver, 1)
    ours, adapter = executor.compile(whole), executor.load_adapter(factors)
    rows = rng.standard_normal((22, 160)).astype(np.float32)
    found = {}
    for mixes in ([[(0, 1.0)], [(0, -0.5)]], [[], []]):
        step = step_with(mixes, [2, 20], [adapter], prefill=1)
        found[bool(mixes[0])] = ours.run(step, {"x": rows})["out"].reshape(22, 70)
    a, b = (array.astype(np.float64) for array in (factors[0][0].a, factors[0][0].b))
    wanted = np.repeat([1.0, -0.5], [2, 20])[:, None] * (rows @ a.T @ b.T)
    assert relative_error(found[True] - found[False], wanted) < 5e-6
