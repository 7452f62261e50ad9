"""Measure the cost of sampling relative to a decode step: batch 16, a vocabulary of 150k, half a billion weights.

Write a model folder with random weights to a temporary directory. Then, for each set of options and logits of two
shapes, repeat one decode step of the batch and one call to the sampler. The minimum time of each is reported, because
other load on the machine only adds time.

    python tools/bench_sampling.py [--batch 16] [--vocab 151936] [--layers 24] [--threads N] [--repeat 15]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.engine.decoder import compute
from genai.engine.sampling.batch import BatchSampler
from genai.engine.sampling.plan import RowSampler, plan_sampling
from tools.random_weights import RandomWeights

OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k 40, top-p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "typical-p 0.9": {"temperature": 0.8, "typical_p": 0.9},
    "top-n-sigma 1": {"temperature": 0.8, "top_n_sigma": 1},
    "XTC": {"temperature": 0.8, "xtc_probability": 0.5},
    "Mirostat 2": {"temperature": 0.8, "mirostat": 2},
    "penalties over 1024 tokens": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "DRY over 1024 tokens": {"temperature": 0.8, "dry_multiplier": 0.8},
    "llama.cpp's chain": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1},
    "5 log-probabilities": {"temperature": 0.8, "logprobs": 5},
}
SHAPES = {"peaked": 4.0, "flat": 1.0}


def write_folder(folder: Path, vocab: int, layers: int) -> Path:
    """Write a 4-bit decoder with random weights and the size of Qwen 2.5 0.5B."""
    spec = DecoderSpec(
        model_type="qwen2",
        vocab_size=vocab,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_size=64,
        context_length=2048,
        qkv_bias=True,
        tie_word_embeddings=True,
    )
    return write_model_folder(folder, spec, ExportOptions(precision="int4"), RandomWeights(spec, seed=0))


def seconds(call: Callable[[], object]) -> float:
    """Return the time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def decode_step(model: genai.Model, batch: int) -> Callable[[], object]:
    """Return a function that computes the next step of `batch` sequences, each of which starts with 64 tokens."""
    decoder, rng = model.decoder, np.random.default_rng(0)
    sequences = [decoder.open() for _ in range(batch)]
    for sequence in sequences:
        sequence.append(rng.integers(3, 1000, 64).tolist())
    compute(decoder, sequences)

    def step() -> None:
        for sequence in sequences:
            sequence.append([5])
        compute(decoder, sequences)

    return step


def sampling(sampler: BatchSampler, batch: int, vocab: int, scale: float) -> dict[str, Callable[[], object]]:
    """Return, for each set of options, a function that samples the tokens of one step."""
    rng = np.random.default_rng(1)
    logits = (scale * rng.standard_normal((batch, vocab))).astype(np.float32)
    histories = [rng.integers(0, vocab, 1024).tolist() for _ in range(batch)]
    calls: dict[str, Callable[[], object]] = {}
    for name, options in OPTIONS.items():
        plan = plan_sampling(genai.SamplingParams.from_options(options), vocab_size=vocab)
        rows = [RowSampler(plan, history, seed=1, row=row) for row, history in enumerate(histories)]
        calls[name] = lambda rows=rows: sampler.sample(logits, rows)  # type: ignore[misc]
    return calls


def main() -> None:
    """Measure and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 16), ("vocab", 151_936), ("layers", 24), ("threads", None), ("repeat", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder) / "model", arguments.vocab, arguments.layers)
        with genai.Model(path, threads=arguments.threads) as model:
            step = decode_step(model, arguments.batch)
            calls = {
                (name, shape): call
                for shape, scale in SHAPES.items()
                for name, call in sampling(model.sampler, arguments.batch, arguments.vocab, scale).items()
            }
            times: dict[tuple[str, str], float] = dict.fromkeys(calls, float("inf"))
            step_time = float("inf")
            for _ in range(arguments.repeat + 1):
                step_time = min(step_time, seconds(step))
                times = {key: min(times[key], seconds(call)) for key, call in calls.items()}
            print(f"{model.info.parameters / 1e6:.0f} M weights, {model.threads} threads")
    print(f"decode step of {arguments.batch} rows: {step_time * 1e3:.1f} ms; minimum of {arguments.repeat + 1} runs\n")
    print("| options | " + " | ".join(f"{shape} logits" for shape in SHAPES) + " |\n|---|" + "---|" * len(SHAPES))
    for name in OPTIONS:
        cells = [f"{times[name, shape] * 1e3:.2f} ms, {times[name, shape] / step_time:.1%}" for shape in SHAPES]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
