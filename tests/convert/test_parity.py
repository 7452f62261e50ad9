"""Every architecture and RoPE scaling against logits and tokens of transformers (tools/make_goldens.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.convert import ExportOptions, plan_build, write_model_folder
from genai.convert.architectures import MODEL_TYPES
from genai.convert.hf_config import HFConfig
from genai.convert.nested import NESTED_TYPES, nested_type, text_part
from genai.engine.decoder import compute as compute_pending

TOLERANCE = 2e-4
REFERENCE_TOLERANCE = 1e-4
MIXTURE_TOLERANCE = 1e-5  # of a logit
# The delta rule subtracts what a state knows from what it should know, and a norm scales the small difference up again.
DELTA_NET_FACTOR = 5
# Scores are not divided by the root of the head's size, so that a softmax is sharper.
UNSCALED_FACTOR = 10
# Each of these has only parts that another architecture also has.
DRAWN = (
    "apertus", "arcee", "bamba", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe", "falcon_h1",
    "falcon_h1_normed", "gemma3n", "gemma4_text", "gemma4_unified", "glm", "glm4_moe", "glm4_moe_lite",
    "granitemoehybrid_dense", "granitemoeshared", "helium", "hunyuan_v1_dense", "internlm3", "kimi_linear", "lfm2_vl",
    "llama4", "mamba", "mamba2", "minicpm3", "nemotron_h", "nemotron_h_experts", "olmo3", "olmoe", "seed_oss", "youtu",
)  # fmt: skip
# Quantised in the default run, too: each way in which projections are cut, tied, biased or routed.
QUANTISED = ("falcon_grouped", "gemma2", "gpt2", "granitemoe", "llama_tied", "phi3", "phimoe", "qwen2_moe", "stablelm")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, golden: Any, golden_folder: Any) -> Iterator[tuple[Any, genai.Model]]:
    with genai.Model(golden_folder(request.param), accuracy="fp32") as model:
        yield golden(request.param), model


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = sorted(path.stem for path in (Path(__file__).parent / "goldens").glob("*.safetensors"))
    if "case" in metafunc.fixturenames:
        marks = {name: pytest.mark.drawn(4) for name in DRAWN}
        cases = [pytest.param(name, marks=marks.get(name, ())) for name in names]
        metafunc.parametrize("case", cases, indirect=True, ids=names)
    if "quantised" in metafunc.fixturenames:
        cases = [(name, precision) for name in names for precision in ("int4", "int8")]
        drawn = pytest.mark.slow, pytest.mark.drawn(4)
        marks = [() if name in QUANTISED and precision == "int4" else drawn for name, precision in cases]
        parameters = [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]
        metafunc.parametrize(("quantised", "precision"), parameters)


def compute(model: genai.Model, tokens: Any, pieces: list[int]) -> np.ndarray:
    """Logits of all tokens, fed in pieces of these lengths."""
    decoder = model.decoder
    sequence, rows, start = decoder.open(), [], 0
    for length in pieces:
        sequence.append([int(token) for token in tokens[start : start + length]])
        rows.append(compute_pending(decoder, [sequence], all_rows=True)[0][-length:])
        start += length
    sequence.close()
    return np.concatenate(rows)


def test_whole_prompt(case: Any) -> None:
    golden, model = case
    actual, expected = compute(model, golden.tokens, [len(golden.tokens)]), golden.expected(len(golden.tokens))
    close(actual, expected)
    if any(golden.config.get(key) for key in ("num_experts", "num_local_experts")):
        assert np.abs(actual - expected).max() <= MIXTURE_TOLERANCE * factor_of(golden)


def factor_of(golden: Any) -> int:
    if golden.config["model_type"].startswith("gemma4"):
        return UNSCALED_FACTOR
    if golden.config["model_type"] == "kimi_linear":
        return 2 * DELTA_NET_FACTOR  # the float32 results of transformers differ by this from its float64 results
    if golden.config["model_type"] == "jamba":  # the parts of Mamba are normalised once more
        return DELTA_NET_FACTOR
    return DELTA_NET_FACTOR if "linear_num_key_heads" in text_part(HFConfig(golden.config)).values else 1


def test_chunks(case: Any) -> None:
    golden, model = case
    pieces = [3, 21, 1, 15]
    ends = np.cumsum(pieces)
    expected = [golden.expected(end)[end - length : end] for end, length in zip(ends, pieces, strict=True)]
    close(compute(model, golden.tokens, pieces), np.concatenate(expected))


def test_token_by_token(case: Any) -> None:
    golden, model = case
    expected = np.array([golden.expected(end)[end - 1] for end in range(1, len(golden.tokens) + 1)])
    close(compute(model, golden.tokens, [1] * len(golden.tokens)), expected)


def test_as_the_reference_device(case: Any, golden_folder: Any) -> None:
    """The forward pass as a person would write it down, beside the compiled one: a prompt in two parts, then tokens."""
    golden, model = case
    pieces = [21, len(golden.tokens) - 24, 1, 1, 1]
    with genai.Model(golden_folder(golden.path.stem), device="reference", accuracy="fp32") as reference:
        expected = compute(reference, golden.tokens, pieces)
    difference = np.abs(compute(model, golden.tokens, pieces) - expected).max()
    assert difference <= REFERENCE_TOLERANCE * factor_of(golden)


def test_greedy_tokens(case: Any) -> None:
    """Each of their tokens is ours, or as likely: theirs are fed, so that a tie does not end the comparison."""
    golden, model = case
    tokens = [*golden.tokens, *golden.greedy]
    logits = compute(model, tokens, [len(golden.tokens)] + [1] * len(golden.greedy))[len(golden.tokens) - 1 : -1]
    chosen = logits[np.arange(len(logits)), golden.greedy]
    behind = logits.max(axis=1) - chosen
    assert behind.max() <= TOLERANCE * np.abs(logits).max()
    assert (behind == 0).mean() > 0.9


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_every_architecture_has_a_golden(golden_names: list[str], golden: Any) -> None:
    configs = [HFConfig(golden(name).config) for name in golden_names]
    assert {text_part(config).model_type for config in configs} == set(MODEL_TYPES)
    assert {nested_type(config) for config in configs} == {*NESTED_TYPES, None}
    kinds = {(golden(name).config.get("rope_parameters") or {}).get("rope_type") for name in golden_names}
    assert kinds >= {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}


def test_goldens_are_small(golden_names: list[str], golden: Any) -> None:
    assert max(golden(name).path.stat().st_size for name in golden_names) <= 100_000


def test_batched(case: Any) -> None:
    """Three sequences in one step, each as if it were alone."""
    golden, model = case
    lengths = [len(golden.tokens), 5, 13]
    sequences = [model.decoder.open() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.append(golden.tokens[:length])
    assert model.info.flattened, model.info.reason
    for rows, length in zip(compute_pending(model.decoder, sequences, all_rows=True), lengths, strict=True):
        close(rows, golden.expected(length)[:length])
    for sequence in sequences:
        sequence.close()


def test_quantised(
    quantised: Any, golden: Any, golden_folder: Any, rounded_weights: Any, precision: Any, tmp_path: Path
) -> None:
    """The same logits as an fp32 model of the rounded weights, of which the tests above say that they are right."""
    folder, tokens = golden_folder(quantised, precision=precision), golden(quantised).tokens
    plan = plan_build(folder.parent / quantised, ExportOptions(precision=precision))
    weights = rounded_weights(plan.spec, plan.options, dict(plan.weights))
    options = ExportOptions(precision="fp32", fused_rope=plan.options.fused_rope)
    spec = replace(plan.spec, tie_word_embeddings=False)  # a tied head may be rounded where the embeddings are not
    rounded = write_model_folder(tmp_path / "rounded", spec, options, weights)
    results = []
    for path in (folder, rounded):
        with genai.Model(path, accuracy="fp32") as model:
            results.append(compute(model, tokens, [30, *[1] * 10]))
    close(*results)
