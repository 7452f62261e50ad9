"""A model as scripts hold it between steps: what a quantiser gives, to be looked at and written."""

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
    """A model, read once.

    Args:
        model: path, onnx.ModelProto, or a model of ours.
    """

    def __init__(self, model: str | Path | onnx.ModelProto | OnnxModel) -> None:
        self._model = model if isinstance(model, OnnxModel) else read_model(model)

    @property
    def ir(self) -> OnnxModel:
        """The model of ours behind it."""
        return self._model

    @property
    def model(self) -> onnx.ModelProto:
        """The model as protobuf, made anew each time: changes of it are not seen here."""
        return to_proto(self._model)

    def graph(self) -> onnx.GraphProto:
        """The main graph of `model`."""
        return self.model.graph

    def nodes(self) -> Any:
        """The nodes of `model`."""
        return self.model.graph.node

    def initializer(self) -> Any:
        """The constants of `model`."""
        return self.model.graph.initializer

    def opset_import(self) -> Any:
        """The operator sets of `model`."""
        return self.model.opset_import

    def ir_version(self) -> int:
        """The ONNX IR version."""
        return self._model.ir_version

    def save_model_to_file(self, output_path: str | Path, use_external_data_format: bool = False) -> None:
        """Write the model.

        Args:
            use_external_data_format: weights go into a file beside it, `output_path` + ".data".

        Raises:
            GraphError: more than 2 GiB for one file. ModelFolderError: it cannot be written.
        """
        write_quantised(self._model, output_path, use_external_data_format)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotSupportedYetError(
            f"ONNXModel.{name} is not supported",
            "edits of graphs are made with genai.onnx, or with onnx on `model`",
            "change `model`, and make a new ONNXModel of it",
        )
