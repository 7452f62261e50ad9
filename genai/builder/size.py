"""How large a model folder will be, before it is written."""

from __future__ import annotations

import math

from genai.quant.blocks import num_blocks

from .options import BITS, ExportOptions, Precision
from .rope_scaling import LongRope
from .spec import DecoderSpec
from .tensors import Shape, tensor_shapes

# Graph, configuration, alignment.
_BESIDE_WEIGHTS = 1 << 20


def folder_bytes(spec: DecoderSpec, options: ExportOptions) -> int:
    """Bytes on disk without the tokenizer's files, rounded up a little."""
    weights = sum(_tensor_bytes(spec, options, name, shape) for name, shape in tensor_shapes(spec).items())
    tables = 2 * 4 * spec.context_length * (spec.rotary_size // 2)
    copies = 2 if isinstance(spec.rope_scaling, LongRope) or spec.local_rope_theta else 1
    return weights + copies * tables + _BESIDE_WEIGHTS


def _tensor_bytes(spec: DecoderSpec, options: ExportOptions, name: str, shape: Shape) -> int:
    if len(shape) < 2 or name.endswith("mlp.gate.weight"):
        return 4 * math.prod(shape)
    if name == "lm_head.weight":
        return _matrix_bytes(shape, options.head, options)
    if name == "model.embed_tokens.weight":
        precision = options.embedding(tied=spec.tie_word_embeddings)
        apart = spec.tie_word_embeddings and precision != options.head
        head = _matrix_bytes(shape, options.head, options) if apart else 0
        return head + _matrix_bytes(shape, precision, options)
    return _matrix_bytes(shape, options.precision, options)


def _matrix_bytes(shape: Shape, precision: Precision, options: ExportOptions) -> int:
    rows, columns = shape
    if precision not in BITS:
        return rows * columns * (2 if precision == "fp16" else 4)
    blocks = num_blocks(columns, options.block_size)
    points = 0 if options.symmetric else 1
    return rows * blocks * (options.block_size * BITS[precision] // 8 + 4 + points)
