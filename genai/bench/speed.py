"""Decode and prefill as medians over several runs, with their share of what the machine can do; and sweeps of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..model import Model
from .ceilings import Shares, bandwidth, products
from .runs import decode_seconds, prefill_seconds
from .traffic import traffic_of

Row = dict[str, Any]


def bench_decode(model: Model, *, context: int, tokens: int, batch: int = 1, repeat: int = 5) -> Row:
    """Time `tokens` decode steps of `batch` sequences after `context` prompt tokens.

    Returns:
        The arguments; tokens_per_second over the whole batch (median; slowest, fastest); and bandwidth, bytes per
        second as measured after each run, with the share of it that the weights and the cache account for.

    Raises:
        ContextOverflowError: context + tokens exceed the model's context.
    """
    traffic = traffic_of(model)
    # A step is counted with the context in the middle of the run.
    unit = 0.0 if traffic is None else traffic.decode_bytes(context + tokens // 2, batch) / batch
    ceiling = None if traffic is None else Shares(unit, bandwidth(model.threads))
    figures = _timed(lambda: batch * tokens / decode_seconds(model, context, tokens, batch), repeat, ceiling)
    found = {} if ceiling is None else ceiling.summary("bandwidth")
    return {"context": context, "tokens": tokens, "batch": batch, **figures, **found}


def bench_prefill(model: Model, *, tokens: int, repeat: int = 5) -> Row:
    """Time one prompt of `tokens` tokens.

    Returns:
        tokens; tokens_per_second (median; slowest, fastest); operations per second of registers alone in the
        arithmetic that prompts are computed in, and the share of it that the products with weights account for.

    Raises:
        ContextOverflowError: the prompt exceeds the model's context.
    """
    traffic = traffic_of(model)
    ceiling = None
    if traffic is not None:
        ceiling = Shares(float(traffic.prefill_operations(1)), products(traffic.arithmetic, model.threads))
    figures = _timed(lambda: tokens / prefill_seconds(model, tokens), repeat, ceiling)
    found = {} if ceiling is None or traffic is None else ceiling.summary(f"{traffic.arithmetic} operations")
    return {"tokens": tokens, **figures, **found}


def sweep_context(model: Model, lengths: Sequence[int], *, tokens: int = 32, repeat: int = 3) -> Iterator[Row]:
    """Per length: the prefill of such a prompt, and decoding after it."""
    for length in lengths:
        prefill = bench_prefill(model, tokens=length, repeat=repeat)
        decode = bench_decode(model, context=length, tokens=tokens, repeat=repeat)
        yield {
            "context": length,
            "prefill tok/s": prefill["tokens_per_second"],
            "prefill share": prefill.get("share"),
            "decode tok/s": decode["tokens_per_second"],
            "decode share": decode.get("share"),
        }


def sweep_batch(model: Model, sizes: Sequence[int], *, context: int, tokens: int, repeat: int = 3) -> Iterator[Row]:
    """Per batch size: decoding, over the whole batch and per sequence."""
    for size in sizes:
        found = bench_decode(model, context=context, tokens=tokens, batch=size, repeat=repeat)
        total = found["tokens_per_second"]
        yield {"batch": size, "tok/s": total, "per sequence": total / size, "share": found.get("share")}


def sweep_threads(
    load: Callable[[int], Model], counts: Sequence[int], *, context: int, tokens: int, repeat: int = 3
) -> Iterator[Row]:
    """Per number of threads: decoding and prefill; `load` gives the model with so many threads."""
    for count in counts:
        with load(count) as model:
            decode = bench_decode(model, context=context, tokens=tokens, repeat=repeat)
            prefill = bench_prefill(model, tokens=context, repeat=repeat)
        yield {
            "threads": count,
            "decode tok/s": decode["tokens_per_second"],
            "decode share": decode.get("share"),
            "prefill tok/s": prefill["tokens_per_second"],
            "prefill share": prefill.get("share"),
        }


def _timed(run: Callable[[], float], repeat: int, ceiling: Shares | None) -> dict[str, float]:
    """Speeds of `repeat` runs after one that does not count."""
    run()
    speeds = []
    for _ in range(repeat):
        speeds.append(run())
        if ceiling is not None:
            ceiling.add(speeds[-1])
    return {"tokens_per_second": statistics.median(speeds), "slowest": min(speeds), "fastest": max(speeds)}
