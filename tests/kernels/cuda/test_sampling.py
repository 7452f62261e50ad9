"""Sampling on the emulated GPU: every step, alone and mixed, against the reference sampler, which works in float64."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.cuda import sampling as cuda
from genai.kernels.cuda.driver import CudaError
from genai.kernels.cuda.sampling import PART, SAMPLING_KERNELS, CudaSampler, launches_of, sampling_kernel
from genai.kernels.cuda.sources import CudaKernel, modules, structs, text_of
from genai.kernels.reference.sampling import ReferenceSampler
from genai.kernels.sampling import (
    ALL_MASKED,
    FINE,
    HAS_INFINITY,
    HAS_NAN,
    MAX_STEPS,
    ROW,
    SamplingBatch,
    Setting,
    Span,
    Step,
    mask_words,
)

from .host_driver import HostDriver, LaunchError

pytestmark = pytest.mark.gpu

STEPS = [step for step in Step if step is not Step.END]


def sampler_of(driver: Any, vocab_size: int) -> CudaSampler:
    return CudaSampler(driver, driver.load(SAMPLING_KERNELS), vocab_size, Threads(1))


@dataclass
class Batch:
    """Rows that are asked for one after another."""

    vocab_size: int
    rows: list[Any] = field(default_factory=list)
    edits: list[tuple[int, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    masks: list[NDArray[np.bool_]] = field(default_factory=list)
    replaced: list[NDArray[np.float32]] = field(default_factory=list)

    def add(
        self, source: int, steps: Collection[int] = (), *, counter: tuple[int, int, int] = (0, 0, 0),
        edits: Collection[tuple[int, float]] = (), tokens: Collection[int] = (), first_output: int = 0,
        mask: NDArray[np.bool_] | None = None, dry_limit: int = 1 << 30, **settings: float,
    ) -> None:  # fmt: skip
        row = np.zeros((), ROW)
        row["steps"][: len(steps)] = list(steps)
        infinite = {"PENALTY_LAST_N": np.inf, "DRY_LAST_N": np.inf}
        neutral = {"TEMPERATURE": 1.0, "REPETITION_PENALTY": 1.0, "DRY_ALLOWED_LENGTH": 2.0, "DRY_BASE": 2.0}
        for name, value in {**neutral, **infinite, **settings}.items():
            row["settings"][Setting[name]] = value
        row["counter"] = counter
        span = {Span.SOURCE: source, Span.FIRST_EDIT: len(self.edits), Span.FIRST_TOKEN: len(self.tokens)}
        self.edits += edits
        self.tokens += tokens
        if mask is not None:
            self.masks.append(mask)
        span |= {Span.END_EDIT: len(self.edits), Span.END_TOKEN: len(self.tokens), Span.DRY_LIMIT: dry_limit}
        span |= {Span.FIRST_OUTPUT: first_output, Span.MASK: 0 if mask is None else len(self.masks)}
        for name, value in span.items():
            row["span"][name] = value
        self.rows.append(row)

    def made(self) -> SamplingBatch:
        words = mask_words(self.vocab_size)
        masks = np.zeros((len(self.masks), words), np.uint32)
        for place, mask in zip(masks, self.masks, strict=True):
            place[...] = np.packbits(np.resize(np.r_[mask, np.zeros(32, bool)], 32 * words), bitorder="little").view(
                "<u4"
            )
        return SamplingBatch(
            rows=np.array(self.rows, ROW), plain=False,
            replaced=np.array(self.replaced, np.float32).reshape(-1, self.vocab_size),
            edit_ids=np.array([token for token, _ in self.edits], np.int32),
            edit_values=np.array([value for _, value in self.edits], np.float32),
            tokens=np.array(self.tokens, np.int32), masks=masks,
        )  # fmt: skip


def random_logits(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    """A row whose numbers, halved and doubled and added up a few times, float32 has exactly; with ties, or without."""
    kind = rng.integers(6)
    row = rng.normal(0, rng.choice([0.1, 1.0, 4.0]), size) + rng.normal(0, 5)
    if kind == 1:
        row = np.full(size, np.round(rng.normal(0, 3)))
    if kind == 2:
        row = np.round(row)
    if kind == 3:
        row[rng.random(size) < rng.random()] = -np.inf
    if kind == 4:
        row[rng.integers(size)] += 20
    if np.isneginf(row).all():
        row[rng.integers(size)] = 0.0
    return (np.round(row * 512) / 512).astype(np.float32)


def random_settings(rng: np.random.Generator) -> dict[str, float]:
    """Of all steps; those that multiply are powers of two, which lose nothing."""
    return {
        "TEMPERATURE": float(rng.choice([0, 2.0**-90, 0.125, 0.5, 1, 1, 2, 4096])),
        "TOP_K": float(rng.choice([1, 2, 5, 40, 300, 2100, 1 << 20])), "TOP_P": rng.random() * 0.999 + 0.001,
        "MIN_P": rng.random() ** 4 + 1e-9, "TYPICAL_P": rng.random() * 0.999 + 0.001,
        "TOP_N_SIGMA": rng.random() * 3 + 0.01, "XTC_PROBABILITY": rng.random(), "XTC_THRESHOLD": rng.random() ** 6,
        "REPETITION_PENALTY": float(rng.choice([0.5, 1, 2])), "PRESENCE_PENALTY": float(rng.choice([-0.5, 0, 1])),
        "FREQUENCY_PENALTY": float(rng.choice([-0.25, 0, 0.5])),
        "PENALTY_LAST_N": float(rng.choice([3, 10, np.inf])), "DRY_MULTIPLIER": float(rng.choice([0.5, 1])),
        "DRY_BASE": float(rng.choice([0.5, 1, 2])), "DRY_ALLOWED_LENGTH": float(rng.integers(1, 4)),
        "DRY_LAST_N": float(rng.choice([4, 30, np.inf])), "MIROSTAT_LIMIT": rng.random() * 12,
        "NO_REPEAT_NGRAM_SIZE": float(rng.choice([0, 0, 0, 1, 2, 3])),
    }  # fmt: skip


def random_batch(rng: np.random.Generator, size: int, count: int) -> tuple[NDArray[np.float32], SamplingBatch]:
    """Rows with steps in any order; histories of few different tokens, so that they repeat."""
    logits = np.array([random_logits(rng, size) for _ in range(count)])
    batch = Batch(size)
    for number in range(count):
        steps = [step for step in rng.permutation(STEPS) if rng.random() < rng.choice([0.0, 0.2, 0.5])]
        few = rng.integers(0, size, rng.integers(1, 6))
        history = rng.choice(few, rng.integers(0, 40)).tolist()
        edits = [(int(token), float(rng.choice([-np.inf, -1, 2]))) for token in rng.integers(0, size, rng.integers(4))]
        mask = rng.random(size) < rng.random() if rng.random() < 0.3 else None
        source = number
        if rng.random() < 0.2:
            batch.replaced.append(random_logits(rng, size))
            source = -len(batch.replaced)
        batch.add(
            source, steps, counter=(int(rng.integers(1 << 62)), number, int(rng.integers(1000))), edits=edits,
            tokens=history, first_output=int(rng.integers(0, len(history) + 1)), mask=mask,
            dry_limit=int(rng.integers(0, 20)), **random_settings(rng),
        )  # fmt: skip
    return logits, batch.made()


def compare(driver: Any, logits: NDArray[np.float32], batch: SamplingBatch) -> None:
    """With the reference, with distributions and without."""
    size, count = logits.shape[1], len(batch.rows)
    sampler, reference = sampler_of(driver, size), ReferenceSampler(size)
    found, wanted = np.full((count, size), np.nan), np.zeros((count, size))
    with np.errstate(all="ignore"):
        tokens, probabilities, status = reference.sample(logits, batch, wanted)
    for ours in (sampler.sample(logits, batch, found), sampler.sample(logits, batch)):
        assert ours[2].tolist() == status.tolist()
        assert ours[0].tolist() == tokens.tolist()
        np.testing.assert_allclose(ours[1], probabilities, rtol=1e-9)
    fine = status == FINE
    np.testing.assert_allclose(found[fine], wanted[fine], rtol=1e-8, atol=1e-13)
    driver.check()


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("size", [1, 2, 7, 33, 300, PART])
def test_any_steps_of_one_part(driver: Any, size: int, seed: int) -> None:
    rng = np.random.default_rng([seed, size])
    compare(driver, *random_batch(rng, size, 48 if size <= 300 else 8))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [PART + 1, 3 * PART - 5, 5 * PART])
def test_any_steps_of_several_parts(driver: Any, size: int, seed: int) -> None:
    rng = np.random.default_rng([seed, size])
    compare(driver, *random_batch(rng, size, 6))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("size", [300, 2 * PART + 9])
def test_each_step_alone(driver: Any, size: int, step: Step) -> None:
    rng = np.random.default_rng([step, size])
    batch = Batch(size)
    for number in range(6):
        settings = random_settings(rng) | {"NO_REPEAT_NGRAM_SIZE": 0.0, "TEMPERATURE": float(rng.choice([0.25, 1, 2]))}
        history = rng.choice(rng.integers(0, size, 5), 20).tolist()
        batch.add(number, [step], counter=(number, 1, 2), tokens=history, first_output=7, **settings)
    logits = np.round(rng.normal(0, 3, (6, size)) * 512) / 512
    compare(driver, logits.astype(np.float32), batch.made())


@pytest.mark.parametrize(("size", "rows"), [(40_000, 2), (262_144, 1)])
def test_large_vocabularies(driver: Any, size: int, rows: int) -> None:
    rng = np.random.default_rng(size)
    logits = rng.normal(0, 3, (rows, size)).astype(np.float32)
    for steps, settings in (
        ([], {}), ([], {"TEMPERATURE": 0}), ([Step.TOP_P], {"TOP_P": 0.9}),
        ([Step.TOP_K, Step.TEMPERATURE], {"TOP_K": 50, "TEMPERATURE": 0.5}),
    ):  # fmt: skip
        batch = Batch(size)
        for number in range(rows):
            batch.add(number, steps, counter=(3, 0, number), **settings)
        compare(driver, logits, batch.made())


def test_ties_that_fill_a_vocabulary(driver: Any) -> None:
    """The lowest ids stay; every search goes to its end, since no number of the row differs."""
    size = 4 * PART
    batch = Batch(size)
    for number, (step, settings) in enumerate([
        (Step.TOP_K, {"TOP_K": 3000}), (Step.TOP_K, {"TOP_K": 3}), (Step.TOP_P, {"TOP_P": 0.7001}),
        (Step.TYPICAL_P, {"TYPICAL_P": 0.3001}), (Step.TOP_P, {"TOP_P": 1e-9}),
    ]):  # fmt: skip
        batch.add(0, [step, Step.MIN_P], MIN_P=0.5, counter=(number, 1, 1), **settings)
    compare(driver, np.full((1, size), -3.5, np.float32), batch.made())


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-6, 1e6, 1e30])
def test_extreme_temperatures(driver: Any, temperature: float) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (4, 5000)).astype(np.float32)
    batch = Batch(5000)
    for number in range(4):
        batch.add(
            number, [Step.TEMPERATURE, Step.TOP_P], TEMPERATURE=temperature, TOP_P=0.61803, counter=(number, 0, 0)
        )
    compare(driver, logits, batch.made())


@pytest.mark.parametrize("size", [50, 3 * PART])
def test_what_cannot_be_sampled(driver: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(6, size)).astype(np.float32)
    logits[0, size // 2] = logits[5, 1] = np.nan
    logits[1, -1] = np.inf
    logits[2] = -np.inf
    logits[5, 0] = np.inf
    batch = Batch(size)
    for number in range(6):
        batch.add(number, [Step.TOP_K], TOP_K=3, edits=[(token, -np.inf) for token in range(size)] * (number == 3))
    for number in (0, 1, 2):  # what a mask takes away does no harm
        mask = np.arange(size) < 5
        batch.add(number, [Step.TOP_P], TOP_P=0.5, mask=mask)
    made = batch.made()
    compare(driver, logits, made)
    _, _, status = sampler_of(driver, size).sample(logits, made)
    assert status[:6].tolist() == [HAS_NAN, HAS_INFINITY, ALL_MASKED, ALL_MASKED, FINE, HAS_NAN]
    assert status[6:].tolist() == [FINE, FINE, ALL_MASKED]


def test_penalties_that_float32_does_not_have(driver: Any) -> None:
    """Changed logits are float32: probabilities agree as far as that goes; infinity does not come of it."""
    size = 3000
    logits = np.random.default_rng(9).normal(0, 3, (2, size)).astype(np.float32)
    logits[1, :3] = 3e38
    batch = Batch(size)
    steps = [Step.PENALTIES, Step.DRY]
    settings = {"REPETITION_PENALTY": 1.1, "PRESENCE_PENALTY": 0.3, "DRY_MULTIPLIER": 0.8, "DRY_BASE": 1.75}
    batch.add(0, steps, tokens=[5, 6, 7, 5, 6], counter=(1, 2, 3), **settings)
    batch.add(1, steps, tokens=[0, 1, 2, 0, 1], counter=(1, 2, 3), **(settings | {"REPETITION_PENALTY": 1e-3}))
    made = batch.made()
    found, wanted = np.zeros((2, size)), np.zeros((2, size))
    ours = sampler_of(driver, size).sample(logits, made, found)
    theirs = ReferenceSampler(size).sample(logits, made, wanted)
    assert ours[0][0] == theirs[0][0] and ours[2].tolist() == [FINE, FINE]
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)


# --- what a row's bits depend on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [300, 3 * PART])
def test_company_and_order_of_threads_change_no_bit(driver: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    logits, batch = random_batch(rng, size, 8)
    together = sampler_of(driver, size).sample(logits, batch)
    if isinstance(driver, HostDriver):
        for order in (1, 7):
            driver.order = order
            again = sampler_of(driver, size).sample(logits, batch)
            assert all(np.array_equal(a, b) for a, b in zip(again, together, strict=True))
        driver.order = 0
    for number in range(8):
        one = SamplingBatch(
            batch.rows[number : number + 1], False, batch.replaced, batch.edit_ids, batch.edit_values, batch.tokens,
            batch.masks,
        )  # fmt: skip
        alone = sampler_of(driver, size).sample(logits, one)
        assert all(np.array_equal(a[0], b[number]) for a, b in zip(alone, together, strict=True))


def test_more_rows_than_memory_is_for(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_MOST_ROWS", 3)
    rng = np.random.default_rng(1)
    compare(driver, *random_batch(rng, 100, 10))
    logits = rng.normal(size=(10, 100)).astype(np.float32)
    rows = np.array([9, 0, 3, 3, 7])
    ours = sampler_of(driver, 100).log_normalizers(logits, rows, 4)
    theirs = ReferenceSampler(100).log_normalizers(logits, rows, 4)
    assert np.allclose(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])


# --- what is started -------------------------------------------------------------------------------------------------


def test_greedy_rows_take_one_small_launch(driver: Any) -> None:
    size = 9 * PART
    logits = np.random.default_rng(2).integers(0, 50, (3, size)).astype(np.float32)
    batch = Batch(size)
    for number in range(3):
        batch.add(number, TEMPERATURE=0, edits=[(5, -np.inf)], mask=np.arange(size) > 2)
    sampler = sampler_of(driver, size)
    del driver.launched[:]
    tokens, probabilities, status = sampler.sample(logits, batch.made())
    assert driver.launched == [sampling_kernel(greedy=True).name]
    logits[:, [0, 1, 2, 5]] = -1
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert probabilities.tolist() == [1.0] * 3 and status.tolist() == [FINE] * 3


def test_nothing_is_allocated_once_it_is_large_enough(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    logits, batch = random_batch(rng, 3000, 5)
    sampler = sampler_of(driver, 3000)
    first = sampler.sample(logits, batch)

    def refuse(nbytes: int) -> Any:
        raise AssertionError(f"{nbytes} bytes were allocated")

    monkeypatch.setattr(driver, "zeros", refuse)
    again = sampler.sample(logits, batch)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_batches_of_the_same_size_are_one_graph(driver: Any) -> None:
    """Whatever is in them; memory that moves makes another."""
    rng, size = np.random.default_rng(6), 2 * PART + 100
    sampler, reference = sampler_of(driver, size), ReferenceSampler(size)
    for rows in (2, 2, 2, 9, 2, 2):
        logits, batch = rng.standard_normal((rows, size)).astype(np.float32), Batch(size)
        for number in range(rows):
            batch.add(number, TEMPERATURE=0)
        assert np.array_equal(sampler.sample(logits, batch.made())[0], reference.sample(logits, batch.made())[0])
    if isinstance(driver, HostDriver):
        assert driver.graphs_launched == 3


def test_launches_follow_from_the_steps() -> None:
    settings = np.zeros(len(Setting))
    settings[Setting.TEMPERATURE] = 1

    def launches(*steps: Step, parts: int = 9) -> int:
        padded = [*steps, *[Step.END] * (MAX_STEPS - len(steps))]
        return launches_of(padded, settings, parts=parts, distributions=False)

    settings[Setting.TOP_K] = 40
    assert launches(Step.TOP_K, Step.TOP_P, parts=1) == 1
    assert launches() == 2 and launches(Step.TOP_P) == launches(Step.TOP_K) == 11
    assert launches(Step.TOP_K, Step.TOP_P, Step.TYPICAL_P) == 11 < launches(Step.TOP_P, Step.TYPICAL_P)
    settings[Setting.TEMPERATURE] = 0
    assert launches() == 1


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 40, PART, 3 * PART + 7])
def test_log_normalizers(driver: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    logits = np.array([random_logits(rng, size) for _ in range(8)])
    logits[3] = -np.inf
    logits[4, 0] = np.nan
    logits[5, -1] = np.inf
    logits[6, rng.permutation(size)[3:]] = -np.inf
    rows = np.array([6, 0, 1, 2, 7, 7, 3, 4, 5])
    sampler, reference = sampler_of(driver, size), ReferenceSampler(size)
    for top in sorted({0, 1, min(5, size), min(100, size), min(size, PART), size}):
        ours, theirs = sampler.log_normalizers(logits, rows, top), reference.log_normalizers(logits, rows, top)
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-14)
        assert ours[1].tolist() == theirs[1].tolist()
    assert [array.shape for array in sampler.log_normalizers(logits, rows[:0], 1)] == [(0,), (0, 1)]
    with pytest.raises(ValueError, match="rows range from 8"):
        sampler.log_normalizers(logits, np.array([8]), 1)


# --- the source ------------------------------------------------------------------------------------------------------


def test_numbers_mean_the_same_on_both_sides() -> None:
    text = text_of("sampling_row.cuh")

    def names(kind: str) -> list[str]:
        found = re.search(rf"enum {kind} \{{([^}}]*)\}}", text)
        assert found
        return [name.strip() for name in found[1].split(",")]

    assert names("Step") == [*(step.name for step in Step), "NORMALIZE", "LIST"]
    assert names("Setting") == [setting.name for setting in Setting]
    assert names("Span") == [span.name for span in Span]
    assert names("Status")[1:] == ["FINE", "HAS_NAN", "HAS_INFINITY", "ALL_MASKED"]
    assert structs("sampling.cu")["SamplingRow"].itemsize == ROW.itemsize
    assert "PART = THREADS * OWN" in text and PART == 256 * 8


class Faulty(HostDriver):
    """Builds the kernels with a fault."""

    def __init__(self, right: str, wrong: str) -> None:
        super().__init__()
        self.right, self.wrong = right, wrong

    def load(self, kernels: Collection[CudaKernel]) -> Mapping[CudaKernel, Any]:
        assert any(self.right in source for source, _ in modules(kernels))
        return super().load(kernels)

    def text(self, source: str) -> str:
        return source.replace(self.right, self.wrong, 1)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if (threadIdx.x % WARP == 0) room.warp_bests[threadIdx.x / WARP] = x;\n  __syncthreads();",
         "if (threadIdx.x % WARP == 0) room.warp_bests[threadIdx.x / WARP] = x;"),
        ("return {at_offset<int>(at.given.table, at.given.table->tokens) + first + skipped, count - skipped, skipped};",
         "return {at_offset<int>(at.given.table, at.given.table->tokens) + first, count, skipped};"),
        ("stays = sort_key > state.floor || (sort_key == state.floor && tokens.id[i] <= state.last);",
         "stays = sort_key >= state.floor;"),
        ("if (mark && !state.listed) marks[tokens.id[i]] = 0;", ""),
        ("if (lane >= distance) reached += other;", "reached += other;"),
    ],
    ids=["barrier", "window", "ties", "marks", "lanes"],
)  # fmt: skip
def test_faults_are_found(driver: Any, right: str, wrong: str) -> None:
    """A barrier that is missing, a window that is too long, ties, marks that stay, a sum over too many lanes."""
    if not isinstance(driver, HostDriver):
        pytest.skip("it is about the host that emulates a GPU")
    faulty = Faulty(right, wrong)
    with pytest.raises((AssertionError, LaunchError, CudaError)):
        for size in (33, 300, 3 * PART):
            for order in (0, 1, 5):
                faulty.order = order
                compare(faulty, *random_batch(np.random.default_rng([order, size]), size, 24 if size < 999 else 6))
