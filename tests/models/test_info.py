"""The description that `genai info` gives of a folder, without loading it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import genai as og
from genai.cli.info import figures_of
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.doctor import PROGRAM_BYTES
from genai.doctor.model_info import describe
from genai.errors import ConfigError, ExternalDataError, GraphError, ModelFolderError, OptionError, TokenizerError
from genai.models.memory_plan import usable
from tools.random_weights import RandomWeights

GIB = 2**30
SPEC = DecoderSpec(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_size=16,
    context_length=131072,
)
BYTES_PER_TOKEN = 2 * 2 * 16 * 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_model_folder(path, SPEC, ExportOptions(precision="int4"), RandomWeights(SPEC))
    return path


def edit_graph(folder: Path, change: Callable[[onnx.ModelProto], Any]) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def test_what_loading_finds_too(bundled_folder: Path, bundled: og.Model) -> None:
    facts = describe(bundled_folder)
    for name in ("parameters", "weight_bytes", "kv_dtype", "kv_bytes_per_token"):
        assert facts[name] == getattr(bundled.info, name), name
    assert facts["batched"] == bundled.info.flattened
    assert facts["memory"]["default_context"] == bundled.context_size
    assert facts["context_length"] == bundled.config.model.context_length
    assert facts["eos_token_ids"] == list(bundled.config.model.eos_token_ids)
    json.dumps(facts)


def test_architecture_and_operators(folder: Path) -> None:
    facts = describe(folder)
    assert (facts["type"], facts["layers"], facts["hidden_size"], facts["vocab_size"]) == ("llama", 2, 32, 64)
    assert facts["parameters"] == sum(array.size for array in RandomWeights(SPEC).values())
    assert facts["embedding_parameters"] == 64 * 32 and facts["embedding_bytes"] > 64 * 32
    rows = dict(figures_of(facts))
    assert ", 2,048 of them in the embedding" in rows["parameters"] and " in the embedding, " in rows["bits per weight"]
    assert facts["kv_bytes_per_token_by_type"] == {
        "fp16": BYTES_PER_TOKEN,
        "fp32": 2 * BYTES_PER_TOKEN,
        "int8": BYTES_PER_TOKEN // 2 * 18 // 16,  # heads of 16 columns, and a scale of two bytes
    }
    assert facts["kv_bytes_full_context"] == 131072 * BYTES_PER_TOKEN
    assert facts["operators"]["com.microsoft::GroupQueryAttention"] == 2
    assert facts["operators_without_kernel"] == []
    assert facts["files"]["model.onnx"] == (folder / "model.onnx").stat().st_size


def test_a_draft_model_is_named(folder: Path) -> None:
    assert describe(folder)["draft_model"] is None
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["draft"] = {**config["model"]["decoder"], "filename": "draft/model.onnx"}
    (folder / "genai_config.json").write_text(json.dumps(config))
    facts = describe(folder)
    assert facts["draft_model"] == "draft/model.onnx" and "draft/model.onnx" in dict(figures_of(facts))["draft model"]
    del config["model"]["draft"]["filename"]
    (folder / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"model\.draft\.filename is not set"):
        describe(folder)


def test_cache_types(folder: Path) -> None:
    assert describe(folder, kv_dtype="fp32")["kv_bytes_per_token"] == 2 * BYTES_PER_TOKEN
    assert describe(folder, accuracy="fp32")["kv_dtype"] == "fp32"
    facts = describe(folder, kv_dtype="fp8", device="reference")
    assert (facts["kv_dtype"], facts["kv_bytes_per_token"]) == ("fp8", BYTES_PER_TOKEN // 2)
    assert facts["kv_bytes_per_token_by_type"]["bf16"] == BYTES_PER_TOKEN
    assert facts["memory"]["cache_bytes"] == facts["kv_bytes_full_context"] == 131072 * BYTES_PER_TOKEN // 2


@pytest.mark.parametrize(
    ("level", "accuracy", "rounded", "line"),
    [
        (4, "auto", True, "activations int8, cache fp16"),
        (4, "fp32", False, "activations fp32, cache fp32"),
        (0, "auto", False, "--accuracy int8 is faster"),
        (3, "auto", False, "activations fp32, cache fp32"),
        (0, "int8", True, "activations int8, cache fp16"),
    ],
)
def test_numerics(tmp_path: Path, level: int, accuracy: str, rounded: bool, line: str) -> None:
    write_model_folder(tmp_path / "m", SPEC, ExportOptions(accuracy_level=level), RandomWeights(SPEC))
    facts = describe(tmp_path / "m", accuracy=accuracy)
    counts = facts["quantised_products_by_activation"]
    assert counts["int8" if rounded else "fp32"] > 0
    assert counts["fp32" if rounded else "int8"] == 0
    assert line in dict(figures_of(facts))["numerics"]


# --- fits or not -----------------------------------------------------------------------------------------------------


def test_it_fits(folder: Path) -> None:
    memory = describe(folder, available_bytes=8 * GIB)["memory"]
    assert memory["fits"]
    assert memory["verdict"] == "fits with the full 131072 tokens of context"
    assert memory["default_context"] == memory["largest_context"] == 131072
    parts = ("loaded_weight_bytes", "cache_bytes", "activation_bytes", "program_bytes")
    assert memory["needed_bytes"] == sum(memory[name] for name in parts)


def free_for(needed: int) -> int:
    """Set the available memory so that the program and a model may use exactly this amount."""
    free = (needed - PROGRAM_BYTES) * 20 // 19
    return PROGRAM_BYTES + next(more for more in range(free - 40, free + 40) if usable(more) >= needed - PROGRAM_BYTES)


def test_what_takes_nearly_all_does_not_fit(folder: Path) -> None:
    """22.2 of 22.6 free GiB: a margin is reserved for other processes."""
    memory = describe(folder, available_bytes=8 * GIB)["memory"]
    assert not describe(folder, available_bytes=memory["needed_bytes"])["memory"]["fits"]
    assert describe(folder, available_bytes=free_for(memory["needed_bytes"]))["memory"]["fits"]


def test_it_fits_with_a_smaller_context(folder: Path) -> None:
    whole = describe(folder, available_bytes=8 * GIB)["memory"]
    available = free_for(whole["needed_bytes"] - 100_000 * BYTES_PER_TOKEN)
    memory = describe(folder, available_bytes=available)["memory"]
    assert not memory["fits"]
    assert memory["missing_bytes"] == 100_000 * BYTES_PER_TOKEN
    assert available - memory["margin_bytes"] == whole["needed_bytes"] - 100_000 * BYTES_PER_TOKEN
    assert memory["largest_context"] == 31072 // 32 * 32
    assert memory["verdict"] == "fits with --ctx-size 31072; the full 131072 tokens need 12.8 MB more"
    assert memory["default_context"] == 31072 // 2 // 32 * 32
    assert describe(folder, context_size=31072, available_bytes=available)["memory"]["fits"]
    asked = describe(folder, context_size=31073, available_bytes=available)["memory"]
    assert asked["verdict"] == "fits with --ctx-size 31072; the requested 31073 tokens need 4.1 kB more"


def test_the_verdict_agrees_with_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest context in the description is the largest that Model accepts."""
    from genai.common import memory_limits

    available = free_for(describe(folder)["memory"]["needed_bytes"] - 100_000 * BYTES_PER_TOKEN)
    memory = describe(folder, available_bytes=available)["memory"]
    monkeypatch.setattr(memory_limits, "available_memory", lambda: available - PROGRAM_BYTES)
    with og.Model(folder) as model:
        assert model.context_size == memory["default_context"]
    with og.Model(folder, context_size=memory["largest_context"]) as model:
        assert model.info.cache_tokens >= memory["largest_context"]
    with pytest.raises(og.GenaiError, match="at most 31072"):
        og.Model(folder, context_size=memory["largest_context"] + 1)


