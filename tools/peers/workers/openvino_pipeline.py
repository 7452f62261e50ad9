"""Measures OpenVINO GenAI's LLMPipeline, by its own performance counters.

usage: openvino_pipeline.py ENGINE JOB
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai
from timing import job, measure


def main() -> None:
    """Load, measure, print."""
    _, case = job()
    pipeline = openvino_genai.LLMPipeline(case["model"], "CPU", INFERENCE_NUM_THREADS=case["threads"])

    def generate(rows: Sequence[Sequence[int]], steps: int) -> tuple[float, float]:
        tokens = np.array(rows, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))
        options = openvino_genai.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True, do_sample=False)
        result = pipeline.generate(inputs, options)
        if any(len(row) != steps + 1 for row in result.tokens):
            raise SystemExit("a sequence ended early")
        # Milliseconds: to the first token, and per later token (a step of the whole batch).
        first = result.perf_metrics.get_ttft().mean / 1e3
        later = result.perf_metrics.get_tpot().mean / 1e3 if steps else 0.0
        return first, steps * later

    measure(generate, case)


if __name__ == "__main__":
    main()
