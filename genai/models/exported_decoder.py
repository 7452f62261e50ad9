"""Decoders that were exported with plain attention: finds the pattern, evaluates the masks, and flattens the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GenaiError
from ..lowering.exported_attention import (
    HIDDEN,
    PlainAttention,
    find_plain_attention,
    other_form,
    replace_plain_attention,
    settle_shapes,
)
from ..lowering.flatten import FlatDecoder, attention_layers, flatten_decoder
from ..lowering.positions import Trial, add_position_ids, context_inputs, replace_constants, replace_tables
from ..lowering.rows import NotFlattenable
from ..onnx.decoder_names import GraphNames
from ..onnx.ir import Graph, OnnxModel, Value
from ..onnx.types import TensorType
from ..optimize import composites, constant_folding, encoders, exported, reshapes, simplify
from ..optimize.base import Level, run_rewrites
from ..optimize.decoders import has_narrow_floats, read_narrow_matrices, widen_floats
from ..optimize.dequantized import PACK_DEQUANTIZED
from ..optimize.shapes import infer_shapes
from ..session.loop import run
from ..session.plan import PlanOptions, build_plan
from .config import Config
from .decoder_file import read_decoder_file
from .identity import LoadedFiles
from .sliding_window import no_window

_BEFORE = (
    simplify.remove_identities,
    *PACK_DEQUANTIZED,
    reshapes.fold_known_shapes,
    constant_folding.fold_constants,
    exported.remove_whole_slices,
    simplify.share_subexpressions,
    composites.fuse_layer_norm,
    composites.fuse_gelu,
    encoders.fuse_rms_norm,
    exported.join_centred_norm,
    simplify.remove_dead_code,
)
_AFTER = (
    encoders.move_transpose_after_norm,
    simplify.remove_identities,
    reshapes.fold_known_shapes,
    constant_folding.fold_constants,
    simplify.share_subexpressions,
    simplify.merge_transposes,
    reshapes.fold_known_reshapes,
    reshapes.merge_reshapes,
    reshapes.remove_idle_reshapes,
    exported.select_columns_of_heads,
    simplify.remove_dead_code,
)
# Numbers of past and new tokens for which values are evaluated, in addition to the longest context.
_TRIALS: tuple[Trial, ...] = ((0, 5), (6, 1), (9, 4), (1, 17))
# Further numbers for masks: prompts, and tokens that follow one at a time.
_MASK_TRIALS: tuple[Trial, ...] = ((0, 23), (14, 1))
# Numbers for which every graph can be computed: a prompt, and tokens that follow one at a time.
_SAFE_TRIALS: tuple[Trial, ...] = ((0, 5), (6, 1), *_MASK_TRIALS)
# A window that is longer than this counts as no window.
_LONGEST_TRIAL = 1 << 20


def flatten_exported(config: Config, files: LoadedFiles | None = None) -> FlatDecoder:
    """Read the folder's graph, replace plain attention and dequantised weights with operators, and flatten it."""
    names, decoder = config.model.decoder.names, config.model.decoder
    model = _read(config, files)
    if any(node.op_type == "GroupQueryAttention" for node in model.graph.nodes):
        return flatten_decoder(model, names)
    trials = Trials(config, model.copy())
    content, context = _sources(model.graph, names)
    factors = sorted(context_inputs(model.graph, content, context) - {names.position_ids, names.attention_mask})
    replace_constants(model.graph, factors, trials.evaluate, _SAFE_TRIALS, _TRIALS)
    layers = find_plain_attention(model.graph, names)
    if len(layers) != decoder.num_hidden_layers:
        raise NotFlattenable(
            f"attention is recognised in {len(layers)} of {decoder.num_hidden_layers} layers: {other_form(model.graph)}"
        )
    if bad := sorted({mask for layer in layers for mask in layer.masks} & content):
        raise NotFlattenable(f"the attention mask {bad[0]!r} depends on the tokens")
    windows = {masks: trials.window(*masks) for masks in {layer.masks for layer in layers}}
    for index, layer in enumerate(layers):
        if windows[layer.masks] is None and decoder.has_window(index) and _is_short(decoder.sliding_window, config):
            raise no_window(config.model, f"the mask {layer.masks[0]!r} of layer {index} has no window")
    heads = decoder.num_attention_heads, decoder.num_key_value_heads
    for layer in layers:
        _check_heads(model.graph, layer, heads)
    replace_plain_attention(model, layers, heads, windows.__getitem__)
    _replace_positions(model.graph, names, trials)
    infer_shapes(model)
    rotations = encoders.fuse_plain_rotation(names.position_ids), encoders.fuse_cached_rotation(names.position_ids)
    run_rewrites(model, (*rotations, *_AFTER), Level.EXTENDED)
    infer_shapes(model)
    flat = flatten_decoder(model, names)
    if any(layer.head_size != decoder.head_size for layer in attention_layers(flat.layers)):
        raise NotFlattenable(f"its heads do not have the size {decoder.head_size} in genai_config.json")
    return flat


def _check_heads(graph: Graph, layer: PlainAttention, heads: tuple[int, int]) -> None:
    """Raise NotFlattenable if the numbers of heads in the graph differ from the numbers in genai_config.json."""
    for name, number, kind in zip((layer.query, layer.key.new), heads, ("attention", "key_value"), strict=True):
        sizes: tuple[Any, ...] = getattr(graph.type_of(name), "shape", None) or ()
        found = sizes[1] if len(sizes) == 4 else None
        if isinstance(found, int) and found != number:
            raise NotFlattenable(f"{name!r} has {found} heads, but genai_config.json has num_{kind}_heads = {number}")


def _is_short(window: int | None, config: Config) -> bool:
    return window is not None and window < min(config.model.context_length, _LONGEST_TRIAL)


