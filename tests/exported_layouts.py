"""Small random models in the layouts of exporters that write no genai_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import genai as og
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from tools.random_weights import RandomWeights

SPEC = DecoderSpec(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_size=16,
    context_length=64,
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}
# The precision of the builder for each precision of transformers.js.
BUILT = {"fp32": "fp32", "fp16": "fp16", "q4": "int4", "int8": "int8"}
Change = Callable[[onnx.ModelProto], Any]


def whole(folder: Path, precision: str = "fp32") -> Path:
    """Write the model as a folder with genai_config.json."""
    write_model_folder(folder, SPEC, ExportOptions(precision=BUILT[precision]), RandomWeights(SPEC))  # type: ignore[arg-type]
    return folder


def describe_as(folder: Path, **changes: Any) -> Path:
    """Write config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def graph_of(precision: str, scratch: Path) -> onnx.ModelProto:
    """Return the model's graph in a precision, with its weights inside."""
    model = onnx.load(whole(scratch, precision) / "model.onnx")
    shutil.rmtree(scratch)
    for value in (*model.graph.input, *model.graph.output):
        if "past" in value.name or "present" in value.name:  # exporters write the size of heads
            value.type.tensor_type.shape.dim[3].dim_value = SPEC.head_size
    return model


def exported(folder: Path, *graphs: str, change: Change | None = None, external: bool = False, **changes: Any) -> Path:
    """Write the model in the layout of transformers.js or optimum.

    Args:
        graphs: paths of graphs, such as "onnx/model_q4.onnx"; the last part of each is its precision.
        change: changes each graph.
        external: True to write the weights to a file beside each graph.
        changes: changes of config.json.
    """
    describe_as(folder, **changes)
    for name in graphs:
        precision = name.removesuffix(".onnx").rpartition("_")[2]
        model = graph_of(precision if precision in BUILT else "fp32", folder / "scratch")
        if change:
            change(model)
        save(model, folder / name, external=external)
    return folder


def save(model: onnx.ModelProto, path: Path, *, external: bool = False) -> None:
    path.parent.mkdir(exist_ok=True)
    onnx.save(
        model, path, save_as_external_data=external, location=f"{path.name}_data", size_threshold=0,
        convert_attribute=False,
    )  # fmt: skip


def without_past(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the decoder of prompts: its past is empty."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for value in [value for value in model.graph.input if "past" in value.name]:
        heads, size = (value.type.tensor_type.shape.dim[axis].dim_value for axis in (1, 3))
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, heads, 0, size), dtype), value.name))
        model.graph.input.remove(value)
    return model


def merged(with_past: onnx.ModelProto, prompts: onnx.ModelProto) -> onnx.ModelProto:
    """Return both decoders as the branches of one graph, as optimum merged them: the weights are outside."""
    outer = onnx.ModelProto.FromString(with_past.SerializeToString())
    branches = []
    for model, name in ((with_past, "with_past"), (prompts, "prompt")):
        nodes = onnx.ModelProto.FromString(model.SerializeToString()).graph.node
        inner = helper.make_graph(list(nodes), name, [], list(model.graph.output))
        shared = {tensor.name for tensor in outer.graph.initializer}
        inner.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name not in shared)
        branches.append(inner)
    results = [value.name for value in with_past.graph.output]
    for inner in branches:  # a subgraph may not define a name of the outer graph
        for value in inner.output:
            renamed(inner, value.name, f"{inner.name}/{value.name}")
    del outer.graph.node[:]
    node = helper.make_node("If", ["use_cache_branch"], results, "choose", None, None)
    node.attribute.extend(
        helper.make_attribute(name, graph) for name, graph in zip(("then_branch", "else_branch"), branches, strict=True)
    )
    outer.graph.node.append(node)
    outer.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    return outer


def renamed(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in graph.output:
        value.name = new if value.name == old else value.name


def split_embedding(model: onnx.ModelProto) -> onnx.ModelProto:
    """Take the table of embeddings out of a decoder, and return the graph that looks up embeddings."""
    graph = model.graph
    (gather,) = (node for node in graph.node if node.op_type == "Gather" and "input_ids" in node.input)
    (table,) = (tensor for tensor in graph.initializer if tensor.name == gather.input[0])
    (ids,) = (value for value in graph.input if value.name == "input_ids")
    graph.node.remove(gather)
    graph.initializer.remove(table)
    graph.input.remove(ids)
    embeds = helper.make_tensor_value_info("inputs_embeds", table.data_type, ["batch", "sequence", table.dims[1]])
    graph.input.insert(0, embeds)
    for node in graph.node:
        node.input[:] = ["inputs_embeds" if name == gather.output[0] else name for name in node.input]
    node = helper.make_node("Gather", [table.name, "input_ids"], ["inputs_embeds"])
    return helper.make_model(
        helper.make_graph([node], "embed", [ids], [embeds], [table]),
        opset_imports=[one for one in model.opset_import if not one.domain],
        ir_version=model.ir_version,
    )


def logits(folder: Path, prompt: list[int]) -> list[Any]:
    """Return the logits after the prompt, and after one token more."""
    with og.Model(folder, quiet=True, accuracy="fp32") as model:
        generator = og.Generator(model, og.GeneratorParams(model))
        found = []
        for tokens in (prompt, [7]):
            generator.append_tokens(tokens)
            found.append(np.array(generator.get_logits()).reshape(-1)[-SPEC.vocab_size :])
        return found
