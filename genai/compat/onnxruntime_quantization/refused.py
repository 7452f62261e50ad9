"""Names of onnxruntime.quantization that are refused with a reason when they are used."""

from __future__ import annotations

from typing import Any

from ..refused import stand_in

_PAGE = "docs/onnx_quantisation.md lists what is there"
_GRAPH = "the classes that edit graphs are not those of onnxruntime; the functions of this module do what they do"
_QUANTIZER = "the one quantiser of that file does it all"
REASONS = {
    "CalibrationMethod.Distribution": "it fits float8 to a mean and a deviation, and no float8 is made here",
    "CudaQuantizer": "it lays weights out for onnxruntime's own CUDA kernels",
    "QDQQuantizer": _GRAPH,
    "QuantType.QFLOAT8E4M3FN": "weights and activations become integers here",
    "base_quantizer": _GRAPH,
    "cuda_quantizer": "it lays weights out for onnxruntime's own CUDA kernels",
    "fusions": "nodes are joined by quant_pre_process",
    "matmul_nbits_quantizer.DefaultWeightOnlyQuantizer": _QUANTIZER,
    "matmul_nbits_quantizer.HQQWeightOnlyQuantizer": _QUANTIZER,
    "matmul_nbits_quantizer.NVAWQWeightOnlyQuantizer": _QUANTIZER,
    "neural_compressor": "methods for weights are in genai.quant",
    "onnx_quantizer": _GRAPH,
    "operators": _GRAPH,
    "qdq_quantizer": _GRAPH,
    "registry": "rules for operators are data, in genai/quantize/onnx_graph/operator_rules.py",
    "tensor_quant_overrides": "pass TensorQuantOverrides as an extra option",
    "write_calibration_table": "it writes tables for TensorRT; save_tensors_data writes ranges as JSON",
}
"""By name; what has a dot exists, and is refused where it is used."""


def __getattr__(name: str) -> Any:
    if name not in REASONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return stand_in(name, REASONS[name], _PAGE)
