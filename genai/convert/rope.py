"""Cosines and sines of the rotary embedding, by position and frequency.

Angles are computed in float32, with the same steps as in transformers. At position 4,096 the angle has an error of
about 2e-4, so a more exact table would differ more from the table that the model was trained with.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from .graph_writer import BOOL, FLOAT, Export
from .rope_scaling import (
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    ProportionalRope,
    QueryScaling,
    YarnScaling,
    long_rope_magnitude,
    yarn_magnitude,
)
from .spec import DecoderSpec

Tables = tuple[NDArray[np.float32], NDArray[np.float32]]

_POSITIONS_AT_ONCE = 1 << 14

COS, SIN = "cos_cache", "sin_cache"
LOCAL_COS, LOCAL_SIN = "cos_cache_local", "sin_cache_local"
QUERY_COS, QUERY_SIN = "cos_cache_query", "sin_cache_query"


def table_names(spec: DecoderSpec, layer: int) -> tuple[str, str]:
    """Return the names of the tables that a layer uses for the rotation."""
    return (LOCAL_COS, LOCAL_SIN) if spec.local_rope(layer) else (COS, SIN)


def query_table_names(spec: DecoderSpec, layer: int) -> tuple[str, str]:
    """Return the names of the tables that a layer uses for the rotation of queries."""
    scaling = spec.query_scaling
    return table_names(spec, layer) if scaling is None or not scaling.rotated else (QUERY_COS, QUERY_SIN)


def scaled_frequencies(spec: DecoderSpec) -> tuple[NDArray[np.float32], float]:
    """Return radians per position, [pairs] or [context_length, pairs], and the factor for cosines and sines."""
    frequencies, scaling, factor = _frequencies(spec, spec.rope_theta), spec.rope_scaling, 1.0
    if isinstance(scaling, LinearScaling):
        frequencies = frequencies / np.float32(scaling.factor)
    elif isinstance(scaling, DynamicScaling):
        frequencies = _dynamic_frequencies(spec, scaling)
    elif isinstance(scaling, Llama3Scaling):
        frequencies = _llama3_frequencies(frequencies, scaling)
    elif isinstance(scaling, FrequencyFactors):
        frequencies, factor = _frequencies(spec, spec.rope_theta, scaling.divisors), scaling.attention_factor
    elif isinstance(scaling, ProportionalRope):
        frequencies = frequencies / np.float32(scaling.factor)
        frequencies[int(scaling.share * spec.rotary_size // 2) :] = 0
    elif isinstance(scaling, YarnScaling):
        frequencies = _yarn_frequencies(spec, frequencies, scaling)
        factor = yarn_magnitude(scaling.factor) if scaling.attention_factor is None else scaling.attention_factor
    return frequencies, factor


def long_rope_tables(spec: DecoderSpec, scaling: LongRope) -> tuple[Tables, Tables]:
    """Return the tables for sequences up to the original context length, and the tables for longer sequences."""
    factor = long_rope_attention_factor(spec, scaling)
    long_factor = factor if scaling.long_attention_factor is None else scaling.long_attention_factor
    short = _frequencies(spec, spec.rope_theta, scaling.short_factor)
    long = _frequencies(spec, spec.rope_theta, scaling.long_factor)
    return (
        rotation_tables(short, range(scaling.original_max_position_embeddings), factor),
        rotation_tables(long, range(spec.context_length), long_factor),
    )


def long_rope_attention_factor(spec: DecoderSpec, scaling: LongRope) -> float:
    """Return the factor for cosines and sines, which keeps attention as sharp over a longer context."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    original = scaling.original_max_position_embeddings
    return long_rope_magnitude(spec.context_length / original, original)


def write_rope_tables(export: Export, total_length: str) -> None:
    """Write the initializers cos_cache and sin_cache; for LongRoPE, write an If that selects them by total length."""
    spec, graph = export.spec, export.graph
    layers = [layer for layer in range(spec.num_layers) if spec.rotated(layer)]
    if any(spec.local_rope(layer) for layer in layers):
        local = _frequencies(spec, spec.local_rope_theta or spec.rope_theta, size=spec.local_rotary_size)
        _write_tables(export, (LOCAL_COS, LOCAL_SIN), local, 1.0)
    if all(spec.local_rope(layer) for layer in layers):
        return
    if not isinstance(spec.rope_scaling, LongRope):
        _write_tables(export, (COS, SIN), *scaled_frequencies(spec))
        if spec.query_scaling is not None and spec.query_scaling.rotated:
            _write_tables(export, (QUERY_COS, QUERY_SIN), *scaled_frequencies(spec), spec.query_scaling)
        return
    short, long = long_rope_tables(spec, spec.rope_scaling)
    path = "/model/rope_caches_subgraph"
    limit = graph.int64(spec.rope_scaling.original_max_position_embeddings)
    beyond = graph.node("Greater", [total_length, limit], f"{path}/Greater", [], element=BOOL)
    graph.nodes(
        "If",
        [beyond],
        [COS, SIN],
        f"{path}/If",
        then_branch=_constant_tables("large", long),
        else_branch=_constant_tables("small", short),
    )
    for name in (COS, SIN):
        graph.value(name, FLOAT, ["max_sequence_length", "head_dim / 2"])