def test_it_does_not_fit_at_all(folder: Path) -> None:
    memory = describe(folder, available_bytes=PROGRAM_BYTES)["memory"]
    assert (memory["fits"], memory["largest_context"], memory["default_context"]) == (False, 0, None)
    assert memory["verdict"].startswith("does not fit: ")


@pytest.mark.parametrize("size", [0, -1, 131073])
def test_contexts_beyond_the_model(folder: Path, size: int) -> None:
    with pytest.raises(OptionError, match="131072"):
        describe(folder, context_size=size)


def test_40_gigabytes_take_neither_time_nor_memory(folder: Path) -> None:
    """The embedding becomes 40 GB in a sparse file; a process that describes the model stays small."""
    rows = 10 * 10**9 // SPEC.hidden_size

    def change(model: onnx.ModelProto) -> None:
        weights = {item.name: item for item in model.graph.initializer}
        gather = next(node for node in model.graph.node if "Gather" in node.op_type and node.input[0] in weights)
        tensor = weights[gather.input[0]]
        embedding = helper.make_tensor(tensor.name, onnx.TensorProto.FLOAT, [0], [])
        embedding.dims[:] = [rows, SPEC.hidden_size]
        embedding.ClearField("float_data")
        embedding.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "big.data"), ("offset", "0"), ("length", str(rows * SPEC.hidden_size * 4))):
            embedding.external_data.add(key=key, value=value)
        model.graph.initializer.remove(tensor)
        model.graph.initializer.append(embedding)
        gather.op_type, gather.domain = "Gather", ""
        del gather.input[2:]
        gather.ClearField("attribute")

    edit_graph(folder, change)
    with (folder / "big.data").open("wb") as file:
        file.truncate(rows * SPEC.hidden_size * 4)
    code = (
        "import json, resource, sys; from genai.doctor.model_info import describe; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "facts = describe(sys.argv[1]); after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "print(json.dumps([facts['weight_bytes'], facts['memory']['loaded_weight_bytes'], "
        "facts['memory']['mapped_weight_bytes'], after - before, "
        "'numba' in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=60
    )
    weight_bytes, loaded, mapped, grown_kilobytes, numba = json.loads(result.stdout)
    assert weight_bytes > 39e9
    assert loaded < 1e9 < 39e9 < mapped, "only the rows that are read take memory"
    assert grown_kilobytes < 100_000
    assert not numba


