"""Timed runs of a model: prompts read and tokens generated, from random tokens."""

from __future__ import annotations

import time

import numpy as np

from ..errors import ContextOverflowError
from ..generator import Generator, GeneratorParams
from ..model import Model


def decode_seconds(model: Model, context: int, tokens: int, batch: int) -> float:
    """Seconds that `tokens` steps of `batch` sequences take, after prompts of `context` tokens.

    Raises:
        ContextOverflowError: they exceed the model's context.
    """
    length = context + tokens + 1
    _check_length(model, length)
    with _generator(model, batch, length) as generator:
        generator.append_tokens(_prompt(model, batch, context))
        generator.generate_next_token()
        begin = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
        return time.perf_counter() - begin


def prefill_seconds(model: Model, tokens: int) -> float:
    """Seconds until the logits after a prompt of `tokens` tokens are there.

    Raises:
        ContextOverflowError: it exceeds the model's context.
    """
    _check_length(model, tokens + 1)
    with _generator(model, 1, tokens + 1) as generator:
        prompt = _prompt(model, 1, tokens)
        begin = time.perf_counter()
        generator.append_tokens(prompt)
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


def _check_length(model: Model, length: int) -> None:
    limit = model.context_size
    if length > limit:
        raise ContextOverflowError(
            f"the run needs {length} tokens", f"the context holds {limit}", "ask for fewer tokens"
        )
