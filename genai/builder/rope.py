"""Cosines and sines of the rotary embedding, by position and frequency.

Angles are computed in float32, step by step as transformers does: at position 4096 the angle itself is only known to
about 2e-4, so a more exact table would be further from the model as it was trained.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from .export import Export
from .graph_writer import BOOL, FLOAT
from .spec import DecoderSpec, Llama3Scaling, LongRope

Tables = tuple[NDArray[np.float32], NDArray[np.float32]]

COS, SIN = "cos_cache", "sin_cache"


def rope_tables(spec: DecoderSpec) -> Tables:
    """Cosines and sines [context_length, rotary_size / 2] of a decoder without LongRoPE."""
    frequencies = _frequencies(spec)
    if isinstance(spec.rope_scaling, Llama3Scaling):
        frequencies = _llama3_frequencies(frequencies, spec.rope_scaling)
    return _tables(frequencies, spec.context_length, 1.0)


def long_rope_tables(spec: DecoderSpec, scaling: LongRope) -> tuple[Tables, Tables]:
    """Tables for sequences up to the original context length, and for longer ones."""
    factor = long_rope_attention_factor(spec, scaling)
    short = _frequencies(spec, scaling.short_factor)
    long = _frequencies(spec, scaling.long_factor)
    return (
        _tables(short, scaling.original_max_position_embeddings, factor),
        _tables(long, spec.context_length, factor),
    )


def long_rope_attention_factor(spec: DecoderSpec, scaling: LongRope) -> float:
    """What cosines and sines are multiplied by, to keep attention as sharp over a longer context."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    original = scaling.original_max_position_embeddings
    stretch = spec.context_length / original
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


def write_rope_tables(export: Export, total_length: str) -> None:
    """Write the initialisers cos_cache and sin_cache, or for LongRoPE an If on the total length that chooses them."""
    graph, scaling = export.graph, export.spec.rope_scaling
    if not isinstance(scaling, LongRope):
        for name, table in zip((COS, SIN), rope_tables(export.spec), strict=True):
            graph.array(name, table)
        return
    short, long = long_rope_tables(export.spec, scaling)
    path = "/model/rope_caches_subgraph"
    limit = graph.int64(scaling.original_max_position_embeddings)
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


def _frequencies(spec: DecoderSpec, divisors: tuple[float, ...] = ()) -> NDArray[np.float32]:
    exponents = np.arange(0, spec.rotary_size, 2, dtype=np.float32) / np.float32(spec.rotary_size)
    wavelengths = np.power(spec.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    if divisors:
        wavelengths *= np.array(divisors, np.float32)
    return np.float32(1) / wavelengths


def _llama3_frequencies(frequencies: NDArray[np.float32], scaling: Llama3Scaling) -> NDArray[np.float32]:
    """Stretch wavelengths above original / low_freq_factor, keep those below original / high_freq_factor."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = np.float32(scaling.original_max_position_embeddings) / (np.float32(2 * math.pi) / frequencies)
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    blended: NDArray[np.float32] = (1 - kept) * frequencies / np.float32(scaling.factor) + kept * frequencies
    return blended


def _tables(frequencies: NDArray[np.float32], length: int, factor: float) -> Tables:
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies).astype(np.float64)
    scale = np.float32(factor)
    return np.cos(angles).astype(np.float32) * scale, np.sin(angles).astype(np.float32) * scale


def _constant_tables(size: str, tables: Tables) -> onnx.GraphProto:
    """A branch of the If: two constants, inside the graph because onnxruntime reads them there."""
    nodes, outputs = [], []
    for kind, table in zip((COS, SIN), tables, strict=True):
        name = f"{kind}_{size}"
        tensor = numpy_helper.from_array(table)
        nodes.append(helper.make_node("Constant", [], [name], name=f"/{size}/{kind}/Constant", value=tensor))
        outputs.append(helper.make_tensor_value_info(name, FLOAT, table.shape))
    return helper.make_graph(nodes, f"{size}_rope_caches_graph", [], outputs)
