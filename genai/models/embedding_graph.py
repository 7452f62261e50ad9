"""Decoders that read embeddings: joins the graph that computes embeddings from token ids to the decoder's graph.

Exporters of multimodal models write two graphs. One graph looks up token embeddings and inserts the features of images
and audio; the other is the decoder. Joined, the graphs form a decoder of token ids. This toolkit supports only text, so
the inputs for image and audio features have no rows.
"""

from __future__ import annotations

import numpy as np

from ..errors import UnsupportedModelError
from ..onnx.decoder_names import GraphNames
from ..onnx.ir import Graph, OnnxModel, OnnxTensor, Value, make_node
from ..onnx.types import TensorType

# Types of embeddings that are converted to the type that the decoder reads.
_FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16"}
_EXPORT = "export both graphs of the folder again with the same exporter"
# From this version of ai.onnx on, these operators compute the same results in all versions.
_STEADY_SINCE = 13
_STEADY = frozenset(
    "Add And Cast Concat Constant ConstantOfShape CumSum Div Equal Expand Gather GatherND Identity Mul Neg NonZero Not "
    "Or Pow Reshape ScatterND Shape Slice Sqrt Squeeze Sub Tanh Transpose Unsqueeze Where".split()
)


def join_embedding(decoder: OnnxModel, embedding: OnnxModel, names: GraphNames) -> None:
    """Insert the nodes of `embedding` before the nodes of `decoder`, which then reads token ids.

    Args:
        decoder: the decoder's graph; it is modified.
        embedding: the embedding graph.
        names: names of token ids and embeddings in both graphs.

    Raises:
        UnsupportedModelError: an input or output is missing or has a different type, an input cannot be empty, or the
            graphs have different opsets, between which an operator of the embedding graph may have changed. Embeddings
            of another float type are converted.
    """
    _check(decoder, embedding, names)
    graph, before = decoder.graph, embedding.graph
    _convert_output(before, names.inputs_embeds, _typed_input(graph, names.inputs_embeds))
    defined = [value.name for value in before.inputs] + [*before.initializers, *before.sparse_initializers]
    defined += [name for node in before.nodes for name in node.outputs if name]
    for name in dict.fromkeys(defined):
        if name not in (names.input_ids, names.inputs_embeds):
            before.rename(name, graph.fresh_name(f"embedding/{name}"))
    (ids,) = (value for value in before.inputs if value.name == names.input_ids)
    nothing = [
        _empty_input(value) for value in before.inputs if value is not ids and value.name not in before.initializers
    ]
    graph.inputs[:] = [value for value in graph.inputs if value.name not in (names.input_ids, names.inputs_embeds)]
    graph.inputs.insert(0, ids)
    graph.nodes[:] = [*before.nodes, *graph.nodes]
    graph.values.update({name: value for name, value in before.values.items() if name != names.inputs_embeds})
    graph.sparse_initializers.update(before.sparse_initializers)
    for tensor in (*before.initializers.values(), *nothing):
        graph.initializers[tensor.name] = tensor
    decoder.functions = {**embedding.functions, **decoder.functions}
    decoder.opset_imports = {**embedding.opset_imports, **decoder.opset_imports}
    decoder.files = (*decoder.files, *embedding.files)
    graph.invalidate()


def _check(decoder: OnnxModel, embedding: OnnxModel, names: GraphNames) -> None:
    outputs = {value.name: value for value in embedding.graph.outputs}
    ids = _typed_input(embedding.graph, names.input_ids)
    if names.inputs_embeds not in outputs or ids is None:
        raise UnsupportedModelError(
            f"the embedding graph computes {', '.join(outputs) or 'nothing'} from "
            f"{', '.join(value.name for value in embedding.graph.inputs) or 'nothing'}",
            f"{names.inputs_embeds!r} from {names.input_ids!r} is expected",
            "set the names of these tensors in genai_config.json under model.decoder.inputs and model.embedding",
        )
    for kind, first, second in (
        (names.inputs_embeds, outputs[names.inputs_embeds], _typed_input(decoder.graph, names.inputs_embeds)),
        (names.input_ids, ids, _typed_input(decoder.graph, names.input_ids)),
    ):
        types = [value.type.dtype.name for value in (first, second) if value and isinstance(value.type, TensorType)]
        if len(set(types)) > 1 and not _FLOATS.issuperset(types):
            raise UnsupportedModelError(
                f"{kind!r} is {types[0]} in the embedding graph and {types[1]} in the decoder",
                "the two types must be equal",
                _EXPORT,
            )
    both = set(decoder.opset_imports) & set(embedding.opset_imports)
    other = [f"{name or 'ai.onnx'}" for name in both if not _is_same_version(decoder, embedding, name)]
    shared = set(decoder.functions) & set(embedding.functions)
    if other or shared:
        names_of_differences = ", ".join([*other, *(name for _, name, _ in shared)])
        raise UnsupportedModelError(
            f"the embedding graph and the decoder have different versions of {names_of_differences}",
            "both graphs must use the same versions, because they are merged, and an operator may have changed between "
            "the versions",
            _EXPORT,
        )


def _is_same_version(decoder: OnnxModel, embedding: OnnxModel, domain: str) -> bool:
    """Return True if the embedding graph computes the same with the decoder's version of a domain."""
    versions = {model.opset_imports[domain] for model in (decoder, embedding)}
    used = {node.op_type for graph in embedding.graphs() for node in graph.nodes if node.key[0] == domain}
    is_steady = not domain and min(versions) >= _STEADY_SINCE and used <= _STEADY
    return len(versions) == 1 or is_steady


def _convert_output(graph: Graph, name: str, wanted: Value | None) -> None:
    """Convert the output `name` of a graph to the float type of an input of another graph, if the types differ."""
    (output,) = (value for value in graph.outputs if value.name == name)
    types = [value.type for value in (output, wanted) if value and isinstance(value.type, TensorType)]
    if len(types) < 2 or types[0].dtype is types[1].dtype:
        return
    inner = graph.fresh_name(f"{name}/stored")
    graph.rename(name, inner)
    graph.nodes.append(make_node("Cast", [inner], [name], name=name, to=int(types[1].dtype)))
    graph.invalidate()


def _typed_input(graph: Graph, name: str) -> Value | None:
    return next((value for value in graph.inputs if value.name == name), None)


def _empty_input(value: Value) -> OnnxTensor:
    """Return an empty tensor for an input of image or audio features."""
    shape, dtype = getattr(value.type, "shape", None), getattr(value.type, "dtype", None)
    if dtype is None or not shape or all(isinstance(size, int) and size > 0 for size in shape):
        raise UnsupportedModelError(
            f"input {value.name!r} of the embedding graph has no axis that may be empty",
            "the input requires image or audio features, which are not supported",
            "use a folder with an embedding graph that also accepts text alone",
        )
    first = next(axis for axis, size in enumerate(shape) if not isinstance(size, int) or size == 0)
    sizes = [0 if axis == first else size if isinstance(size, int) else 1 for axis, size in enumerate(shape)]
    return OnnxTensor.from_array(value.name, np.zeros(sizes, dtype.numpy_dtype))
