"""Folders of exporters without genai_config.json: which graph is used, what is derived, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import genai as og
from genai.cli.app import run
from genai.convert.resolve import BuildHooks, resolve_model
from genai.doctor.model_info import describe
from genai.errors import ConfigError, ExternalDataError, ModelFolderError, OptionError, UnsupportedModelError
from genai.quantize.assemble import write_config
from tests.exported_layouts import (
    CONFIG,
    Change,
    describe_as,
    exported,
    graph_of,
    logits,
    merged,
    renamed,
    save,
    split_embedding,
    whole,
    without_past,
)  # fmt: skip

PROMPT = [5, 9, 30, 2, 11]


def refused(path: Path, error: type[og.GenaiError], *words: str) -> None:
    with pytest.raises(error) as caught:
        og.Model(path, quiet=True)
    text = str(caught.value)
    assert caught.value.why and caught.value.fix, text
    for word in words:
        assert word in text, text
    assert "genai_config.json" not in text, text


@pytest.mark.parametrize(
    ("graphs", "used"),
    [
        (["model.onnx"], "model.onnx"),
        (["onnx/model.onnx"], "onnx/model.onnx"),
        (["onnx/model.onnx", "onnx/model_q4.onnx"], "onnx/model_q4.onnx"),
        (["onnx/model_fp16.onnx", "onnx/model_int8.onnx"], "onnx/model_int8.onnx"),
        (["my_export.onnx"], "my_export.onnx"),
    ],
)
def test_the_graph_that_is_used(tmp_path: Path, graphs: list[str], used: str) -> None:
    folder = exported(tmp_path / "model", *graphs)
    with og.Model(folder, quiet=True) as model:
        assert model.config.model.decoder.filename == used
        assert model.info.flattened


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "q4", "int8"])
def test_the_logits_of_the_whole_folder(tmp_path: Path, precision: str, external: bool) -> None:
    name = f"onnx/model_{precision}.onnx".replace("_fp32", "")
    folder = exported(tmp_path / "model", name, external=external)
    expected = logits(whole(tmp_path / "whole", precision), PROMPT)
    for found, right in zip(logits(folder, PROMPT), expected, strict=True):
        np.testing.assert_array_equal(found, right)


def keep_last_rows(model: onnx.ModelProto) -> None:
    """Compute logits of the last `num_logits_to_keep` tokens only; 0 stands for all, because -0 is the first row."""
    graph = model.graph
    head = next(node for node in graph.node if "logits" in node.output)
    constants = {"axis": [0], "end": [2**63 - 1], "rows": [1]}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in constants.items())
    graph.input.append(helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []))
    place = list(graph.node).index(head)
    for node in (
        helper.make_node("Slice", [head.input[0], "start", "end", "rows"], ["kept"]),
        helper.make_node("Unsqueeze", ["negative", "axis"], ["start"]),
        helper.make_node("Neg", ["num_logits_to_keep"], ["negative"]),
    ):
        graph.node.insert(place, node)
    head.input[0] = "kept"


def test_an_input_that_selects_rows_of_logits(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", "onnx/model_q4.onnx", change=keep_last_rows)
    with og.Model(folder, quiet=True) as model:
        assert model.info.flattened, model.info.reason
    expected = logits(whole(tmp_path / "whole", "q4"), PROMPT)
    np.testing.assert_array_equal(logits(folder, PROMPT), expected)


def test_what_is_derived(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", "onnx/model_q4.onnx")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9, "max_length": 20, "do_sample": True})
    )
    config = og.Config(folder)
    assert config.search == {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
    model = config.model
    assert (model.type, model.vocab_size, model.context_length) == ("llama", 64, 64)
    assert (model.bos_token_id, model.eos_token_ids, model.pad_token_id) == (1, (2, 3), None)
    decoder = model.decoder
    assert (decoder.num_hidden_layers, decoder.num_key_value_heads, decoder.head_size) == (2, 1, 16)
    assert (decoder.num_attention_heads, decoder.hidden_size) == (2, 32)
    derived = describe(folder)["derived"]
    assert "search.temperature" in derived["values_by_source"]["generation_config.json"]
    assert "model.context_length" in derived["values_by_source"]["config.json"]
    assert "model.decoder.head_size" in derived["values_by_source"]["onnx/model_q4.onnx"]
    (folder / "onnx/genai_config.json").write_text(json.dumps(derived["config"]).replace("onnx/", ""))
    assert og.Config(folder / "onnx").model.decoder.names == decoder.names


def test_the_end_of_the_tokenizer_ends_replies(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", "model.onnx")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": {"9": {"content": "<|im_end|>"}}})
    )
    assert og.Config(folder).model.eos_token_ids == (2, 3, 9)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 8, "content": "<|end|>"}]}))
    assert og.Config(folder).model.eos_token_ids == (2, 3, 8)


def test_the_tokenizer_limits_a_model_without_limit(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", "model.onnx", max_position_embeddings=None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 48}))
    assert og.Config(folder).model.context_length == 48
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1e30}))
    refused(folder, ConfigError, "max_position_embeddings is missing")


def test_other_names_of_inputs_and_keys(tmp_path: Path) -> None:
    """GPT-2 spells its keys differently, and torch.onnx names states as its caller wishes."""

    def rename(model: onnx.ModelProto) -> None:
        pairs = {"input_ids": "tokens", "attention_mask": "mask"}
        for layer in range(2):
            for kind in ("key", "value"):
                pairs[f"past_key_values.{layer}.{kind}"] = f"past_{kind}_{layer}"
                pairs[f"present.{layer}.{kind}"] = f"present_{kind}_{layer}_out"
        for node in model.graph.node:
            node.input[:] = [pairs.get(name, name) for name in node.input]
            node.output[:] = [pairs.get(name, name) for name in node.output]
        for value in (*model.graph.input, *model.graph.output):
            value.name = pairs.get(value.name, value.name)

    spelled = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
    others = dict.fromkeys(
        ["num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings", "num_key_value_heads"]
    )
    folder = exported(tmp_path / "model", "model.onnx", change=rename, **others, **spelled)
    expected = logits(whole(tmp_path / "whole"), PROMPT)
    np.testing.assert_array_equal(logits(folder, PROMPT), expected)


def test_a_text_decoder_inside_a_larger_model(tmp_path: Path) -> None:
    inner = {name: value for name, value in CONFIG.items() if name not in ("architectures", "eos_token_id")}
    folder = exported(
        tmp_path / "model", "model.onnx", **{**dict.fromkeys(inner), "text_config": inner, "model_type": "both"}
    )
    config = og.Config(folder)
    assert (config.model.type, config.model.context_length) == ("both", 64)


def test_a_graph_by_its_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = exported(tmp_path / "model", "onnx/model.onnx", "onnx/model_q4.onnx")
    caplog.set_level("INFO", "genai")
    with og.Model(folder / "onnx/model.onnx") as model:
        assert model.folder == folder
        assert model.config.model.decoder.filename == "onnx/model.onnx"
    assert "using the graph onnx/model.onnx; the others are onnx/model_q4.onnx" in caplog.text


@pytest.mark.parametrize(
    ("precision", "graph"), [("q4", "model_q4"), ("int4", "model_q4"), ("fp32", "model"), ("Q4", "model_q4")]
)
def test_a_precision_chooses_a_graph(tmp_path: Path, precision: str, graph: str) -> None:
    folder = exported(tmp_path / "model", "onnx/model.onnx", "onnx/model_q4.onnx")
    assert resolve_model(folder, None, BuildHooks(), precision) == folder / f"onnx/{graph}.onnx"


def test_a_precision_that_no_graph_has(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", "onnx/model.onnx", "onnx/model_q4.onnx")
    with pytest.raises(OptionError, match="no graph in the precision 'fp16'") as caught:
        resolve_model(folder, None, BuildHooks(), "fp16")
    assert "q4, fp32" in caught.value.why and caught.value.fix
    with pytest.raises(OptionError, match="a precision cannot be set"):
        resolve_model(whole(tmp_path / "whole"), None, BuildHooks(), "q4")


# Two branches or two graphs


def test_a_graph_with_two_branches(tmp_path: Path) -> None:
    model = graph_of("fp32", tmp_path / "scratch")
    folder = describe_as(tmp_path / "model")
    save(merged(model, without_past(model)), folder / "onnx/decoder_model_merged.onnx")
    with og.Model(folder, quiet=True) as loaded:
        assert loaded.info.flattened, loaded.info.reason
    np.testing.assert_array_equal(logits(folder, PROMPT), logits(whole(tmp_path / "whole"), PROMPT))


def test_two_graphs(tmp_path: Path) -> None:
    model = graph_of("fp32", tmp_path / "scratch")
    folder = describe_as(tmp_path / "model")
    save(model, folder / "decoder_with_past_model.onnx")
    save(without_past(model), folder / "decoder_model.onnx")
    assert og.Config(folder).model.decoder.filename == "decoder_with_past_model.onnx"
    np.testing.assert_array_equal(logits(folder, PROMPT), logits(whole(tmp_path / "whole"), PROMPT))


def scaled(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the same graph with a norm of twice its weights."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    tensor = next(tensor for tensor in model.graph.initializer if "norm" in tensor.name)
    tensor.CopyFrom(numpy_helper.from_array(3 - 5 * numpy_helper.to_array(tensor), f"{tensor.name}_other"))
    for node in model.graph.node:
        node.input[:] = [f"{name}_other" if f"{name}_other" == tensor.name else name for name in node.input]
    return model


def test_branches_that_differ(tmp_path: Path) -> None:
    model = graph_of("fp32", tmp_path / "scratch")
    folder = describe_as(tmp_path / "merged")
    save(merged(model, without_past(scaled(model))), folder / "decoder_model_merged.onnx")
    refused(folder, UnsupportedModelError, "decoder_model_merged.onnx", "differ", "logits differ by up to")
    folder = describe_as(tmp_path / "two")
    save(model, folder / "decoder_with_past_model.onnx")
    save(without_past(scaled(model)), folder / "decoder_model.onnx")
    refused(folder, UnsupportedModelError, "decoder_with_past_model.onnx", "differ")


def test_a_past_that_may_not_be_empty(tmp_path: Path) -> None:
    model = graph_of("fp32", tmp_path / "scratch")
    decoder = onnx.ModelProto.FromString(model.SerializeToString())
    first = next(value.name for value in decoder.graph.input if value.name.endswith("0.key"))
    last = helper.make_node("Gather", [first, "last"], ["newest"], axis=2)
    decoder.graph.initializer.append(numpy_helper.from_array(np.array(-1, np.int64), "last"))
    total = helper.make_node("ReduceSum", ["newest"], ["total"], keepdims=0)
    zero = helper.make_node("Sub", ["total", "total"], ["zero"])
    end = decoder.graph.node[-1]
    assert end.output[0] == "logits"
    end.output[0] = "plain"
    decoder.graph.node.extend([last, total, zero, helper.make_node("Add", ["plain", "zero"], ["logits"])])
    folder = describe_as(tmp_path / "model")
    save(merged(decoder, without_past(model)), folder / "decoder_model_merged.onnx")
    refused(folder, UnsupportedModelError, "does not accept a past of length 0")


def test_branches_with_different_outputs(tmp_path: Path) -> None:
    model = graph_of("fp32", tmp_path / "scratch")
    both = merged(model, without_past(model))
    branch = next(one for one in both.graph.node[0].attribute if one.name == "else_branch")
    del branch.g.output[-1]
    folder = describe_as(tmp_path / "model")
    save(both, folder / "decoder_model_merged.onnx")
    with pytest.raises(og.GenaiError) as caught:
        og.Model(folder, quiet=True)
    assert caught.value.why and caught.value.fix


def test_an_input_that_selects_no_branch(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))

    folder = exported(tmp_path / "model", "decoder_model_merged.onnx", change=change)
    refused(folder, UnsupportedModelError, "use_cache_branch", "does not select a branch")


# Embeddings in a graph of their own


@pytest.mark.parametrize(
    "names", [("decoder_model_merged", "embed_tokens"), ("decoder_model_merged_q4", "embed_tokens")]
)
def test_a_separate_table_of_embeddings(tmp_path: Path, names: tuple[str, str]) -> None:
    precision = "q4" if names[0].endswith("q4") else "fp32"
    model = graph_of("fp32", tmp_path / "scratch")
    folder = describe_as(tmp_path / "model")
    save(split_embedding(model), folder / f"onnx/{names[1]}.onnx")
    save(model, folder / f"onnx/{names[0]}.onnx")
    (folder / "onnx/vision_encoder.onnx").write_bytes(b"")
    config = og.Config(folder)
    assert config.model.embedding == f"onnx/{names[1]}.onnx"
    assert config.exported is not None and config.exported.variant.precision == precision
    with og.Model(folder, quiet=True) as loaded:
        assert loaded.info.flattened
    np.testing.assert_array_equal(logits(folder, PROMPT), logits(whole(tmp_path / "whole"), PROMPT))


def test_positions_with_three_axes(tmp_path: Path) -> None:
    """Qwen2-VL reads positions in time, height and width, which are equal for text."""

    def change(model: onnx.ModelProto) -> None:
        shape = [3, "batch", "tokens"]
        model.graph.input.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, shape))
        added = [
            helper.make_node("ReduceSum", ["position_ids", "first"], ["all"], keepdims=1),
            helper.make_node("Mul", ["all", "none"], ["zero"]),
            helper.make_node("Squeeze", ["zero", "first"], ["zeros"]),
            helper.make_node("Add", ["input_ids", "zeros"], ["tokens"]),
        ]
        for node in model.graph.node:
            node.input[:] = ["tokens" if name == "input_ids" else name for name in node.input]
        nodes = [*added, *model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "first"))
        model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "none"))

    folder = exported(tmp_path / "model", "model.onnx", change=change)
    for found, right in zip(logits(folder, PROMPT), logits(whole(tmp_path / "whole"), PROMPT), strict=True):
        np.testing.assert_allclose(found, right, atol=1e-5)


def test_no_table_of_embeddings(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", "onnx/decoder_model_merged.onnx", change=split_embedding)
    refused(folder, ModelFolderError, "no graph computes them", "embed_tokens.onnx")


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, ["num_hidden_layers 2", "num_hidden_layers is 3 in config.json"]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads 1", "is 2 in config.json"]),
        ({"head_dim": 8}, ["head_size 16", "head_dim is 8"]),
        ({"vocab_size": 65}, ["vocab_size 64", "vocab_size is 65"]),
        ({"vocab_size": 2**40}, ["vocab_size is 1099511627776"]),
        ({"hidden_size": "wide"}, ["hidden_size is 'wide'"]),
        ({"num_attention_heads": True}, ["num_attention_heads is True"]),
        ({"num_attention_heads": 0}, ["num_attention_heads is 0"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings is missing"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
    ],
)
def test_a_configuration_that_contradicts_the_graph(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    refused(exported(tmp_path / "model", "model.onnx", **changes), ConfigError, *words)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", "model.onnx")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": -1}))
    refused(folder, ConfigError, "generation_config.json", "temperature")
    (folder / "generation_config.json").write_text("[")
    refused(folder, ConfigError, "generation_config.json")
    (folder / "config.json").write_text("[]")
    refused(folder, ConfigError, "config.json")


def test_weights_that_are_missing(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", "onnx/model.onnx", external=True)
    (folder / "onnx/model.onnx_data").unlink()
    refused(folder, ExternalDataError, "model.onnx_data")


def test_two_decoders(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", "a.onnx", "b.onnx")
    refused(folder, ModelFolderError, "2 graphs of the same precision: a.onnx, b.onnx", str(folder / "a.onnx"))
    og.Config(folder / "b.onnx")
    folder = exported(tmp_path / "both", "model.onnx", "onnx/model.onnx")
    refused(folder, ModelFolderError, "onnx/model.onnx, model.onnx")


def add_input(name: str, shape: list[Any], dtype: int = TensorProto.FLOAT) -> Any:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))

    return change


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("past_conv.0", ["b", 32, 3], "the graph needs the input 'past_conv.0'"),
        ("past_conv.1", ["b", 32, 3], "states of a fixed size, such as those of convolutions, are not supported"),
        ("cache_position", ["s"], "the graph needs the input 'cache_position'"),
        ("pixels", ["b", 3, 8, 8], "the graph needs the input 'pixels'"),
        ("encoder_hidden_states", ["b", "s", 32], "reads the output of an encoder"),
    ],
)
def test_inputs_that_the_configuration_does_not_explain(
    tmp_path: Path, name: str, shape: list[Any], words: str
) -> None:
    folder = exported(tmp_path / "model", "model.onnx", change=add_input(name, shape))
    refused(folder, UnsupportedModelError, words, "`genai run")


def test_layers_without_an_output(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.output.remove(next(value for value in model.graph.output if value.name == "present.1.value"))

    refused(exported(tmp_path / "model", "model.onnx", change=change), ConfigError, "no output that replaces")


def _tokens_before_heads(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        if "past" in value.name:
            sizes = value.type.tensor_type.shape.dim
            heads = sizes[1].dim_value
            sizes[1].dim_param, sizes[2].dim_value = "past", heads


def _one_state(model: onnx.ModelProto) -> None:
    states = [2, 2, "b", 1, "t", 16]
    inputs = {"input_ids": ["b", "s"], "attention_mask": ["b", "t"], "past": states}
    model.CopyFrom(plain_graph(inputs, {"logits": ["b", "s", 64], "present": states}))


def _ids_of_floats(model: onnx.ModelProto) -> None:
    next(value for value in model.graph.input if value.name == "input_ids").type.tensor_type.elem_type = 1


def _hidden_states(model: onnx.ModelProto) -> None:
    renamed(model.graph, "logits", "hidden_states")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_tokens_before_heads, ["past_key_values.0.key", "must have the axes [batch, heads, tokens, columns]"]),
        (_one_state, ["the input 'past' holds the keys and values of all layers"]),
        (_ids_of_floats, ["'input_ids' of whole numbers"]),
        (_hidden_states, ["no output 'logits'"]),
    ],
)
def test_other_interfaces(tmp_path: Path, change: Change, words: list[str]) -> None:
    refused(exported(tmp_path / "model", "model.onnx", change=change), UnsupportedModelError, *words)


def test_logits_of_another_name(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        renamed(model.graph, "logits", "output")

    folder = exported(tmp_path / "model", "model.onnx", change=change)
    assert og.Config(folder).model.decoder.names.logits == "output"


def test_a_decoder_without_a_cache(tmp_path: Path) -> None:
    folder = describe_as(tmp_path / "model")
    model = without_past(graph_of("fp32", tmp_path / "scratch"))
    save(model, folder / "model.onnx")
    refused(folder, UnsupportedModelError, "the decoder has no cache", "text-generation-with-past")


def plain_graph(inputs: dict[str, list[Any]], outputs: dict[str, list[Any]]) -> onnx.ModelProto:
    """Return a graph that only has an interface."""
    kinds = {name: TensorProto.INT64 if "ids" in name else TensorProto.FLOAT for name in inputs}
    nodes = [helper.make_node("Cast", [next(iter(inputs))], [name], to=TensorProto.FLOAT) for name in outputs]
    return helper.make_model(
        helper.make_graph(
            nodes, "g",
            [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "outputs", "architecture", "command"),
    [
        ({"input_ids": ["b", "s"]}, {"last_hidden_state": ["b", "s"]}, "BertModel", "`genai embed"),
        ({"input_ids": ["b", "s"]}, {"logits": ["b", "s"]}, "BertForSequenceClassification", "`genai rerank"),
        ({"input_ids": ["b", "s"], "style": [1, 9]}, {"waveform": ["b", "s"]}, "Speech", "`genai run"),
        ({"pixel_values": ["b", 3, 8, 8]}, {"logits": ["b", 3, 8, 8]}, "ViTModel", "`genai run"),
    ],
)
def test_models_of_other_kinds(
    tmp_path: Path, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], architecture: str, command: str
) -> None:
    folder = describe_as(tmp_path / "model", architectures=[architecture])
    save(plain_graph(inputs, outputs), folder / "onnx/model.onnx")
    refused(folder, UnsupportedModelError, command)


# The command line


def test_info_shows_what_was_derived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported(tmp_path / "model", "onnx/model.onnx", "onnx/model_q4.onnx", external=True)
    assert run(["info", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "onnx/model_q4.onnx; others: onnx/model.onnx" in text
    assert "context_length" in text and "from config.json" in text and "head_size" in text
    assert "onnx/model_q4.onnx_data" in text and "onnx/model.onnx_data" not in text
    assert run(["info", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["derived"]["precision"] == "q4"


def test_info_of_a_folder_with_genai_config(tmp_path: Path) -> None:
    assert describe(whole(tmp_path / "whole"))["derived"] is None


def test_the_configuration_of_a_quantised_folder(tmp_path: Path) -> None:
    """`genai quantize` joins the graphs into model.onnx, and writes the derived configuration."""
    folder = describe_as(tmp_path / "model")
    model = graph_of("fp32", tmp_path / "scratch")
    save(model, tmp_path / "model.onnx")
    save(split_embedding(model), folder / "onnx/embed_tokens.onnx")
    save(model, folder / "onnx/decoder_model_merged.onnx")
    found = og.Config(folder).exported
    assert found is not None
    write_config(found, tmp_path / "genai_config.json")
    with og.Model(tmp_path, quiet=True) as loaded:
        assert loaded.info.flattened
    np.testing.assert_array_equal(logits(tmp_path, PROMPT), logits(folder, PROMPT))
