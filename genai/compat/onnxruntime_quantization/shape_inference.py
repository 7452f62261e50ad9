"""onnxruntime.quantization.shape_inference."""

from __future__ import annotations

from ...quantize.onnx_graph.shape_inference import quant_pre_process as quant_pre_process
