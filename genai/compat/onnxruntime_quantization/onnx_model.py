"""ONNXModel: a quantiser's result, which scripts inspect and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from ...errors import NotSupportedYetError
from ...onnx.ir import OnnxModel
from ...onnx.reader import read_model
from ...onnx.writer import to_proto
from ...quantize.onnx_graph.writing import write_quantised


class ONNXModel:
    """A model that is read once.

    Args:
        model: path, onnx.ModelProto, or a genai.onnx model.
    """

    def __init__(self, model: str | Path | onnx.ModelProto | OnnxModel) -> None:
        self._model = model if isinstance(model, OnnxModel) else read_model(model)

    @property
    def ir(self) -> OnnxModel:
        """The underlying genai.onnx model."""
        return self._model

    @property
    def model(self) -> onnx.ModelProto:
        """The model as protobuf, created on each access: changes to it do not affect this object."""
        return to_proto(self._model)

    def graph(self) -> onnx.GraphProto:
        """Return the main graph of `model`."""
        return self.model.graph

    def nodes(self) -> Any:
        """Return the nodes of `model`."""
        return self.model.graph.node

    def initializer(self) -> Any:
        """Return the constants of `model`."""
        return self.model.graph.initializer

    def opset_import(self) -> Any:
        """Return the operator sets of `model`."""
        return self.model.opset_import

    def ir_version(self) -> int:
        """Return the ONNX IR version."""
        return self._model.ir_version

    def save_model_to_file(self, output_path: str | Path, use_external_data_format: bool = False) -> None:
        """Write the model.

        Args:
            output_path: path to write to.
            use_external_data_format: True to write weights to a separate file, `output_path` + ".data".

        Raises:
            GraphError: a single file would exceed 2 GiB.
            ModelFolderError: the file cannot be written.
        """
        write_quantised(self._model, output_path, use_external_data_format)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotSupportedYetError(
            f"ONNXModel.{name} is not supported",
            "this class cannot edit graphs",
            "edit `model` with genai.onnx or onnx, and create a new ONNXModel from the result",
        )
