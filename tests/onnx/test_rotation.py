"""Rotations are fused into the attention that reads them, if it supports the same rotation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai.onnx.ir import OnnxModel
from genai.onnx.reader import read_model
from genai.optimize.base import Level, run_rewrites
from genai.optimize.decoders import fuse_rotation


def decoder(query: dict[str, Any] | None = None, key: dict[str, Any] | None = None, **change: Any) -> OnnxModel:
    """q and k rotated, then attention; `query`, `key`: attributes of the rotations, `change`: of the rest."""
    shape = [1, "T", 32]
    names = {"query_ids": "position_ids", "key_table": "cos", "norm": "", **change}
    common = {"domain": "com.microsoft"}
    nodes = [
        helper.make_node("RotaryEmbedding", ["q", names["query_ids"], "cos", "sin"], ["rq"], **common, **(query or {})),
        helper.make_node(
            "RotaryEmbedding", ["k", "position_ids", names["key_table"], "sin"], ["rk"], **common, **(key or {})
        ),
        helper.make_node(
            "PagedAttention",
            ["rq", "rk", "v", "", "", "", "", "", names["norm"]],
            ["out"],
            domain="genai",
            num_heads=4,
            kv_num_heads=2,
            layer=0,
            v_head_size=8,
        ),
    ]
    floats = {name: [1, "T", 32 if name == "q" else 16] for name in "qkv"}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name, sizes in floats.items()]
    inputs += [helper.make_tensor_value_info(n, TensorProto.INT64, [1, "T"]) for n in ("position_ids", "others")]
    tables = [
        numpy_helper.from_array(np.ones(size, np.float32), name)
        for name, size in {"cos": (9, 4), "sin": (9, 4), "cos2": (9, 4), "weight": (8,)}.items()
    ]
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, shape)]
    if change.get("shown"):
        outputs.append(helper.make_tensor_value_info("rq", TensorProto.FLOAT, shape))
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, tables)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("genai", 1)]
    return read_model(helper.make_model(graph, opset_imports=imports))


def fused(model: OnnxModel) -> bool:
    run_rewrites(model, [fuse_rotation("position_ids")], Level.ALL)
    return all(node.op_type != "RotaryEmbedding" for node in model.graph.nodes)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_both_rotations_become_attributes(interleaved: int) -> None:
    model = decoder({"interleaved": interleaved}, {"interleaved": interleaved})
    assert fused(model)
    (attention,) = model.graph.nodes
    assert attention.inputs[:5] == ["q", "k", "v", "cos", "sin"]
    assert attention.attribute("do_rotary") == 1
    assert attention.attribute("rotary_interleaved") == interleaved


@pytest.mark.parametrize(
    "options",
    [
        {"query": {"scale": 2.0}},
        {"query": {"interleaved": 1}},
        {"key": {"num_heads": 1}},
        {"key": {"is_packed_batching": 1}},
        {"key_table": "cos2"},
        {"query_ids": "others"},
        {"norm": "weight"},
        {"shown": True},
    ],
)
def test_what_attention_would_do_otherwise_stays(options: dict[str, Any]) -> None:
    assert not fused(decoder(**options))
