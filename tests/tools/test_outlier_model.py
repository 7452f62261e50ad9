"""A copy of the bundled model with outlier channels: the gains change, everything else stays."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import genai
from genai.engine.decoder import compute
from genai.models.folders import bundled_model
from genai.onnx.reader import read_model
from tools.outlier_model import make

PROMPT = [1, 5, 9, 200, 31, 7]


def _gains(folder: Path) -> dict[str, np.ndarray]:
    constants = read_model(folder / "model.onnx").graph.initializers
    return {name: tensor.array() for name, tensor in constants.items() if name.endswith("layernorm.weight")}


def _logits(folder: Path) -> np.ndarray:
    model = genai.Model(folder, accuracy="fp32", quiet=True)
    sequence = model.decoder.open()
    sequence.append(PROMPT)
    (logits,) = compute(model.decoder, [sequence])
    model.close()
    return logits


def test_gains_of_some_channels_are_multiplied(tmp_path: Path) -> None:
    source = Path(bundled_model())
    count = make(source, tmp_path / "copy", every=64, factor=30.0)
    before, after = _gains(source), _gains(tmp_path / "copy")
    assert count == len(before) == 13 and before.keys() == after.keys()
    for name, gains in before.items():
        expected = gains.astype(np.float32)
        expected[::64] *= np.float32(30.0)
        np.testing.assert_array_equal(after[name], expected.astype(gains.dtype))


def test_the_copy_runs_and_predicts_something_else(tmp_path: Path) -> None:
    source = Path(bundled_model())
    make(source, tmp_path / "copy", every=64, factor=30.0)
    assert np.isfinite(_logits(tmp_path / "copy")).all()
    assert np.abs(_logits(tmp_path / "copy") - _logits(source)).max() > 1.0


def test_external_gains_are_read(tmp_path: Path) -> None:
    """Gains that are stored in the data file are also multiplied, and then stored in the model file."""
    folder = tmp_path / "external"
    make(Path(bundled_model()), folder, every=64, factor=1.0)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    name = "model.layers.0.input_layernorm.weight"
    tensor = next(item for item in model.graph.initializer if item.name == name)
    gains = numpy_helper.to_array(tensor).copy()
    (folder / "gains.bin").write_bytes(gains.tobytes())
    onnx.external_data_helper.set_external_data(tensor, "gains.bin")
    tensor.ClearField("raw_data")
    onnx.save(model, folder / "model.onnx")
    make(folder, tmp_path / "copy", every=64, factor=2.0)
    assert _gains(tmp_path / "copy")[name][0] == 2 * gains[0]
