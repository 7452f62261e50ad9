"""MXFP4 as in gpt-oss: experts in blocks of 32 4-bit floats (E2M1), with one power-of-two scale per block."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..hf_config import HFConfig
from .matrices import Array, Codes, Files, Matrices, bases, part

_BLOCK, _BIAS = 32, 127


def read(files: Files, settings: HFConfig) -> Matrices:
    """Read name_blocks uint8 [experts, rows, blocks, 16] and name_scales uint8 [experts, rows, blocks]."""
    settings.get("modules_to_not_convert")
    for base in bases(files, "_blocks"):
        names = (f"{base}_blocks", f"{base}_scales")
        blocks = part(files, names[0], ("uint8",), (None, None, None, _BLOCK // 2))
        scales = part(files, names[1], ("uint8",), blocks.shape[:3])
        rows = prod(blocks.shape[:2])
        one = _codes(names, blocks.reshape(rows, *blocks.shape[2:]), scales.reshape(rows, -1)).matrix()
        yield base, one.of_experts(len(blocks))


def power_scales(name: str, exponents: NDArray[np.uint8]) -> Callable[[], Array]:
    """Return a function that converts E8M0 exponents to powers of two."""

    def read() -> Array:
        if (exponents == 255).any():
            raise InputError(f"{name} contains the exponent 255", "255 is the code for NaN", "download the file again")
        found: Array = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
        return found

    return read


def _codes(names: tuple[str, ...], blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Codes:
    rows, count = scales.shape
    shape = rows, count * _BLOCK
    packed: Callable[[], NDArray[np.uint8]] = lambda: np.ascontiguousarray(blocks).reshape(rows, -1)  # noqa: E731
    return Codes(shape, 4, count, names, packed, power_scales(names[1], scales), grid="mxfp4")
