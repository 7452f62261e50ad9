"""Matrices as the libraries that quantise store them, read as they read them (tools/make_checkpoint_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai.convert.prequantized.formats import FORMATS, quantisation_of
from genai.convert.prequantized.matrices import FLOAT32, LazyMatrix
from genai.quant.block_types import dequantize, type_of

ARRAYS = np.load(Path(__file__).parent / "checkpoint_goldens.npz")
CASES = sorted({name.partition("/")[0] for name in ARRAYS})
# What is no grid of integers, or has no blocks along rows: floats then.
FLOATS = {"compressed_fp8", "compressed_fp8_tensor", "fp8_blocks", "fp8_tensor", "hqq_4_axis_0", "hqq_1"}
# Libraries add and multiply in another order where a float stands for 0; all others are exact but for one rounding.
TOLERANCE = 1.5e-7
LEAST = {"hqq_2", "hqq_3", "hqq_4", "hqq_8", "hqq_4_axis_0", "hqq_1", "mlx_2", "mlx_3", "mlx_4", "mlx_6", "mlx_8"}


def stored(case: str) -> dict[str, Any]:
    """The tensors of a case, by the library's names."""
    found = {}
    for name in ARRAYS:
        if name.startswith(prefix := f"{case}/stored/"):
            key, _, kind = name.removeprefix(prefix).partition(":")
            array = ARRAYS[name]
            found[key] = array.view(getattr(ml_dtypes, kind)) if kind else array
    return found


def matrices(case: str) -> dict[str, LazyMatrix]:
    settings = json.loads(ARRAYS[f"{case}/settings"].tobytes())
    key = "quantization" if case.startswith("mlx") else "quantization_config"
    found = quantisation_of({key: settings})
    assert found is not None and settings.get("quant_method", "mlx") in (found.method, "intel/auto-round")
    return dict(found.format.read(stored(case), found.settings))


def values(matrix: LazyMatrix) -> Any:
    """A matrix as float32, its columns in their own order."""
    read = matrix.read()
    assert read.dtype == matrix.dtype
    found = read if matrix.dtype == FLOAT32 else dequantize(read)
    assert found.shape == matrix.shape
    return found if matrix.order is None else found[:, np.argsort(matrix.order)]


@pytest.mark.parametrize("case", CASES)
def test_the_library_s_own_numbers(case: str) -> None:
    found = matrices(case)
    expected = ARRAYS[f"{case}/values"]
    (name,) = found
    assert name == f"model.layers.0.mlp.{'experts.down_proj' if case == 'mxfp4' else 'down_proj.weight'}"
    ours = values(found[name])
    tolerance = (3e-6 if case in LEAST else TOLERANCE) * np.abs(expected).max()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance)
    assert {matrix.dtype == FLOAT32 for matrix in found.values()} == {case in FLOATS}
    assert all(bool(matrix.why) == (case in FLOATS) for matrix in found.values())
    assert all(part in stored(case) for matrix in found.values() for part in matrix.parts)


def test_every_format_has_a_golden() -> None:
    methods = {json.loads(ARRAYS[f"{case}/settings"].tobytes()).get("quant_method", "mlx") for case in CASES}
    assert methods == set(FORMATS) - {"fbgemm_fp8"}  # a scale per row, as compressed_fp8 has


@pytest.mark.parametrize("case", ["gptq_4_act_order"])
def test_columns_are_put_in_order(case: str) -> None:
    (matrix,) = matrices(case).values()
    assert matrix.order is not None and sorted(matrix.order) == list(range(128))
    kind = type_of(matrix.read())
    assert kind is not None and kind.name == "4 bits by 32 with zero points"
