"""Fixtures of the sampling tests: a row's distribution from the engine, and from the published definitions in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.engine.sampling.batch import BatchSampler
from genai.engine.sampling.breakers import Breakers
from genai.engine.sampling.guidance import Guidance
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.kernels.cpu.program import thread_pool
from genai.kernels.device import Executor
from genai.kernels.reference import sampling as reference

from .schema_replies import Takes, Walk, byte_guidance, taken, walked

Distribution = Callable[..., np.ndarray]
ALONE = open_executor(threads=1)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's name: each test has separate, reproducible numbers."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture(scope="session")
def guidance() -> Guidance:
    """A compiler of grammars for a vocabulary of bytes and an end."""
    return byte_guidance()


@pytest.fixture(scope="session")
def walk(guidance: Guidance) -> Walk:
    """walk(schema, seed) -> a reply of random bytes that the grammar allows; None if it did not end."""
    return partial(walked, guidance)


@pytest.fixture(scope="session")
def takes(guidance: Guidance) -> Takes:
    """takes(schema, text) -> True if the text is a whole reply."""
    return partial(taken, guidance)


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} threads")
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Executor:
    """A device whose threads share even the smallest piece of work."""
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)
    return open_executor(threads=request.param)


@pytest.fixture(scope="session")
def ours() -> Distribution:
    """ours(logits, tokens=(), prompt_length=0, breakers=(), **options): the distribution that a token is drawn from."""

    def distribution(
        logits: np.ndarray,
        tokens: Sequence[int] = (),
        prompt_length: int = 0,
        breakers: Sequence[Sequence[int]] = (),
        **options: Any,
    ) -> np.ndarray:
        row = np.asarray(logits, np.float32)
        plan = plan_sampling(SamplingParams(**options), vocab_size=len(row), breakers=Breakers.of(breakers))
        sampler = RowSampler(plan, list(tokens), seed=1, prompt_length=prompt_length)
        return BatchSampler(len(row), ALONE).distributions(row[None], [sampler])[0]

    return distribution


@pytest.fixture(scope="session")
def published() -> Distribution:
    """The same distribution from the published definitions, each applied to a whole row in float64."""
    return _published


def _published(
    logits: np.ndarray,
    tokens: Sequence[int] = (),
    prompt_length: int = 0,
    breakers: Sequence[Sequence[int]] = (),
    **options: Any,
) -> np.ndarray:
    params = SamplingParams(**options)
    row = np.asarray(logits, np.float32).astype(np.float64)
    for token, bias in dict(params.logit_bias).items():
        row[token] += bias
    if params.no_repeat_ngram_size:
        row = reference.no_repeat_ngram(row, tokens, params.no_repeat_ngram_size)
    for name in params.samplers:
        row = _step(name, row, params, list(tokens), prompt_length, breakers)
    if params.mirostat:
        row = reference.mirostat(row, 2 * params.mirostat_tau)
    if params.temperature == 0:
        return (np.arange(len(row)) == np.argmax(row)).astype(np.float64)
    return reference.softmax(row)


def _step(
    name: str,
    row: np.ndarray,
    params: SamplingParams,
    tokens: list[int],
    prompt_length: int,
    breakers: Sequence[Sequence[int]],
) -> np.ndarray:
    if name == "penalties":
        begin = 0 if params.penalty_last_n is None else max(0, len(tokens) - params.penalty_last_n)
        row = reference.repetition_penalty(row, tokens[begin:], params.repetition_penalty)
        output = tokens[max(begin, prompt_length) :]
        return reference.presence_and_frequency_penalty(row, output, params.presence_penalty, params.frequency_penalty)
    if name == "dry":
        if not params.dry_multiplier:
            return row
        begin = 0 if params.dry_last_n is None else max(0, len(tokens) - params.dry_last_n)
        numbers = (params.dry_multiplier, params.dry_base, params.dry_allowed_length)
        window = tokens[begin:]
        return reference.dry(row, window, *numbers, _since_breaker(window, breakers))
    if name == "temperature":
        return row / (params.temperature or 1.0)
    steps: dict[str, tuple[Callable[..., np.ndarray], Any, bool]] = {
        "top_n_sigma": (reference.top_n_sigma, params.top_n_sigma, params.top_n_sigma > 0),
        "top_k": (reference.top_k, params.top_k, params.top_k > 0),
        "typical_p": (reference.typical_p, params.typical_p, params.typical_p < 1),
        "top_p": (reference.top_p, params.top_p, params.top_p < 1),
        "min_p": (reference.min_p, params.min_p, params.min_p > 0),
        "xtc": (reference.xtc, params.xtc_threshold, params.xtc_probability == 1),
    }
    if name not in steps:
        pytest.fail(f"tests/engine/sampling/conftest.py: _step has no {name!r}")
    step, number, active = steps[name]
    return step(row, number) if active else row


def _since_breaker(tokens: Sequence[int], breakers: Sequence[Sequence[int]]) -> int:
    """The number of last tokens that follow the last sequence breaker."""
    for end in range(len(tokens), 0, -1):
        if any(end >= len(breaker) and list(tokens[end - len(breaker) : end]) == list(breaker) for breaker in breakers):
            return len(tokens) - end
    return len(tokens)
