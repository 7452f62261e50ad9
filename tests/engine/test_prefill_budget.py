"""Streamed replies continue while another prompt is computed; without streaming, prompts are not delayed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from genai.engine.engine import Engine
from genai.engine.sampling.batch import BatchSampler
from genai.engine.scheduler import Pending, PrefillBudget, plan_step
from tests.engine.test_engine_loop import VOCAB, FakeDecoder, FakeJob, FakeSequence

QUIET, PER_TOKEN = 0.020, 0.003


class Clock:
    """Simulates a machine with fixed times per step and per prompt token."""

    def __init__(self, *, watched: int, prompts: list[int]) -> None:
        self.prefill_budget, self.watched, self.prompts = PrefillBudget(), watched, prompts
        self.gaps: list[float] = []

    def run(self, most: int = 10**6) -> float:
        """Return the seconds until all prompts are computed."""
        while any(self.prompts) and len(self.gaps) < most:
            runs = [Pending(1, False)] * self.watched + [Pending(left, True) for left in self.prompts if left]
            waiting = [run.num_tokens for run in runs if run.prefill]
            budget = self.prefill_budget.tokens(prompts=waiting, watched=self.watched)
            step = plan_step(runs, 256, budget)
            assert sum(not part.prefill for part in step) == self.watched
            tokens = sum(part.num_tokens for part in step if part.prefill)
            left = [count for count in self.prompts if count]
            for part in step:
                if part.prefill:
                    left[part.sequence - self.watched] -= part.num_tokens
            self.prompts = left
            seconds = QUIET * (self.watched > 0) + tokens * PER_TOKEN
            self.prefill_budget.note(tokens, seconds)
            self.gaps.append(seconds)
        return sum(self.gaps)


def test_a_watched_reply_goes_on_at_its_pace() -> None:
    clock = Clock(watched=1, prompts=[2048])
    seconds = clock.run()
    assert np.percentile(clock.gaps, 95) <= 1.5 * QUIET
    assert max(clock.gaps) < 16 * QUIET
    assert seconds < 3.5 * 2048 * PER_TOKEN


def test_many_prompts_get_more_of_the_time_in_steps_that_are_no_longer() -> None:
    few, many = Clock(watched=4, prompts=[2048]), Clock(watched=4, prompts=[2048] * 16)
    alone, together = few.run(), many.run()
    assert together < 0.7 * 16 * alone
    assert max(many.gaps) < 1.2 * max(few.gaps)


def test_nobody_watches() -> None:
    clock = Clock(watched=0, prompts=[2048])
    clock.run()
    assert len(clock.gaps) == 8
    assert PrefillBudget().tokens(prompts=[2048] * 3, watched=0) == sys.maxsize


def test_the_first_prompt_does_not_wait() -> None:
    assert PrefillBudget().tokens(prompts=[2048], watched=1) > 0


def measured_budget() -> PrefillBudget:
    """Return a budget that has just computed prompt tokens. A step may then have 70 of them."""
    prefill_budget = PrefillBudget()
    for _ in range(40):
        prefill_budget.note(0, QUIET)
    prefill_budget.note(50, QUIET + 50 * PER_TOKEN)
    return prefill_budget


@pytest.mark.parametrize("prompts", [[60], [2048, 60], [60] * 8])
def test_a_short_prompt_does_not_wait(prompts: list[int]) -> None:
    assert 60 <= measured_budget().tokens(prompts=prompts, watched=4) < 80
    assert measured_budget().tokens(prompts=[2048], watched=4) == 0


def test_short_prompts_overtake_long_ones_which_make_progress() -> None:
    runs = [Pending(1, False), *(Pending(count, True) for count in (2048, 50, 1000, 30, 40))]
    step = plan_step(runs, 256, 201)
    assert [(part.sequence, part.num_tokens) for part in step] == [(0, 1), (1, 101), (2, 30), (4, 30), (5, 40)]
    assert [(part.sequence, part.num_tokens) for part in plan_step(runs[1:3], 100, 1)] == [(0, 1)]
    short_first = [Pending(20, True), Pending(2048, True), Pending(300, True)]
    assert [part.num_tokens for part in plan_step(short_first, 512)] == [20, 192, 300]


def test_kernels_that_are_compiled_meanwhile_are_forgotten() -> None:
    prefill_budget = PrefillBudget()
    for tokens, seconds in ((256, 30.0), (0, QUIET), (256, 256 * PER_TOKEN)):
        prefill_budget.note(tokens, seconds)
    for _ in range(40):
        prefill_budget.note(0, QUIET)
    assert prefill_budget.tokens(prompts=[2048], watched=1) > 50


@pytest.mark.parametrize("budget", [0, 1, 5, 100])
def test_a_plan_holds_no_more_of_prompts(budget: int) -> None:
    runs = [Pending(40, True), Pending(3, False), Pending(7, True), Pending(1, False)]
    step = plan_step(runs, 64, budget)
    assert sum(part.num_tokens for part in step if part.prefill) == min(budget, 47)
    assert sum(part.num_tokens for part in step if not part.prefill) == 4


class PromptSequence(FakeSequence):
    """Long parts have prefill numerics."""

    def pending(self) -> Pending:
        count = len(self.tokens) - self.num_computed
        return Pending(count, self.num_computed < len(self.prompt))

    def append(self, tokens, *, together: int = 0) -> None:
        self.prompt = getattr(self, "prompt", list(tokens))
        super().append(tokens)


class PromptDecoder(FakeDecoder):
    def __init__(self) -> None:
        super().__init__(chunk=64)
        self.plans: list[tuple[int, int]] = []  # tokens of prompts, others

    def open(self) -> PromptSequence:
        return PromptSequence(self)

    def step(self, sequences, step, *, all_rows=(), output=""):
        prompts = sum(part.num_tokens for part in step if part.prefill)
        self.plans.append((prompts, sum(part.num_tokens for part in step) - prompts))
        return super().step(sequences, step, all_rows=all_rows, output=output)


class Device:
    """A clock, and a device that computes asynchronously until the host waits for a token."""

    def __init__(self) -> None:
        self.now = self.done = 0.0

    def start(self, seconds: float) -> None:
        self.now += 0.0001
        self.done = max(self.done, self.now) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.done)

    @property
    def clock(self) -> SimpleNamespace:
        return SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now)


class StartingDecoder(PromptDecoder):
    """A decoder whose steps are only started, not waited for."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.token_budget = device, 2048

    def step(self, sequences, step, *, all_rows=(), output=""):
        logits = super().step(sequences, step, all_rows=all_rows, output=output)
        prompts, others = self.plans[-1]
        self.device.start(QUIET * bool(others) + PER_TOKEN * prompts)
        return logits


