"""Measure OpenVINO GenAI's LLMPipeline: time to the first token with its own counter, total time with the clock.

usage: openvino_pipeline.py ENGINE JOB
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai
from timing import job, measure


def main() -> None:
    """Load the model, measure, and print the result."""
    _, case = job()
    pipeline = openvino_genai.LLMPipeline(case["model"], "CPU", INFERENCE_NUM_THREADS=case["threads"])

    def generate(rows: Sequence[Sequence[int]], steps: int) -> tuple[float, float]:
        tokens = np.array(rows, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))
        options = openvino_genai.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True, do_sample=False)
        begin = time.perf_counter()
        result = pipeline.generate(inputs, options)
        seconds = time.perf_counter() - begin
        if any(len(row) != steps + 1 for row in result.tokens):
            raise SystemExit("a sequence ended early")
        first = result.perf_metrics.get_ttft().mean / 1e3  # milliseconds
        return first, seconds - first

    measure(generate, case)


if __name__ == "__main__":
    main()
