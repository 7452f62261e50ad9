"""onnxruntime.quantization.calibrate."""

from __future__ import annotations

from ...quantize.onnx_graph.calibrate import (
    CalibraterBase as CalibraterBase,
    CalibrationDataReader as CalibrationDataReader,
    EntropyCalibrater as EntropyCalibrater,
    HistogramCalibrater as HistogramCalibrater,
    MinMaxCalibrater as MinMaxCalibrater,
    PercentileCalibrater as PercentileCalibrater,
    create_calibrator as create_calibrator,
)
from ...quantize.onnx_graph.tensors_data import (
    CalibrationMethod as CalibrationMethod,
    TensorData as TensorData,
    TensorsData as TensorsData,
)
