"""The table of session speeds: models with different inputs, and models that cannot be measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import helper

from tools import session_speed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Models with the dimensions of texts, of images, of rows without names, and with fixed sizes."""
    shapes = {"text": ["batch", "sequence"], "image": ["batch", 3, 8, 8], "rows": [None, 4], "fixed": [2, 4]}
    for name, shape in shapes.items():
        values = [helper.make_tensor_value_info(value, 1, shape) for value in "xy"]
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", values[:1], values[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, tmp_path / f"{name}.onnx")
    return tmp_path


def test_dims_of_models(folder):
    found = {path.stem: session_speed.dims_of(path) for path in folder.glob("*.onnx")}
    assert found == {"text": ["batch=1", "sequence=128"], "image": ["batch=1"], "rows": [], "fixed": []}


@pytest.mark.oracle
@pytest.mark.parametrize(("flags", "bars"), [([], 8), (["--cpu"], 5)])
def test_a_table_of_all_models(folder, monkeypatch, capsys, flags, bars):
    pytest.importorskip("onnxruntime")
    (folder / "junk.onnx").write_bytes(b"junk")
    monkeypatch.setattr(session_speed, "REPEAT", 2)
    monkeypatch.setattr(sys, "argv", ["session_speed", str(folder), *flags])
    with pytest.raises(SystemExit, match="1"):
        session_speed.main()
    captured = capsys.readouterr()
    rows = captured.out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["fixed", "image", "rows", "text"]
    assert all(row.count("|") == bars for row in rows)
    assert captured.err.startswith("junk: ")


def test_the_documented_command_exists():
    found = subprocess.run([sys.executable, "-m", "tools.session_speed"], capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "usage" in found.stderr
