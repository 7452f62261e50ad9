"""The default method by model size, and the time that each method takes.

The figures are data, so that the default does not depend on a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from genai.quant.methods import METHODS

# The largest models, in weights, for which each method is the default.
DEFAULT_METHODS: tuple[tuple[float, str], ...] = ((500e6, "gptq"), (float("inf"), "search"))
# Sequences and tokens per sequence of the calibration text: in general, and of text that the model generates for a
# method that nobody chose. Generating a token reads every weight, so a long text would take longer than the method.
SAMPLES, LENGTH = 128, 512
OWN_SAMPLES, OWN_LENGTH = 32, 256
# Sequences, and tokens per sequence at most, of the evaluation: the full one, and the default one.
EVAL_SAMPLES = 16
QUICK_EVAL_SAMPLES, QUICK_EVAL_LENGTH = 4, 128


@dataclass(frozen=True)
class Cost:
    """The processor time of a method on one thread, in seconds per million weights.

    Attributes:
        fixed: the time that does not depend on the calibration text.
        per_token: the time per 1,000 calibration tokens, without generating them.
        per_column: the time of Python code per column of a matrix. Columns per weight fall with the square root of the
            model's size, so the figure is for a model of one million weights. Threads do not share this work, because
            Python code runs on one thread at a time.
    """

    fixed: float
    per_token: float = 0.0
    per_column: float = 0.0


# Measured as processor time with `python -m tools.quantise_costs --random` on one thread of an Intel Xeon with AMX, at
# 4 bits in blocks of 32, with 4,096 calibration tokens: rtn and search with random weights and a hidden size of
# 512 (27 million weights), the others with the bundled model (4.3 million). The time per calibration token is that of
# the run with 1.24 billion weights in docs/explanation/quantisation.md. The two figures of gptq fit the runs with the
# bundled model (1.5 s per million weights) and with 1.24 billion weights.
_PASS = 0.011
COSTS: dict[str, Cost] = {
    "rtn": Cost(0.028),
    "search": Cost(0.095),
    "importance": Cost(0.55, _PASS),
    "hqq": Cost(0.625),
    "gptq": Cost(0.3, _PASS, 2.6),
    "awq": Cost(1.27, _PASS),
    "distill": Cost(3.2, _PASS),
}
# Generating 1,000 tokens of calibration text, in seconds per million weights; measured in the same way with the bundled
# model. Larger models need less time per weight, because they are limited by memory.
GENERATING = 0.065


def default_method(weights: int) -> str:
    """Return the method for a model with this number of weights if the user has not chosen one."""
    return next(method for most, method in DEFAULT_METHODS if weights <= most)


def estimated_seconds(method: str, weights: int, tokens: int, *, generated: bool, threads: int) -> float:
    """Return the time of a method by the table.

    Args:
        method: a name in METHODS.
        weights: number of weights of the model.
        tokens: number of calibration tokens.
        generated: True if the model generates the calibration text.
        threads: number of threads, among which the work is divided, except Python code for each column.
    """
    cost, needs_data = COSTS[method], METHODS[method].needs != "nothing"
    per_token = (cost.per_token + GENERATING * generated) * needs_data
    millions = weights / 1e6
    return millions * (cost.fixed + per_token * tokens / 1e3) / threads + cost.per_column * math.sqrt(millions)


def costs_text(methods: Sequence[str], weights: int, tokens: int, *, generated: bool, threads: int) -> str:
    """Return the estimated times of methods, such as "rtn 1 s, gptq 20 s, distill 2 min"."""
    return ", ".join(
        f"{method} {_duration(estimated_seconds(method, weights, tokens, generated=generated, threads=threads))}"
        for method in methods
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
