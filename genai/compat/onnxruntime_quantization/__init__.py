"""Quantisation of any ONNX model, with the names and signatures of onnxruntime.quantization.

    from genai.compat.onnxruntime_quantization import QuantType, quantize_dynamic, quantize_static

The implementation is in `genai.quantize.onnx_graph`.
"""

from __future__ import annotations

from typing import Any

from ...quantize.onnx_graph.tensors_data import (
    CalibrationMethod as CalibrationMethod,
    TensorData as TensorData,
    TensorsData as TensorsData,
    load_tensors_data as load_tensors_data,
    save_tensors_data as save_tensors_data,
)
from .calibrate import (
    CalibraterBase as CalibraterBase,
    CalibrationDataReader as CalibrationDataReader,
    MinMaxCalibrater as MinMaxCalibrater,
    create_calibrator as create_calibrator,
)
from .quant_utils import (
    QuantFormat as QuantFormat,
    QuantizationMode as QuantizationMode,
    QuantType as QuantType,
)
from .quantize import (
    DynamicQuantConfig as DynamicQuantConfig,
    QuantConfig as QuantConfig,
    StaticQuantConfig as StaticQuantConfig,
    get_qdq_config as get_qdq_config,
    quantize as quantize,
    quantize_dynamic as quantize_dynamic,
    quantize_static as quantize_static,
)
from .refused import REASONS
from .shape_inference import quant_pre_process as quant_pre_process


def __getattr__(name: str) -> Any:
    from . import refused

    if name in REASONS and "." not in name:
        return getattr(refused, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for name in REASONS if "." not in name)})
