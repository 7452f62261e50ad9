"""Measure the host's time per GPU step in microseconds, without a GPU: `python -m tools.cuda_host_time`.

Generator and LLM decode on a simulated GPU (simulated_gpu.py). If the GPU's work takes no time, the time of a step is
the host's time, without the time of CuPy's own calls. If the work takes time, a step shows how the two overlap.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import genai
from genai.compat.onnxruntime_genai.generator import Generator, GeneratorParams
from genai.kernels.cuda.executor import CudaExecutor
from genai.models import loading
from genai.models.folders import bundled_model

from .arguments import folder, microseconds, positive
from .simulated_gpu import SimulatedGpu

CONTEXT, TOKENS = 64, 100
Clock = Callable[[], float]


def load(gpu: SimulatedGpu, folder: Path) -> genai.Model:
    """Load a model on the simulated GPU."""
    before = loading.open_executor
    loading.open_executor = lambda device, threads: CudaExecutor(gpu, threads)  # type: ignore[assignment]
    try:
        model = genai.Model(folder, quiet=True, context_size=512, cache_bytes=64 << 20)
    finally:
        loading.open_executor = before
    gpu.vocab_size, gpu.first_token = model.config.model.vocab_size, 1 + max(model.config.model.eos_token_ids)
    return model


def generator_step(model: genai.Model, batch: int, options: dict[str, Any], tokens: int, clock: Clock) -> float:
    """Return the seconds per call of generate_next_token."""
    params = GeneratorParams(model)
    length = CONTEXT + tokens + 10
    params.set_search_options(batch_size=batch, max_length=length, min_length=length, **options)
    with Generator(model, params) as generator:
        generator.append_tokens([[5 + i % 90 for i in range(CONTEXT)] for _ in range(batch)])
        for _ in range(4):
            generator.generate_next_token()
        begin = clock()
        for _ in range(tokens):
            generator.generate_next_token()
        return (clock() - begin) / tokens


def llm_step(model: genai.Model, batch: int, options: dict[str, Any], tokens: int, clock: Clock) -> float:
    """Return the seconds per step of an LLM with concurrent requests, measured over `tokens` additional steps."""
    with genai.LLM(model, max_sequences=batch) as llm:
        prompts = [[5 + i % 90 for i in range(CONTEXT)] for _ in range(batch)]

        def seconds(count: int) -> float:
            begin = clock()
            llm.generate(prompts, max_tokens=count, ignore_eos=True, seed=1, **options)
            return clock() - begin

        few = seconds(8)
        return (seconds(8 + tokens) - min(few, seconds(8))) / tokens


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"do_sample": False}, {"temperature": 0}),
    "drawn": (
        {"do_sample": True, "top_k": 40, "top_p": 0.9, "temperature": 0.8, "random_seed": 1},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """Print a table of the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph-us", type=microseconds, default=0.0, help="time of a step's graph")
    parser.add_argument("--choice-us", type=microseconds, default=0.0, help="time of the graph that selects tokens")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=positive, default=TOKENS)
    parser.add_argument("--repeat", type=positive, default=5)
    parser.add_argument("--only", choices=["Generator", "LLM"])
    parser.add_argument("--kind", choices=[*OPTIONS])
    parser.add_argument("--model", type=folder, default=bundled_model())
    given = parser.parse_args(arguments)
    try:
        measure(given)
    except genai.GenaiError as error:
        parser.error(str(error))


def measure(given: argparse.Namespace) -> None:
    """Print a line for each case; raise GenaiError if the model cannot be loaded or a case needs too much memory."""
    gpu = SimulatedGpu(graph_us=given.graph_us, choice_us=given.choice_us)
    # CPU time excludes other load on this machine, but waiting for the simulated GPU takes only wall-clock time.
    clock = time.perf_counter if given.graph_us else time.process_time
    ways: dict[str, Callable[..., float]] = {"Generator": generator_step, "LLM": llm_step}
    cases = [(*case, batch) for case in product(ways, OPTIONS) for batch in given.batches]
    with load(gpu, given.model) as model:
        for name, kind, batch in cases:
            if given.only not in (None, name) or given.kind not in (None, kind):
                continue
            own = OPTIONS[kind][name == "LLM"]
            times = [1e6 * ways[name](model, batch, own, given.tokens, clock) for _ in range(given.repeat)]
            least, median = min(times), statistics.median(times)
            print(f"{name:10} {kind:7} batch {batch:3}: min {least:7.0f} us per step, median {median:7.0f}", flush=True)


if __name__ == "__main__":
    main()
