"""The file that is measured runs in this engine, and has the types of llama.cpp's mixture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import genai
from genai.convert import build_model
from genai.weight_files.gguf import GgufFile
from tools import gguf_speed


def test_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HIDDEN": 2048, "LAYERS": 8, "WIDTH": 512, "VOCAB": 1024}.items():
        monkeypatch.setattr(gguf_speed, name, value)
    gguf_speed.write_q4_k_m(tmp_path / "a.gguf")
    kinds = Counter(tensor.kind for tensor in GgufFile(tmp_path / "a.gguf").tensors.values() if tensor.kind != "F32")
    assert kinds == {"Q4_K": 8 * 7 - 8, "Q6_K": 8 + 1}  # two matrices of four layers, and the embedding
    build_model(tmp_path / "a.gguf", tmp_path / "model")
    with genai.LLM(tmp_path / "model") as llm:
        (completion,) = llm.generate([np.arange(5).tolist()], max_tokens=3, min_tokens=3)
        assert len(completion.token_ids) == 3
