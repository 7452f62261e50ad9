"""The kernels that common models need on this machine. `genai doctor --compile` compiles them ahead of time.

Most operators are created when a program first needs them, for a weight format or a head size. This module creates the
common operators. A model with a different format compiles its own operators when it is loaded.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import product

import numpy as np

from ..cache_layout import can_rotate
from ..weight_layout import FactorType, layout_with
from .arrays import (
    blas,
    byte_functions,
    bytes,
    depthwise,
    functions,
    interpolation,
    overlaps,
    planes,
    pooling,
    recurrent,
    selection,
)
from .arrays.blocked import convolution as blocked, pooling as blocked_pooling
from .arrays.blocked.scaling import scale_blocks_op
from .arrays.gemm import dense_attention, product as gemm, windows
from .arrays.gemm.micro import floats, integers
from .attention import phases, prefill, store
from .attention.pages import PAGE_KINDS
from .attention.panels import Panels
from .jit import isa, vector_math
from .jit.native import Compiled
from .linear.bfloat_tiles import PARTS, DenseWeights, FloatWeights, HalfWeights, SplitWeights, fill_op, supported
from .linear.decode import decode_op
from .linear.dot import dot_for
from .linear.embedding import gather_op
from .linear.micro_kernels import Dense, DenseType, FloatBlocks, IntegerBlocks
from .linear.packing import pack_op
from .linear.prefill import prefill_op
from .rowwise import elementwise, gather, norm

_BITS, _BLOCK_SIZES, _GATES = (4, 8), (32, 64, 128), ("", "silu")
_FACTORS: tuple[FactorType, ...] = ("half", "float")
_HEAD_SIZES, _GROUPS = (32, 64, 80, 96, 128, 256), range(1, 9)
_IMAGES = (224, 640)
_TAILS = ("copy", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh")


def all_kernels() -> list[Compiled]:
    """Return the kernels and operators without duplicates, in no particular order."""
    found = [*_of_modules(), *_rowwise(), *_products(), *_attention(), *_arrays()]
    return list(dict.fromkeys(made for made in found if isinstance(made, Compiled)))


def _of_modules() -> Iterator[object]:
    """Yield the kernels in the namespaces of all modules, including those that measure peak rates."""
    package = import_module(__package__)
    for module in pkgutil.walk_packages(package.__path__, f"{__package__}."):
        yield from (value for value in vars(import_module(module.name)).values() if isinstance(value, Compiled))


def _rowwise() -> Iterator[object]:
    yield from map(elementwise.unary_op, vector_math.UNARY)
    yield from map(elementwise.binary_op, vector_math.BINARY)
    yield from (elementwise.gate_op(name) for name in ("gelu", "gelu_tanh", "relu", "silu"))
    yield from (norm.norm_op(*flags) for flags in product((False, True), repeat=2))
    yield from (gather.gather_op(*flags) for flags in product(gather.ELEMENTS, (False, True)))


def _products() -> Iterator[object]:
    """Yield the matmuls of decoders: block-quantised and dense weights, with decode and prefill arithmetic."""
    yield from (pack_op(bits, 32) for bits in _BITS)
    for bits, size, factors, points, gate in product(_BITS, _BLOCK_SIZES, _FACTORS, (False, True), _GATES):
        layout = layout_with(bits, size, factors, points, whole_points=True)
        yield gather_op(layout)
        yield decode_op(IntegerBlocks(layout, isa.isa(), dot_for(isa.isa(), bits)), gate)
        yield decode_op(FloatBlocks(layout, isa.isa()), gate)
        if isa.isa() == "amx" and supported(layout):
            yield prefill_op(FloatWeights(layout) if layout.wide else HalfWeights(layout), gate, "")
    if isa.isa() == "amx":
        for weights in (SplitWeights(), DenseWeights(row_parts=PARTS)):
            yield from (prefill_op(weights, gate, "") for gate in ("", "gelu", "silu"))
            yield from (prefill_op(weights, "", "gelu", splits_results=splits) for splits in (False, True))
        yield from (fill_op(parts) for parts in (1, PARTS))
    dense: tuple[DenseType, ...] = ("float32", "float16", "bfloat16")
    for kind, gate in product(dense, _GATES):
        yield decode_op(Dense(kind), gate)


def _attention() -> Iterator[object]:
    for kind in PAGE_KINDS:
        yield store.store_op(kind)
        yield prefill.prefill_op(kind)
        for size, group in product(_HEAD_SIZES, _GROUPS):
            if kind != "int4" or can_rotate(size):
                yield from phases.prefill_operators(Panels(group, size, size), size, kind).values()
                yield from phases.decode_operators(group, size, size, kind).values()


def _arrays() -> Iterator[object]:
    """Yield the operators that sessions use."""
    for kind in (floats(), integers()):
        yield gemm.product_op(kind)
    yield windows.pack_windows(floats().tiling)
    yield windows.pack_byte_windows(integers().tiling)
    yield dense_attention.attend_op(floats().tiling)
    yield from (gemm.finish_op(floats(), name) for name in _TAILS)
    results: tuple[gemm.Result, ...] = ("int32", "float32", "bytes")
    yield from (gemm.finish_op(integers(), "copy", result) for result in results)
    yield from map(windows.columns_op, (4, 8))
    yield from map(bytes.dequantize_op, (np.dtype(np.int8), np.dtype(np.uint8)))
    yield from map(byte_functions.combine_op, ("Add", "Mul"))
    sizes = (None, *((size, size, step) for size in (3, 5) for step in (1, 2)))
    items: tuple[depthwise.ItemType, ...] = ("float32", "int8", "uint8")
    yield from (depthwise.depthwise_op(known, item) for known in sizes for item in items)
    yield from (overlaps.add_overlaps, pooling.pool_op("max"), pooling.pool_op("mean"))
    yield from map(recurrent.steps_op, recurrent.USUAL_STEPS)
    yield from map(selection.pick_op, (4, 8))
    yield from map(interpolation.interpolate_op, (False, True))
    yield from map(planes.reduce_op, planes.REDUCTIONS)
    yield from map(functions.softmax_columns_op, (False, True))
    yield from map(planes.scale_op, (False, True))
    yield from _blocked()
    yield from (blas.product_op(letter, is_wide) for letter in "sd" for is_wide in (False, True))


def _blocked() -> Iterator[object]:
    """Yield the operators for images of 224 x 224 and 640 x 640 pixels, after up to five halvings of their sizes."""
    yield from map(blocked.finish_blocks, ("copy", "silu", "hard_swish"))
    yield blocked.finish_blocks("hard_swish", is_scaled=True)
    yield from map(scale_blocks_op, ("copy", "relu"))
    yield from (blocked_pooling.pool_blocks("max"), blocked_pooling.pool_blocks("mean"))
    sizes = [side >> halvings for side in _IMAGES for halvings in range(1, 6)]
    widths = {*sizes, *(size * size for size in sizes)}
    for form, stride, width, blocks in product(blocked.FORMS, (1, 2), widths, (1, 2, 4)):
        if form != "plain" or width >= min(_IMAGES) // 2:  # only the first convolution reads a plain image
            tile = blocked.tile_for(form, blocked.step_of(form, stride), width, blocks)
            yield from (blocked.blocked_op(tile), blocked.blocked_op(replace(tile, clips=False)))
