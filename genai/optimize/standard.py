"""The rules for general graphs, in the order in which they run."""

from __future__ import annotations

from . import (
    blocked,
    byte_tables,
    composites,
    constant_folding,
    convolutions,
    halves,
    linear,
    quantized,
    reshapes,
    simplify,
)
from .base import Rewrite

SESSION_RULES: tuple[Rewrite, ...] = (
    halves.compute_halves_in_float32,
    simplify.remove_identities,
    reshapes.fold_known_shapes,
    constant_folding.fold_constants,
    simplify.share_subexpressions,
    simplify.merge_transposes,
    convolutions.fold_pad_into_conv,
    convolutions.fold_conv_batch_norm,
    linear.fold_product_batch_norm,
    convolutions.fold_arithmetic_after_conv,
    convolutions.fold_factor_before_conv,
    convolutions.fuse_conv_activation,
    convolutions.fuse_conv_addition,
    composites.fuse_layer_norm,
    composites.fuse_gelu,
    composites.fuse_silu,
    composites.fuse_hard_swish,
    composites.fuse_attention,
    quantized.fuse_matmul_integer_to_float,
    quantized.fuse_quantized_nodes,
    quantized.fuse_integer_product_bias,
    quantized.move_quantized,
    quantized.fuse_quantized_arithmetic,
    linear.fuse_linear,
    linear.fuse_linear_activation,
    linear.fuse_linear_addition,
    linear.join_products,
    reshapes.fold_known_reshapes,
    byte_tables.tabulate_bytes,
    simplify.remove_dead_code,
)

# The rules that change the layout of values for the CPU's kernels, after all rules that merge nodes.
LAYOUT_RULES: tuple[Rewrite, ...] = (blocked.block_convolutions, simplify.remove_dead_code)
