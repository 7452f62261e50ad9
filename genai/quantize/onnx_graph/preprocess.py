"""Preparation of a model for quantisation: constant folding, fusion of batch norms and convolutions, type inference."""

from __future__ import annotations

from ...onnx.ir import OnnxModel
from ...optimize.base import Level, run_rewrites
from ...optimize.constant_folding import lift_constants
from ...optimize.shapes import infer_shapes
from ...optimize.standard import SESSION_RULES

# onnxruntime recognises a preprocessed model by this entry.
_MARK = {"onnx.quant.pre_process": "onnxruntime.quant"}


def preprocess(model: OnnxModel, *, simplify: bool = True, infer: bool = True) -> None:
    """Prepare a model for quantisation, in place.

    Args:
        simplify: True to simplify the model, using only standard operators.
        infer: True to infer the types of the values.
    """
    if simplify:
        run_rewrites(model, (lift_constants,), Level.BASIC)
        infer_shapes(model)
        run_rewrites(model, SESSION_RULES, Level.BASIC)
    if infer:
        infer_shapes(model)
    model.metadata.update(_MARK)
