"""What every worker does the same way. It runs in each engine's own environment, so it imports nothing of ours."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# A run of at most so many prompt tokens, and a few steps, goes before the one that counts.
WARM_PROMPT, WARM_STEPS = 512, 4

# prompts (rows of tokens), steps after the first token -> seconds to the first token, seconds of the steps
Generate = Callable[[Sequence[Sequence[int]], int], tuple[float, float]]


def job() -> tuple[str, dict[str, Any]]:
    """The engine's name and the job, from the command line."""
    return sys.argv[1], json.loads(sys.argv[2])


def prompts(vocab_size: int, batch: int, length: int, seed: int) -> list[list[int]]:
    """Random tokens, the same in every engine."""
    source = random.Random(seed)
    return [[source.randrange(2, vocab_size) for _ in range(length)] for _ in range(batch)]


def measure(generate: Generate, case: dict[str, Any]) -> None:
    """Warm up if the case says so, run it, and print one line of JSON."""
    size = case["vocab_size"], case["batch"]
    if case["warm"]:
        # Other tokens than those that count: some engines remember what they have read.
        generate(prompts(*size, min(case["prompt"], WARM_PROMPT), seed=1), WARM_STEPS)
    rows = prompts(*size, case["prompt"], seed=0)
    prefill, decode = generate(rows, case["new"] if case["warm"] else 0)
    found = {"prefill_seconds": prefill, "decode_seconds": decode, "first_token_at": time.monotonic()}
    print(json.dumps(found), flush=True)
