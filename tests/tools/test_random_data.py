"""Data files of random numbers: a folder that was copied with its graph only can compute."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import genai
from genai.engine.decoder import compute
from tools import random_data


def test_a_graph_gets_the_data_it_asks_for(bundled_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_folder, folder, ignore=shutil.ignore_patterns("*.data"))
    assert random_data.fill(folder) > 1_000_000
    assert (folder / "model.onnx.data").stat().st_size == (bundled_folder / "model.onnx.data").stat().st_size
    with genai.Model(folder, quiet=True, context_size=64) as model:
        sequence = model.decoder.open()
        sequence.append([1, 2, 3])
        (logits,) = compute(model.decoder, [sequence])
        sequence.close()
    assert np.isfinite(np.asarray(logits)).all() and np.ptp(np.asarray(logits)) > 0


def test_a_type_that_is_not_known(tmp_path: Path) -> None:
    tensor = onnx.TensorProto(name="odd", data_type=onnx.TensorProto.INT64, dims=[2])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="model.onnx.data")
    graph = onnx.GraphProto(name="g", initializer=[tensor])
    (tmp_path / "model.onnx").write_bytes(onnx.ModelProto(graph=graph).SerializeToString())
    with pytest.raises(ValueError, match="odd: INT64 is not supported"):
        random_data.fill(tmp_path)