def _replace_positions(graph: Graph, names: GraphNames, trials: Trials) -> None:
    """Replace all values that are computed from positions and lengths and are combined with values of tokens."""
    content, context = _sources(graph, names)
    tables = sorted(context_inputs(graph, content, context) - {names.position_ids})
    if all(value.name != names.position_ids for value in graph.inputs):
        add_position_ids(graph, names.position_ids, names.input_ids)
    replace_tables(graph, tables, trials.evaluate, _TRIALS, trials.longest, names.position_ids)
    graph.topological_sort()


def _sources(graph: Graph, names: GraphNames) -> tuple[set[str], set[str]]:
    """Return the values that depend on tokens, and those that depend only on lengths, positions and the mask."""
    context = {names.attention_mask, names.position_ids}
    content = {value.name for value in graph.inputs} - context
    for node in graph.nodes:
        if node.op_type in ("Shape", "Size"):
            context.update(node.outputs)
        elif not content.isdisjoint(node.inputs):
            content.update(node.outputs)
        elif not context.isdisjoint(node.inputs):
            context.update(node.outputs)
    return content - {""}, context - {""}


class _EvaluationError(NotFlattenable):
    """A value cannot be computed for a number of past and new tokens."""


@dataclass(frozen=True)
class Trials:
    """Evaluates values of a decoder's graph that do not depend on token ids or on the content of the cache."""

    config: Config
    model: OnnxModel

    @property
    def longest(self) -> int:
        """The largest number of tokens of a trial."""
        return min(self.config.model.context_length, _LONGEST_TRIAL)

    def window(self, *masks: str) -> int | None:
        """Return the number of tokens that a query sees by all masks, its own included; None = all preceding tokens."""
        longest = self.longest
        window = int(self._visible(masks, (longest - 1, 1)).sum())
        for past, new in (*_TRIALS, *_MASK_TRIALS):
            try:
                seen = self._visible(masks, (past, new))
            except _EvaluationError:
                if past and new > 1:  # some graphs fail for several tokens after others, so that no mask is defined
                    continue
                raise
            age = np.arange(past, past + new)[:, None] - np.arange(past + new)
            if not np.array_equal(seen, (age >= 0) & (age < window)):
                raise NotFlattenable(f"mask {masks[0]!r} is neither causal nor a sliding window")
        return window if window < longest else None

    def _visible(self, names: Sequence[str], trial: Trial) -> NDArray[np.bool_]:
        """Return a boolean array [new, past + new]: True where all masks let a new token see a token."""
        past, new = trial
        visible = np.ones((new, past + new), np.bool_)
        for mask in self.evaluate(names, trial):
            if mask.ndim != 4 or mask.shape[:2] != (1, 1):
                raise NotFlattenable(
                    f"a mask has the shape {list(mask.shape)}, which differs between heads or sequences"
                )
            rows = np.broadcast_to(mask[0, 0], (new, past + new))
            seen = rows if rows.dtype == np.bool_ else rows == 0
            if rows.dtype != np.bool_ and not np.all(seen | (rows < HIDDEN)):
                raise NotFlattenable("a mask has values other than visible and hidden: it is a bias")
            visible &= seen
        return visible

    def evaluate(self, names: Sequence[str], trial: Trial) -> list[NDArray[Any]]:
        """Compute values of the graph for one sequence without padding."""
        part = self.model.copy()
        part.graph.outputs = [Value(name) for name in names]
        part.graph.invalidate()
        simplify.remove_dead_code.apply(part)
        part.graph.inputs = [value for value in part.graph.inputs if part.graph.consumers(value.name)]
        part.graph.invalidate()
        try:
            found = run(build_plan(part, PlanOptions()), self._feeds(part.graph, trial))
        except (GenaiError, MemoryError) as error:
            raise _EvaluationError(f"{names[0]!r} could not be evaluated: {error}") from error
        return [np.asarray(found[name]) for name in names]

    def _feeds(self, graph: Graph, trial: Trial) -> Mapping[str, NDArray[Any]]:
        decoder, (past, new) = self.config.model.decoder, trial
        names, sizes = decoder.names, (decoder.num_key_value_heads, decoder.head_size)
        known = {
            names.input_ids: np.zeros((1, new)),
            names.attention_mask: np.ones((1, past + new)),
            names.position_ids: np.arange(past, past + new)[None],
        }
        feeds: dict[str, Any] = {}
        for value in graph.inputs:
            if value.name in graph.initializers:
                continue
            if not isinstance(value.type, TensorType):
                raise NotFlattenable(f"input {value.name!r} is not a tensor")
            dtype = value.type.dtype.numpy_dtype
            if value.name in known:
                feeds[value.name] = known[value.name].astype(dtype)
                continue
            known_sizes = (value.type.shape or ())[1:4:2]
            pairs = zip(known_sizes, sizes, strict=False) if len(known_sizes) == 2 else ((None, size) for size in sizes)
            heads, size = (dim if isinstance(dim, int) else given for dim, given in pairs)
            # A broadcast view needs no memory, and only its shape matters.
            feeds[value.name] = np.broadcast_to(np.zeros((), dtype), (1, heads, past, size))
        return feeds


def _read(config: Config, files: LoadedFiles | None) -> OnnxModel:
    model = read_decoder_file(config, files)
    if has_narrow_floats(model.graph):
        widen_floats(model)
        # Folding constants would widen matrices that kernels can read in 16 bits.
        run_rewrites(model, (read_narrow_matrices,), Level.EXTENDED)
    settle_shapes(model, config.model.decoder.names)
    run_rewrites(model, _BEFORE, Level.EXTENDED)
    infer_shapes(model)
    return model
