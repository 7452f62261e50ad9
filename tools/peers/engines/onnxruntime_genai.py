"""onnxruntime-genai with its own model builder."""

from __future__ import annotations

from pathlib import Path

from genai.builder import ExportOptions, build_model

from ..processes import run_logged
from ..shapes import SHAPES
from .base import InEnvironment

# As its builder would be asked by who wants speed: int8 activations, no logits but the last, the tied matrix once.
_OPTIONS = ("block_size=32", "accuracy_level=4", "prune_lm_head=true", "shared_embeddings=true", "hf_token=false")


class OnnxRuntimeGenai(InEnvironment):
    """INT4, blocks of 32, `accuracy_level` 4."""

    name = "onnxruntime-genai"
    title = "onnxruntime-genai"
    form = f"its builder, `-p int4 -e cpu --extra_options {' '.join(_OPTIONS)}`"
    # The builder needs torch and transformers; onnxruntime-genai itself does not.
    packages = ("onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "transformers", "torch==2.13.0")
    worker = "generator_api.py"

    def build(self, work: Path, checkpoint: Path, output: Path) -> None:
        if SHAPES[checkpoint.name].config.get("num_experts"):  # one folder for both: our builder writes their operators
            build_model(checkpoint, output, ExportOptions(precision="int4", block_size=32))
            return
        builder = [self.venv(work).python, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint)]
        target = ["-o", str(output), "-p", "int4", "-e", "cpu", "-c", str(self.folder(work) / "cache")]
        run_logged([*builder, *target, "--extra_options", *_OPTIONS], self.venv(work).log)
