"""The GGUF files of tools/hybrid_speed.py, in a small size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import genai
from genai.convert import build_model
from genai.engine.decoder import compute

pytest.importorskip("gguf")
from tools import hybrid_speed


@pytest.mark.parametrize("name", ["lfm2-1.2b", "qwen3.5-0.8b"])
def test_a_small_model_of_the_kind_runs(name: str, tmp_path: Path) -> None:
    shape = replace(hybrid_speed.MODELS[name], hidden=256, width=1024, layers=4, vocab=2048, attending=(1, 3))
    if "full_attention_interval" in shape.keys:
        shape = replace(shape, keys={**shape.keys, "full_attention_interval": 2})
    hybrid_speed.write_model(tmp_path / "model.gguf", shape)
    build_model(tmp_path / "model.gguf", tmp_path / "folder")
    with genai.Model(tmp_path / "folder") as model:
        sequence = model.decoder.open()
        sequence.append([1, 2, 3])
        rows = compute(model.decoder, [sequence], all_rows=True)[0]
        sequence.close()
    assert rows.shape == (3, 2048)
    assert np.isfinite(rows).all()
    assert (tmp_path / "model.gguf").stat().st_size < 12e6


def test_rows_of_large_matrices_differ(tmp_path: Path) -> None:
    import gguf

    shape = replace(hybrid_speed.MODELS["lfm2-1.2b"], hidden=256, width=1024, layers=1, vocab=2048, attending=(0,))
    hybrid_speed.write_model(tmp_path / "model.gguf", shape)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    table = gguf.dequantize(found["token_embd.weight"].data, gguf.GGMLQuantizationType.Q4_0)
    assert table.shape == (2048, 256)
    assert len(np.unique(table[:, 0])) > 8
    assert 0.2 < table.std() < 1
