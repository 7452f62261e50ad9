"""`genai run` and `genai bench session`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from safetensors.numpy import save_file

from genai.cli.app import run
from genai.models.folders import bundled_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of y = x + x, float32 [N, 2]; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    values = [helper.make_tensor_value_info(name, 1, ["N", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", values[:1], values[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return str(path)


def test_inputs_from_a_file(model, capsys):
    np.save("x.npy", np.ones((3, 2), np.float32))
    assert run(["run", model, "--input", "x=x.npy", "--output", "out.npz"]) == 0
    assert "y: float32[3, 2] min 2 mean 2 max 2" in capsys.readouterr().out
    assert np.load("out.npz")["y"].tolist() == [[2, 2]] * 3
    np.savez("all.npz", x=np.zeros((1, 2), np.float32))
    assert run(["run", model, "-i", "all.npz"]) == 0


@pytest.mark.parametrize("name", ["out.txt", "out", "out.npy"])
def test_other_endings_are_refused(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", model, "--random", "--dim", "N=3", "-o", name]) == 2
    message = capsys.readouterr().err
    assert f"--output {name}: unknown ending" in message and "out.npz" in message
    assert not Path(name).exists()


@pytest.mark.parametrize("command", [["run"], ["bench", "session"]])
def test_zero_threads_are_refused_as_by_other_commands(
    command: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, model, "-t", "0"]) == 2
    assert "--threads" in capsys.readouterr().err


def test_an_input_that_the_model_does_not_have(model, capsys):
    np.save("x.npy", np.ones((3, 2), np.float32))
    assert run(["run", model, "--input", "foo=x.npy"]) == 2
    message = capsys.readouterr().err
    assert "has no input 'foo'" in message and "the inputs are x" in message
    assert run(["run", model, "--input", "x=nosuch.npy"]) == 1
    message = capsys.readouterr().err
    assert "the file does not exist" in message and "Errno" not in message


def test_an_input_of_a_wrong_type_beside_random_inputs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[2] x, float[2] y) => (float[2] z) { z = Add(x, y) }'
    )
    onnx.save(model, "two.onnx")
    np.save("x.npy", np.ones(2, np.int64))
    assert run(["run", "two.onnx", "--input", "x=x.npy", "--random"]) == 1
    message = capsys.readouterr().err
    assert "input 'x': unexpected data type" in message and "random" not in message


def test_a_negative_seed(model, capsys):
    assert run(["run", model, "--random", "--seed", "-1"]) == 2
    assert "--seed" in capsys.readouterr().err


def test_made_up_inputs_and_profile(model, capsys):
    assert run(["run", model, "--random", "--dim", "N=4", "--profile", "--level", "none"]) == 0
    captured = capsys.readouterr()
    assert "float32[4, 2]" in captured.out
    assert "Add" in captured.out
    assert json.loads(next(Path().glob("genai_profile_*.json")).read_text())


def test_random_inputs_of_unknown_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Older exporters write -1 for an unknown size; random inputs have one element along such an axis."""
    values = [helper.make_tensor_value_info(name, 1, [-1, 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "a.onnx")
    assert run(["run", str(tmp_path / "a.onnx"), "--random"]) == 0
    assert "y: float32[1, 2]" in capsys.readouterr().out


def test_unnamed_dimensions(model, capsys):
    proto = onnx.load(model)
    proto.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    onnx.save(proto, model)
    assert run(["run", model, "--random", "--dim", "x:0=4"]) == 0
    assert "float32[4, 2]" in capsys.readouterr().out
    assert run(["run", model, "--random", "--dim", "x:1=4"]) == 2
    assert "use one of the model's dimensions: x:0" in capsys.readouterr().err


def test_compiling_is_told_apart(model: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GENAI_CACHE_DIR": str(tmp_path / "cache")}
    proto = onnx.load(model)
    proto.graph.node[0].CopyFrom(helper.make_node("Softmax", ["x"], ["y"]))
    onnx.save(proto, model)
    command = [sys.executable, "-m", "genai", "run", model, "--random"]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr for _ in range(2)
    )
    assert re.search(r"^[\d.]+ ms, plus [\d.]+ s to compile kernels \(once\)$", first, re.MULTILINE)
    assert re.search(r"^[\d.]+ ms$", second, re.MULTILINE)


@pytest.mark.oracle
def test_comparing(model, capsys):
    pytest.importorskip("onnxruntime")
    assert run(["run", model, "--random", "--compare", "onnxruntime"]) == 0
    assert "y: 0 (0 relative to the largest value)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "no value for input x tensor(float)['N', 2]\n"),
        (["--random", "--dim", "N"], 2, "NAME=EXTENT"),
        (["--random", "--level", "most"], 2, "--level"),
        (["--random", "--compare", "other"], 2, "--compare"),
        (["-i", "x=absent.npy"], 1, "absent.npy"),
    ],
)
def test_bad_flags(model, capsys, flags, code, message):
    assert run(["run", model, *flags]) == code
    assert message in capsys.readouterr().err


