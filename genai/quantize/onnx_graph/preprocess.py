"""Makes a model ready for quantisation: constants folded, batch norms in their convolutions, every type known."""

from __future__ import annotations

from ...onnx.ir import OnnxModel
from ...optimize.base import Level, run_rewrites
from ...optimize.constant_folding import lift_constants
from ...optimize.shapes import infer_shapes
from ...optimize.standard import SESSION_RULES

# By this entry onnxruntime sees that a model went through such a step.
_MARK = {"onnx.quant.pre_process": "onnxruntime.quant"}


def preprocess(model: OnnxModel, *, simplify: bool = True, infer: bool = True) -> None:
    """Make a model ready for quantisation, in place.

    Args:
        simplify: rewrite it within the standard operators. infer: find the types of its values.
    """
    if simplify:
        run_rewrites(model, (lift_constants,), Level.BASIC)
        infer_shapes(model)
        run_rewrites(model, SESSION_RULES, Level.BASIC)
    if infer:
        infer_shapes(model)
    model.metadata.update(_MARK)
