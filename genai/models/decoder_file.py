"""Reads a decoder's ONNX file, joins an embedding graph, sets constant inputs, and applies a configured window."""

from __future__ import annotations

import numpy as np

from genai.common.log import logger

from ..errors import UnsupportedModelError
from ..onnx.ir import DataType, Graph, OnnxModel, OnnxTensor, Value, make_node
from ..onnx.node import MS
from ..onnx.reader import read_model
from ..onnx.types import TensorType
from .branch_trial import check_prompt
from .cache_branch import has_branches, keep_branch
from .config import Config
from .embedding_graph import join_embedding
from .identity import LoadedFiles
from .sliding_window import apply_sliding_window

_log = logger(__name__)
# Positions of models that read images: time, height and width.
_AXES = 3
# The inputs of GroupQueryAttention with the scales of a quantised cache.
_CACHE_SCALES = (12, 13)
# Graphs with a past that have computed a prompt like their counterparts in this process.
_TRIED: set[tuple[tuple[str, object, object], ...]] = set()


def read_decoder_file(config: Config, files: LoadedFiles | None = None) -> OnnxModel:
    """Read the decoder's graph. Files from Config.add_model_data take precedence over files in the folder.

    Args:
        config: the folder's configuration.
        files: records the files, and raises ModelFolderError if they differ from files that it recorded earlier.
    """
    model = _read_prompt_decoder(config, files)
    _settle_inputs(model.graph)
    _settle_positions(model.graph, config.model.decoder.names.position_ids)
    _settle_cache(model.graph)
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


def _read_prompt_decoder(config: Config, files: LoadedFiles | None) -> OnnxModel:
    """Read the graph. If it is one of two graphs or has two branches, return the one with a past, after a trial."""
    name = config.model.decoder.filename
    model = _read_graph(config, name, files)
    other = config.exported.variant.without_past if config.exported else ""
    is_merged = has_branches(model.graph)
    if not is_merged and not other:
        return model
    key = tuple(_stamp(config, file) for file in (name, other) if file)
    if key not in _TRIED:
        # The trial changes the graphs, so it reads its own.
        models = [_read_graph(config, file, files) for file in (name, other or name)]
        for one, with_past in zip(models, (True, False), strict=True):
            if is_merged:
                keep_branch(one.graph, with_past=with_past)
            _settle_inputs(one.graph)
        check_prompt(config, *models)
        _TRIED.add(key)
    if is_merged:
        keep_branch(model.graph)
    return model


def _stamp(config: Config, name: str) -> tuple[str, object, object]:
    """Return the identification of a graph's contents."""
    if name in config.model_data:
        return name, config.model_data[name], None
    facts = (config.folder / name).stat()
    return str(config.folder / name), facts.st_mtime_ns, facts.st_size


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


def _settle_positions(graph: Graph, name: str) -> None:
    """Replace positions in time, height and width [3, batch, tokens] with positions of text, which are equal."""
    value = next((value for value in graph.inputs if value.name == name), None)
    if value is None or not isinstance(value.type, TensorType) or value.type.shape is None:
        return
    shape = list(value.type.shape)
    if len(shape) != 3 or shape[0] != _AXES:
        return
    axis, row, inner = (graph.fresh_name(f"{name}/{part}") for part in ("axis", "row", "axes"))
    kinds = (MS, "MRotaryEmbedding"), (MS, "RotaryEmbedding")
    rotations = [node for node in graph.consumers(name) if node.key[:2] in kinds]
    graph.rename(name, inner)
    for node in rotations:  # with equal positions, the sections of a head make no difference
        node.op_type = "RotaryEmbedding"
        node.inputs[1] = name
        for attribute in ("mrope_section", "mrope_layout"):
            node.attributes.pop(attribute, None)
    graph.inputs[graph.inputs.index(value)] = Value(name, TensorType(value.type.dtype, tuple(shape[1:])))
    graph.add_initializer(OnnxTensor.from_array(axis, np.array([0], np.int64)))
    nodes = make_node("Unsqueeze", [name, axis], [row]), make_node("Concat", [row] * _AXES, [inner], axis=0)
    graph.nodes[:0] = nodes
    graph.invalidate()


def _settle_cache(graph: Graph) -> None:
    """Remove the quantisation of keys and values from a graph, because the type of the cache is an option here."""
    removed: set[str] = set()
    for node in graph.nodes:
        kinds = {str(node.attribute(name, "NONE")) for name in ("k_quant_type", "v_quant_type")}
        if node.key[:2] != (MS, "GroupQueryAttention") or kinds == {"NONE"}:
            continue
        for name in ("k_quant_type", "v_quant_type", "kv_cache_bit_width"):
            node.attributes.pop(name, None)
        node.inputs = [name if index not in _CACHE_SCALES else "" for index, name in enumerate(node.inputs)]
        removed |= {*node.inputs[3:5], *node.outputs[1:3]}
    if removed:
        for values in (graph.inputs, graph.outputs):
            values[:] = [_as_float_cache(value) if value.name in removed else value for value in values]
        graph.invalidate()
        _log.info("the quantised KV cache of the graph is not used; the cache has the type of kv_dtype")


def _as_float_cache(value: Value) -> Value:
    """Return a past or present tensor [batch, heads, tokens, size] as float32; 4-bit tensors pack two values."""
    shape = value.type.shape if isinstance(value.type, TensorType) else None
    return Value(value.name, TensorType(DataType.FLOAT, None if shape is None else (*shape[:-1], "head_size")))