def test_the_graph_of_a_chat_model_says_how_to_chat(capsys):
    folder = bundled_model()
    assert run(["run", str(folder / "model.onnx")]) == 2
    said = capsys.readouterr().err
    assert "input_ids tensor(int64)['batch_size', 'sequence_length'], " in said
    assert "NodeArg" not in said
    assert f"and 11 more (`genai info {folder / 'model.onnx'}`)" in said
    assert f"`genai chat {folder}`" in said


def test_a_missing_model(capsys):
    assert run(["run", "absent.onnx", "--random"]) == 1
    assert "absent.onnx" in capsys.readouterr().err


def test_bench_session(model, capsys):
    assert run(["bench", "session", model, "--dim", "N=3", "-r", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == 2
    assert 0 < found["create_least_ms"] <= found["create_ms"]


@pytest.mark.oracle
def test_bench_session_beside_onnxruntime(model, capsys):
    pytest.importorskip("onnxruntime")
    assert run(["bench", "session", model, "--dim", "N=3", "-r", "2", "--json", "--compare"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run_ratio"] == pytest.approx(found["run_ms"] / found["onnxruntime_run_ms"])
    assert found["create_ratio"] == pytest.approx(found["create_ms"] / found["onnxruntime_create_ms"])


def test_info_of_a_file(model, capsys):
    assert run(["info", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["inputs"] == "x tensor(float)[N, 2]"
    assert found["operators"] == "Add 1"
    assert run(["info", "absent.onnx"]) == 1


def test_what_is_read_is_not_written_over(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("in.npz", x=np.ones((1, 2), np.float32))
    before = (tmp_path / "in.npz").read_bytes()
    for given in (["-i", "in.npz", "-o", "./in.npz"], ["-i", "in.npz", "-o", model]):
        assert run(["run", model, *given]) == 2
        assert "is the same file as an input file" in capsys.readouterr().err
    assert (tmp_path / "in.npz").read_bytes() == before and onnx.load(model).graph.node


def test_a_dimension_that_no_input_has(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", model, "--random", "--dim", "M=3"]) == 2
    assert "no input of the model has a dimension with that name" in (said := capsys.readouterr().err) and ": N" in said
    assert run(["bench", "session", model, "--dim", "M=3"]) == 2 and "M=3" in capsys.readouterr().err
    assert (
        run(["run", model, "--dim", "N=3"]) == 2 and "--dim cannot be used without --random" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "command", [["run", "--random"], ["bench", "session"], ["quantize-onnx", "-o", "out.onnx"]], ids=" ".join
)
def test_a_model_in_place_of_a_graph(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the command for the model, and its graph."""
    encoder = tmp_path / "my encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text('{"model_type": "bert"}')
    (encoder / "model.safetensors").touch()
    assert run([*command, "pebble"]) == 1
    said = capsys.readouterr().err
    assert "pebble is a model, not an ONNX file" in said and "`genai chat pebble`" in said
    assert str(bundled_model() / "model.onnx") in said
    assert run([*command, str(encoder)]) == 1
    said = capsys.readouterr().err
    assert "is a model, not an ONNX file" in said and f"run `genai embed '{encoder}'`" in said
    assert run([*command, "nothing"]) == 1 and "is a model" not in capsys.readouterr().err


def test_quantising_an_encoder_names_the_command_for_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = Path(__file__).parents[1] / "embed" / "models" / "electra" / "onnx" / "model.onnx"
    assert run(["quantize", str(encoder), "-o", str(tmp_path / "out")]) == 1
    assert "to quantise the graph, use `genai quantize-onnx`" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    save_file({"norm": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    assert run(["quantize", str(tmp_path), "-o", str(tmp_path / "out")]) == 1
    assert "use `genai embed` or `genai rerank`, which take quantised weights with --precision int8" in (
        capsys.readouterr().err
    )
    (tmp_path / "config.json").write_text('{"model_type": ["bert"]}')
    assert run(["info", str(tmp_path)]) == 1
    assert "model_type is ['bert']" in capsys.readouterr().err
