"""Random inputs that are indices of tables stay within the tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from genai.cli.app import run
from genai.errors import NodeError
from genai.models.folders import bundled_model
from genai.session.arrays import random_feed
from genai.session.session import Session

Make = Callable[..., onnx.ModelProto]
IDS = {"ids": (TensorProto.INT64, [8, 4])}
Y = {"y": (TensorProto.FLOAT, None)}


def lookup(table: str, ids: str = "ids", out: str = "y", axis: int = 0) -> onnx.NodeProto:
    return helper.make_node("Gather", [table, ids], [out], axis=axis)


def tables(**rows: int) -> dict[str, np.ndarray]:
    return {name: np.ones((size, 3), np.float32) for name, size in rows.items()}


def branches() -> list[onnx.NodeProto]:
    """An If whose branches look up the outer graph's ids, as merged decoders of optimum do."""
    inner = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    parts = [helper.make_graph([lookup("t", out="z")], name, [], [inner]) for name in ("first", "second")]
    return [helper.make_node("If", ["flag"], ["y"], then_branch=parts[0], else_branch=parts[1])]


FLAG = {"flag": (TensorProto.BOOL, [])}
CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], dict[str, tuple[int, list[int]]], dict[str, int]]]
CASES = {
    "one table": ([lookup("t")], tables(t=2), {}, {"ids": 2}),
    "columns": ([lookup("t", axis=1)], tables(t=7), {}, {"ids": 3}),
    "the smallest": (
        [lookup("t", out="a"), lookup("u", out="b"), helper.make_node("Add", ["a", "b"], ["y"])],
        tables(t=5, u=2), {}, {"ids": 2},
    ),
    "reshaped and cast": (
        [
            helper.make_node("Flatten", ["ids"], ["flat"]), helper.make_node("Cast", ["flat"], ["small"], to=6),
            lookup("t", "small"),
        ],
        tables(t=2), {}, {"ids": 2},
    ),
    "in branches": (branches(), tables(t=2), FLAG, {"ids": 2}),
    "no table": ([helper.make_node("Cast", ["ids"], ["y"], to=1)], {}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "constants", "more", "expected"), CASES.values(), ids=CASES)
def test_indices_are_within_their_tables(
    nodes: list[onnx.NodeProto],
    constants: dict[str, np.ndarray],
    more: dict[str, tuple[int, list[int]]],
    expected: dict[str, int],
    make_model: Make,
) -> None:
    session = Session(make_model(nodes, {**IDS, **more}, Y, constants))
    assert session.table_sizes == expected
    feed = random_feed(session.inputs, {}, tables=session.table_sizes)
    assert feed["ids"].max() == expected.get("ids", 10) - 1 and feed["ids"].min() == 0
    session.run(feed)


def test_random_caches_have_the_size_of_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    graph = bundled_model() / "model.onnx"
    assert run(["run", str(graph), "--random", "--compare", "onnxruntime"]) == 0
    assert "past" not in capsys.readouterr().err
    session = Session(graph)
    narrow = random_feed(session.inputs, {"kv_cache_dim": 1, "past_sequence_length": 2, "total_sequence_length": 3})
    with pytest.raises(
        NodeError, match=r"past_key has shape \[1, 2, 2, 1\], but the node has 2 key/value heads of size 32"
    ):
        session.run(narrow)


def test_commands_stay_within_tables(make_model: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(make_model([lookup("t")], IDS, Y, tables(t=2)), tmp_path / "model.onnx")
    assert run(["run", str(tmp_path / "model.onnx"), "--random"]) == 0
    assert run(["bench", "session", str(tmp_path / "model.onnx"), "-r", "1", "--json"]) == 0, capsys.readouterr().err
