"""Decoders that were exported with plain attention: finds the pattern, evaluates the masks, and flattens the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GenaiError
from ..lowering.exported_attention import find_plain_attention, replace_plain_attention, settle_shapes
from ..lowering.flatten import FlatDecoder, flatten_decoder
from ..lowering.rows import NotFlattenable
from ..onnx.ir import OnnxModel, Value
from ..optimize.shapes import infer_shapes
from ..optimize.simplify import remove_dead_code
from ..session.loop import run
from ..session.plan import PlanOptions, build_plan
from .config import Config
from .decoder_file import read_decoder_file
from .identity import LoadedFiles
from .sliding_window import no_window

# Numbers of past and new tokens for which a mask is evaluated, in addition to one token at the end of the longest
# context.
_TRIALS = ((0, 5), (6, 1), (9, 4), (1, 17))
# A window that is longer than this counts as no window.
_LONGEST_TRIAL = 1 << 20
# Mask values below this are zero after a softmax.
_HIDDEN = -1e4


def flatten_exported(config: Config, files: LoadedFiles | None = None) -> FlatDecoder:
    """Read the folder's graph, replace plain attention with attention operators, and flatten it."""
    names, decoder = config.model.decoder.names, config.model.decoder
    model = _read(config, files)
    layers = find_plain_attention(model.graph, names)
    if len(layers) != decoder.num_hidden_layers:
        raise NotFlattenable(
            f"plain attention was found {len(layers)} times, but there are {decoder.num_hidden_layers} layers"
        )
    try:
        windows = {mask: visible_window(config, mask, files) for mask in {layer.mask for layer in layers}}
    except (GenaiError, MemoryError) as error:
        raise NotFlattenable(f"an attention mask could not be evaluated: {error}") from error
    for index, layer in enumerate(layers):
        if windows[layer.mask] is None and decoder.has_window(index) and _is_short(decoder.sliding_window, config):
            raise no_window(config.model, f"the mask {layer.mask!r} of layer {index} has no window")
    heads = decoder.num_attention_heads, decoder.num_key_value_heads
    replace_plain_attention(model, layers, heads, windows.__getitem__)
    infer_shapes(model)
    flat = flatten_decoder(model, names)
    if any(layer.head_size != decoder.head_size for layer in flat.layers):
        raise NotFlattenable(f"its heads do not have the size {decoder.head_size} in genai_config.json")
    return flat


def _is_short(window: int | None, config: Config) -> bool:
    return window is not None and window < min(config.model.context_length, _LONGEST_TRIAL)


def visible_window(config: Config, mask: str, files: LoadedFiles | None = None) -> int | None:
    """Evaluate a mask. Return the number of tokens that a query sees, its own included; None = all preceding tokens."""
    model = _read(config, files)
    model.graph.outputs = [Value(mask)]
    model.graph.invalidate()
    remove_dead_code.apply(model)
    plan = build_plan(model, PlanOptions())
    longest = min(config.model.context_length, _LONGEST_TRIAL)
    window = int(_visible(config, model, plan, longest - 1, 1).sum())
    for past, new in _TRIALS:
        seen = _visible(config, model, plan, past, new)
        age = np.arange(past, past + new)[:, None] - np.arange(past + new)
        if not np.array_equal(seen, (age >= 0) & (age < window)):
            raise NotFlattenable(f"mask {mask!r} is neither causal nor a sliding window")
    return window if window < longest else None


def _visible(config: Config, model: OnnxModel, plan: Any, past: int, new: int) -> NDArray[np.bool_]:
    """Return a boolean array [new, past + new]: True where a new token sees a token."""
    decoder, names = config.model.decoder, config.model.decoder.names
    known = {
        names.input_ids: np.zeros((1, new)),
        names.attention_mask: np.ones((1, past + new)),
        names.position_ids: np.arange(past, past + new)[None],
    }
    # A broadcast view needs no memory, and only its shape matters.
    cache = np.broadcast_to(np.float32(0), (1, decoder.num_key_value_heads, past, decoder.head_size))
    feeds: dict[str, Any] = {}
    for value in model.graph.inputs:
        dtype = getattr(value.type, "dtype", None)
        if dtype is None:
            raise NotFlattenable(f"input {value.name!r} is not a tensor")
        array = known.get(value.name, cache)
        feeds[value.name] = array.astype(dtype.numpy_dtype) if array is not cache else array
    mask = np.asarray(next(iter(run(plan, feeds).values())))
    if mask.ndim != 4 or mask.shape[:2] != (1, 1):
        raise NotFlattenable(f"a mask has the shape {list(mask.shape)}, which differs between heads or sequences")
    rows = np.broadcast_to(mask[0, 0], (new, past + new))
    seen = rows if rows.dtype == np.bool_ else rows == 0
    if rows.dtype != np.bool_ and not np.all(seen | (rows < _HIDDEN)):
        raise NotFlattenable("a mask has values other than visible and hidden: it is a bias")
    return seen


def _read(config: Config, files: LoadedFiles | None) -> OnnxModel:
    model = read_decoder_file(config, files)
    settle_shapes(model, config.model.decoder.names)
    return model
