"""The kernels that common models need, for compilation and measurement without a model."""

from __future__ import annotations

from ..cache_layout import can_rotate
from .arrays.kernels import array_kernels
from .attention import (
    FLOAT_KINDS,
    KINDS,
    any_kernels,
    hadamard_kernel,
    heads_together,
    split_kernel,
    store_kernel_of,
    tile_kernel,
)
from .decode import GATED_GROUPS, decode_kernel, gated_kernel, groups_of
from .decode_lanes import Room, gated_lanes_kernel, lanes, lanes_kernel
from .executor import TAKE_CHOSEN
from .grouped import arrange_kernel as arrange_groups_kernel
from .linear import (
    HOPPER,
    MULTIPROCESSORS,
    ROWS_AT_ONCE,
    WARPGROUP_SHAPES,
    arrange_kernel,
    gemm_kernel,
    gemv_kernel,
    warpgroup_kernel,
)
from .logits import GATHER
from .lora import expand_kernels, shrink_kernels
from .lowering import BINARY, REORDER, STATES, UNARY, apply_kernel, combine_kernel, embedding_kernel
from .moe import SWIGLU, mix_kernel, pairs_gemm_kernel, pairs_gemv_kernel, route_kernels
from .norms import norm_kernel
from .rotate_keys import rotate_keys_kernel
from .sampling import SAMPLING_KERNELS
from .sources import CudaKernel
from .speeds import SPEED_KERNELS
from .weight_layout import BlockReader
from .weights import DeviceMatrix, pack_kernel

# Head sizes, with the number of query heads per KV head, of Llama 3, Qwen 2.5 and 3, Phi 3, Gemma 2, and the bundled
# model.
_HEADS = ((64, 4), (64, 7), (128, 4), (128, 8), (96, 1), (256, 2), (32, 4))

# Block formats of onnxruntime, with and without zero points; GGUF's K formats; formats with tables.
READERS = (
    *(BlockReader(bits) for bits in (2, 3, 4, 5, 6, 8)),
    *(BlockReader(bits, factor="Single<float>") for bits in (4, 8)),
    *(BlockReader(bits, offset="Point<unsigned char>") for bits in (2, 4, 8)),
    BlockReader(4, 2, offset="Point<half_bits>"),
    *(BlockReader(bits, factor="Double<half_bits, unsigned char>", offset="Minimum<Double<half_bits, unsigned char>>")
      for bits in (4, 5)),
    BlockReader(2, 2, factor="Double<half_bits, low_nibble>", offset="Minimum<Beside<half_bits>>"),
    *(BlockReader(bits, 2, factor="Double<half_bits, signed char>") for bits in (3, 6)),
    BlockReader(4, grid=True), BlockReader(4, grid=True, factor="Single<exponent_bits>"),
    BlockReader(4, 2, grid=True, factor="Single<float8_bits>"),
    BlockReader(3, 2, True, "Double<half_bits, unsigned char>"),
    BlockReader(2, grid=True, factor="Double<float, signed char>"),
)  # fmt: skip


def all_kernels(capability: int = HOPPER) -> list[CudaKernel]:
    """Return each kernel that a GPU of a compute capability (times ten) can run, without duplicates."""
    found = [apply_kernel(name) for name in UNARY] + [combine_kernel(name) for name in BINARY]
    found += [norm_kernel(centred) for centred in (False, True)]
    matrices = [_matrix(None, scalar) for scalar in ("float", "half_bits", "bfloat_bits")]
    matrices += [_matrix(reader) for reader in READERS]
    found += [embedding_kernel(one.reader, one.scalar) for one in matrices]
    found += [pack_kernel(reader) for reader in READERS] + [REORDER, *STATES]
    found += [
        arrange_kernel(layout) for layout in ("floats<32>", "floats<8>", "floats<4>", "bfloats", "tiles", "bytes")
    ]
    found.append(arrange_groups_kernel())
    room = Room.of(capability, MULTIPROCESSORS)
    for matrix in matrices:
        found += [gemv_kernel(matrix, tokens) for tokens in ROWS_AT_ONCE]
        if matrix.reader:
            found += [decode_kernel(matrix, groups) for groups in groups_of(room)]
            ways = lanes(matrix, room, gated=False)
            found += [lanes_kernel(matrix, way, normed=False) for way in ways]
        found += [gemm_kernel(matrix, large=large) for large in (True, False)]
        found += [warpgroup_kernel(matrix, which) for which in range(len(WARPGROUP_SHAPES))]
    for matrix, activation in ((_matrix(BlockReader(bits)), name) for bits in (4, 8) for name in ("silu", "gelu_tanh")):
        found += [gated_kernel(matrix, activation, groups) for groups in GATED_GROUPS]
        ways = lanes(matrix, room, gated=False)
        found += [lanes_kernel(matrix, way, normed=True) for way in ways]
        ways = lanes(matrix, room, gated=True)
        found += [gated_lanes_kernel(matrix, activation, way, normed=True) for way in ways]
    found += [*route_kernels(), mix_kernel()]
    of_experts = [
        _matrix(None, "float"),
        _matrix(None, "bfloat_bits"),
        *(_matrix(BlockReader(bits)) for bits in (4, 8)),
    ]
    for matrix, activation in ((matrix, name) for matrix in of_experts for name in (SWIGLU, "copy")):
        exact = (True, False) if matrix.reader else (True,)
        found += [pairs_gemv_kernel(matrix, activation, most, exact=one) for most in ROWS_AT_ONCE for one in exact]
        found.append(pairs_gemm_kernel(matrix, activation))
    found += [*shrink_kernels(), *expand_kernels()]
    found += array_kernels()
    found += [hadamard_kernel(), *(kernel for kind in FLOAT_KINDS for kernel in any_kernels(kind))]
    for kind in KINDS:
        found += [store_kernel_of(kind), rotate_keys_kernel(kind)]
        for size, group in _HEADS:
            if kind == "int4" and not can_rotate(size):
                continue
            found.append(split_kernel(kind, size, size, heads_together(group, 1)))
            found += [split_kernel(kind, size, size, one, fresh=True) for one in {1, heads_together(group, 1)}]
            if kind != "float32":
                found.append(tile_kernel(kind, size, size))
    found += [GATHER, TAKE_CHOSEN, *SAMPLING_KERNELS, *SPEED_KERNELS]
    those = {kernel for kernel in found if kernel.capability in (0, capability)}
    return sorted(those, key=lambda kernel: kernel.name)


def _matrix(reader: BlockReader | None, scalar: str = "") -> DeviceMatrix:
    return DeviceMatrix(1, 1, {}, reader, scalar, 0, ())
