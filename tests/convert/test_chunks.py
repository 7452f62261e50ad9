"""Attention that is limited to chunks of the sequence: the graph, its recognition, and configurations of Llama 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.convert import DecoderSpec
from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.errors import GenaiError
from genai.lowering.flatten import attention_layers
from genai.models.config import Config
from genai.models.decoder_graph import read_decoder, read_decoder_file
from genai.onnx.ir import OnnxModel
from genai.ops.group_query_attention import group_query_attention


def describe(golden: Any, **changes: Any) -> DecoderSpec:
    return find("llama4_text").describe(HFConfig({**golden("llama4_text").config, **changes}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_experts_per_tok": 2}, "2 experts per token scale their inputs"),
        ({"attention_chunk_size": -1}, "attention_chunk_size is -1"),
        ({"attention_chunk_size": None}, "attention_chunk_size is None"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ({"layer_types": ["sliding_attention"] * 7}, "layer_types in config.json contains 'sliding_attention'"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]"),
        ({"moe_layers": "odd"}, "moe_layers is 'odd'"),
        ({"moe_layers": [1, 3], "attn_scale": -1}, "query_scaling has the beta -1.0"),
        ({"floor_scale": 0}, "floor_scale is 0"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(golden: Any, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(GenaiError) as caught:
        describe(golden, **changes)
    assert match in caught.value.what and caught.value.why and caught.value.fix


def test_published_forms(golden: Any) -> None:
    """Files list no layers, or more than the model has; a chunk that is longer than the context is none."""
    spec = describe(golden, layer_types=None, no_rope_layers=[], moe_layers=[0, 5, 9], attn_temperature_tuning=4)
    assert spec.rope_layers == spec.chunked_layers == (0, 1, 2, 4, 5, 6) and spec.dense_layers == (1, 2, 3, 4, 6)
    assert spec.query_scaling is not None and [spec.scales_queries(layer) for layer in (2, 3)] == [False, True]
    spec = describe(golden, layer_types=None, no_rope_layers=[1, 0] * 5, attn_temperature_tuning=False)
    assert spec.chunked_layers == (0, 2, 4, 6) and spec.query_scaling is None
    assert describe(golden, attention_chunk_size=128).chunk(0) == 0 == describe(golden).chunk(3)
    assert describe(golden, layer_types=None, attention_chunk_size=None).chunked_layers == ()


def changed(model: OnnxModel, change: str) -> None:
    """Change the bias so that it no longer hides the tokens of other chunks."""
    (where,) = (node for node in model.graph.nodes if node.outputs == ["/model/chunks/Where/output_0"])
    nodes = {node.name: node for node in model.graph.nodes}
    if change == "swapped":
        where.inputs[1:] = where.inputs[:0:-1]
    elif change == "another size":
        nodes["/model/chunks/Div_2"].inputs[1] = model.graph.add_constant("other", np.array(5, np.int64))
    elif change == "token ids":
        nodes["/model/chunks/Div_1"].inputs[0] = "input_ids"
    else:
        nodes["/model/chunks/Range"].inputs[0] = model.graph.add_constant("other", np.array(1, np.int64))
    model.graph.invalidate()


def test_chunks_are_part_of_the_graph_only(golden_folder: Any) -> None:
    """Other runtimes compute the bias in the graph; genai_config.json has no window that they would apply, too."""
    config = Config(golden_folder("llama4"))
    flat = read_decoder(config).flat
    assert flat is not None and [layer.chunk for layer in attention_layers(flat.layers)] == [17, None] * 2
    text = (Path(golden_folder("llama4")) / "genai_config.json").read_text()
    assert "sliding" not in text and "chunk" not in text


@pytest.mark.parametrize("change", ["swapped", "another size", "token ids", "another start"])
def test_other_biases_are_not_taken_for_chunks(golden_folder: Any, change: str) -> None:
    config = Config(golden_folder("llama4"))
    model = read_decoder_file(config)
    changed(model, change)
    graph = read_decoder(config, model=model)
    assert graph.flat is None and graph.info.reason


@pytest.mark.parametrize("past", [0, 7])
def test_an_operator_with_chunks(past: int) -> None:
    """Every token sees only its chunk, as in a sequence that begins with the chunk."""
    rng, chunk, length = np.random.default_rng(0), 5, 13
    query, key, value = (rng.standard_normal((1, length, width), np.float32) for width in (32, 16, 16))

    def run(start: int, end: int, before: int = 0, chunk: int = 0) -> np.ndarray:
        old = [x[:, before:start].reshape(1, -1, 2, 8).swapaxes(1, 2) for x in (key, value)] if start > before else None
        lengths = np.array([end - before - 1], np.int32)
        total = np.array(end - before, np.int32)
        return group_query_attention(
            query[:, start:end], key[:, start:end], value[:, start:end], *(old or (None, None)), lengths, total,
            num_heads=4, kv_num_heads=2, chunk=chunk,
        )[0]  # fmt: skip

    firsts = range(0, length, chunk)
    expected = np.concatenate([run(first, min(first + chunk, length), first) for first in firsts], axis=1)
    np.testing.assert_allclose(run(past, length, chunk=chunk), expected[:, past:], rtol=1e-5, atol=1e-6)
