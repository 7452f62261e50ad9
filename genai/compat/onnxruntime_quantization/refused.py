"""Names in onnxruntime.quantization that raise an error with a reason when they are used."""

from __future__ import annotations

from typing import Any

from ..refused import stand_in

_PAGE = "for the supported names, see docs/reference/onnx-quantisation.md"
_GRAPH = "onnxruntime's classes for editing graphs do not exist here; the functions of this module replace them"
_QUANTIZER = "MatMulNBitsQuantizer replaces this class"
REASONS = {
    "CalibrationMethod.Distribution": "float8 is not supported",
    "CudaQuantizer": "the weight layout is specific to onnxruntime's CUDA kernels",
    "QDQQuantizer": _GRAPH,
    "QuantType.QFLOAT8E4M3FN": "weights and activations are quantised to integers only",
    "base_quantizer": _GRAPH,
    "cuda_quantizer": "the weight layout is specific to onnxruntime's CUDA kernels",
    "fusions": "quant_pre_process fuses nodes",
    "matmul_nbits_quantizer.DefaultWeightOnlyQuantizer": _QUANTIZER,
    "matmul_nbits_quantizer.HQQWeightOnlyQuantizer": _QUANTIZER,
    "matmul_nbits_quantizer.NVAWQWeightOnlyQuantizer": _QUANTIZER,
    "neural_compressor": "methods for weights are in genai.quant",
    "onnx_quantizer": _GRAPH,
    "operators": _GRAPH,
    "qdq_quantizer": _GRAPH,
    "registry": "operator rules are data, in genai/quantize/onnx_graph/operator_rules.py",
    "tensor_quant_overrides": "pass TensorQuantOverrides as an extra option",
    "write_calibration_table": "TensorRT tables are not supported; save_tensors_data writes ranges as JSON",
}
"""Reasons by name. Names with a dot exist, and raise an error when they are used."""


def __getattr__(name: str) -> Any:
    if name not in REASONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return stand_in(name, REASONS[name], _PAGE)
