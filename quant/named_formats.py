"""The named formats, as grids that quantisation methods can use."""

from __future__ import annotations

from genai.kernels.weights import BLOCKS

from . import formats
from .formats import GRIDS, row_scaled_format
from .grids import CodebookGrid, CodeGrid, UniformGrid
from .two_levels import TwoLevelGrid

# For each name: the number of bits in a code, and the supported block sizes (the first is the default).
NAMED_FORMATS: dict[str, tuple[int, tuple[int, ...]]] = {
    "q2_k": (2, (16,)),
    "q3_k": (3, (16,)),
    "q4_k": (4, (32,)),
    "q5_k": (5, (32,)),
    "q6_k": (6, (16,)),
    "nl2": (2, (32, 16)),
    "nl3": (3, (32, 16)),
    "nl4": (4, (32, 16)),
    "iq4_xs": (4, (32,)),
    "iq4_nl": (4, (32,)),
    "mxfp4": (4, (32,)),
    "nf4": (4, (64, *(size for size in BLOCKS if size != 64))),
    "fp4": (4, (64, *(size for size in BLOCKS if size != 64))),
}
_K_QUANTS = {
    "q2_k": formats.Q2_K, "q3_k": formats.Q3_K, "q4_k": formats.Q4_K, "q5_k": formats.Q5_K, "q6_k": formats.Q6_K,
}  # fmt: skip


def named_grid(name: str, block_size: int, *, half_scales: bool = True) -> CodeGrid:
    """Return the grid of a format.

    Args:
        name: a key of NAMED_FORMATS.
        block_size: one of the block sizes in NAMED_FORMATS.
        half_scales: True if floats of blocks and groups are rounded to float16; the floats of whole rows (nl2, nl3,
            nl4) are never rounded.
    """
    bits, _ = NAMED_FORMATS[name]
    if (format := _K_QUANTS.get(name)) is not None:
        inner = UniformGrid(bits, format.block_size, not format.offset_bits)
        return TwoLevelGrid(format, inner, half_scales)
    if name.startswith("nl"):
        format = row_scaled_format(bits, block_size)
        return TwoLevelGrid(format, CodebookGrid(GRIDS[f"iq{bits}"], block_size), half_scales, trains=True)
    if name == "iq4_xs":
        return TwoLevelGrid(formats.IQ4_XS, CodebookGrid(GRIDS["iq4"], block_size), half_scales)
    values = GRIDS["iq4" if name == "iq4_nl" else name]
    return CodebookGrid(values, block_size, half_scales=half_scales, powers_of_two=name == "mxfp4")
