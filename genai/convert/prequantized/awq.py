"""AutoAWQ's "gemm" layout: 4-bit integers packed along the outputs, eight per word, in the order of its kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import unpack_bits

from ...errors import UnsupportedModelError
from ..hf_config import HFConfig
from .matrices import (
    Codes,
    Files,
    Matrices,
    bases,
    bits_of,
    check_bits,
    check_group_size,
    check_symmetric,
    floats,
    rows_of_bits,
    words,
)

# Positions of the numbers 0 to 7 in a word (awq/utils/packing_utils.py, AWQ_REVERSE_ORDER).
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def read(files: Files, settings: HFConfig) -> Matrices:
    """Read qweight [inputs, outputs / 8], qzeros [groups, outputs / 8] and scales [groups, outputs]."""
    version = settings.text("version", default="gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(
            f"quantization_config.version is {version!r}",
            "'gemm' is the only supported AWQ version",
            "use a 'gemm' checkpoint of the same model, or the float checkpoint",
        )
    for base in bases(files, ".qweight"):
        yield f"{base}.weight", _codes(files, settings, base).matrix()


def _codes(files: Files, settings: HFConfig, base: str) -> Codes:
    parts = tuple(f"{base}.{name}" for name in ("qweight", "qzeros", "scales"))
    scales = floats(files, parts[2], (None, None))
    groups, rows = scales.shape
    zeros = words(files, parts[1], (groups, None))
    bits = bits_of(parts[1], zeros.shape[1] * 32, rows)
    check_bits(parts[0], bits, settings, "bits", "w_bit")
    if bits != 4:
        raise UnsupportedModelError(
            f"{base} has {bits} bits per weight",
            "AWQ defines the order of the numbers in a word only for 4 bits",
            "build the model from the float checkpoint",
        )
    weight = words(files, parts[0], (None, zeros.shape[1]))

    def packed() -> NDArray[np.uint8]:
        return rows_of_bits(_unpacked(weight), bits)

    check_group_size(parts[0], len(weight), groups, settings, "group_size", "q_group_size")
    shape, points = (rows, len(weight)), _unpacked(zeros)
    check_symmetric(parts[1], points, bits, settings, "zero_point", symmetric=False)
    check_symmetric(parts[1], points, bits, settings, "sym", symmetric=True)
    return Codes(shape, bits, groups, parts, packed, lambda: scales.T, points)


def _unpacked(packed: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Unpack [columns, outputs / 8] to [outputs, columns]."""
    bytes_ = np.ascontiguousarray(packed).view(np.uint8)
    codes = unpack_bits(bytes_, 4, 2 * bytes_.shape[1]).reshape(len(packed), -1, 8)
    return np.ascontiguousarray(codes[..., _PLACES].reshape(len(packed), -1).T)
