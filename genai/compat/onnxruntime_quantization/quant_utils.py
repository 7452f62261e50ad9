"""onnxruntime.quantization.quant_utils."""

from __future__ import annotations

from ...quantize.onnx_graph.types import (
    QuantFormat as QuantFormat,
    QuantizationMode as QuantizationMode,
    QuantType as QuantType,
)
