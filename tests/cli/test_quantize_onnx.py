"""`genai quantize-onnx`."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import genai
from genai.cli.app import run


@pytest.fixture
def model(tmp_path):
    random = np.random.default_rng(0)
    node = helper.make_node
    weights = {"w": random.standard_normal((16, 32), np.float32), "v": random.standard_normal((32, 4), np.float32)}
    graph = helper.make_graph(
        [
            node("MatMul", ["x", "w"], ["h"], name="first"),
            node("Relu", ["h"], ["r"], name="relu"),
            node("MatMul", ["r", "v"], ["y"], name="second"),
        ],
        "g",
        [helper.make_tensor_value_info("x", 1, ["N", 16])],
        [helper.make_tensor_value_info("y", 1, ["N", 4])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def data(folder, name: str = "a.npz"):
    path = folder / name
    np.savez(path, x=np.random.default_rng(1).standard_normal((8, 16), np.float32))
    return path


def kinds(path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def error(path, model) -> float:
    feed = {"x": np.random.default_rng(2).standard_normal((5, 16), np.float32)}
    found, expected = (genai.InferenceSession(str(one)).run(None, feed)[0] for one in (path, model))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_dynamic(model, tmp_path, capsys):
    out = tmp_path / "q.onnx"
    assert run(["quantize-onnx", str(model), "-o", str(out), "--per-channel"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{out}\n" and "kB ->" in shown.err
    assert kinds(out).count("MatMulInteger") == 2
    assert error(out, model) < 0.02


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_static(form, model, tmp_path):
    out = tmp_path / "q.onnx"
    files = [str(part) for name in ("a.npz", "b.npz") for part in ("--calib", data(tmp_path, name))]
    command = ["quantize-onnx", str(model), "-o", str(out), *files, "--format", form, "--exclude", "second"]
    assert run([*command, "--external-data", "--method", "Percentile"]) == 0
    assert ("QLinearMatMul" in kinds(out)) == (form == "QOperator")
    assert kinds(out).count("MatMul") == 1 + (form == "QDQ")
    assert (tmp_path / "q.onnx.data").exists()
    assert error(out, model) < 0.05


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--method", "Mean", "--calib", "a.npz"], 2, "MinMax"),
        (["--format", "qdq", "--calib", "a.npz"], 2, "QDQ"),
        (["--weight-type", "int8"], 2, "QInt8"),
        (["--exclude", "frist"], 2, "did you mean 'first'?"),
        (["--calib", "no.npz"], 1, "numpy.savez"),
        (["--calib", "bad.npz"], 1, "numpy.savez"),
        (["--calib", "other.npz"], 1, "rename 'z' to 'x'"),
    ],
)
def test_bad_input(arguments, code, word, model, tmp_path, capsys):
    data(tmp_path)
    (tmp_path / "bad.npz").write_bytes(b"PK, but no more")
    np.savez(tmp_path / "other.npz", z=np.ones((1, 16), np.float32))
    arguments = [str(tmp_path / one) if one.endswith(".npz") else one for one in arguments]
    assert run(["quantize-onnx", str(model), "-o", str(tmp_path / "q.onnx"), *arguments]) == code
    assert word in capsys.readouterr().err
    assert not (tmp_path / "q.onnx").exists()


def test_the_float_model_is_not_written_over(model, capsys):
    before = model.read_bytes()
    assert run(["quantize-onnx", str(model), "-o", str(model.parent / "." / "model.onnx")]) == 2
    assert "is the same file as MODEL" in capsys.readouterr().err and model.read_bytes() == before


def test_calibration_data_without_names(model, tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.ones((8, 16), np.float32))
    out = ["-o", str(tmp_path / "q.onnx"), "--calib", str(tmp_path / "a.npy")]
    assert run(["quantize-onnx", str(model), *out]) != 0
    assert "a single array without a name" in (said := capsys.readouterr().err) and "numpy.savez" in said
