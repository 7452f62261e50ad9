"""Tiny encoders that torch.onnx exported, with what sentence-transformers gets (tools/make_encoder_goldens.py)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

MODELS = Path(__file__).parent / "models"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy of a model's folder that a test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(MODELS / name, tmp_path / name))

    return copy
