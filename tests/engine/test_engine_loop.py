"""The engine's loop with a decoder that is a function of the tokens: running, waiting and failing requests."""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from genai.engine.decoder import Decoder
from genai.engine.engine import Engine
from genai.engine.sampling.batch import BatchSampler, TokenLogprob
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.engine.scheduler import Pending, StepPlan
from genai.engine.sequence import DecoderSequence
from genai.errors import CacheCapacityError, GraphError

VOCAB = 50
POISON = 49


class FakeSequence(DecoderSequence):
    """Counts the tokens that it holds of the decoder's capacity."""

    def __init__(self, decoder: FakeDecoder) -> None:
        super().__init__()
        self.num_computed = 0
        self.decoder = decoder
        decoder.sequences.append(self)

    def pending(self) -> Pending:
        return Pending(len(self.tokens) - self.num_computed, False)

    def fork(self) -> FakeSequence:
        other = FakeSequence(self.decoder)
        other.tokens, other.num_computed = list(self.tokens), self.num_computed
        return other

    def publish(self) -> None:
        assert self.num_computed <= len(self.tokens)

    def stored_arrays(self) -> Any:
        raise NotImplementedError

    def truncate(self, length: int = 0) -> None:
        self.num_computed = min(self.num_computed, length)

    def close(self) -> None:
        super().close()
        self.decoder.sequences.remove(self)


class FakeDecoder(Decoder):
    """Logits are a hash of the tokens. The cache holds `capacity` tokens; a sequence with POISON fails its step."""

    vocab_size = VOCAB

    def __init__(self, capacity: int = 10**9, chunk: int = 10**9) -> None:
        self.capacity, self.token_budget = capacity, chunk
        self.sequences: list[FakeSequence] = []
        self.most_running = self.num_steps = self.num_computed = 0

    def open(self) -> FakeSequence:
        return FakeSequence(self)

    def step(
        self, sequences: Sequence[FakeSequence], step: StepPlan, *, all_rows: Collection[int] = (), output: str = ""
    ) -> list[np.ndarray | None]:
        self.num_steps += 1
        self.most_running = max(self.most_running, len(sequences))
        planned = {part.sequence: part.num_tokens for part in step}
        assert sum(planned.values()) <= self.token_budget
        takes = [planned.get(index, 0) for index in range(len(sequences))]
        held = sum(sequence.num_computed for sequence in self.sequences)
        if held + sum(takes) > self.capacity:
            raise CacheCapacityError("the cache is full", f"{held} + {sum(takes)} > {self.capacity}", "wait")
        if any(POISON in sequence.tokens for sequence in sequences):
            raise GraphError("a kernel failed", "poison", "do not")
        results: list[np.ndarray | None] = []
        for index, (sequence, take) in enumerate(zip(sequences, takes, strict=True)):
            first = sequence.num_computed
            sequence.num_computed += take
            self.num_computed += take
            done = take and sequence.num_computed == len(sequence.tokens)
            rows = range(first, first + take) if index in all_rows else range(first + take - bool(done), first + take)
            results.append(np.stack([row_of(sequence.tokens[: i + 1]) for i in rows]) if len(rows) else None)
        return results


def row_of(tokens: list[int]) -> np.ndarray:
    logits = np.random.default_rng(zlib.crc32(bytes(tokens))).standard_normal(VOCAB).astype(np.float32)
    logits[POISON] = -np.inf
    return logits


class FakeJob:
    """Generates `count` tokens after a prompt."""

    def __init__(
        self, prompt: list[int], count: int, *, sample: int = 0, siblings: Sequence[FakeJob] = (), **options: Any
    ) -> None:
        self.prompt, self.count, self.sample, self.siblings = prompt, count, sample, siblings
        self.params = SamplingParams(seed=1, **options)
        self.sequence: Any = None
        self.has_sequence = False
        self.row: Any = None
        self.num_prompt, self.max_length = len(prompt), len(prompt) + count
        self.cancelled = self.is_watched = False
        self.adapters = self.origin = self.deadline = None
        self.priority, self.keeps_sequence = 0, False
        self.wants_prompt_logits = self.params.prompt_logprobs is not None
        self.output: list[int] = []
        self.prompt_rows: dict[int, np.ndarray] = {}
        self.ends: list[BaseException | None] = []

    def take_siblings(self) -> Sequence[FakeJob]:
        siblings, self.siblings = self.siblings, ()
        return siblings

    def start(self, sequence: Any) -> None:
        sequence.append(self.prompt)
        self.adopt(sequence)

    def adopt(self, sequence: Any) -> None:
        self.sequence, self.has_sequence = sequence, True
        plan = plan_sampling(self.params, vocab_size=VOCAB)
        self.row = RowSampler(plan, sequence.tokens, seed=1, row=self.sample, prompt_length=len(self.prompt))

    def note_reused(self, num_tokens: int) -> None:
        pass

    def take_prompt_logits(self, logits: np.ndarray, start: int) -> None:
        if self.params.prompt_logprobs == 7:
            raise ValueError("no logits, please")
        self.prompt_rows |= dict(enumerate(logits, start))

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        if self.params.min_tokens == 7:
            raise ValueError("no tokens, please")
        self.sequence.append([token])
        self.output.append(token)
        return len(self.output) < self.count

    def finish(self, error: BaseException | None) -> None:
        self.ends.append(error)


def run(requests: Sequence[FakeJob], decoder: FakeDecoder, most: int = 32, steps: int = 5000) -> Engine:
    engine = Engine(decoder, BatchSampler(VOCAB), most)  # type: ignore[arg-type]
    for request in requests:
        engine.submit(request)  # type: ignore[arg-type]
    for _ in range(steps):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work, "it does not come to an end"
    assert not decoder.sequences, "a sequence was not closed"
    return engine


