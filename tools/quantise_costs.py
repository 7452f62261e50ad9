"""Measure the processor time of every quantisation method, for the table in genai/quantize/costs.py.

Each run is a separate process with one thread, whose processor time does not depend on other processes of the machine.
A first run of each method compiles its kernels and is not counted. The time of the command's other parts (reading,
evaluation, writing) is excluded by subtracting the time of a run with 0 bits, which quantises nothing.

    python -m tools.quantise_costs CHECKPOINT [CHECKPOINT …]
    python -m tools.quantise_costs --random    # the bundled model, and a random model of 27 million weights
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from genai.quant.methods import METHODS

BUNDLED = Path(__file__).parent / "bundled_model" / "checkpoint"
_RUN = """
import json, sys, time
from genai.quantize import QuantizeOptions, quantize_model
options = dict(json.loads(sys.argv[3]), threads=1, samples=32, length=128, evaluate=False)
report = quantize_model(sys.argv[1], sys.argv[2], QuantizeOptions(**options))
print(json.dumps([time.process_time(), report.weights]))
"""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


def seconds(model: Path, folder: Path, **options: object) -> tuple[float, int]:
    """Return the processor time of a run and the number of weights."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [sys.executable, "-c", _RUN, str(model), f"{place}/out", json.dumps(options)]
        done = subprocess.run(
            command, env={**os.environ, **_ONE_THREAD}, capture_output=True, text=True, check=True
        ).stdout
    used, weights = json.loads(done.splitlines()[-1])
    return float(used), int(weights)


def random_model(folder: Path) -> Path:
    """Write a random model of 27 million weights with the bundled tokenizer."""
    from genai.convert import DecoderSpec, ExportOptions, write_model_folder
    from tools.random_weights import RandomWeights

    spec = DecoderSpec(
        model_type="llama", vocab_size=1536, hidden_size=512, intermediate_size=1536, num_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_size=64, context_length=1024,
    )  # fmt: skip
    options = ExportOptions(precision="fp32")
    return write_model_folder(folder / "model", spec, options, RandomWeights(spec, seed=3), tokenizer_dir=BUNDLED)


def main(arguments: list[str]) -> None:
    """Print the processor seconds per million weights of each method."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models = [BUNDLED, random_model(folder)] if arguments == ["--random"] else [Path(one) for one in arguments]
        for model in models:
            rest, weights = min(seconds(model, folder, bits=0, method="rtn") for _ in range(2))
            print(f"{model.name}: {weights:,} weights, {rest:.2f} s without quantisation", flush=True)
            for name in sorted(METHODS, key=("rtn", "search", "gptq", "distill", "awq", "importance", "hqq").index):
                used, _ = min(seconds(model, folder, method=name) for _ in range(2))
                per_million = (used - rest) / weights * 1e6
                print(f"  {name:<10} {used - rest:7.2f} s, {per_million:7.3f} s per million weights", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
