"""The cost of LoRA adapters, measured by runs without targets, with unused targets, and with adapters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.adapter_mix import AdapterMix
from ..engine.decoder import compute
from ..errors import ContextOverflowError, OptionError
from ..lora.bind import bind
from ..lora.names import FUSED, Module
from ..lora.parameters import MOST_RANK, AdapterParameters, Pair
from ..models.model import Model
from .speed import BenchRow, Progress, silent

_SPREAD = 0.01


def random_adapter(model: Model, rank: int, seed: int) -> Any:
    """Return a random adapter for every projection of a model, in the memory of the model's device.

    Projections that the graph fuses into one product (q, k and v) get separate factors, as in trained adapters.
    """
    targets = model.lora_targets()
    rng = np.random.default_rng(seed)

    def random_matrix(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32) * np.float32(_SPREAD)

    pairs = {}
    for module, parts in targets.parts.items():
        inner = [Module(module.layer, name) for name in FUSED.get(module.projection, ())]
        if not inner or not all(one in targets.parts for one in inner):
            rows = sum(part.width for part in parts)
            pairs[str(module)] = Pair(random_matrix(rank, parts[0].target.columns), random_matrix(rows, rank))
    adapter = AdapterParameters(Path("random adapter"), pairs, "peft")
    return model.decoder.executor.load_adapter(bind(adapter, targets))


def bench_lora(
    load: Callable[[bool], Model],
    *,
    ranks: Sequence[int],
    batches: Sequence[int],
    context: int,
    tokens: int,
    prompt: int,
    repeat: int = 5,
    progress: Progress = silent,
) -> Iterator[BenchRow]:
    """Yield rows of figures; the runs to compare alternate.

    Args:
        load: function that loads the model, with targets for adapters if its argument is True.
        ranks: ranks of the random adapters for every projection.
        batches: numbers of sequences that decode together, each with a separate adapter.
        context: prompt tokens of a decode run.
        tokens: steps of a decode run.
        prompt: tokens of a prefill run.
        repeat: measured runs per row.

    Returns:
        One row per rank and batch, and a last row per rank for prefill: tok/s of the model without targets, the extra
        time with targets but no adapter, and the extra time with adapters, both as shares. All figures are medians over
        the runs.

    Raises:
        ContextOverflowError: a run exceeds the model's context.
        OptionError: a rank is above the maximum for adapters.
    """
    if max(ranks) > MOST_RANK:
        raise OptionError(
            f"rank {max(ranks)} is too large",
            f"the maximum rank of an adapter is {MOST_RANK}",
            "use ranks in this range",
        )
    with load(False) as plain, load(True) as placed:
        longest = max(context + tokens + 1, prompt + 1)
        if longest > plain.context_size:
            raise ContextOverflowError(
                f"a run needs {longest} tokens", f"the context size is {plain.context_size}", "request fewer tokens"
            )
        total, done = len(ranks) * (len(batches) + 1) * (repeat + 1), 0
        for rank in ranks:
            adapters = [random_adapter(placed, rank, seed) for seed in range(max(batches))]
            mixes = [AdapterMix.of([(one, bytes([seed % 256]), 1.0)]) for seed, one in enumerate(adapters)]
            for batch in [*batches, 0]:
                used, none = mixes[: batch or 1], [None] * (batch or 1)
                rounds = []
                for turn in range(repeat + 1):
                    progress(done, total)
                    done += 1
                    round_seconds = [
                        _decode(model, selected, context, tokens) if batch else _prefill(model, selected[0], prompt)
                        for model, selected in ((plain, none), (placed, none), (placed, used))
                    ]
                    if turn:
                        rounds.append(round_seconds)
                seconds = statistics.median(base for base, _, _ in rounds)
                yield {
                    "run": f"decode, batch {batch}" if batch else f"prefill, {prompt} tokens",
                    "rank": rank,
                    "tok/s": (batch * tokens if batch else prompt) / seconds,
                    "places share": statistics.median(one / base - 1 for base, one, _ in rounds),
                    "adapters share": statistics.median(one / base - 1 for base, _, one in rounds),
                    "adapter MiB": adapters[0].nbytes / 2**20,
                }


def _decode(model: Model, mixes: Sequence[Any], context: int, tokens: int) -> float:
    """Return the seconds of `tokens` decode steps of all sequences together."""
    decoder = model.decoder
    rng = np.random.default_rng(0)
    sequences = [decoder.open() for _ in mixes]
    try:
        for sequence, mix in zip(sequences, mixes, strict=True):
            sequence.adapt(mix)
            sequence.append(rng.integers(0, decoder.vocab_size, context).tolist())
        compute(decoder, sequences)
        decoder.executor.wait()
        begin = time.perf_counter()
        for step in range(tokens):
            for sequence in sequences:
                sequence.append([step % decoder.vocab_size])
            compute(decoder, sequences)
        decoder.executor.wait()
        return time.perf_counter() - begin
    finally:
        for sequence in sequences:
            sequence.close()


def _prefill(model: Model, mix: Any, prompt: int) -> float:
    """Return the seconds of the prefill of a prompt."""
    decoder, sequence = model.decoder, model.decoder.open()
    try:
        sequence.adapt(mix)
        sequence.append(np.random.default_rng(0).integers(0, decoder.vocab_size, prompt).tolist())
        begin = time.perf_counter()
        compute(decoder, [sequence])
        decoder.executor.wait()
        return time.perf_counter() - begin
    finally:
        sequence.close()