def _write_tables(
    export: Export, names: tuple[str, str], frequencies: NDArray[np.float32], factor: float,
    queries: QueryScaling | None = None,
) -> None:  # fmt: skip
    """Write the tables in chunks of positions, so that little memory is used even for a long context."""
    length = export.spec.context_length
    for index, name in enumerate(names):
        starts = range(0, length, _POSITIONS_AT_ONCE)
        chunks = (
            rotation_tables(frequencies, range(i, min(i + _POSITIONS_AT_ONCE, length)), factor, queries)[index]
            for i in starts
        )
        export.graph.initializer(name, (length, frequencies.shape[-1]), np.float32, chunks)


def _frequencies(
    spec: DecoderSpec, theta: float, divisors: tuple[float, ...] = (), size: int | None = None
) -> NDArray[np.float32]:
    """Return the frequencies of `size` rotated elements, by default those of the layers without a window."""
    wavelengths = _wavelengths(theta, spec.rotary_size if size is None else size)
    if divisors:
        wavelengths *= np.array(divisors, np.float32)
    return np.float32(1) / wavelengths


def _wavelengths(theta: float, size: int) -> NDArray[np.float32]:
    """Return the wavelengths in positions per radian."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def _dynamic_frequencies(spec: DecoderSpec, scaling: DynamicScaling) -> NDArray[np.float32]:
    """Return one row of frequencies per position: the frequencies for a sequence that ends at that position."""
    original, size = scaling.original_max_position_embeddings, spec.rotary_size
    rows = np.empty((spec.context_length, size // 2), np.float32)
    rows[:original] = _frequencies(spec, spec.rope_theta)
    for position in range(original, spec.context_length):
        growth = scaling.factor * (position + 1) / original - (scaling.factor - 1)
        rows[position] = _frequencies(spec, spec.rope_theta * growth ** (size / (size - 2)))
    return rows


def _llama3_frequencies(frequencies: NDArray[np.float32], scaling: Llama3Scaling) -> NDArray[np.float32]:
    """Stretch wavelengths above original / low_freq_factor; keep wavelengths below original / high_freq_factor."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = np.float32(scaling.original_max_position_embeddings) / (np.float32(2 * math.pi) / frequencies)
    share = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    blended: NDArray[np.float32] = (1 - share) * frequencies / np.float32(scaling.factor) + share * frequencies
    return blended


def _yarn_frequencies(spec: DecoderSpec, frequencies: NDArray[np.float32], scaling: YarnScaling) -> NDArray[np.float32]:
    """Keep frequencies over beta_fast turns within the original length; reduce frequencies under beta_slow turns."""

    def dimension(turns: float) -> float:
        length = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return spec.rotary_size * math.log(length) / (2 * math.log(spec.rope_theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rotary_size - 1)
    pairs = np.arange(spec.rotary_size // 2, dtype=np.float32)
    stretched = np.clip((pairs - np.float32(first)) / np.float32(last - first or 0.001), 0, 1)
    slow = np.float32(1) / (np.float32(scaling.factor) * _wavelengths(spec.rope_theta, spec.rotary_size))
    blended: NDArray[np.float32] = slow * stretched + frequencies * (1 - stretched)
    return blended


def rotation_tables(
    frequencies: NDArray[np.float32], at: range, factor: float, queries: QueryScaling | None = None
) -> Tables:
    """Return cosines and sines; frequencies are [pairs], the same for all positions, or [context_length, pairs]."""
    positions = np.array(at, np.float32)[:, None]
    at_positions = frequencies if frequencies.ndim == 1 else frequencies[at.start : at.stop]
    angles = (positions * at_positions).astype(np.float64)
    scale: Any = np.float32(factor)
    if queries is not None:
        scale = scale * queries.factors(at)[:, None]
    return np.cos(angles).astype(np.float32) * scale, np.sin(angles).astype(np.float32) * scale


def _constant_tables(size: str, tables: Tables) -> onnx.GraphProto:
    """Return a branch of the If with two constants, which must be in the graph for onnxruntime to read them."""
    nodes, outputs = [], []
    for kind, table in zip((COS, SIN), tables, strict=True):
        name = f"{kind}_{size}"
        tensor = numpy_helper.from_array(table)
        nodes.append(helper.make_node("Constant", [], [name], name=f"/{size}/{kind}/Constant", value=tensor))
        outputs.append(helper.make_tensor_value_info(name, FLOAT, table.shape))
    return helper.make_graph(nodes, f"{size}_rope_caches_graph", [], outputs)
