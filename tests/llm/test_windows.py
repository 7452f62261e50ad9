"""Models whose layers all have windows give back the blocks that left them: no token is another for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.engine import paged
from genai.engine.decoder import compute
from genai.kvcache.table import GONE
from tests.integrity import check_pool, check_table
from tools.random_weights import RandomWeights

from .conftest import SPEC

WINDOW = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Path:
    place = tmp_path_factory.mktemp("windows") / "model"
    spec = DecoderSpec(**{**SPEC, "sliding_window": WINDOW, "model_type": "mistral", "context_length": 512})
    weights = RandomWeights(spec, seed=5)
    write_model_folder(place, spec, ExportOptions(precision="int4"), weights, tokenizer_dir=bundled_folder)
    return place


@pytest.fixture(scope="module")
def windowed(folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(folder, threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def keeping(folder: Path) -> Iterator[genai.LLM]:
    """The same, with all blocks kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "_widest_window", lambda program: None)
        model = genai.Model(folder, threads=2)
    with model, genai.LLM(model) as llm:
        yield llm


LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1, "n": 2},
    {"temperature": 1.1, "seed": 2, "banned_strings": ["a", "the"]},
    {"temperature": 1, "seed": 3, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_tokens_are_those_of_a_cache_that_keeps_all(
    options: dict[str, Any], windowed: genai.LLM, keeping: genai.LLM
) -> None:
    prompts = ["The cat and the dog " * 20, "Once"]
    found = windowed.generate(prompts, **options, **LONG)
    expected = keeping.generate(prompts, **options, **LONG)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    check_pool(windowed.model.decoder.pool, [])  # type: ignore[arg-type]


def test_beams_states_and_guesses(windowed: genai.LLM, keeping: genai.LLM, folder: Path, tmp_path: Path) -> None:
    prompt = "The cat and the dog " * 20
    beams = [llm.generate(prompt, num_beams=3, max_tokens=60, ignore_eos=True)[0] for llm in (windowed, keeping)]
    assert beams[0].token_ids == beams[1].token_ids
    whole = keeping.generate(prompt, temperature=0.8, seed=1, **LONG)[0]
    half = windowed.generate(prompt, temperature=0.8, seed=1, **{**LONG, "max_tokens": 120}, keep_state=True)[0]
    assert half.state is not None
    half.state.save_state(tmp_path / "state")
    with genai.LLM(folder, threads=2, speculation="lookup") as other:
        rest = other.load_state(tmp_path / "state").resume(max_tokens=80)
        assert half.token_ids + rest.token_ids == whole.token_ids
        again = other.generate(prompt, temperature=0.8, seed=1, **LONG)[0]
        assert again.token_ids == whole.token_ids
    half.state.close()


def test_a_sequence_holds_no_more_than_its_window(windowed: genai.LLM) -> None:
    decoder = windowed.model.decoder
    sequence, tokens = decoder.open(), np.random.default_rng(0).integers(3, 1500, 400).tolist()
    sequence.append(tokens)
    compute(decoder, [sequence])
    check_table(sequence.table)
    assert (
        sequence.table.num_gone
        == (400 - WINDOW) // 32 - 1
        == len(sequence.table.blocks) - len(sequence.table.held_blocks)
    )
    fork = sequence.fork()
    sequence.close()
    for token in tokens[:100]:
        fork.append([token])
        compute(decoder, [fork])
    assert len(fork.table.held_blocks) <= 4 and fork.table.blocks[0] == GONE
    fork.rewind(490)
    assert fork.num_computed == 489, "a little is taken back without being computed again"
    fork.rewind(300)
    assert fork.num_computed == 0, "what left the window is computed again"
    (rows,) = compute(decoder, [fork])
    other = decoder.open()
    other.append(tokens[:300], together=400)
    (expected,) = compute(decoder, [other])
    np.testing.assert_array_equal(rows[-1], expected[-1])
    fork.close()
    other.close()


def test_the_prefix_cache_finds_what_was_given_back(windowed: genai.LLM) -> None:
    prompt = "A prompt of its own, " * 40
    first = windowed.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)[0]
    second = windowed.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)[0]
    assert first.token_ids == second.token_ids
    assert second.cached_tokens >= second.prompt_tokens - 32


def test_many_long_sequences_share_a_small_cache(folder: Path, keeping: genai.LLM) -> None:
    """Eight sequences of 400 tokens need 104 blocks, where none is given back."""
    prompts = [f"{number} " * 30 for number in range(8)]
    options: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.9, "seed": 1}
    block = keeping.model.decoder.storage.layout.bytes_per_block  # type: ignore[attr-defined]
    with genai.LLM(folder, threads=2, cache_bytes=52 * block) as llm:
        found = llm.generate(prompts, **options)
        assert llm.stats().preempted == 0
        assert llm.model.decoder.pool.num_blocks < 60  # type: ignore[union-attr]
    assert [one.token_ids for one in found] == [one.token_ids for one in keeping.generate(prompts, **options)]


@pytest.mark.parametrize("layers", [[0], [0, 1]])
def test_a_layer_that_sees_all_keeps_all(layers: list[int], tmp_path: Path, bundled_folder: Path) -> None:
    changes = {"sliding_window": 40, "sliding_layers": tuple(layers), "model_type": "gemma2"}
    spec = DecoderSpec(**{**SPEC, **changes})
    place = tmp_path / "model"
    write_model_folder(
        place, spec, ExportOptions(precision="int4"), RandomWeights(spec, seed=1), tokenizer_dir=bundled_folder
    )
    with genai.Model(place, threads=1) as model:
        sequence = model.decoder.open()
        sequence.append([5] * 200)
        compute(model.decoder, [sequence])
        assert (sequence.table.num_gone > 0) == (layers == [0, 1])
        sequence.close()
