"""The models for measuring sessions that are made without torch, and the suffix of detection models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from genai.session.arrays import Peer, differences
from genai.session.session import Session
from tools import session_families, session_models

ROWS = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)


def test_random_trees_are_computed() -> None:
    values = Session(session_families.random_trees(4, 3, features=5)).run({"rows": ROWS})["values"]
    assert values.shape == (3, 1) and len(np.unique(values)) == 3


@pytest.mark.oracle
def test_random_trees_agree_with_onnxruntime() -> None:
    pytest.importorskip("onnxruntime")
    model = session_families.random_trees(4, 3, features=5)
    feed = {"rows": ROWS}
    assert max(gap for _, _, gap in differences(Session(model).run(feed), Peer(model).run(feed))) < 1e-6


def test_boxes_are_suppressed() -> None:
    shapes = {"boxes": [1, 2, 4], "scores": [1, 1, 2]}
    inputs = [helper.make_tensor_value_info(f"{name}_in", 1, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    nodes = [helper.make_node("Identity", [f"{name}_in"], [name]) for name in shapes]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    plain = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = session_families.suppressed(plain)
    onnx.checker.check_model(model)
    feed = {
        "boxes_in": np.float32([[[0, 0, 10, 10], [0, 0, 10, 9]]]),
        "scores_in": np.float32([[[0.5, 0.9]]]),
    }
    assert Session(model).run(feed)["selected"].tolist() == [[0, 0, 1]]


def test_names_of_derived_models_name_their_sources() -> None:
    for name in (*session_models.QUANTIZED, *session_models.HALVES):
        assert name[:-5] in {*session_models.MODELS, *session_families.FAMILIES}
