"""8-bit floats with one scale per matrix, per row, or per block of 128 x 128 (DeepSeek's and Qwen's FP8).

No block format has a grid of 256 values, so the weights are converted to float32 and stored like float weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import InputError
from ..hf_config import HFConfig
from .matrices import FLOAT32, Array, Files, LazyMatrix, Matrices, bases, contradiction, part

KINDS = ("float8_e4m3fn", "float8_e5m2")
WHY = "8-bit floats"
_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
# Scales of activations and of cached keys and values, which are not quantised to 8-bit floats here.
_UNUSED = (".input_scale", ".k_scale", ".v_scale", ".activation_scale", ".input_scale_ub")


def read(files: Files, settings: HFConfig) -> Matrices:
    """Read weight [outputs, inputs] and its factors, weight_scale_inv [blocks, blocks] or weight_scale."""
    block = settings.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise settings.wrong("weight_block_size", block, "two positive sizes")
    kind = None if settings.get("fmt") is None else settings.text("fmt")
    for base in bases(files, ".weight"):
        if files[name := f"{base}.weight"].dtype.name not in KINDS:
            continue
        weight = part(files, name, KINDS, (None, None))
        if kind is not None and kind not in weight.dtype.name:
            raise contradiction(name, f"type {weight.dtype.name}", f"fmt = {kind!r}")
        scale_name = next(
            (found for end in ("_scale_inv", "_scale") if (found := f"{name}{end}") in files), f"{name}_scale"
        )
        scale = part(files, scale_name, _SCALES)
        check_scale(scale_name, scale, weight.shape, block)
        unused = tuple(extra for end in _UNUSED if (extra := f"{base}{end}") in files)
        yield name, matrix(weight, scale, (name, scale_name, *unused), block)


def matrix(weight: Array, scale: Array, parts: tuple[str, ...], block: list[int] | None) -> LazyMatrix:
    """Return weight * scale as float32."""
    rows, columns = weight.shape
    return LazyMatrix((rows, columns), parts, FLOAT32, _product(weight, scale, block), why=WHY)


def _product(weight: Array, scale: Array, block: list[int] | None) -> Callable[[], Array]:
    def product() -> Array:
        factors = scale.astype(np.float32)
        if scale.size == 1:
            factors = factors.reshape(1, 1)
        elif scale.ndim == 1:
            factors = factors[:, None]
        elif block is not None and scale.shape != (len(weight), 1):
            rows, columns = (min(size, most) for size, most in zip(block, weight.shape, strict=True))
            factors = np.repeat(np.repeat(factors, rows, 0)[: len(weight)], columns, 1)[:, : weight.shape[1]]
        return weight.astype(np.float32) * factors

    return product


def check_scale(name: str, scale: Array, shape: tuple[int, ...], block: list[int] | None) -> None:
    rows, columns = shape
    allowed = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if block is not None:
        allowed.append((-(-rows // block[0]), -(-columns // block[1])))
    if scale.shape not in allowed:
        raise InputError(
            f"{name} has shape {list(scale.shape)} for a matrix of shape {list(shape)}",
            "a matrix must have one scale, or one scale per row"
            + (f" or per block of {block[0]} x {block[1]}" if block else " (weight_block_size is not set)"),
            "check that quantization_config and the weights belong to the same checkpoint",
        )
