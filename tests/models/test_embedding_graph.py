"""Decoders with a separate embedding graph, as exporters of multimodal models write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
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
PICTURE = 63


def write_whole(folder: Path) -> Path:
    write_model_folder(folder, SPEC, ExportOptions(precision="fp32"), RandomWeights(SPEC))
    return folder


def write_split(folder: Path, *, plain: bool, change: Callable[[onnx.ModelProto], None] | None = None) -> Path:
    """Write the same model with its table in a separate graph, which inserts image features for image tokens."""
    write_whole(folder)
    decoder = onnx.load(folder / "model.onnx")
    (gather,) = (node for node in decoder.graph.node if node.op_type == "Gather" and "input_ids" in node.input)
    table, made = gather.input[0], gather.output[0]
    (tensor,) = (tensor for tensor in decoder.graph.initializer if tensor.name == table)
    decoder.graph.node.remove(gather)
    decoder.graph.initializer.remove(tensor)
    (ids,) = (value for value in decoder.graph.input if value.name == "input_ids")
    decoder.graph.input.remove(ids)
    width = numpy_helper.to_array(tensor).shape[1]
    decoder.graph.input.insert(0, helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, ["b", "s", width]))
    for node in decoder.graph.node:
        node.input[:] = ["inputs_embeds" if name == made else name for name in node.input]
    onnx.save(decoder, folder / "model.onnx", save_as_external_data=True, location="split.data")
    tensor.name = "table"
    looked_up = "inputs_embeds" if plain else "looked_up"
    nodes = [helper.make_node("Gather", ["table", "input_ids"], [looked_up], name="/lookup")]
    constants = [tensor]
    if not plain:
        nodes += [
            helper.make_node("Equal", ["input_ids", "picture"], ["is_picture"]),
            helper.make_node("NonZero", ["is_picture"], ["found"]),
            helper.make_node("Transpose", ["found"], ["places"], perm=[1, 0]),
            helper.make_node("ScatterND", [looked_up, "places", "image_features"], ["inputs_embeds"]),
        ]
        constants.append(numpy_helper.from_array(np.array(PICTURE, np.int64), "picture"))
    embedding = helper.make_model(
        helper.make_graph(
            nodes,
            "embedding",
            [
                helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"]),
                helper.make_tensor_value_info("image_features", TensorProto.FLOAT, ["rows", width]),
            ],
            [helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, ["b", "s", width])],
            constants,
        ),
        opset_imports=[one for one in decoder.opset_import if one.domain == ""],
        ir_version=decoder.ir_version,
    )
    if change:
        change(embedding)
    onnx.save(embedding, folder / "embedding.onnx")
    edit_config(folder, embedding={"filename": "embedding.onnx"}, vision={"filename": "vision.onnx"})
    return folder


def edit_config(folder: Path, **keys: Any) -> None:
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"].update(keys)
    path.write_text(json.dumps(config))


def tokens(folder: Path, prompt: list[int]) -> list[int]:
    with og.Model(folder, quiet=True) as model:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=24, do_sample=False)
        with og.Generator(model, params) as generator:
            generator.append_tokens(prompt)
            while not generator.is_done():
                generator.generate_next_token()
            return [int(token) for token in generator.get_sequence(0)]


@pytest.mark.parametrize("plain", [True, False])
def test_the_same_tokens_as_of_one_graph(tmp_path: Path, plain: bool) -> None:
    whole, split = write_whole(tmp_path / "whole"), write_split(tmp_path / "split", plain=plain)
    for prompt in ([5], [1, 9, 30, 2], list(range(3, 19))):
        assert tokens(split, prompt) == tokens(whole, prompt)


def test_a_plain_table_runs_in_batches(tmp_path: Path) -> None:
    with og.Model(write_split(tmp_path / "split", plain=True), quiet=True) as model:
        assert model.info.flattened


@pytest.mark.parametrize("plain", [True, False])
def test_a_table_with_another_operator_set(tmp_path: Path, plain: bool) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = 14

    whole, split = write_whole(tmp_path / "whole"), write_split(tmp_path / "split", plain=plain, change=change)
    assert tokens(split, [1, 9, 30, 2]) == tokens(whole, [1, 9, 30, 2])


def test_a_table_of_16_bits_beside_a_decoder_of_32_bits(tmp_path: Path) -> None:
    whole, split = write_whole(tmp_path / "whole"), write_split(tmp_path / "split", plain=True, change=_half_table)
    with og.Model(split, quiet=True) as model:
        assert model.info.flattened
    assert tokens(split, [1, 9, 30, 2]) == tokens(whole, [1, 9, 30, 2])


def test_without_the_graph_that_makes_embeddings(tmp_path: Path) -> None:
    folder = write_split(tmp_path / "split", plain=True)
    edit_config(folder, embedding={})
    refused(folder, og.UnsupportedModelError, "inputs_embeds", "model.embedding")


def test_a_file_outside_the_folder(tmp_path: Path) -> None:
    folder = write_split(tmp_path / "split", plain=True)
    for name in ("../embedding.onnx", str(tmp_path / "embedding.onnx")):
        edit_config(folder, embedding={"filename": name})
        refused(folder, og.ConfigError, "model.embedding.filename", name)


def test_a_missing_file(tmp_path: Path) -> None:
    folder = write_split(tmp_path / "split", plain=True)
    (folder / "embedding.onnx").unlink()
    refused(folder, og.GenaiError, "embedding.onnx")


def _other_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = model.graph.node[0].output[0] = "rows"


def _other_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version -= 1


def _another_operator(model: onnx.ModelProto) -> None:
    """Add an operator whose axes became an input in a later version."""
    _other_opset(model)
    model.graph.node.append(helper.make_node("ReduceMax", ["inputs_embeds"], ["largest"], axes=[0]))


def _old_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 12


def _half_table(model: onnx.ModelProto) -> None:
    """Store the table, which then has slightly different numbers, as float16."""
    for value in (model.graph.output[0], model.graph.input[1]):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    table = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float16)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(table, "table"))


def _whole_numbers(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT32


def _needs_a_picture(model: onnx.ModelProto) -> None:
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 576


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_output, "rows"),
        (_another_operator, "ai.onnx"),
        (_old_opset, "ai.onnx"),
        (_whole_numbers, "INT32"),
        (_needs_a_picture, "image_features"),
    ],
)
def test_graphs_that_do_not_fit(tmp_path: Path, change: Callable[[onnx.ModelProto], None], words: str) -> None:
    refused(write_split(tmp_path / "split", plain=True, change=change), og.UnsupportedModelError, words)


def refused(folder: Path, error: type[og.GenaiError], *words: str) -> None:
    with pytest.raises(error) as caught:
        og.Model(folder, quiet=True)
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.why and caught.value.fix
