"""Reads a decoder's ONNX file, joins an embedding graph, sets constant inputs, and applies a configured window."""

from __future__ import annotations

import numpy as np

from ..errors import UnsupportedModelError
from ..onnx.ir import Graph, OnnxModel, OnnxTensor
from ..onnx.reader import read_model
from .config import Config
from .embedding_graph import join_embedding
from .identity import LoadedFiles
from .sliding_window import apply_sliding_window


def read_decoder_file(config: Config, files: LoadedFiles | None = None) -> OnnxModel:
    """Read the decoder's graph. Files from Config.add_model_data take precedence over files in the folder.

    Args:
        config: the folder's configuration.
        files: records the files, and raises ModelFolderError if they differ from files that it recorded earlier.
    """
    model = _read_graph(config, config.model.decoder.filename, files)
    _settle_inputs(model.graph)
    apply_sliding_window(model.graph, config.model)
    names = config.model.decoder.names
    if any(value.name == names.inputs_embeds for value in model.graph.inputs):
        if not config.model.embedding:
            raise UnsupportedModelError(
                f"{config.model.decoder.filename} takes {names.inputs_embeds!r} instead of token ids",
                "model.embedding in genai_config.json is not set to a graph that computes token embeddings",
                "set model.embedding to the file of that graph, or export the model with its embedding",
            )
        join_embedding(model, _read_graph(config, config.model.embedding, files), names)
    return model


def _read_graph(config: Config, name: str, files: LoadedFiles | None) -> OnnxModel:
    data, path, opened = config.model_data, config.folder / name, None if files is None else files.note
    if name in data:
        return read_model(data[name], external_data=data, external_folder=path.parent, opened=opened)
    return read_model(path, external_data=data, opened=opened)


def _settle_inputs(graph: Graph) -> None:
    """Set `num_logits_to_keep` (which transformers also exports as "onnx::Neg_67") to 0, which means all logits."""
    for value in list(graph.inputs):
        name = value.name
        if name not in graph.initializers and (name == "num_logits_to_keep" or name.startswith("onnx::Neg_")):
            shape = getattr(value.type, "shape", None) or ()
            zeros = np.zeros([size if isinstance(size, int) else 1 for size in shape], np.int64)
            graph.add_initializer(OnnxTensor.from_array(name, zeros))
            graph.inputs.remove(value)
    graph.invalidate()
