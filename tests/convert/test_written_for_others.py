"""What we build loads in onnxruntime-genai as it is, and both compute the same logits.

The goldens' architectures in sizes that onnxruntime's operators accept (heads of a multiple of 8, whole blocks).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.convert.nested import text_part
from genai.convert.rope_scaling import LongRope
from genai.engine.decoder import compute as compute_pending
from tools.random_weights import RandomWeights

pytestmark = pytest.mark.oracle

TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, 101, 40)]
PROMPT = 22
# onnxruntime's kernel for experts with a gated GELU needs a GPU, and it has no kernel for relu(x) ** 2.
NOT_ON_A_CPU = {"gemma4_moe", "nemotron_h_experts"}
# Those of the default run.
INT4 = ("gemma2", "gpt2", "llama_tied", "mixtral", "phimoe", "qwen2_moe", "stablelm")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        goldens = (Path(__file__).parent / "goldens").glob("*.safetensors")
        names = sorted({path.stem for path in goldens} - NOT_ON_A_CPU)
        slow = {name: () if name in INT4 else (pytest.mark.slow, pytest.mark.drawn(2)) for name in names}
        cases = [pytest.param(name, "int4", marks=slow[name]) for name in names]
        metafunc.parametrize(("name", "precision"), [*((name, "fp32") for name in names), *cases])


def fitting(config: dict[str, Any]) -> DecoderSpec:
    text = text_part(HFConfig(config))
    spec = find(text.model_type).describe(text)
    partial = 1.0 if spec.partial_rotary_factor == 1 else 0.5
    size = 16 if partial == 1 else 32
    scaling = spec.rope_scaling
    if isinstance(scaling, LongRope):
        factors = {name: tuple(1.0 + i for i in range(8)) for name in ("short_factor", "long_factor")}
        scaling = replace(scaling, **factors)
    experts = spec.experts and replace(
        spec.experts, intermediate_size=64, shared_intermediate_size=64 if spec.experts.shared_intermediate_size else 0
    )
    recurrent = spec.recurrent and replace(
        spec.recurrent, layers=tuple(layer for layer in spec.recurrent.layers if layer < 4)
    )
    latent = spec.latent and replace(spec.latent, rank=16, rope_size=16)
    return replace(
        spec,
        recurrent=recurrent,
        latent=latent,
        sparsities=spec.sparsities and (0.8, 0.0, 0.0, 0.0),
        hidden_size=64,
        intermediate_size=96,
        head_size=size if latent is None else latent.row_size,
        num_layers=4,
        partial_rotary_factor=partial,
        rope_scaling=scaling,
        experts=experts,
        full_head_size=spec.full_head_size and 2 * size,
        num_cached_layers=spec.num_cached_layers and 3,
        intermediate_sizes=spec.intermediate_sizes and (96, 96, 96, 128),
        **{
            field: tuple(layer for layer in getattr(spec, field) or () if layer < 4) if getattr(spec, field) else value
            for field, value in (
                ("sliding_layers", None),
                ("rope_layers", None),
                ("chunked_layers", ()),
                ("dense_layers", ()),
                ("feed_forward_layers", None),
            )
        },
    )


def test_same_logits(name: str, precision: Any, golden: Any, og_logits: Any, tmp_path: Path) -> None:
    spec = fitting(golden(name).config)
    if spec.rope_scaling and isinstance(spec.rope_scaling, LongRope):
        spec = replace(spec, rope_scaling=replace(spec.rope_scaling, original_max_position_embeddings=64))
    folder = write_model_folder(
        tmp_path / "model", spec, ExportOptions(precision=precision, accuracy_level=1), RandomWeights(spec, seed=2)
    )
    theirs = og_logits(folder, TOKENS, PROMPT)
    with genai.Model(folder, accuracy="fp32", kv_dtype="fp32") as model:
        sequence, rows = model.decoder.open(), []
        for piece in (TOKENS[:PROMPT], *([token] for token in TOKENS[PROMPT:])):
            sequence.append(piece)
            rows.append(compute_pending(model.decoder, [sequence], all_rows=True)[0])
    ours = np.concatenate(rows)
    assert ours.std() > 0.1
    assert np.abs(ours - theirs).max() <= 2e-4 * np.abs(theirs).max()
