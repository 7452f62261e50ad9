"""A trial of decoders that an exporter wrote as two graphs, or as two branches of one graph.

One of the two computes prompts, and the other computes tokens that have a past. This toolkit uses the second with a
past of length 0 for prompts. Graphs differ in whether this is valid: some have no causal mask, because the exporter
traced them with a single token. Therefore, both compute a few tokens, and the results must be equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GenaiError, UnsupportedModelError
from ..onnx.ir import DataType, OnnxModel
from ..optimize.shapes import infer_shapes
from ..session.loop import run
from ..session.plan import PlanOptions, build_plan
from .config import Config

# More than one token, so that a missing causal mask shows.
_TOKENS = 5
# Relative to the largest value. Quantised activations differ if their rows are computed together.
_TOLERANCE = 2e-2


def check_prompt(config: Config, with_past: OnnxModel, without_past: OnnxModel) -> None:
    """Raise UnsupportedModelError unless the decoder with a past computes a prompt like the one without a past.

    Args:
        config: the configuration.
        with_past: the decoder of later tokens.
        without_past: the decoder of prompts.
    """
    name = config.model.decoder.filename
    try:
        found, expected = _logits(config, with_past), _logits(config, without_past)
    except (GenaiError, MemoryError) as error:
        raise UnsupportedModelError(
            f"{name}: the decoder of tokens with a past does not accept a past of length 0",
            f"a trial with {_TOKENS} tokens failed: {error}",
            _FIX,
        ) from error
    difference = np.abs(found - expected).max() if found.shape == expected.shape else np.inf
    if not difference <= _TOLERANCE * max(float(np.abs(expected).max()), 1e-6):
        raise UnsupportedModelError(
            f"{name}: the decoders of prompts and of later tokens differ",
            f"for the same {_TOKENS} tokens, their logits differ by up to {difference:.3g}",
            _FIX,
        )


_FIX = (
    "export the model as one decoder with its past, for example with `optimum-cli export onnx --task "
    "text-generation-with-past` of a current version"
)


def _logits(config: Config, model: OnnxModel) -> NDArray[np.float32]:
    infer_shapes(model)
    decoder, names = config.model.decoder, config.model.decoder.names
    plan = build_plan(model, PlanOptions())
    known: dict[str, NDArray[Any]] = {
        names.input_ids: (1 + np.arange(_TOKENS)[None]) % config.model.vocab_size,
        names.attention_mask: np.ones((1, _TOKENS)),
        names.position_ids: np.arange(_TOKENS)[None],
    }
    feeds = {}
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        dtype, shape = getattr(value.type, "dtype", DataType.FLOAT), getattr(value.type, "shape", None) or ()
        array = known.get(value.name)
        if value.name == names.inputs_embeds:
            array = np.sin(np.arange(_TOKENS * decoder.hidden_size)).reshape(1, _TOKENS, decoder.hidden_size)
        elif array is None:
            both = (2,) if len(shape) == 5 else ()
            array = np.zeros((*both, 1, decoder.num_key_value_heads, 0, decoder.head_size))
        feeds[value.name] = array.astype(dtype.numpy_dtype)
    logits = np.asarray(run(plan, feeds)[names.logits], np.float32)
    return logits.reshape(-1, logits.shape[-1])[-_TOKENS:]
