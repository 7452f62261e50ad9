"""Outputs of onnxruntime's weight quantiser, `matmul_nbits_quantizer`."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from genai.convert import ExportOptions, build_model
from genai.quantize.source import FloatModel

from .points import Points, point
from .subject import Measuring

MAKER = "onnxruntime"


def ways() -> dict[str, Callable[[Any, Any], Any]]:
    """Return functions by name; each makes a quantiser from onnxruntime's module and a model."""
    found: dict[str, Callable[[Any, Any], Any]] = {}
    for size in (32, 128):
        for symmetric in (True, False):
            label = f"default 4/{size}{'' if symmetric else ' zero points'}"
            found[label] = lambda q, model, size=size, symmetric=symmetric: q.MatMulNBitsQuantizer(
                model, bits=4, block_size=size, is_symmetric=symmetric, op_types_to_quantize=("MatMul", "Gather")
            )
        found[f"hqq 4/{size}"] = lambda q, model, size=size: q.MatMulNBitsQuantizer(
            model, algo_config=q.HQQWeightOnlyQuantConfig(block_size=size, bits=4)
        )
        found[f"k_quant 4/{size}"] = lambda q, model, size=size: q.MatMulNBitsQuantizer(
            model, bits=4, block_size=size, is_symmetric=False, algo_config=q.KQuantWeightOnlyQuantConfig()
        )
        found[f"rtn 4/{size}"] = lambda q, model, size=size: q.MatMulNBitsQuantizer(
            model, bits=4, block_size=size, is_symmetric=True, algo_config=q.RTNWeightOnlyQuantConfig()
        )
    found["default 8/32"] = lambda q, model: q.MatMulNBitsQuantizer(
        model, bits=8, block_size=32, is_symmetric=True, op_types_to_quantize=("MatMul", "Gather")
    )
    return found


def measure(measuring: Measuring, work: Path, points: Points) -> None:
    """Measure all settings that the points file lacks."""
    import onnx
    from onnxruntime.quantization import matmul_nbits_quantizer

    logging.getLogger(matmul_nbits_quantizer.__name__).setLevel(logging.WARNING)  # the module logs every node
    subject = measuring.subject
    due = {label: make for label, make in ways().items() if not points.has(subject.name, MAKER, label)}
    floats, made = work / subject.name / "onnx-floats", work / subject.name / "onnx-made"
    if due and not floats.exists():
        build_model(subject.checkpoint, floats, ExportOptions(precision="fp32"))
    for label, make in due.items():
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(floats, made, ignore=shutil.ignore_patterns("*.onnx*"))
        model = onnx.load(floats / "model.onnx")
        beside = _nbytes(model) - 4 * measuring.elements
        begin = time.perf_counter()
        quantizer = make(matmul_nbits_quantizer, model)
        quantizer.process()
        seconds = time.perf_counter() - begin
        bits = 8 * (_nbytes(quantizer.model.model) - beside) / measuring.elements
        quantizer.model.save_model_to_file(str(made / "model.onnx"), True)
        with FloatModel(made, requantize=True) as one:
            quality = measuring.quality(one)
        points.add(point(subject.name, MAKER, label, bits, quality, seconds=seconds))


def _nbytes(model: Any) -> int:
    import onnx

    return sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in model.graph.initializer)
