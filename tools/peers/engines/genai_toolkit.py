"""This project, used through its public API, with the interpreter that runs the comparison."""

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
    """Our engine: `genai build --precision int4 --block-size 32`; tied head and embeddings are one INT4 matrix."""

    name = "genai"
    title = "genai"
    form = "`genai build --precision int4 --block-size 32`"

    def install(self, work: Path) -> None:
        """Do nothing: the engine is this checkout."""

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
        """Do nothing: this engine loads PEFT's format."""

    def command(self, work: Path, job: Job) -> list[str]:
        return [sys.executable, str(WORKERS / "generator_api.py"), self.name, json.dumps(asdict(job))]

    def environment(self, work: Path) -> Mapping[str, str]:
        """Put this checkout first on the import path, even if the package is also installed."""
        return {"PYTHONPATH": str(_ROOT)}


def _commit() -> str:
    """Return the commit, because the code changes more often than the version number; "" outside a repository."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
