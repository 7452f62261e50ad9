"""onnxruntime-genai with its own model builder."""

from __future__ import annotations

import shutil
from pathlib import Path

from genai.convert import ExportOptions, build_model

from ..adapter import add_adapter_inputs, write_adapter_file
from ..processes import run_logged
from ..shapes import SHAPES
from .base import InEnvironment

# Options for speed: int8 activations, logits of only the last token, a single copy of the tied matrix.
_OPTIONS = ("block_size=32", "accuracy_level=4", "prune_lm_head=true", "shared_embeddings=true", "hf_token=false")


class OnnxRuntimeGenai(InEnvironment):
    """onnxruntime-genai with INT4 weights, blocks of 32, `accuracy_level` 4."""

    name = "onnxruntime-genai"
    title = "onnxruntime-genai"
    form = f"its builder, `-p int4 -e cpu --extra_options {' '.join(_OPTIONS)}`"
    # The builder needs torch and transformers; onnxruntime-genai itself does not.
    packages = ("onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "transformers", "torch==2.13.0")
    worker = "generator_api.py"

    def build(self, work: Path, checkpoint: Path, output: Path) -> None:
        if SHAPES[checkpoint.name].config.get("num_experts"):  # our builder writes operators that both engines run
            build_model(checkpoint, output, ExportOptions(precision="int4", block_size=32))
            return
        self._run_builder(work, checkpoint, output)

    def _run_builder(self, work: Path, checkpoint: Path, output: Path, *options: str) -> None:
        builder = [self.venv(work).python, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint)]
        target = ["-o", str(output), "-p", "int4", "-e", "cpu", "-c", str(self.folder(work) / "cache")]
        run_logged([*builder, *target, "--extra_options", *_OPTIONS, *options], self.venv(work).log)

    def adapted(self, work: Path, shape: str) -> tuple[Path, Path]:
        return self.folder(work) / "adapted" / shape, self.folder(work) / "adapters" / f"{shape}.onnx_adapter"

    def build_adapter(self, work: Path, adapter: Path, shape: str) -> None:
        """Build the graph with inputs of rank 0 at every projection, as Olive does."""
        model, output = self.adapted(work, shape)
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(model, ignore_errors=True)
        # Query, key and value must be separate projections, as they are in the adapter.
        self._run_builder(work, work / "checkpoints" / shape, model, "disable_qkv_fusion=true")
        add_adapter_inputs(model / "model.onnx", adapter)
        write_adapter_file(adapter, output)
