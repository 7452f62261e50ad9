"""The engine under load: simultaneous requests, random arrivals, and a reply that decodes during a long prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..engine.adapter_mix import AdapterMix
from ..engine.engine import DEFAULT_MAX_SEQUENCES, Engine
from ..engine.request import EngineRequest
from ..engine.sampling.params import SamplingParams
from ..engine.sampling.plan import RowSampler, plan_sampling
from ..engine.sequence import DecoderSequence
from ..errors import ContextOverflowError, OptionError
from ..models.model import Model
from .speed import BenchRow, Progress, silent

# Arrival rate, as a fraction of the requests per second that the engine finished when all arrived at the same time.
_LOAD = 0.7
# Lengths are uniformly distributed between mean * (1 - _SPREAD) and mean * (1 + _SPREAD).
_SPREAD = 0.5
_PERCENTILES = (50, 95, 99)
# Tokens of the watched request's prompt, the number of steps that it decodes alone before the long prompt arrives, and
# the maximum number of tokens of its reply.
_SHORT_PROMPT, _ALONE_STEPS, _LONGEST_REPLY = 16, 64, 4096


class TimedRequest:
    """A request of random tokens (see engine.Request) that records the time of each generated token."""

    wants_prompt_logits = cancelled = keeps_sequence = False
    adapters: AdapterMix | None = None
    deadline: float | None = None
    origin: DecoderSequence | None = None
    priority = 0
    sequence: DecoderSequence
    has_sequence = False
    row: RowSampler

    def __init__(self, prompt: Sequence[int], count: int, vocab_size: int, *, watched: bool) -> None:
        self.prompt, self.num_prompt, self.max_length = prompt, len(prompt), len(prompt) + count
        self._plan = plan_sampling(SamplingParams(temperature=0.0), vocab_size=vocab_size)
        self.is_watched = watched
        self.arrival = 0.0
        self.times: list[float] = []
        self.error: BaseException | None = None

    def take_siblings(self) -> Sequence[EngineRequest]:
        return ()

    def start(self, sequence: DecoderSequence) -> None:
        sequence.append(self.prompt)
        self.adopt(sequence)

    def adopt(self, sequence: DecoderSequence) -> None:
        self.sequence, self.has_sequence = sequence, True
        self.row = RowSampler(self._plan, sequence.tokens, seed=0, row=0, prompt_length=self.num_prompt)

    def note_reused(self, num_tokens: int) -> None:
        pass

    def take_prompt_logits(self, logits: Any, start: int) -> None:
        raise AssertionError("the request needs no prompt logits")

    def take(self, token: int, logprob: Any) -> bool:
        self.times.append(time.perf_counter())
        self.sequence.append([token])
        return len(self.sequence.tokens) < self.max_length

    def note_proposals(self, proposed: int, accepted: int) -> None:
        raise AssertionError("no tokens are proposed")

    def expire(self) -> BaseException | None:
        raise AssertionError("the request has no deadline")

    def keep(self, sequence: DecoderSequence) -> None:
        raise AssertionError("the request keeps no sequence")

    def finish(self, error: BaseException | None) -> None:
        if self.has_sequence:
            self.has_sequence = False
            del self.sequence
        self.error = error


def bench_throughput(
    model: Model,
    *,
    requests: int = 64,
    prompt: int = 128,
    tokens: int = 64,
    rate: float | None = None,
    long_prompt: int = 2048,
    max_sequences: int = DEFAULT_MAX_SEQUENCES,
    seed: int = 0,
    progress: Progress = silent,
) -> Iterator[BenchRow]:
    """Measure the engine under load, with prompts of random tokens.

    Args:
        requests: number of requests.
        prompt: mean length of a prompt; lengths vary by up to half of the mean.
        tokens: mean length of a reply; lengths vary by up to half of the mean.
        rate: mean number of requests per second, which arrive at random times; None = 0.7 of the rate that was reached
            when all requests arrived at the same time.
        long_prompt: tokens of the prompt that is prefilled while another request's reply is watched.
        max_sequences: maximum number of requests in a step.
        seed: seed of the random lengths, tokens and arrivals.

    Returns:
        Three rows. "at once" and "arriving": prompt and generated tokens per second, and percentiles of the seconds to
        the first token (ttft) and of the milliseconds between two tokens (itl). "watched": itl of a reply alone and
        during another request's long prefill, and the time of that prefill, alone and during the reply.

    Raises:
        ContextOverflowError: a request would not fit.
        OptionError: an argument is out of range.
    """
    if requests < 1 or (rate is not None and not 0 < rate < float("inf")):
        raise OptionError(
            f"requests = {requests}, rate = {rate}",
            "the number of requests must be at least 1, and the rate must be finite and above 0",
            "change the value that is out of range",
        )
    longest = max(int((prompt + tokens) * (1 + _SPREAD)) + 2, long_prompt + 1, _ALONE_STEPS * 2)
    if longest > model.context_size:
        raise ContextOverflowError(
            f"a request has {longest} tokens", f"the context size is {model.context_size}", "request fewer tokens"
        )
    load = _Load(model, max_sequences, requests, progress)
    rng = np.random.default_rng(seed)
    lengths = [[_drawn(rng, mean) for mean in (prompt, tokens)] for _ in range(requests)]
    load.run([load.timed_request(rng, 64, 4) for _ in range(4)], [0.0] * 4)  # warm-up that compiles the kernels

    timed_requests = [load.timed_request(rng, *one) for one in lengths]
    seconds = load.run(timed_requests, [0.0] * requests)
    rate = rate or _LOAD * requests / seconds
    yield {"run": "at once", "requests/s": requests / seconds, **_figures(timed_requests, seconds)}

    timed_requests = [load.timed_request(rng, *one, watched=True) for one in lengths]
    seconds = load.run(timed_requests, np.cumsum(rng.exponential(1 / rate, requests)).tolist())
    yield {"run": "arriving", "requests/s": rate, **_figures(timed_requests, seconds)}
    yield {"run": "watched", **_watched(load, rng, long_prompt)}


class _Load:
    """Requests to one model, which an engine runs on this thread."""

    def __init__(self, model: Model, max_sequences: int, requests: int, progress: Progress) -> None:
        self._model, self._max_sequences = model, max_sequences
        self._progress, self._total, self._done = progress, 2 * requests, 0

    def timed_request(
        self, rng: np.random.Generator, prompt: int, tokens: int, *, watched: bool = False
    ) -> TimedRequest:
        vocab_size = self._model.decoder.vocab_size
        return TimedRequest(rng.integers(0, vocab_size, prompt).tolist(), tokens, vocab_size, watched=watched)

    @property
    def context_size(self) -> int:
        return self._model.context_size

    def engine(self) -> Engine:
        return Engine(self._model.decoder, self._model.sampler, self._max_sequences)

    def run(self, timed_requests: Sequence[TimedRequest], arrivals: Sequence[float]) -> float:
        """Submit each request at its arrival time in seconds; return the seconds until all requests are finished."""
        engine = self.engine()
        begin = time.perf_counter()
        coming = sorted(zip(arrivals, range(len(timed_requests)), strict=True), reverse=True)
        while coming or engine.has_work:
            while coming and begin + coming[-1][0] <= time.perf_counter():
                arrival, index = coming.pop()
                timed_requests[index].arrival = begin + arrival
                engine.submit(timed_requests[index])
                self._done += 1
                self._progress(min(self._done, self._total), self._total)
            if engine.has_work:
                engine.step()
            else:
                time.sleep(max(0.0, begin + coming[-1][0] - time.perf_counter()))
        _check(timed_requests)
        return time.perf_counter() - begin


def _watched(load: _Load, rng: np.random.Generator, long_prompt: int) -> BenchRow:
    alone = load.timed_request(rng, long_prompt, 1)
    alone_seconds = load.run([alone], [0.0])
    engine = load.engine()
    reply = load.timed_request(rng, _SHORT_PROMPT, min(load.context_size - _SHORT_PROMPT, _LONGEST_REPLY), watched=True)
    engine.submit(reply)
    _step_until(engine, lambda: len(reply.times) > _ALONE_STEPS)
    quiet = np.diff(reply.times[1:])
    prompt = load.timed_request(rng, long_prompt, 1)
    before, begin = len(reply.times), time.perf_counter()
    engine.submit(prompt)
    _step_until(engine, lambda: bool(prompt.times) or prompt.error is not None)
    seconds = time.perf_counter() - begin
    busy = np.diff(reply.times[before - 1 :])
    reply.cancelled = True
    engine.step()
    _check([reply, prompt])
    return {
        **{f"itl alone p{p} ms": float(np.percentile(quiet, p)) * 1e3 for p in _PERCENTILES},
        **{f"itl p{p} ms": float(np.percentile(busy, p)) * 1e3 for p in _PERCENTILES},
        "itl longest ms": float(busy.max()) * 1e3,
        "prompt alone s": alone_seconds,
        "prompt s": seconds,
    }


def _step_until(engine: Engine, done: Callable[[], bool]) -> None:
    while engine.has_work and not done():
        engine.step()


def _check(timed_requests: Sequence[TimedRequest]) -> None:
    for timed_request in timed_requests:
        if timed_request.error is not None:
            raise timed_request.error


def _drawn(rng: np.random.Generator, mean: int) -> int:
    return int(rng.integers(max(1, int(mean * (1 - _SPREAD))), int(mean * (1 + _SPREAD)) + 1))


def _figures(timed_requests: Sequence[TimedRequest], seconds: float) -> BenchRow:
    first = [timed_request.times[0] - timed_request.arrival for timed_request in timed_requests]
    between = np.concatenate([np.diff(timed_request.times) for timed_request in timed_requests])
    figures: BenchRow = {
        "prompt tok/s": sum(timed_request.num_prompt for timed_request in timed_requests) / seconds,
        "generated tok/s": sum(len(timed_request.times) for timed_request in timed_requests) / seconds,
    }
    for name, values, unit in (("ttft", first, 1.0), ("itl", between, 1e3)):
        if len(values):
            suffix = "ms" if unit > 1 else "s"
            figures |= {f"{name} p{p} {suffix}": float(np.percentile(values, p)) * unit for p in _PERCENTILES}
    return figures
