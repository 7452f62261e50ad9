"""What cannot be quantised, or not so: a typed error that says what, why and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import genai
import genai.compat.onnxruntime_quantization as q

from .conftest import Feeds, images, make, small_model


@pytest.fixture
def static(small_path, tmp_path):
    def call(reader: Any = None, source: Any = None, **options: Any) -> None:
        reader = Feeds(images(1)) if reader is None else reader
        q.quantize_static(source if source is not None else small_path, tmp_path / "q.onnx", reader, **options)

    return call


@pytest.fixture
def dynamic(small_path, tmp_path):
    return lambda source=None, **options: q.quantize_dynamic(
        source if source is not None else small_path, tmp_path / "q.onnx", **options
    )


def refused(call: Any, kind: Any, *words: str, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        call(**options)
    error = caught.value
    assert error.what and error.why and error.fix
    for word in words:
        assert word in str(error), str(error)


# Data


def test_no_reader(small_path, tmp_path):
    call = lambda **options: q.quantize_static(small_path, tmp_path / "q.onnx", **options)  # noqa: E731
    refused(call, genai.OptionError, "no calibration_data_reader")
    refused(call, genai.OptionError, "does not exist", calibration_cache_path=tmp_path / "none.json")


def test_no_data(static):
    refused(static, genai.InputError, "returns no data", reader=Feeds([]))


def test_not_a_reader(static):
    refused(static, genai.OptionError, "get_next", reader=images(1))


def test_items_that_are_no_feeds(static):
    refused(static, genai.InputError, "item 1", "ndarray", reader=Feeds([images(1)[0], np.ones(3)]))


def test_wrong_names(static):
    data = {"X": images(1)[0]["x"]}
    refused(static, genai.InputError, "item 0", "has no 'x'", "rename 'X' to 'x'", reader=Feeds([data]))
    refused(static, genai.InputError, "item 1", "add ['x']", reader=Feeds([images(1)[0], {}]))
    refused(static, genai.InputError, "item 0", "more", reader=Feeds([{**images(1)[0], "more": np.ones(1)}]))


def test_wrong_shapes(static):
    refused(static, genai.InputError, "item 0", "x", reader=Feeds([{"x": np.ones((2, 5, 8, 8), np.float32)}]))
    refused(static, genai.InputError, "item 0", "x", reader=Feeds([{"x": np.ones((2, 3, 8, 8), np.int64)}]))


@pytest.mark.parametrize("method", [q.CalibrationMethod.MinMax, q.CalibrationMethod.Entropy])
def test_nan_names_the_value_and_what_makes_it(static, method):
    bad = images(1)[0]["x"].copy()
    bad[0, 0, 0, 0] = np.nan
    reader = Feeds([images(1)[0], {"x": bad}])
    refused(static, genai.InputError, "'x'", "an input", "NaN", "item 1", reader=reader, calibrate_method=method)
    node = helper.make_node
    model = make(
        [node("Sqrt", ["x"], ["root"], name="root of it"), node("MatMul", ["root", "w"], ["y"], name="product")],
        {"w": np.ones((8, 8), np.float32)},
        {"x": (1, [2, 3, 8, 8])},
        {"y": (1, [2, 3, 8, 8])},
    )
    reader = Feeds(images(1))
    refused(static, genai.InputError, "'root'", "'root of it' (Sqrt)", source=model, reader=reader)


def test_weights_that_are_not_finite(static, dynamic):
    model = small_model()
    weight = next(one for one in model.graph.initializer if one.name == "mw")
    values = onnx.numpy_helper.to_array(weight).copy()
    values[2, 3] = np.nan
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "mw"))
    refused(dynamic, genai.InputError, "'mw'", source=model)
    # The float model is run first, and gives NaN too.
    refused(static, genai.InputError, "'y'", source=model)


# Names


@pytest.mark.parametrize("option", ["nodes_to_exclude", "nodes_to_quantize"])
def test_unknown_nodes(static, dynamic, option):
    for call in (static, dynamic):
        refused(call, genai.OptionError, option, "'matmull'", "did you mean 'matmul'?", **{option: ["matmull"]})
        refused(call, genai.OptionError, option, "list of node names", **{option: "matmul"})


def test_unknown_operators(static, dynamic):
    for call in (static, dynamic):
        refused(call, genai.OptionError, "'MatMull'", "did you mean 'MatMul'?", op_types_to_quantize=["MatMull"])
        refused(call, genai.OptionError, "list of operator types", op_types_to_quantize="MatMul")
    refused(dynamic, genai.NotSupportedYetError, "'Sigmoid'", op_types_to_quantize=["Sigmoid", "MatMul"])


def test_operators_that_onnxruntime_knows_and_the_model_does_not_have_are_passed_over(dynamic, static):
    dynamic(op_types_to_quantize=["MatMul", "Attention", "LSTM", "EmbedLayerNormalization", "Transpose"])
    static(op_types_to_quantize=["MatMul", "EmbedLayerNormalization"])


def test_nothing_to_do(static, dynamic):
    everything = [node.name for node in small_model().graph.node]
    for call in (static, dynamic):
        refused(call, genai.InputError, "nothing in the model", nodes_to_exclude=everything)
    half = make(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        {"w": np.ones((8, 4), np.float16)},
        {"x": (10, [2, 8])},
        {"y": (10, [2, 4])},
    )
    refused(dynamic, genai.InputError, "float32", source=half)
    refused(static, genai.InputError, "float32", source=half, reader=Feeds([{"x": np.ones((2, 8), np.float16)}]))


def test_overrides_of_what_is_not_there(static):
    def refuse(given: Any, *words: str, kind: Any = genai.OptionError) -> None:
        refused(static, kind, *words, extra_options={"TensorQuantOverrides": given})

    refuse({"mww": [{"symmetric": True}]}, "'mww'", "did you mean 'mw'?")
    refuse({"mw": [{"scal": 1.0}]}, "'scal'", "did you mean 'scale'?")
    refuse({"mw": [{"scale": 1.0}]}, "must be set together")
    refuse({"mw": [{"scale": 1.0, "zero_point": 0, "rmin": 1.0}]}, "rmin")
    refuse({"mw": [{"scale": -1.0, "zero_point": 0}]}, "above 0")
    refuse({"mw": [{}, {}]}, "axis")
    refuse({"mw": [{"axis": 1}, {}]}, "2 dictionaries", "5 channels")
    refuse({"x": [{"axis": 1}]}, "activation")
    refuse({"mw": "int8"}, "list of dictionaries")
    refuse([], "must map tensor names")
    refuse({"mw": [{"convert": {}}]}, "convert", kind=genai.NotSupportedYetError)


# Options


def test_unknown_extra_options(static, dynamic):
    for call in (static, dynamic):
        refused(
            call,
            genai.OptionError,
            "'ActivationSymetric'",
            "ActivationSymmetric",
            extra_options={"ActivationSymetric": True},
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ActivationSymmetric", 1),
        ("WeightSymmetric", "yes"),
        ("CalibPercentile", 101),
        ("CalibMovingAverageConstant", 2.0),
        ("MinimumRealRange", -1.0),
        ("OpTypesToExcludeOutputQuantization", "Conv"),
        ("QDQOpTypePerChannelSupportToAxis", {"MatMul": "1"}),
        ("CalibStridedMinMax", 0),
        ("DefaultTensorType", 99),
    ],
)
def test_values_of_the_wrong_kind(static, name, value):
    refused(static, genai.OptionError, name, extra_options={name: value})


@pytest.mark.parametrize(
    "name", ["SmoothQuant", "SmoothQuantFolding", "extra.Sigmoid.nnapi", "BlockSize", "EnableSubgraph"]
)
def test_refused_extra_options(static, name):
    value = 32 if name == "BlockSize" else True
    refused(static, genai.NotSupportedYetError, name, extra_options={name: value})
    static(extra_options={name: type(value)(0)})


def test_static_options_of_dynamic_quantisation(dynamic):
    refused(dynamic, genai.NotSupportedYetError, "ActivationSymmetric", extra_options={"ActivationSymmetric": True})
    dynamic(extra_options={"ActivationSymmetric": False})


def test_types(static, dynamic):
    refused(static, genai.NotSupportedYetError, "QFLOAT8E4M3FN", activation_type=q.QuantType.QFLOAT8E4M3FN)
    refused(static, genai.OptionError, "QInt4", quant_format=q.QuantFormat.QOperator, weight_type=q.QuantType.QInt4)
    refused(dynamic, genai.OptionError, "weight_type", weight_type=q.QuantType.QInt16)
    refused(static, genai.OptionError, "weight_type", weight_type=3)
    refused(static, genai.OptionError, "QInt8", weight_type="QInt88")
    static(weight_type="QInt8", activation_type="QUInt8")  # names will do
    refused(static, genai.OptionError, "signed", activation_type=q.QuantType.QInt8, weight_type=q.QuantType.QUInt8)
    refused(static, genai.OptionError, "quant_format", quant_format="QDQ")
    refused(static, genai.OptionError, "per_channel", per_channel=1)
    refused(q.QuantType.from_string, genai.OptionError, "QInt8", t="QInt88")
    assert q.QuantType.from_string("QInt8") is q.QuantType.QInt8


def test_methods(static):
    refused(static, genai.NotSupportedYetError, "Distribution", calibrate_method=q.CalibrationMethod.Distribution)
    refused(static, genai.OptionError, "CalibrationMethod", calibrate_method="MinMax")


def test_quantised_already(static, dynamic, tmp_path):
    dynamic()
    (tmp_path / "q.onnx").rename(tmp_path / "done.onnx")
    for call in (static, dynamic):
        refused(call, genai.InputError, "already", source=tmp_path / "done.onnx")


def test_old_operator_sets(static, dynamic):
    for opset, call, options in ((9, static, {}), (12, static, {"per_channel": True}), (10, dynamic, {})):
        model = small_model(opset)
        del model.graph.node[9]  # the norm came later
        model.graph.node[-1].input[0] = "ge"
        refused(call, genai.GraphError, f"opset {opset}", "convert_version", source=model, **options)


def test_places(small_path, tmp_path):
    call = q.quantize_dynamic
    refused(call, genai.OptionError, "output folder", model_input=small_path, model_output=tmp_path / "no" / "q.onnx")
    refused(call, genai.OptionError, "path", model_input=small_path, model_output=None)
    refused(
        call,
        genai.ModelFolderError,
        "no model file",
        model_input=tmp_path / "no.onnx",
        model_output=tmp_path / "q.onnx",
    )
    refused(
        q.quantize,
        genai.OptionError,
        "quant_config",
        model_input=small_path,
        model_output=tmp_path / "q",
        quant_config={},
    )
    assert not (tmp_path / "q.onnx").exists()


def test_a_failed_run_leaves_no_file(static, tmp_path):
    refused(static, genai.InputError, "no data", reader=Feeds([]))
    assert not list(tmp_path.iterdir())


# Files of ranges


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("no", "JSON"),
        ("[]", "list"),
        ("{}", "no calibration ranges"),
        ('{"data": {}, "calibration_method": {"value": "Mean"}}', "no calibration ranges"),
        ('{"data": {"x": 3}, "calibration_method": {"value": "CalibrationMethod.MinMax"}}', "lowest"),
        (
            '{"data": {"x": {"lowest": NaN, "highest": 1}}, "calibration_method": {"value": "MinMax"}}',
            "finite",
        ),
        (
            '{"data": {"x": {"lowest": 2, "highest": 1}}, "calibration_method": {"value": "MinMax"}}',
            "first must not be larger",
        ),
        ('{"data": {"x": {"lowest": "a", "highest": 1}}, "calibration_method": {"value": "MinMax"}}', "number"),
        ('{"data": {}, "calibration_method": {"value": "MinMax"}, "smooth_quant": true}', "SmoothQuant"),
        ('{"data": {}, "calibration_method": {"value": "Entropy"}}', "Entropy"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_damaged_files_of_ranges(static, tmp_path, text, word):
    path = tmp_path / "ranges.json"
    path.write_text(text)
    refused(static, genai.InputError, word, calibration_cache_path=path)


def test_ranges_of_another_model(static, tmp_path):
    """What is not in the file stays float, and that is said."""
    path = tmp_path / "ranges.json"
    path.write_text('{"data": {"x": {"lowest": -1, "highest": 1}}, "calibration_method": {"value": "MinMax"}}')
    with pytest.warns(UserWarning, match="stay float"):
        static(calibration_cache_path=path)


# Calibrators


def test_calibrators(small_path):
    refused(q.create_calibrator, genai.OptionError, "'bins'", model=small_path, extra_options={"bins": 3})
    refused(
        q.create_calibrator,
        genai.NotSupportedYetError,
        "per_channel",
        model=small_path,
        extra_options={"per_channel": True},
    )
    refused(q.create_calibrator(small_path).compute_data, genai.StateError, "no data")
    refused(q.MinMaxCalibrater, genai.OptionError, "averaging_constant", model_path=small_path, averaging_constant=0)
    kinds = q.calibrate
    refused(kinds.HistogramCalibrater, genai.OptionError, "'mean'", model_path=small_path, method="mean")
    refused(kinds.HistogramCalibrater, genai.NotSupportedYetError, model_path=small_path, method="distribution")
    refused(kinds.PercentileCalibrater, genai.OptionError, "percentile", model_path=small_path, percentile=-1)
    refused(
        q.get_qdq_config,
        genai.OptionError,
        "'mode'",
        model_input=small_path,
        calibration_data_reader=None,
        calibrate_args={"mode": 1},
    )


def test_preparation(small_path, tmp_path):
    out = tmp_path / "p.onnx"
    refused(q.quant_pre_process, genai.OptionError, "the argument is missing: input_model", output_model_path=out)
    refused(
        q.quant_pre_process, genai.OptionError, "the argument is missing: output_model_path", input_model=small_path
    )
    refused(
        q.quant_pre_process, genai.NotSupportedYetError, "guess_output_rank",
        input_model=small_path, output_model_path=out, guess_output_rank=True,
    )  # fmt: skip
    refused(
        q.quant_pre_process,
        genai.OptionError,
        "'skip_shapes'",
        input_model=small_path,
        output_model_path=out,
        skip_shapes=1,
    )
