"""CPU time of the gated delta rule in a prompt, beside the CPU time of a model's whole prompt.

    python -m tools.recurrence_speed MODEL --heads 16 --size 128 --layers 18 [--tokens 512]

MODEL is a folder, and the other numbers are the sizes of its linear attention. One thread is used. CPU time depends
less on other processes than wall time does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import genai
from genai.engine.decoder import compute
from genai.kernels.cache_layout import StateLayer
from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.device import StateSlots, StepContext
from genai.kernels.ir import LinearAttention
from tests.kernels.cuda.programs import MadeUpConstants, program
from tools.arguments import folder, positive

REPEAT = 5


def cpu_seconds(run: Callable[[], Any]) -> float:
    """Return the lowest CPU time of several runs."""
    best = float("inf")
    for _ in range(REPEAT):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def rule_seconds(heads: int, size: int, tokens: int) -> float:
    """Return the CPU time of the delta rule of one layer for one sequence."""
    rng = np.random.default_rng(0)
    widths = {**dict.fromkeys(("q", "k", "v", "out"), heads * size), "decay": heads, "beta": heads}
    op = LinearAttention(
        "q", "k", "v", "out", 0, heads=heads, key_heads=heads, value_heads=heads, head_size=size, v_head_size=size,
        scale=1.0, decay="decay", beta="beta",
    )  # fmt: skip
    states = StateLayer(np.zeros((1, heads * size * size), np.float32))
    compiled = CpuExecutor(1).compile(program([op], widths, MadeUpConstants(), ["out"]), [states])
    given = {
        name: rng.standard_normal((tokens, widths[name])).astype(np.float32) / np.float32(size**0.5) for name in "qkv"
    }
    given["decay"] = -np.abs(rng.standard_normal((tokens, heads)).astype(np.float32))
    given["beta"] = rng.uniform(0, 1, (tokens, heads)).astype(np.float32)
    writes = np.full(tokens, -1, np.int32)
    writes[-1] = 0
    context = StepContext(
        tokens=np.zeros(tokens, np.int64), positions=np.arange(tokens),
        cu_seqlens_q=np.array([0, tokens], np.int32), context_lens=np.array([tokens], np.int32),
        groups=(StateSlots(np.array([-1], np.int32), writes),), num_decode_sequences=0,
        logits_indices=np.zeros(0, np.int64), rope_table=np.zeros(1, np.int32),
    )  # fmt: skip
    return cpu_seconds(lambda: compiled.run(context, given))


def prompt_seconds(model: genai.Model, tokens: int) -> float:
    """Return the CPU time of a prompt."""

    def run() -> None:
        sequence = model.decoder.open()
        sequence.append(np.random.default_rng(1).integers(3, 200, tokens).tolist())
        compute(model.decoder, [sequence])
        sequence.close()

    return cpu_seconds(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=folder)
    for name in ("heads", "size", "layers"):
        parser.add_argument(f"--{name}", type=positive, required=True)
    parser.add_argument("--tokens", type=positive, default=512)
    given = parser.parse_args()
    rule = given.layers * rule_seconds(given.heads, given.size, given.tokens)
    with genai.Model(given.model, threads=1) as model:
        whole = prompt_seconds(model, given.tokens)
    print(
        f"{given.tokens} tokens: {whole:.2f} s of CPU time, of which the delta rule takes {rule:.2f} s "
        f"({rule / whole:.0%})"
    )


if __name__ == "__main__":
    main()
