"""Beam search against transformers: 200 random cases (tools/make_beam_goldens.py), on a folder of the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from tools.make_beam_goldens import EOS, PATH, SPEC
from tools.random_weights import RandomWeights

GOLDENS = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def beam_llm(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Iterator[genai.LLM]:
    spec, folder = DecoderSpec(**SPEC), tmp_path_factory.mktemp("beams") / "model"
    weights = RandomWeights(spec, GOLDENS["seed"])
    write_model_folder(folder, spec, ExportOptions(precision="fp32"), weights, tokenizer_dir=bundled_folder)
    with genai.LLM(folder, threads=2) as llm:
        yield llm


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    same = (
        "num_beams num_return_sequences length_penalty early_stopping repetition_penalty no_repeat_ngram_size".split()
    )
    stops = [token for token in case["eos_token_id"] if token != EOS]
    return {
        **{name: case[name] for name in same},
        "max_tokens": case["max_new_tokens"],
        "min_tokens": case["min_new_tokens"],
        "stop_token_ids": stops,
    }


@pytest.mark.parametrize("part", range(10))
def test_outputs_and_scores_are_those_of_transformers(beam_llm: genai.LLM, part: int) -> None:
    for number, case in list(enumerate(GOLDENS["cases"]))[part::10]:
        found = beam_llm.generate(case["prompt"], **options_of(case))
        outputs = [[*one.token_ids, *([one.stopped_by] if one.finish_reason == "stop" else [])] for one in found]
        assert outputs == case["outputs"], (number, options_of(case))
        np.testing.assert_allclose([one.score for one in found], case["scores"], atol=2e-4)


def test_prompts_together_give_what_each_gives_alone(beam_llm: genai.LLM) -> None:
    prompts = [case["prompt"] for case in GOLDENS["cases"][:12]]
    options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 3, "max_tokens": 12, "logprobs": 2}
    together = beam_llm.generate(prompts, **options)
    alone = [one for prompt in prompts for one in beam_llm.generate(prompt, **options)]
    assert [(one.token_ids, one.score, one.logprobs) for one in together] == [
        (one.token_ids, one.score, one.logprobs) for one in alone
    ]
    assert [(one.prompt_index, one.sample_index) for one in together[:4]] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_beams_give_all_blocks_back(beam_llm: genai.LLM) -> None:
    pool = beam_llm.model.decoder.pool
    assert pool is not None
    beam_llm.generate([[5] * 70, [6] * 3], num_beams=6, max_tokens=40, ignore_eos=True)
    assert pool.num_free == pool.num_blocks


def test_log_probabilities_add_up_to_the_score(beam_llm: genai.LLM) -> None:
    (best,) = beam_llm.generate([7, 8, 9], num_beams=3, length_penalty=0.0, max_tokens=9, ignore_eos=True, logprobs=1)
    assert best.logprobs is not None and best.score is not None
    assert sum(one.logprob for one in best.logprobs) == pytest.approx(best.score, abs=1e-6)
    assert [one.token for one in best.logprobs] == list(best.token_ids)