class WaitingSampler(BatchSampler):
    def __init__(self, device: Device) -> None:
        super().__init__(VOCAB)
        self.device = device

    def sample(self, *given, **options):
        self.device.wait()
        return super().sample(*given, **options)


@pytest.mark.parametrize("watched", [False, True])
def test_the_engine_reads_a_prompt_beside_a_watched_reply(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr("genai.engine.engine.time", device.clock)
    decoder = StartingDecoder(device)
    decoder.token_budget = 64
    engine = Engine(decoder, WaitingSampler(device))
    reply, long = FakeJob([1, 2], 2000), FakeJob([3] * 600, 1)
    reply.is_watched = watched
    engine.submit(reply)
    for _ in range(5):
        engine.step()
    engine.submit(long)
    while not long.ends:
        engine.step()
    reading = decoder.plans[5:]
    assert all(others == 1 for _, others in reading)
    with_prompt = sum(prompts > 0 for prompts, _ in reading)
    assert sum(prompts for prompts, _ in reading) == 600
    if watched:
        assert with_prompt <= 0.1 * len(reading)
    else:
        assert with_prompt == len(reading) == 10


def test_a_device_that_computes_while_the_host_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step lasts until its tokens are available, not until it is started; the same holds for prompt chunks that no
    caller waits for.
    """
    device = Device()
    monkeypatch.setattr("genai.engine.engine.time", device.clock)
    decoder = StartingDecoder(device)
    engine = Engine(decoder, WaitingSampler(device))
    first = FakeJob([3] * 6000, 1)  # read in parts that nobody waits for
    engine.submit(first)
    while not first.ends:
        engine.step()
    assert [prompts for prompts, _ in decoder.plans] == [2048, 2048, 1904]
    reply, long = FakeJob([1, 2], 2000), FakeJob([3] * 2048, 1)
    reply.is_watched = True
    engine.submit(reply)
    for _ in range(5):
        engine.step()
    engine.submit(long)
    gaps = []
    while not long.ends:
        before = device.now
        engine.step()
        gaps.append(device.now - before)
    assert np.percentile(gaps, 95) <= 1.5 * QUIET and max(gaps) < 16 * QUIET
