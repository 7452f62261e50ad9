"""Checkpoints that others have quantised: logits are those of the same numbers as floats; what is kept, and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import genai
from genai.builder import ExportOptions, build_model, plan_build
from genai.builder.build import execute
from genai.engine.decoder import compute
from genai.engine.paged import PagedDecoder
from tools.quantised_checkpoints import FAMILIES, FORMATS, VOCAB, write

TOKENS = [1, *np.random.Generator(np.random.PCG64(5)).integers(3, VOCAB, 39).tolist()]
TOLERANCE = 2e-5
CORE = {("awq", "llama"), ("gptq_act_order", "llama"), ("nf4", "llama"), ("mlx", "qwen2"), ("w4a16", "phi3"),
        ("awq", "qwen3_moe"), ("mlx", "mixtral"), ("fp8", "llama")}  # fmt: skip
DRAWN = (pytest.mark.drawn(8),)


def logits(folder: Path, accuracy: str = "fp32") -> Any:
    with genai.Model(folder, accuracy=accuracy) as model:
        assert isinstance(model.decoder, PagedDecoder)
        sequence = model.decoder.open()
        sequence.append(TOKENS)
        rows = compute(model.decoder, [sequence], all_rows=True)[0]
        sequence.close()
    return np.asarray(rows)


@pytest.mark.parametrize(
    ("form", "family"),
    [
        pytest.param(form, family, marks=() if (form, family) in CORE else DRAWN)
        for form in FORMATS
        for family in FAMILIES
    ],
)
def test_logits_are_those_of_the_same_numbers_as_floats(form: str, family: str, tmp_path: Path) -> None:
    source, floats = write(tmp_path, form, family)
    wide = logits(build_model(floats, tmp_path / "wide", ExportOptions(precision="fp32")))
    found = logits(build_model(source, tmp_path / "kept", ExportOptions(precision="kept")))
    np.testing.assert_allclose(found, wide, atol=TOLERANCE * np.abs(wide).max())
    anew = logits(build_model(source, tmp_path / "anew", ExportOptions(precision="fp32")))
    np.testing.assert_allclose(anew, wide, atol=TOLERANCE * np.abs(wide).max())
