"""GPTQ, as AutoGPTQ and GPTQModel write it: integers of 2, 3, 4 or 8 bits packed along the inputs.

Zero points are stored less 1, but for checkpoint_format "gptq_v2". With desc_act, g_idx says which group each column is
of: columns are read in an order in which groups lie side by side, and products look their inputs up in that order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import unpack_bits

from ...errors import UnsupportedModelError
from ..hf_config import HFConfig
from .matrices import Codes, Files, Matrices, bases, bits_of, check_bits, floats, group_order, part, rows_of_bits, words

_LESS = {"gptq": 1, "gptq_v2": 0}


def read(files: Files, settings: HFConfig) -> Matrices:
    """qweight [inputs * bits / 32, outputs], qzeros [groups, outputs * bits / 32], scales [groups, outputs], g_idx."""
    format = settings.text("checkpoint_format", default="gptq")
    if format not in _LESS:
        raise UnsupportedModelError(
            f"quantization_config.checkpoint_format is {format!r}",
            f"of GPTQ's formats {' and '.join(_LESS)} are read; others are laid out for one kernel",
            "look for the checkpoint of the same model in one of these, or build from the float one",
        )
    return matrices(files, settings, _LESS[format])


def matrices(files: Files, settings: HFConfig, less: int) -> Matrices:
    """Those of a layout whose zero points are stored less 0 or 1."""
    for base in bases(files, ".qweight"):
        yield f"{base}.weight", _codes(files, settings, base, less).matrix()


def _codes(files: Files, settings: HFConfig, base: str, less: int) -> Codes:
    weight_name, zeros_name, scales_name, index_name = (
        f"{base}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx")
    )
    scales = floats(files, scales_name, (None, None))
    groups, rows = scales.shape
    zeros = words(files, zeros_name, (groups, None))
    bits = bits_of(zeros_name, zeros.shape[1] * 32, rows)
    check_bits(weight_name, bits, settings, "bits")
    weight = words(files, weight_name, (None, rows))
    columns = len(weight) * 32 // bits
    order, parts = None, [weight_name, zeros_name, scales_name]
    if index_name in files:
        parts.append(index_name)
        order, _ = group_order(index_name, part(files, index_name, ("int32", "int64"), (columns,)), groups)

    def packed() -> NDArray[np.uint8]:
        rows_bits = _bytes(weight.T)
        return rows_bits if order is None else rows_of_bits(unpack_bits(rows_bits, bits, columns)[:, order], bits)

    points = unpack_bits(_bytes(zeros), bits, rows).T.astype(np.uint16) + np.uint16(less)
    return Codes((rows, columns), bits, groups, tuple(parts), packed, lambda: scales.T, points, order=order)


def _bytes(packed: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Rows of words as rows of bits: both begin with the lowest one."""
    return np.ascontiguousarray(packed).view(np.uint8)
