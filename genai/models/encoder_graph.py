"""Analysis of an encoder's graph before compilation: reads it, and converts it to a flat batch if possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GenaiError
from ..lowering.encoder import EncoderInputs, FlatEncoder, flatten_encoder
from ..lowering.rows import NotFlattenable
from ..onnx.ir import OnnxModel, Value
from ..onnx.types import TensorType
from ..optimize import composites, constant_folding, encoders, linear, reshapes, simplify
from ..optimize.base import Level, run_rewrites
from ..optimize.decoders import fuse_matmul_bias, fuse_rotation, widen_floats
from ..optimize.dequantized import PACK_DEQUANTIZED
from ..optimize.shapes import infer_shapes
from ..session.loop import run
from ..session.plan import PlanOptions, build_plan

_BEFORE = (
    simplify.remove_identities,
    reshapes.fold_known_shapes,
    constant_folding.fold_constants,
    simplify.share_subexpressions,
    simplify.merge_transposes,
    composites.fuse_layer_norm,
    composites.fuse_gelu,
    encoders.fuse_rms_norm,
    encoders.join_score_addends,
    composites.fuse_attention,
    reshapes.fold_known_reshapes,
    simplify.remove_dead_code,
)
_AFTER = (
    simplify.remove_identities,
    reshapes.fold_known_shapes,
    constant_folding.fold_constants,
    simplify.share_subexpressions,
    simplify.merge_transposes,
    reshapes.fold_known_reshapes,
    reshapes.merge_reshapes,
    reshapes.remove_idle_reshapes,
    *PACK_DEQUANTIZED,
    fuse_matmul_bias,
    linear.fuse_linear,
    linear.fuse_linear_activation,
    linear.fuse_linear_addition,
    simplify.remove_dead_code,
)


def flat_encoder(model: OnnxModel, inputs: EncoderInputs, outputs: Sequence[str], max_tokens: int) -> FlatEncoder:
    """Flatten an encoder. The model is modified.

    Raises:
        NotFlattenable: the graph cannot be flattened; the message names the reason.
    """
    widen_floats(model)
    infer_shapes(model)
    run_rewrites(model, _BEFORE, Level.EXTENDED)
    infer_shapes(model)

    def evaluate(names: Sequence[str], length: int) -> list[NDArray[Any]]:
        try:
            return _evaluated(model, inputs, names, length)
        except (GenaiError, MemoryError) as error:
            raise NotFlattenable(f"{names[0]!r} cannot be computed for {length} tokens: {error}") from error

    flat = flatten_encoder(model, inputs, outputs, evaluate, max_tokens)
    infer_shapes(model)
    run_rewrites(
        model,
        (
            encoders.move_transpose_after_norm,
            encoders.fuse_plain_rotation(flat.position_ids),
            *_AFTER,
            fuse_rotation(flat.position_ids),
        ),
        Level.EXTENDED,
    )
    infer_shapes(model)
    return flat


def _evaluated(model: OnnxModel, inputs: EncoderInputs, names: Sequence[str], length: int) -> list[NDArray[Any]]:
    """Compute values of the graph for one sequence, whose token ids are -1, because padding has other ids."""
    part = model.copy()
    part.graph.outputs = [Value(name) for name in names]
    part.graph.invalidate()
    simplify.remove_dead_code.apply(part)
    part.graph.inputs = [value for value in part.graph.inputs if part.graph.consumers(value.name)]
    part.graph.invalidate()
    known: Mapping[str, NDArray[Any]] = {
        inputs.input_ids: np.full((1, length), -1),
        inputs.attention_mask: np.ones((1, length)),
        inputs.token_type_ids: np.zeros((1, length)),
        inputs.position_ids: np.arange(length)[None],
    }
    feeds = {}
    for value in part.graph.inputs:
        if value.name in part.graph.initializers:
            continue
        if value.name not in known or not isinstance(value.type, TensorType):
            raise NotFlattenable(f"the meaning of the graph's input {value.name!r} is unknown")
        feeds[value.name] = known[value.name].astype(value.type.dtype.numpy_dtype)
    found = run(build_plan(part, PlanOptions()), feeds)
    return [np.asarray(found[name]) for name in names]
