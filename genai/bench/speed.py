"""Median decode, prefill and start-up speeds, their shares of the machine's ceilings, and sweeps over parameters."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genai.common.interrupts import temporary_folder

from ..engine.static_batch import StaticBatch
from ..errors import ContextOverflowError, GenaiError
from ..models.greedy import greedy_batch
from ..models.model import Model
from .ceilings import Ceiling, ceiling_of, traffic_of

BenchRow = dict[str, Any]
Progress = Callable[[int, int], None]
"""A callback that is called with the number of finished runs and the total number of runs."""


def silent(done: int, total: int) -> None:
    """Ignore the progress."""


def bench_decode(
    model: Model, *, context: int, tokens: int, batch: int = 1, repeat: int = 5, progress: Progress = silent
) -> BenchRow:
    """Time `tokens` decode steps of `batch` sequences after `context` prompt tokens.

    Returns:
        The arguments; tokens_per_second over the whole batch (median; slowest, fastest); the memory bandwidth in bytes
        per second, measured after each run; and the share of the bandwidth that is used to read the weights and the
        cache.

    Raises:
        ContextOverflowError: context + tokens exceed the model's context.
    """
    traffic = traffic_of(model)
    ceiling = None
    if traffic is not None:
        # The context grows during the run, so bytes are counted for the middle of the run.
        unit = traffic.decode_bytes(context + tokens // 2, batch) / batch
        ceiling = ceiling_of(model, "bandwidth", unit, "bandwidth")
    figures = _timed(lambda: batch * tokens / decode_seconds(model, context, tokens, batch), repeat, ceiling, progress)
    return {"context": context, "tokens": tokens, "batch": batch, **figures}


def bench_prefill(model: Model, *, tokens: int, repeat: int = 5, progress: Progress = silent) -> BenchRow:
    """Time the prefill of one prompt of `tokens` tokens.

    Returns:
        tokens; tokens_per_second (median; slowest, fastest); the operations per second on registers only, in the
        arithmetic that is used for prompts; and the share of these operations that the products with weights reach.

    Raises:
        ContextOverflowError: the prompt exceeds the model's context.
    """
    traffic = traffic_of(model)
    ceiling = None
    if traffic is not None:
        name, unit = f"{traffic.arithmetic} operations", float(traffic.prefill_operations(1))
        ceiling = ceiling_of(model, name, unit, traffic.arithmetic)
    return {"tokens": tokens, **_timed(lambda: tokens / prefill_seconds(model, tokens), repeat, ceiling, progress)}


def sweep_context(
    models: Sequence[Model], lengths: Sequence[int], *, tokens: int = 32, repeat: int = 3, progress: Progress = silent
) -> Iterator[BenchRow]:
    """Yield one row per length and model: the prefill of a prompt of that length, and decoding after the prefill."""
    for length in lengths:
        for model in models:
            prefill = bench_prefill(model, tokens=length, repeat=repeat, progress=progress)
            decode = bench_decode(model, context=length, tokens=tokens, repeat=repeat, progress=progress)
            cache = {"cache": model.info.kv_dtype} if len(models) > 1 else {}
            yield {"context": length, **cache, **_in_short("prefill", prefill), **_in_short("decode", decode)}


def sweep_batch(
    model: Model, sizes: Sequence[int], *, context: int, tokens: int, repeat: int = 3, progress: Progress = silent
) -> Iterator[BenchRow]:
    """Yield one row per batch size: decode speed of the whole batch and per sequence."""
    for size in sizes:
        result = bench_decode(model, context=context, tokens=tokens, batch=size, repeat=repeat, progress=progress)
        total = result["tokens_per_second"]
        yield {"batch": size, "tok/s": total, "per sequence": total / size, "share": result.get("share")}


def sweep_threads(
    load: Callable[[int], Model],
    counts: Sequence[int],
    *,
    context: int,
    tokens: int,
    repeat: int = 3,
    progress: Progress = silent,
) -> Iterator[BenchRow]:
    """Yield one row per thread count: decode and prefill speed; `load` loads the model with that many threads."""
    for count in counts:
        with load(count) as model:
            decode = bench_decode(model, context=context, tokens=tokens, repeat=repeat, progress=progress)
            prefill = bench_prefill(model, tokens=context, repeat=repeat, progress=progress)
        yield {"threads": count, **_in_short("decode", decode), **_in_short("prefill", prefill)}


def _in_short(name: str, result: BenchRow) -> BenchRow:
    return {f"{name} tok/s": result["tokens_per_second"], f"{name} share": result.get("share")}


def _timed(run: Callable[[], float], repeat: int, ceiling: Ceiling | None, progress: Progress) -> dict[str, float]:
    """Return the median speed of `repeat` runs after a warm-up run, and the medians of the ceiling and the share."""
    progress(0, repeat + 1)
    run()
    speeds, ceilings = [], []
    for done in range(repeat):
        progress(done + 1, repeat + 1)
        speeds.append(run())
        if ceiling is not None:
            ceilings.append(ceiling.measure())
    result = {"tokens_per_second": statistics.median(speeds), "slowest": min(speeds), "fastest": max(speeds)}
    if ceiling is not None:
        result[ceiling.name] = statistics.median(ceilings)
        shares = (speed * ceiling.unit / limit for speed, limit in zip(speeds, ceilings, strict=True))
        result["share"] = statistics.median(shares)
    return result


def decode_seconds(model: Model, context: int, tokens: int, batch: int) -> float:
    """Return the seconds of `tokens` decode steps of `batch` sequences, after prompts of `context` tokens."""
    with _batch(model, batch, context + tokens + 1) as sequences:
        sequences.append_tokens(_prompt(model, batch, context))
        sequences.step()
        begin = time.perf_counter()
        for index in range(tokens):
            sequences.step(is_last=index == tokens - 1)
        return time.perf_counter() - begin


def prefill_seconds(model: Model, tokens: int) -> float:
    """Return the seconds from a prompt of `tokens` tokens to its last logits."""
    with _batch(model, 1, tokens + 1) as sequences:
        prompt = _prompt(model, 1, tokens)
        begin = time.perf_counter()
        sequences.append_tokens(prompt)
        model.decoder.executor.wait()
        return time.perf_counter() - begin


def _batch(model: Model, batch: int, length: int) -> StaticBatch:
    """Return a batch for sequences of `length` tokens; min_length prevents an EOS from ending a run early."""
    if length > model.context_size:
        raise ContextOverflowError(
            f"the run needs {length} tokens", f"the context size is {model.context_size}", "request fewer tokens"
        )
    return greedy_batch(model, batch, min_length=length)


def _prompt(model: Model, batch: int, tokens: int) -> list[list[int]]:
    size = (batch, tokens)
    rows: list[list[int]] = np.random.default_rng(0).integers(0, model.config.model.vocab_size, size).tolist()
    return rows


_TIMEOUT_SECONDS = 600.0
# Prints the seconds from the start time, which the parent passes, until the packages are loaded, the model is loaded
# and the first token is generated, and then the seconds spent compiling kernels.
_WORKER = """
import json, sys, time
folder, tokens, threads, device, started = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4], float(sys.argv[5])
import genai
from genai.models.greedy import greedy_batch
from genai.models.model import Model
marks = [time.time() - started]
model = Model(folder, threads=threads or None, device=device or None)
marks.append(time.time() - started)
batch = greedy_batch(model, 1)
batch.append_tokens([[3 + i % 97 for i in range(tokens)]])
batch.step()
marks.append(time.time() - started)
from genai.devices import compile_seconds
marks.append(compile_seconds())
print(json.dumps(marks), flush=True)
"""


def bench_startup(
    folder: Path,
    *,
    tokens: int = 128,
    threads: int | None = None,
    device: str | None = None,
    cold: bool = False,
    repeat: int = 5,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure the seconds from process start to loaded packages, to a loaded model and to the first generated token.

    Args:
        tokens: length of the prompt.
        device: as in genai.Model.
        cold: True to start every run with an empty kernel cache.

    Returns:
        The medians, including the seconds spent compiling kernels, and the slowest and fastest time to the first token.

    Raises:
        GenaiError: a process failed; the error contains its message.
    """
    count, runs = repeat + (not cold), []
    for done in range(count):
        progress(done, count)
        runs.append(_run(folder, tokens, threads or 0, device or "", cold))
    counted = runs if cold else runs[1:]
    packages, loaded, first, compiling = (statistics.median(times) for times in zip(*counted, strict=True))
    last = [run[2] for run in counted]
    return {
        "prompt": tokens,
        "cold": cold,
        "packages s": packages,
        "model s": loaded,
        "first token s": first,
        "compiling s": compiling,
        "slowest s": max(last),
        "fastest s": min(last),
    }


def _run(folder: Path, tokens: int, threads: int, device: str, cold: bool) -> list[float]:
    with temporary_folder(Path(tempfile.gettempdir()), "genai-bench-", mode=0o700) as empty:
        environment = {**os.environ, **({"GENAI_CACHE_DIR": str(empty)} if cold else {})}
        started = time.time()
        command = [sys.executable, "-c", _WORKER, str(folder), str(tokens), str(threads), device, repr(started)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    if result.returncode:
        raise GenaiError(
            f"the model in {folder} cannot be loaded in a separate process",
            result.stderr.strip().splitlines()[-1] if result.stderr.strip() else f"exit status {result.returncode}",
            "to see the whole error, run `genai generate` with this model",
        )
    marks: list[float] = json.loads(result.stdout.splitlines()[-1])
    return marks
