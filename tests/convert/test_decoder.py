"""The form of the graph: inputs and outputs, operators, unique names, an order in which it can run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx

from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from tools.random_weights import RandomWeights


def graph_of(spec: DecoderSpec, options: ExportOptions, tmp_path: Path) -> onnx.GraphProto:
    model = onnx.load(write_model_folder(tmp_path / "out", spec, options, RandomWeights(spec)) / "model.onnx")
    assert model.ir_version == 10
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 22, "com.microsoft": 1}
    return model.graph


def shape_of(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_inputs_and_outputs(tiny: DecoderSpec, tmp_path: Path) -> None:
    graph = graph_of(replace(tiny, sliding_window=8, sliding_layers=(0,)), ExportOptions(), tmp_path)
    assert {value.name: shape_of(value) for value in graph.input} == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        "past_key_values.0.key": ["batch_size", 2, "past_sliding_length", "kv_cache_dim"],
        "past_key_values.1.key": ["batch_size", 2, "past_sequence_length", "kv_cache_dim"],
        "past_key_values.0.value": ["batch_size", 2, "past_sliding_length", "kv_cache_dim"],
        "past_key_values.1.value": ["batch_size", 2, "past_sequence_length", "kv_cache_dim"],
    }
    assert {value.name: shape_of(value) for value in graph.output} == {
        "logits": ["batch_size", "sequence_length", 48],
        "present.0.key": ["batch_size", 2, "total_sliding_length", "kv_cache_dim"],
        "present.1.key": ["batch_size", 2, "total_sequence_length", "kv_cache_dim"],
        "present.0.value": ["batch_size", 2, "total_sliding_length", "kv_cache_dim"],
        "present.1.value": ["batch_size", 2, "total_sequence_length", "kv_cache_dim"],
    }


def test_operators(tiny: DecoderSpec, tmp_path: Path) -> None:
    graph = graph_of(tiny, ExportOptions(), tmp_path)
    assert Counter(node.op_type for node in graph.node) == {
        "Constant": 2,
        "ReduceSum": 1,
        "Sub": 1,
        "Cast": 2,
        "Shape": 1,
        "Gather": 2,
        "SimplifiedLayerNormalization": 1,
        "SkipSimplifiedLayerNormalization": 4,
        "GroupQueryAttention": 2,
        "MatMulNBits": 2 * 5 + 1,
        "Sigmoid": 2,
        "Mul": 4,
    }
    assert all(dict(attributes(node)).get("accuracy_level", 4) == 4 for node in graph.node)


def attributes(node: onnx.NodeProto) -> list[tuple[str, int]]:
    return [(attribute.name, attribute.i) for attribute in node.attribute]


def test_unset_accuracy_level_is_left_out(tiny: DecoderSpec, tmp_path: Path) -> None:
    graph = graph_of(tiny, ExportOptions(accuracy_level=0), tmp_path)
    assert not any("accuracy_level" in dict(attributes(node)) for node in graph.node)


def test_positions_are_an_input_only_if_rotation_is_not_fused(tiny: DecoderSpec, tmp_path: Path) -> None:
    graph = graph_of(tiny, ExportOptions(fused_rope=False), tmp_path)
    assert "position_ids" in [value.name for value in graph.input]
    assert sum(node.op_type == "RotaryEmbedding" for node in graph.node) == 4


def test_pruned_logits_have_one_position(tiny: DecoderSpec, tmp_path: Path) -> None:
    graph = graph_of(tiny, ExportOptions(prune_lm_head=True), tmp_path)
    assert shape_of(graph.output[0]) == ["batch_size", 1, 48]


def test_every_value_is_made_once_before_it_is_read_and_its_type_is_said(tiny: DecoderSpec, tmp_path: Path) -> None:
    spec = replace(tiny, qk_norm=True, qkv_bias=True, post_norms=True, logit_softcap=3.0, embedding_scale=2.0)
    graph = graph_of(spec, ExportOptions(symmetric=False), tmp_path)
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer} | {""}
    made = [name for node in graph.node for name in node.output if name]
    assert len(made) == len(set(made))
    assert len({node.name for node in graph.node}) == len(graph.node)
    for node in graph.node:
        assert known.issuperset(node.input), node.name
        known.update(node.output)
    constants = {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    typed = {value.name for value in [*graph.value_info, *graph.output]}
    assert typed == set(made) - constants
