"""Lines of words turned into columns: every count of lines and words, and nothing beside them is touched."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.gemm.packing import pack_left, pack_rows
from genai.kernels.cpu.gemm.tiling import TILINGS
from genai.kernels.cpu.tape.program import Call, Items
from genai.kernels.cpu.tape.replay import Replay


@pytest.mark.parametrize("isa", list(TILINGS))
@pytest.mark.parametrize("rows", [1, 2, 13, 14, 16, 29, 45])
@pytest.mark.parametrize("words", [1, 15, 16, 17, 50])
def test_rows_as_panels(crews, normal, isa, rows, words):
    tiling, guard = TILINGS[isa], 64
    x = normal(rows, words + 3)[:, :words]
    expected = pack_left(x, tiling).data.reshape(-1)
    out = np.full(rows * words + guard, np.nan, np.float32)
    panels = -(-rows // tiling.rows)
    call = Call(pack_rows, (x.ctypes.data, x.strides[0], rows, panels, words, out.ctypes.data), Items(factor=panels))
    for crew in crews:
        crew.run(Replay([[call]], 0.0), {})
        np.testing.assert_array_equal(out[: rows * words], expected)
        assert np.isnan(out[rows * words :]).all()