def everyone(requests: Sequence[FakeJob]) -> Iterator[FakeJob]:
    for request in requests:
        yield request
        yield from everyone(request.siblings)


def alone(request: FakeJob) -> list[int]:
    copy = FakeJob(request.prompt, request.count, sample=request.sample)
    run([copy], FakeDecoder())
    return copy.output


@pytest.mark.parametrize("seed", range(20))
def test_random_loads(seed: int) -> None:
    """With any capacity, chunk size and maximum number of sequences, every request gets its tokens exactly once."""
    rng = random.Random(seed)
    requests = []
    for _ in range(rng.randrange(1, 12)):
        prompt = [rng.randrange(40) for _ in range(rng.randrange(1, 30))]
        count = rng.randrange(1, 20)
        siblings = [FakeJob(prompt, count, sample=i) for i in range(1, rng.choice([1, 1, 3, 6]))]
        options = {"prompt_logprobs": 0} if rng.random() < 0.3 else {}
        requests.append(FakeJob(prompt, count, siblings=siblings, **options))
    all_jobs = list(everyone(requests))
    longest = max(len(request.prompt) + request.count for request in all_jobs)
    decoder = FakeDecoder(capacity=rng.choice([longest, 2 * longest, 10**6]), chunk=rng.choice([1, 5, 16, 1000]))
    most = rng.choice([1, 2, 4, 32])
    run(requests, decoder, most)
    assert decoder.most_running <= most
    for request in all_jobs:
        assert request.ends == [None]
        assert request.output == alone(request)
        if request.wants_prompt_logits or request.params.prompt_logprobs is not None:
            for i in range(len(request.prompt)):
                np.testing.assert_array_equal(request.prompt_rows[i], row_of(request.prompt[: i + 1]))


def test_the_youngest_waits_and_the_oldest_goes_on() -> None:
    first, second = FakeJob([1] * 10, 30), FakeJob([2] * 10, 30)
    decoder = FakeDecoder(capacity=45)
    engine = Engine(decoder, BatchSampler(VOCAB))  # type: ignore[arg-type]
    engine.submit(first)  # type: ignore[arg-type]
    engine.submit(second)  # type: ignore[arg-type]
    while not first.ends:
        engine.step()
    assert len(first.output) == 30 and 0 < len(second.output) < 30 and not second.ends
    waited = len(second.output)
    while engine.has_work:
        engine.step()
    assert second.ends == [None] and waited < len(second.output) == 30
    # Its tokens were computed again once, not over and over.
    assert decoder.num_computed <= 39 + 39 + 10 + waited


def test_one_that_cannot_fit_alone_fails_alone() -> None:
    good, bad, other = FakeJob([1] * 5, 5), FakeJob([2] * 50, 5), FakeJob([3] * 5, 5)
    run([good, bad, other], FakeDecoder(capacity=20))
    assert isinstance(bad.ends[0], CacheCapacityError) and len(bad.ends) == 1
    assert (good.ends, other.ends) == ([None], [None])
    assert good.output == alone(good) and other.output == alone(other)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: FakeJob([POISON, 1], 5), GraphError),
        (lambda: FakeJob([1, 2], 5, prompt_logprobs=7), ValueError),
        (lambda: FakeJob([1, 2], 5, min_tokens=7), ValueError),
        (lambda: FakeJob([1, 2], 5, logits_processors=[lambda ids, logits: 5]), RuntimeError),
        (lambda: FakeJob([1, 2], 5, logit_bias=dict.fromkeys(range(VOCAB), -float("inf"))), RuntimeError),
    ],
)
def test_what_fails_ends_alone(make: Any, kind: type[Exception]) -> None:
    requests = [FakeJob([1, 2, 3], 6), make(), FakeJob([4], 9)]
    bad_siblings = [FakeJob([5], 3), FakeJob([5], 3)]
    requests[1].siblings = bad_siblings
    run(requests, FakeDecoder())
    assert isinstance(requests[1].ends[0], kind) and len(requests[1].ends) == 1
    assert all(len(request.ends) == 1 for request in bad_siblings)
    for request in (requests[0], requests[2]):
        assert request.ends == [None] and request.output == alone(request)


def test_cancelled_jobs_leave_at_the_next_step() -> None:
    running, waiting, other = FakeJob([1], 50), FakeJob([2], 5), FakeJob([3], 5)
    engine = Engine(FakeDecoder(), BatchSampler(VOCAB), 2)  # type: ignore[arg-type]
    for request in (running, other, waiting):
        engine.submit(request)  # type: ignore[arg-type]
    engine.step()
    running.cancelled = waiting.cancelled = True
    engine.step()
    assert running.ends == waiting.ends == [None] and len(running.output) == 1 and not waiting.output
    while engine.has_work:
        engine.step()
    assert len(other.output) == 5


def test_abandon_tells_all() -> None:
    running, waiting = FakeJob([1], 50, siblings=[FakeJob([1], 50, sample=1)]), FakeJob([2], 5)
    siblings = list(running.siblings)
    engine = Engine(FakeDecoder(), BatchSampler(VOCAB), 1)  # type: ignore[arg-type]
    engine.submit(running)  # type: ignore[arg-type]
    engine.submit(waiting)  # type: ignore[arg-type]
    engine.step()
    engine.abandon(ValueError("broken"))
    for request in (running, waiting, *siblings):
        assert len(request.ends) == 1 and isinstance(request.ends[0], ValueError)
    assert not engine.has_work


def test_a_step_without_work_does_nothing() -> None:
    decoder = FakeDecoder()
    Engine(decoder, BatchSampler(VOCAB)).step()  # type: ignore[arg-type]
    assert decoder.num_steps == 0
