"""Sizes of symbolic dimensions: formulas, sizes of given arrays, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from genai.cli.app import run
from genai.errors import OptionError
from genai.onnx.ir import Value
from genai.onnx.types import DataType, TensorType
from genai.session.arrays import random_feed
from genai.session.dimensions import Sizes, formula_of, sizes_in

Capture = pytest.CaptureFixture[str]
NUMBERS = {"a": 7, "b": 3, "s0": 2, "past_sequence_length": 5, "sequence_length": 4}


def value(name: str, *shape: int | str | None) -> Value:
    return Value(name, TensorType(DataType.FLOAT, shape))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("past_sequence_length + sequence_length", 9), ("a*b", 21), ("a * b + 1", 22), ("1 + a*b", 22),
        ("a - b - 1", 3), ("(a - b)*2", 8), ("a//2", 3), ("a / 2", 3), ("Max(1, s0)", 2), ("min(a, b, 2)", 2),
        ("2*s0 - 1", 3), ("((a))*1", 7),
    ],
)  # fmt: skip
def test_formulas(text: str, expected: int) -> None:
    formula = formula_of(text)
    assert formula is not None and formula(NUMBERS.__getitem__) == expected


@pytest.mark.parametrize(
    "text",
    [
        "batch", "batch-size", "unk__12", "a.b", "batch size", "a +", "+ a", "a ** 2", "a(b)", "(a", "a)", "12", "",
        "a[0]", "__import__('os')", "a + 0x1", "1.5*a", "a + " * 200 + "a", "Max(", "Max()", "<unk>", "?", "%x",
    ],
)  # fmt: skip
def test_names_that_are_no_formula(text: str) -> None:
    formula = formula_of(text)
    assert formula is None or not formula.names


def test_sizes_follow_their_formulas() -> None:
    inputs = [
        value("ids", "batch", "sequence_length"), value("mask", "batch", "past_sequence_length + sequence_length"),
        value("past", "batch * heads", "past_sequence_length", 8), value("total", "total_sequence_length", None),
    ]  # fmt: skip
    shapes = {name: array.shape for name, array in random_feed(inputs, {}).items()}
    assert shapes == {"ids": (1, 1), "mask": (1, 2), "past": (1, 1, 8), "total": (2, 1)}
    given = {"batch": 2, "heads": 3, "past_sequence_length": 0, "sequence_length": 5, "total:1": 4}
    shapes = {name: array.shape for name, array in random_feed(inputs, given).items()}
    assert shapes == {"ids": (2, 5), "mask": (2, 5), "past": (6, 0, 8), "total": (5, 4)}
    sizes = Sizes(inputs, {"sequence_length": 5}, sizes_in(inputs, {"past": np.ones((6, 9, 8))}))
    assert (sizes["past_sequence_length + sequence_length"], sizes["batch"], sizes["batch * heads"]) == (14, 1, 6)
    assert sizes.chosen == {"past_sequence_length + sequence_length": 14, "batch": 1}
    assert Sizes(inputs, {"batch * heads": 12})["batch * heads"] == 12
    only = [value("total", "total_sequence_length")]
    assert Sizes(only, {})["total_sequence_length"] == 1, "its parts are not among the dimensions"


@pytest.mark.parametrize(
    ("shape", "given", "what", "why"),
    [
        (("n",), {"n": -1}, "--dim n=-1", "negative"),
        (("a + b",), {"a": 1, "b": 2, "a + b": 4}, "--dim a + b=4", "it is 3 for a=1, b=2"),
        (("a - b",), {"b": 3}, "'a - b' cannot be computed from a=1, b=3", "would be -2"),
        (("a // b",), {"b": 0}, "cannot be computed", "zero"),
        (("a*a*a*a",), {"a": 10**18}, "cannot be computed", "too large"),
        (("a + b",), {"c": 1}, "--dim c=1", "no input"),
    ],
)
def test_sizes_that_are_refused(shape: tuple[str, ...], given: dict[str, int], what: str, why: str) -> None:
    with pytest.raises(OptionError) as caught:
        random_feed([value("x", *shape)], given)
    assert what in caught.value.what and why in caught.value.why and caught.value.fix


@pytest.fixture
def joined(tmp_path: Path) -> str:
    """z = x + concat(y, y), so that z's inputs fit together only if m is twice n."""
    names = {"x": ["m"], "y": ["n"], "z": ["m"]}
    values = {name: helper.make_tensor_value_info(name, 1, shape) for name, shape in names.items()}
    nodes = [helper.make_node("Concat", ["y", "y"], ["t"], axis=0), helper.make_node("Add", ["x", "t"], ["z"])]
    graph = helper.make_graph(nodes, "g", [values["x"], values["y"]], [values["z"]])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return str(path)


def test_a_failed_run_names_the_random_inputs(joined: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(["run", joined, "--random", "--dim", "m=3"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "the model cannot run on these random inputs" in said and "x [3], y [1], with the sizes n=1" in said
    assert "--dim NAME=SIZE" in said and "kernel has a bug" not in said
    assert run(["run", joined, "--random", "--dim", "m=2"]) == 0
    np.save(tmp_path / "x.npy", np.ones(3, np.float32))
    np.save(tmp_path / "y.npy", np.ones(1, np.float32))
    given = [f"--input={name}={tmp_path / name}.npy" for name in "xy"]
    assert run(["run", joined, *given]) == 1 and "random" not in capsys.readouterr().err


def test_negative_sizes_on_the_command_line(joined: str, capsys: Capture) -> None:
    assert run(["run", joined, "--random", "--dim", "n=-2"]) == 2
    assert "a size cannot be negative" in capsys.readouterr().err


def test_comparing_looks_for_onnxruntime_first(joined: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    monkeypatch.setattr("genai.session.session.Session.__init__", lambda *_: pytest.fail("the model is loaded first"))
    for command in (["run", joined, "--random", "--compare", "onnxruntime"], ["bench", "session", joined, "--compare"]):
        assert run(command) == 1
        said = capsys.readouterr().err
        assert "needs the package onnxruntime" in said and "pip install onnxruntime" in said
