"""Code that all workers share. It runs in each engine's environment, so it cannot import this project."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# The maximum number of prompt tokens in the warm-up run, and its number of steps.
WARM_PROMPT, WARM_STEPS = 512, 4

# (prompts as rows of tokens, steps after the first token) -> (seconds to the first token, seconds of the steps)
Generate = Callable[[Sequence[Sequence[int]], int], tuple[float, float]]


def job() -> tuple[str, dict[str, Any]]:
    """Return the engine's name and the job, both from the command line."""
    return sys.argv[1], json.loads(sys.argv[2])


def prompts(vocab_size: int, batch: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens, which are the same for every engine."""
    source = random.Random(seed)
    return [[source.randrange(2, vocab_size) for _ in range(length)] for _ in range(batch)]


def measure(generate: Generate, case: dict[str, Any]) -> None:
    """Run the case, with a warm-up first if `warm` is true, and print one line of JSON."""
    size = case["vocab_size"], case["batch"]
    if case["warm"]:
        # The warm-up and the measured run use different tokens, because some engines cache prompts.
        generate(prompts(*size, min(case["prompt"], WARM_PROMPT), seed=1), WARM_STEPS)
    rows = prompts(*size, case["prompt"], seed=0)
    prefill, decode = generate(rows, case["new"] if case["warm"] else 0)
    found = {"prefill_seconds": prefill, "decode_seconds": decode, "first_token_at": time.monotonic()}
    print(json.dumps(found), flush=True)
