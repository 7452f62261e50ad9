"""MXFP4 as gpt-oss has it: experts as blocks of 32 floats of 4 bits (E2M1), with a power of two for each."""

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
    """name_blocks uint8 [experts, rows, blocks, 16], name_scales uint8 [experts, rows, blocks]: all experts at once."""
    settings.get("modules_to_not_convert")
    for base in bases(files, "_blocks"):
        names = (f"{base}_blocks", f"{base}_scales")
        blocks = part(files, names[0], ("uint8",), (None, None, None, _BLOCK // 2))
        scales = part(files, names[1], ("uint8",), blocks.shape[:3])
        rows = prod(blocks.shape[:2])
        one = _codes(names, blocks.reshape(rows, *blocks.shape[2:]), scales.reshape(rows, -1)).matrix()
        yield base, one.of_experts(len(blocks))


def power_scales(name: str, exponents: NDArray[np.uint8]) -> Callable[[], Array]:
    """What reads the powers of two of E8M0 exponents."""

    def read() -> Array:
        if (exponents == 255).any():
            raise InputError(f"{name} holds the exponent 255", "it stands for no number", "download the file again")
        found: Array = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
        return found

    return read


def _codes(names: tuple[str, ...], blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Codes:
    rows, count = scales.shape
    shape = rows, count * _BLOCK
    packed: Callable[[], NDArray[np.uint8]] = lambda: np.ascontiguousarray(blocks).reshape(rows, -1)  # noqa: E731
    return Codes(shape, 4, count, names, packed, power_scales(names[1], scales), grid="mxfp4")
