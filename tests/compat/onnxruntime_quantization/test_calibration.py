"""Calibration: what is looked at, how long it is kept, and what is done with what has no range."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from onnx import helper

import genai.compat.onnxruntime_quantization as q
from genai.quant.histograms import Extremes
from genai.quantize.onnx_graph.calibrate import Observations

from . import shapes
from .conftest import Feeds, apart, images, initializers, make, op_types, run_here


def test_ranges_are_those_of_the_float_model(small_path):
    """Every value that a session gives out when it is asked to."""
    import onnx

    import genai

    calibrator = q.create_calibrator(small_path)
    calibrator.collect_data(Feeds(images(2)))
    calibrator.collect_data(Feeds(images(2, seed=5)))
    found = calibrator.compute_data()
    model = onnx.load(small_path)
    names = [node.output[0] for node in model.graph.node[:-1]]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    session = genai.InferenceSession(model)
    runs = [session.run(names, feed) for feed in (*images(2), *images(2, seed=5))]
    assert set(found) == {*names, "x", "y"}
    for index, name in enumerate(names):
        low, high = (f(np.concatenate([np.ravel(run[index]) for run in runs])) for f in (np.min, np.max))
        assert np.allclose(found[name].range_value, (low, high), rtol=1e-5, atol=1e-6)


def test_operators_to_calibrate(small_path):
    calibrator = q.create_calibrator(small_path, ["Conv"])
    assert calibrator.select_tensors_to_calibrate()[0] == {"x", "c"}
    calibrator.augment_graph()
    calibrator.set_execution_providers(["CPUExecutionProvider"])
    calibrator.create_inference_session()
    calibrator.collect_data(Feeds(images(1)))
    assert set(calibrator.compute_data().keys()) == {"x", "c"}
    assert calibrator.get_augment_model().graph.node[0].op_type == "Conv"
    calibrator.clear_collected_data()
    with pytest.raises(Exception, match="no data"):
        calibrator.compute_data()


def test_symmetric_and_moving_ranges(small_path):
    data = images(3)
    symmetric = q.MinMaxCalibrater(small_path, symmetric=True)
    symmetric.collect_data(Feeds(data))
    low, high = symmetric.compute_data()["x"].range_value
    assert high == -low == max(np.abs(feed["x"]).max() for feed in data)
    moving = q.MinMaxCalibrater(small_path, moving_average=True, averaging_constant=0.5)
    moving.collect_data(Feeds(data))
    a, b, c = (feed["x"].max() for feed in data)
    assert moving.compute_data()["x"].highest == pytest.approx((a / 2 + b / 2) / 2 + c / 2)


@pytest.mark.parametrize("method", [one for one in q.CalibrationMethod if one.name != "Distribution"])
def test_memory_does_not_grow_with_the_data(method, small_path):
    """The feeds alone would be 23 MB more, and what is computed of them several times as much."""

    def peak(count: int) -> int:
        calibrator = q.create_calibrator(small_path, calibrate_method=method)

        class Reader(q.CalibrationDataReader):
            left = count

            def get_next(self):
                self.left -= 1
                return images(1, batch=1000, seed=self.left)[0] if self.left >= 0 else None

        tracemalloc.start()
        try:
            calibrator.collect_data(Reader())
            calibrator.compute_data()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)
    assert peak(38) < peak(8) + 8_000_000


def test_masks_stay_float_and_that_is_said(tmp_path):
    """A scale for -3.4e38 would leave nothing of the scores beside it."""
    random = np.random.default_rng(0)
    model = shapes.bert(32, 1, 4, 50)
    feeds = [
        {"ids": random.integers(0, 50, (1, 8)), "mask": (np.arange(8) < length)[None].astype(np.int64)}
        for length in (8, 5, 3)
    ]
    with pytest.warns(UserWarning, match="stay float"):
        q.quantize_static(model, tmp_path / "q.onnx", Feeds(feeds))
    expected = [run_here(model, feed) for feed in feeds]
    assert apart([run_here(tmp_path / "q.onnx", feed) for feed in feeds], expected) < 0.1
    assert max(float(np.max(value)) for name, value in initializers(tmp_path / "q.onnx").items() if "scale" in name) < 1


def test_infinite_values_stay_float(tmp_path):
    node = helper.make_node
    model = make(
        [node("Log", ["x"], ["log"], name="log"), node("MatMul", ["x", "w"], ["p"], name="product"),
         node("Add", ["p", "log"], ["y"], name="sum")],
        {"w": np.eye(4, dtype=np.float32)}, {"x": (1, [3, 4])}, {"y": (1, [3, 4])},
    )  # fmt: skip
    feed = {"x": np.eye(3, 4, dtype=np.float32)}
    with pytest.warns(UserWarning, match="log"):
        q.quantize_static(model, tmp_path / "q.onnx", Feeds([feed]))
    found, expected = run_here(tmp_path / "q.onnx", feed), run_here(model, feed)
    assert np.array_equal(np.isinf(found), np.isinf(expected))


def test_a_value_is_let_go_once_it_is_unbounded():
    observations = Observations(["a"], Extremes)
    observations("a", np.asarray([1.0, np.inf]))
    observations("a", np.asarray([5.0]))
    observations("b", np.asarray([np.nan]))
    assert observations.unbounded == {"a": np.inf}
    assert observations.not_a_number is None


def test_a_cache_is_written_and_read(small_path, tmp_path):
    cache = tmp_path / "ranges.json"
    q.quantize_static(small_path, tmp_path / "a.onnx", Feeds(images(2)), calibration_cache_path=cache)
    q.quantize_static(small_path, tmp_path / "b.onnx", None, calibration_cache_path=cache)
    first, second = (tmp_path / name for name in ("a.onnx", "b.onnx"))
    assert first.read_bytes() == second.read_bytes()
    found = q.load_tensors_data(cache)
    assert found.calibration_method is q.CalibrationMethod.MinMax
    found["x"] = (-1, 1)
    assert "x" in found and len(found) == len(list(found)) == len(found.values())
    again = q.TensorsData.from_dict(found.to_dict())
    assert {name: one.range_value for name, one in again.items()} == {
        name: one.range_value for name, one in found.items()
    }


def test_inputs_with_defaults_are_constants(tmp_path):
    """Old exporters list every weight as an input."""
    model = make(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        {"w": np.eye(4, dtype=np.float32)}, {"x": (1, [2, 4]), "w": (1, [4, 4])}, {"y": (1, [2, 4])},
    )  # fmt: skip
    q.quantize_static(model, tmp_path / "q.onnx", Feeds([{"x": np.ones((2, 4), np.float32)}]))
    assert initializers(tmp_path / "q.onnx")["w_quantized"].dtype == np.int8


def test_bytes_are_the_same_each_time(small_path, tmp_path):
    for name in ("a", "b"):
        q.quantize_static(small_path, tmp_path / name, Feeds(images(2)), per_channel=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_relu_is_left_away_where_integers_saturate(small_path, tmp_path):
    q.quantize_static(small_path, tmp_path / "q.onnx", Feeds(images(2)))
    assert "Relu" not in op_types(tmp_path / "q.onnx")
    q.quantize_static(
        small_path, tmp_path / "q.onnx", Feeds(images(2)), extra_options={"QDQKeepRemovableActivations": True}
    )
    assert "Relu" in op_types(tmp_path / "q.onnx")


def test_dedicated_pairs(small_path, tmp_path):
    counts = []
    for dedicated in (False, True):
        q.quantize_static(
            small_path, tmp_path / "q.onnx", Feeds(images(2)), extra_options={"DedicatedQDQPair": dedicated}
        )
        counts.append(op_types(tmp_path / "q.onnx").count("QuantizeLinear"))
    assert counts[1] == counts[0] + 1  # `a` has two users
