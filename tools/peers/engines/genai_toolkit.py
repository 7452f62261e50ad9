"""This project, through its public API, in the interpreter that runs the comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import genai
from genai.convert import ExportOptions, build_model

from ..cases import Job
from ..processes import PeerError
from .base import WORKERS, Engine

_ROOT = WORKERS.parent.parent.parent


class GenaiToolkit(Engine):
    """Ours: `genai build --precision int4 --block-size 32`; the tied head and the embeddings are one INT4 matrix."""

    name = "genai"
    title = "genai"
    form = "`genai build --precision int4 --block-size 32`"

    def install(self, work: Path) -> None:
        """Nothing to do: it is this checkout."""

    def versions(self, work: Path) -> dict[str, str]:
        packages = {name: version(name) for name in ("numpy", "numba", "llvmlite")}
        commit = _commit()
        return {"genai": genai.__version__} | ({"commit": commit} if commit else {}) | packages

    def build(self, work: Path, checkpoint: Path, output: Path) -> None:
        try:
            build_model(checkpoint, output, ExportOptions(precision="int4", block_size=32))
        except genai.GenaiError as error:
            raise PeerError(str(error)) from error

    def adapted(self, work: Path, shape: str) -> tuple[Path, Path]:
        return self.model(work, shape), work / "adapters" / shape

    def build_adapter(self, work: Path, adapter: Path, shape: str) -> None:
        """Nothing to do: PEFT's form is read."""

    def command(self, work: Path, job: Job) -> list[str]:
        return [sys.executable, str(WORKERS / "generator_api.py"), self.name, json.dumps(asdict(job))]

    def environment(self, work: Path) -> Mapping[str, str]:
        """This checkout comes first, wherever the package is installed from."""
        return {"PYTHONPATH": str(_ROOT)}


def _commit() -> str:
    """What is measured, since a version number changes more slowly than code; empty outside a repository."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
