"""GPTQ in the layout of AutoGPTQ and GPTQModel: integers of 2, 3, 4 or 8 bits packed along the inputs.

Zero points are stored minus 1, except with checkpoint_format "gptq_v2". With desc_act, g_idx holds the group of each
column. Columns are then sorted by group, and matmuls permute their inputs accordingly.
"""

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
    contradiction,
    floats,
    group_order,
    part,
    rows_of_bits,
    words,
)

_LESS = {"gptq": 1, "gptq_v2": 0}


def read(files: Files, settings: HFConfig) -> Matrices:
    """Read qweight [inputs * bits / 32, outputs], qzeros [groups, outputs * bits / 32] and scales [groups, outputs]."""
    format = settings.text("checkpoint_format", default="gptq")
    if format not in _LESS:
        raise UnsupportedModelError(
            f"quantization_config.checkpoint_format is {format!r}",
            f"the supported GPTQ formats are {' and '.join(_LESS)}",
            "use a checkpoint of the same model in one of these formats, or the float checkpoint",
        )
    return matrices(files, settings, _LESS[format])


def matrices(files: Files, settings: HFConfig, less: int) -> Matrices:
    """Yield the matrices of a layout whose stored zero points are the actual zero points minus `less` (0 or 1)."""
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
    check_group_size(weight_name, columns, groups, settings, "group_size")
    order, parts = None, [weight_name, zeros_name, scales_name]
    sorts = settings.get("desc_act")
    if index_name in files:
        parts.append(index_name)
        order, _ = group_order(index_name, part(files, index_name, ("int32", "int64"), (columns,)), groups)
        if order is not None and sorts is False:
            raise contradiction(index_name, "columns that are not in the order of their groups", "desc_act = False")
    elif sorts is True and groups > 1:
        part(files, index_name, ("int32", "int64"))  # raises, because the order of the columns is unknown

    def packed() -> NDArray[np.uint8]:
        rows_bits = _bytes(weight.T)
        return rows_bits if order is None else rows_of_bits(unpack_bits(rows_bits, bits, columns)[:, order], bits)

    points = unpack_bits(_bytes(zeros), bits, rows).T.astype(np.uint16) + np.uint16(less)
    check_symmetric(zeros_name, points, bits, settings, "sym", symmetric=True)
    return Codes((rows, columns), bits, groups, tuple(parts), packed, lambda: scales.T, points, order=order)


def _bytes(packed: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Convert rows of words to rows of bits, both with the lowest bit first."""
    return np.ascontiguousarray(packed).view(np.uint8)