# --- templates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", ("none", False, False)),
        ("<think>{{ x }}</think>", ("think", True, False)),
        ("<tool_call>{{ x }}</tool_call>", ("hermes", False, True)),
        ("<tool_call>{{ x }}</tool_call><think>", ("hermes", True, True)),
        ("<|channel|>analysis<|message|>", ("gpt_oss", True, True)),
        ("[TOOL_CALLS]", ("mistral", False, True)),
    ],
)
def test_chat_templates(folder: Path, template: str, expected: tuple[str, bool, bool]) -> None:
    (folder / "chat_template.jinja").write_text(template)
    facts = describe(folder)
    assert facts["chat_template"] is True
    assert (facts["reply_format"], facts["reasoning"], facts["tool_calls"]) == expected


def test_no_chat_template(folder: Path) -> None:
    facts = describe(folder)
    assert facts["chat_template"] is False
    assert facts["reply_format"] is None


# --- graphs that do not run batched, or not at all -------------------------------------------------------------------


def add_node(op_type: str, domain: str = "", **attributes: Any) -> Callable[[onnx.ModelProto], None]:
    """Insert an operator with one input and one output before the last node."""

    def change(model: onnx.ModelProto) -> None:
        last = model.graph.node[-1]
        inputs = [last.input[0]]
        if op_type == "CumSum":
            model.graph.initializer.append(helper.make_tensor("axis", onnx.TensorProto.INT64, [], [1]))
            inputs.append("axis")
        model.graph.node.insert(
            len(model.graph.node) - 1, helper.make_node(op_type, inputs, ["mixed"], name="mix", domain=domain)
        )
        last.input[0] = "mixed"
        if domain:
            model.opset_import.append(helper.make_opsetid(domain, 1))

    return change


def test_a_graph_that_runs_alone(folder: Path) -> None:
    edit_graph(folder, add_node("CumSum"))
    facts = describe(folder, available_bytes=8 * GIB)
    assert facts["batched"] is False
    assert "CumSum" in facts["not_batched_because"]
    assert facts["operators_without_kernel"] == []
    # As exported the past is fp32, and a step holds it twice.
    assert facts["kv_bytes_per_token_by_type"] == {"fp32": 2 * BYTES_PER_TOKEN}
    assert facts["memory"]["cache_bytes"] == 2 * 131072 * 2 * BYTES_PER_TOKEN


def test_an_operator_without_kernel(folder: Path) -> None:
    edit_graph(folder, add_node("Mystery", "com.example"))
    facts = describe(folder)
    assert facts["operators_without_kernel"] == ["com.example::Mystery (version 1)"]
    assert facts["operators"]["com.example::Mystery"] == 1


# --- bad folders -----------------------------------------------------------------------------------------------------


def refused(folder: Path, error: type[og.GenaiError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        describe(folder)
    assert caught.value.why
    assert caught.value.fix


def test_missing_things(folder: Path) -> None:
    (folder / "model.onnx.data").unlink()
    refused(folder, ExternalDataError, r"model\.onnx\.data")
    (folder / "model.onnx").unlink()
    refused(folder, ModelFolderError, r"model\.onnx")
    (folder / "genai_config.json").unlink()
    refused(folder, ModelFolderError, "genai_config")
    refused(folder / "nothing", ModelFolderError, "nothing")


def test_damaged_things(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    refused(folder, TokenizerError, "tokenizer_config")
    data = folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:100])
    refused(folder, ExternalDataError, r"model\.onnx\.data")
    (folder / "model.onnx").write_bytes(b"\x00\x01 no model")
    refused(folder, GraphError, r"model\.onnx")
    (folder / "genai_config.json").write_text("[1, 2")
    refused(folder, ConfigError, "not JSON")


@pytest.mark.parametrize("name", ["bits", "block_size", "N", "K"])
@pytest.mark.parametrize("value", [0, -4, "four", None])
def test_attributes_that_no_size_follows_from(folder: Path, name: str, value: object) -> None:
    def change(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        node.ClearField("attribute")
        node.attribute.extend(kept)
        if value is not None:
            node.attribute.append(helper.make_attribute(name, value))

    edit_graph(folder, change)
    if value is None and name in ("bits", "block_size"):
        describe(folder)  # the operator's own default
    else:
        refused(folder, GraphError, "MatMulNBits")


@pytest.mark.parametrize("name", ["num_heads", "kv_num_heads"])
def test_attention_without_heads(folder: Path, name: str) -> None:
    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == name:
                    attribute.i = 0

    edit_graph(folder, change)
    facts = describe(folder)
    assert not facts["batched"]
    assert f"{name} 0" in facts["not_batched_because"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_listed(folder: Path) -> None:
    folder.chmod(0o100)
    try:
        refused(folder, ModelFolderError, "cannot be read")
    finally:
        folder.chmod(0o700)
