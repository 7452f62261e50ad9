"""The external-data file: what was appended, where its description says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from genai.convert.graph_writer import DataFile


def test_tensors_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "bytes": rng.integers(0, 256, (3, 5), np.uint8),
        "floats": rng.standard_normal((7, 2), np.float32),
        "large": rng.standard_normal((512, 1024), np.float32),
    }
    with DataFile(tmp_path / "x.data") as data:
        described = [data.append(n, a.shape, a.dtype.type, [a[:1], a[1:]]) for n, a in arrays.items()]
    for tensor in described:
        offset = int({entry.key: entry.value for entry in tensor.external_data}["offset"])
        assert offset % (4096 if tensor.name == "large" else 64) == 0
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(tmp_path))
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), arrays[tensor.name])


def test_strided_chunks(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with DataFile(tmp_path / "x.data") as data:
        data.append("t", (4, 3), np.float32, [array.T])
    assert np.fromfile(tmp_path / "x.data", np.float32).tolist() == array.T.ravel().tolist()


def test_chunks_that_do_not_add_up(tmp_path: Path) -> None:
    with DataFile(tmp_path / "x.data") as data:
        with pytest.raises(ValueError, match=r"t \[3\] needs 12 bytes, but its chunks contain 8 bytes"):
            data.append("t", (3,), np.float32, [np.zeros(2, np.float32)])
        with pytest.raises(ValueError, match="a chunk of t is float64, expected float32"):
            data.append("t", (3,), np.float32, [np.zeros(3)])
