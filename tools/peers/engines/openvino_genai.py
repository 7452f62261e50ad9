"""OpenVINO GenAI with models exported by optimum-intel and nncf."""

from __future__ import annotations

from pathlib import Path

from ..processes import run_logged
from .base import InEnvironment

_OPTIONS = ("--weight-format", "int4", "--group-size", "32", "--sym", "--ratio", "1.0", "--all-layers")


class OpenVinoGenai(InEnvironment):
    """OpenVINO GenAI with symmetric INT4 weights in groups of 32, including head and embeddings, like other engines."""

    name = "openvino-genai"
    title = "OpenVINO GenAI"
    form = f"`optimum-cli export openvino {' '.join(_OPTIONS)}`"
    packages = ("openvino-genai", "openvino", "optimum-intel", "nncf", "transformers", "torch==2.13.0")
    worker = "openvino_pipeline.py"

    def install(self, work: Path) -> None:
        super().install(work)
        # torchvision is an indirect dependency, which is not needed. Its newest version does not load with this torch.
        self.venv(work).pip("uninstall", "--yes", "torchvision")

    def build(self, work: Path, checkpoint: Path, output: Path) -> None:
        export = [self.venv(work).program("optimum-cli"), "export", "openvino", "-m", str(checkpoint)]
        task = ["--task", "text-generation-with-past"]
        run_logged([*export, *task, *_OPTIONS, str(output)], self.venv(work).log)
