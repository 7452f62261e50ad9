"""Pointers of Git LFS in place of weights, as a clone without the large files has them."""

from __future__ import annotations

from pathlib import Path

import pytest

import genai
from genai.errors import GenaiError
from genai.onnx.external_data import ExternalDataError
from genai.weight_files.gguf import GgufModel
from genai.weight_files.safetensors import SafetensorsFile, read_safetensors
from genai.weight_files.torch_file import TorchFile

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", SafetensorsFile),
        ("adapter.safetensors", read_safetensors),
        ("pytorch_model.bin", TorchFile),
        ("model.gguf", GgufModel),
        ("model.onnx", lambda path: genai.InferenceSession(str(path))),
    ],
)
def test_pointers_are_named(name: str, read: object, tmp_path: Path) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(GenaiError, match=rf"{name} is a pointer of Git LFS, not the file itself") as caught:
        read(tmp_path / name)  # type: ignore[operator]
    assert "git lfs pull" in caught.value.fix


def test_external_data(tmp_path: Path) -> None:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3000])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3000])],
        [onnx.numpy_helper.from_array(np.ones(3000, np.float32), "w")],
    )
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    (tmp_path / "m.data").write_text(POINTER)
    with pytest.raises(ExternalDataError, match="is a pointer of Git LFS"):
        genai.InferenceSession(str(tmp_path / "m.onnx"))
