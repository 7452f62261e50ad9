"""Compare decode and prompt speed of hybrid models with programs of llama.cpp and its forks, in turns.

    python -m tools.hybrid_speed --work WORK --llama-bench B/bin/llama-bench [--llama-bench ...] [--model lfm2-1.2b]

The models have the shapes of LFM2-1.2B and Qwen3.5-0.8B, and a shape like Gemma 4 E2B. They are written as GGUF files
of Q4_0 with random blocks if they are missing. Every program reads the same file; ours converts it first. Use a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from genai.quant.ggml import GGML_TYPES
from tools import gguf_speed
from tools.arguments import positive
from tools.gguf_models import Shape, add_tensor, add_value, close, metadata, normal, random_blocks, tensors

_WINDOWS = [layer % 5 != 4 for layer in range(35)]
MODELS = {
    "lfm2-1.2b": Shape(
        "lfm2", {"shortconv.l_cache": 3}, layers=16, kv_heads=8, width=8192, tied=True, qk="head", recurrent="conv",
        hidden=2048, heads=32, vocab=65536, attending=(2, 5, 8, 10, 12, 14),
    ),
    "qwen3.5-0.8b": Shape(
        "qwen35",
        {
            "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16,
            "ssm.time_step_rank": 16, "ssm.inner_size": 2048, "rope.dimension_sections": [11, 11, 10, 0],
        },
        layers=24, kv_heads=2, width=3584, rotated=64, qk="head", tied=True, recurrent="apart", hidden=1024, heads=8,
        head=256, vocab=248320, attending=tuple(range(3, 24, 4)),
    ),
    "gemma4-like": Shape(
        "gemma4",
        {
            "attention.sliding_window": 512, "attention.sliding_window_pattern": _WINDOWS,
            "rope.freq_base_swa": 10000.0, "attention.key_length": 512, "attention.value_length": 512,
            "attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count": 512,
            "rope.dimension_count_swa": 256, "final_logit_softcapping": 30.0, "attention.shared_kv_layers": 20,
            "embedding_length_per_layer_input": 256, "attention.head_count_kv": [1] * 35,
            "feed_forward_length": [6144] * 15 + [12288] * 20,
        },
        layers=35, tied=True, hidden=1536, vocab=262144,
    ),
}  # fmt: skip
CASES = {"decode": ("decode", ["-n", "64"]), "prefill": ("prefill", ["-n", "512"])}
_PART_ROWS = 64


def write_model(path: Path, shape: Shape) -> None:
    """Write a model of Q4_0 whose large matrices repeat random rows in random order."""
    writer, random = gguf.GGUFWriter(str(path), shape.arch), np.random.RandomState(0)
    keys = metadata(shape) | gguf_speed.vocabulary(shape.vocab)
    for key, value in keys.items():
        add_value(writer, key, value)
    number, small = gguf.GGMLQuantizationType.Q4_0, normal(random)

    def matrix(*dims: int, scale: float | None = None) -> NDArray[np.float32]:
        if len(dims) < 2 or dims[0] < 1024:
            return small(*dims, scale=scale)
        return np.broadcast_to(np.float32(scale or dims[-1] ** -0.5), dims)  # replaced below; takes no memory

    for name, values in tensors(shape, matrix):
        if values.strides != (0, 0) or values.shape[1] % 32:
            add_tensor(writer, name, np.ascontiguousarray(values), "Q4_0", random)
            continue
        rows, columns = values.shape
        part = random_blocks(GGML_TYPES[number], (_PART_ROWS, columns // 32), random, float(values[0, 0]))
        order = random.permutation(np.arange(rows) % _PART_ROWS)
        writer.add_tensor(name, part.reshape(_PART_ROWS, -1)[order], raw_dtype=number)
    close(writer)


def _ours(folder: Path, case: str, threads: int) -> float:
    command, options = CASES[case]
    arguments = ["bench", command, str(folder), *options, "-r", "1", "-t", str(threads), "--json"]
    return float(json.loads(_run([sys.executable, "-m", "genai", *arguments]))["tokens_per_second"])


def _theirs(program: Path, file: Path, case: str, threads: int) -> float:
    # Forks have no option for tokens in the cache, so theirs start with an empty cache, and ours with 128 tokens.
    counts = ["-p", "0", "-n", "64"] if case == "decode" else ["-p", "512", "-n", "0"]
    text = _run([str(program), "-m", str(file), "-t", str(threads), "-r", "1", "-o", "json", *counts])
    try:
        return float(json.loads(text[text.index("[\n") :])[0]["avg_ts"])  # some programs print notes before
    except (ValueError, LookupError) as error:
        raise RuntimeError(f"{program} printed no result: {text.strip()[-200:]!r}") from error


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/genai/hybrids"), help="folder of the models")
    parser.add_argument("--llama-bench", type=Path, action="append", default=[], help="a program to compare with")
    parser.add_argument("--model", choices=MODELS, action="append", help="a model to measure; all by default")
    parser.add_argument("--case", choices=CASES, action="append", help="what to measure; everything by default")
    parser.add_argument("--repeat", type=positive, default=3, help="processes per program and case")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads")
    parser.add_argument("--write-only", action="store_true", help="write and convert the models, and measure nothing")
    asked = parser.parse_args(arguments)
    work = asked.work.expanduser().resolve()
    work.mkdir(parents=True, exist_ok=True)
    for name in asked.model or MODELS:
        file, folder = work / f"{name}.gguf", work / name
        if not file.exists():
            partial = file.with_suffix(".partial")
            write_model(partial, MODELS[name])
            partial.rename(file)
        if not folder.exists():
            _run([sys.executable, "-m", "genai", "build", str(file), "-o", str(folder)])
        for case in () if asked.write_only else asked.case or CASES:
            _measure(name, file, folder, case, asked)


def _measure(name: str, file: Path, folder: Path, case: str, asked: Any) -> None:
    found: dict[str, list[float]] = {}
    for turn in range(asked.repeat):
        for program in [None, *asked.llama_bench]:
            label = "ours" if program is None else str(program)
            try:
                if turn == 0 and program is None:
                    _ours(folder, case, asked.threads)  # compiles kernels and loads the file; not counted
                speed = (
                    _ours(folder, case, asked.threads)
                    if program is None
                    else _theirs(program, file, case, asked.threads)
                )
            except RuntimeError as error:
                print(f"{name} {case}: {error}", flush=True)
                continue
            found.setdefault(label, []).append(speed)
    ours = statistics.median(found.get("ours", [float("nan")]))
    for label, speeds in found.items():
        middle = statistics.median(speeds)
        spread = f"{min(speeds):.1f} to {max(speeds):.1f}"
        print(f"{name} {case}: {middle:.1f} tok/s ({spread}) {label}; ours is {ours / middle:.2f} times", flush=True)


if __name__ == "__main__":
    main()
