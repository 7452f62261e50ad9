"""Lines of words turned into columns: every count of lines and words, and nothing beside them is touched."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.gemm.micro import TILINGS
from genai.kernels.cpu.arrays.gemm.packing import left_panels, rows_call
from genai.kernels.cpu.program.calls import program_of


@pytest.mark.parametrize("isa", list(TILINGS))
@pytest.mark.parametrize("rows", [1, 2, 13, 14, 16, 29, 45])
@pytest.mark.parametrize("words", [1, 15, 16, 17, 50])
def test_rows_as_panels(everywhere, normal, isa, rows, words):
    tiling, guard = TILINGS[isa], 64
    x = normal(rows, words + 3)[:, :words]
    expected = left_panels(x, tiling)

    def packed(threads):
        out = np.full(rows * words + guard, np.nan, np.float32)
        threads.run(program_of([[rows_call(x, x.strides[0], rows, words, tiling, out)]]), nanoseconds=0.0)
        return out

    out = everywhere(packed)
    np.testing.assert_array_equal(out[: rows * words], expected)
    assert np.isnan(out[rows * words :]).all()
