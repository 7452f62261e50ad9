"""The rules for general graphs, in the order that they run."""

from __future__ import annotations

from .base import Rewrite
from .byte_tables import tabulate_bytes
from .composites import fuse_attention, fuse_gelu, fuse_layer_norm
from .constant_folding import fold_constants
from .convolutions import fold_conv_batch_norm, fold_pad_into_conv, fuse_conv_activation, fuse_conv_addition
from .linear import fuse_linear, fuse_linear_activation, fuse_linear_addition, join_products
from .quantized import (
    fuse_integer_product_bias,
    fuse_matmul_integer_to_float,
    fuse_quantized_arithmetic,
    fuse_quantized_nodes,
    move_quantized,
)
from .reshapes import fold_known_reshapes, fold_known_shapes
from .simplify import merge_transposes, remove_dead_code, remove_identities, share_subexpressions

SESSION_RULES: tuple[Rewrite, ...] = (
    remove_identities,
    fold_known_shapes,
    fold_constants,
    share_subexpressions,
    merge_transposes,
    fold_pad_into_conv,
    fold_conv_batch_norm,
    fuse_conv_activation,
    fuse_conv_addition,
    fuse_layer_norm,
    fuse_gelu,
    fuse_attention,
    fuse_matmul_integer_to_float,
    fuse_quantized_nodes,
    fuse_integer_product_bias,
    move_quantized,
    fuse_quantized_arithmetic,
    fuse_linear,
    fuse_linear_activation,
    fuse_linear_addition,
    join_products,
    fold_known_reshapes,
    tabulate_bytes,
    remove_dead_code,
)
