"""Every name of the installed onnxruntime.quantization: there with the same signature, or refused with a reason."""

from __future__ import annotations

import importlib
import inspect
import re

import numpy as np
import pytest

import genai
import genai.compat.onnxruntime_quantization as ours
from genai.compat.onnxruntime_quantization.refused import REASONS
from tools.name_table import QUANTIZATION

pytestmark = pytest.mark.oracle
theirs = pytest.importorskip("onnxruntime.quantization")
pytest.importorskip("onnx_ir")  # their matmul_nbits_quantizer needs it


def test_nothing_is_undecided():
    assert [name for name in QUANTIZATION.names(theirs) if QUANTIZATION.state(name) == "missing"] == []


def test_the_page_says_what_is_so():
    listed = dict(re.findall(r"^\| (\S+) \| (.+) \|$", QUANTIZATION.page.read_text(encoding="utf-8"), re.M))
    names = QUANTIZATION.names(theirs)
    assert set(names) <= listed.keys()
    assert {name: listed[name] for name in names} == {name: QUANTIZATION.state(name) for name in names}


@pytest.mark.parametrize("name", [name for name in REASONS if "." not in name])
def test_refused_names_say_why(name):
    found = getattr(ours, name)
    assert name in dir(ours)
    with pytest.raises(genai.NotSupportedYetError, match=name) as caught:
        found()
    assert caught.value.why == REASONS[name]


def test_no_such_name():
    with pytest.raises(AttributeError, match="'quantise'"):
        ours.quantise  # noqa: B018


CALLABLES = """
quantize_static quantize_dynamic quantize quant_pre_process get_qdq_config StaticQuantConfig DynamicQuantConfig
create_calibrator save_tensors_data load_tensors_data CalibraterBase MinMaxCalibrater calibrate.HistogramCalibrater
calibrate.EntropyCalibrater calibrate.PercentileCalibrater MinMaxCalibrater.collect_data MinMaxCalibrater.compute_data
CalibrationDataReader.set_range CalibrationDataReader.get_next
matmul_nbits_quantizer.MatMulNBitsQuantizer matmul_nbits_quantizer.WeightOnlyQuantConfig
matmul_nbits_quantizer.DefaultWeightOnlyQuantConfig matmul_nbits_quantizer.RTNWeightOnlyQuantConfig
matmul_nbits_quantizer.HQQWeightOnlyQuantConfig matmul_nbits_quantizer.GPTQWeightOnlyQuantConfig
matmul_nbits_quantizer.KQuantWeightOnlyQuantConfig matmul_nbits_quantizer.NVAWQWeightOnlyQuantConfig
onnx_model.ONNXModel.save_model_to_file
""".split()


@pytest.mark.parametrize("path", CALLABLES)
def test_signatures(path):
    """The same parameters in the same order with the same defaults."""
    found = []
    for library in (theirs, ours):
        value = library
        for part in path.split("."):
            if not hasattr(value, part):
                importlib.import_module(f"{library.__name__}.{part}")
            value = getattr(value, part)
        found.append(list(inspect.signature(value).parameters.values()))
    expected, actual = found
    assert [(one.name, one.kind) for one in actual] == [(one.name, one.kind) for one in expected]
    for one, other in zip(actual, expected, strict=True):
        # A default that could be changed by accident is None here; enumerations are ours.
        if other.default not in ({}, []) and not isinstance(other.default, tuple):
            assert str(one.default).rsplit(".", 1)[-1] == str(other.default).rsplit(".", 1)[-1], one.name


def test_enumerations_have_the_same_members():
    for name in ("QuantType", "QuantFormat", "QuantizationMode", "CalibrationMethod"):
        expected, found = getattr(theirs, name), getattr(ours, name)
        assert {one.name: one.value for one in found} == {one.name: one.value for one in expected}
        assert [str(one) for one in found] == [str(one) for one in expected]
    assert [one.tensor_type for one in ours.QuantType] == [one.tensor_type for one in theirs.QuantType]


def test_modules_that_scripts_import_from():
    for module, names in {
        "calibrate": "CalibrationDataReader CalibrationMethod TensorsData create_calibrator MinMaxCalibrater",
        "quant_utils": "QuantType QuantFormat QuantizationMode",
        "quantize": "quantize_static quantize_dynamic quantize StaticQuantConfig DynamicQuantConfig QuantConfig",
        "shape_inference": "quant_pre_process",
        "matmul_nbits_quantizer": "MatMulNBitsQuantizer",
        "onnx_model": "ONNXModel",
    }.items():
        for name in names.split():
            for library in ("onnxruntime", "genai"):
                assert hasattr(importlib.import_module(f"{library}.quantization.{module}"), name)


def test_a_reader_of_ours_serves_theirs_and_the_other_way_round():
    assert issubclass(theirs.CalibrationDataReader, ours.CalibrationDataReader)

    class Reader(ours.CalibrationDataReader):
        left = 2

        def get_next(self):
            self.left -= 1
            return {"x": np.ones(1)} if self.left >= 0 else None

    assert isinstance(Reader(), theirs.CalibrationDataReader)
    assert len(list(Reader())) == 2
    with pytest.raises(NotImplementedError):
        Reader().set_range(0, 1)
    with pytest.raises(TypeError):
        ours.CalibrationDataReader()
