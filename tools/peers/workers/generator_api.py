"""Measure an engine with the classes Model, GeneratorParams and Generator: genai or onnxruntime-genai.

usage: generator_api.py ENGINE JOB
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from timing import job, measure


def open_genai(case: dict[str, Any]) -> tuple[Any, Any]:
    """Return the module and a loaded model."""
    import genai

    return genai, genai.Model(case["model"], threads=case["threads"], quiet=True)


def open_onnxruntime_genai(case: dict[str, Any]) -> tuple[Any, Any]:
    """Return the module and a loaded model."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(case["model"])
    session = {"intra_op_num_threads": case["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    return onnxruntime_genai, onnxruntime_genai.Model(config)


def main() -> None:
    """Load the model, measure, and print the result."""
    engine, case = job()
    api, model = (open_genai if engine == "genai" else open_onnxruntime_genai)(case)
    adapters = api.Adapters(model) if case["adapter"] else None
    if adapters is not None:
        adapters.load(case["adapter"], "measured")

    def generate(rows: Sequence[Sequence[int]], steps: int) -> tuple[float, float]:
        length = len(rows[0]) + steps + 1
        params = api.GeneratorParams(model)
        # min_length prevents an end token from ending the run early.
        params.set_search_options(do_sample=False, batch_size=len(rows), max_length=length, min_length=length)
        generator = api.Generator(model, params)
        if adapters is not None:
            generator.set_active_adapter(adapters, "measured")
        begin = time.perf_counter()
        generator.append_tokens(_array(rows))
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(steps):
            generator.generate_next_token()
        end = time.perf_counter()
        del generator
        return first - begin, end - first

    measure(generate, case)


def _array(rows: Sequence[Sequence[int]]) -> Any:
    import numpy as np

    tokens = np.array(rows, np.int32)
    return tokens if len(rows) > 1 else tokens[0]


if __name__ == "__main__":
    main()
