"""Speed of a model on this machine: decode and prefill, medians over several runs, random tokens as input."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from .errors import ContextOverflowError
from .generator import Generator, GeneratorParams
from .model import Model


def bench_decode(model: Model, *, context: int, tokens: int, batch: int, repeat: int) -> dict[str, Any]:
    """Time `tokens` decode steps of `batch` sequences after `context` prompt tokens.

    Returns:
        tokens_per_second over the whole batch (median, min, max of the runs) and the arguments.

    Raises:
        ContextOverflowError: context + tokens exceed the model's context.
    """
    _check_length(model, context + tokens + 1)
    speeds = [batch * tokens / _decode_seconds(model, context, tokens, batch) for _ in range(repeat + 1)][1:]
    return {"context": context, "tokens": tokens, "batch": batch, **_summary(speeds)}


def bench_prefill(model: Model, *, tokens: int, repeat: int) -> dict[str, Any]:
    """Time one prompt of `tokens` tokens; see bench_decode for the result."""
    _check_length(model, tokens + 1)
    speeds = []
    for _ in range(repeat + 1):
        with _generator(model, 1, tokens + 1) as generator:
            prompt = _prompt(model, 1, tokens)
            begin = time.perf_counter()
            generator.append_tokens(prompt)
            speeds.append(tokens / (time.perf_counter() - begin))
    return {"tokens": tokens, **_summary(speeds[1:])}


def _decode_seconds(model: Model, context: int, tokens: int, batch: int) -> float:
    length = context + tokens + 1
    with _generator(model, batch, length) as generator:
        generator.append_tokens(_prompt(model, batch, context))
        generator.generate_next_token()
        begin = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
        return time.perf_counter() - begin


def _generator(model: Model, batch: int, length: int) -> Generator:
    """min_length keeps an EOS from ending a run early."""
    params = GeneratorParams(model)
    params.set_search_options(do_sample=False, batch_size=batch, max_length=length, min_length=length)
    return Generator(model, params)


def _prompt(model: Model, batch: int, tokens: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    rows: list[list[int]] = rng.integers(0, model.config.model.vocab_size, (batch, tokens)).tolist()
    return rows


def _summary(speeds: list[float]) -> dict[str, float]:
    return {
        "tokens_per_second": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
    }


def _check_length(model: Model, length: int) -> None:
    limit = model.context_size
    if length > limit:
        raise ContextOverflowError(
            f"the run needs {length} tokens", f"the context holds {limit}", "ask for fewer tokens"
        )
