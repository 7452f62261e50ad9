"""Models with recurrent layers reuse states of earlier requests, and no token changes.

The cases are those in which other toolkits read whole prompts again, or gave other tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.spec import DeltaNetSpec, LatentSpec, MambaSpec, ShortConvSpec
from genai.engine.paged import PagedDecoder
from tests.integrity import check_pool
from tools.random_weights import RandomWeights

from .conftest import SPEC

HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"model_type": "lfm2", "qk_norm": True, "recurrent": ShortConvSpec(layers=(0, 2), kernel=3)},
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "qk_norm": True,
        "recurrent": DeltaNetSpec(layers=(0, 1, 2), kernel=4, key_heads=2, value_heads=4, key_size=16, value_size=16),
    },
    "falcon_h1": {
        "recurrent": MambaSpec(
            layers=(0, 1, 2, 3), kernel=4, heads=4, head_size=16, state_size=16, groups=2, beside_attention=True
        ),
    },
    "mamba2": {  # no layer has keys and values, or a feed-forward layer
        "feed_forward_layers": (),
        "recurrent": MambaSpec(layers=(0, 1, 2, 3), kernel=4, heads=4, head_size=16, state_size=16, groups=2),
    },
    "kimi_linear": {  # one decay for each element of a key, and one row per token for all heads
        "num_key_value_heads": 1,
        "head_size": 48,
        "attention_scale": 0.2,
        "rope_layers": (),
        "recurrent": DeltaNetSpec(
            layers=(0, 1, 2), kernel=4, key_heads=3, value_heads=3, key_size=16, value_size=16, gate_rank=16
        ),
        "latent": LatentSpec(rank=32, rope_size=16, nope_size=16, value_size=16),
    },
    "jamba": {  # Mamba-1 has one decay for each state
        "rope_layers": (),
        "recurrent": MambaSpec(
            layers=(0, 1, 3), kernel=4, heads=128, head_size=1, state_size=8, rank=4, norm="none", part_norms=True
        ),
    },
    "latent": {  # it has no state, but one row per token for all heads
        "num_key_value_heads": 1,
        "head_size": 48,
        "attention_scale": 0.2,
        "latent": LatentSpec(rank=32, rope_size=16, nope_size=16, value_size=16),
    },
}
DRAWN = ("falcon_h1", "jamba", "kimi_linear", "latent", "mamba2")
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
RNG = np.random.default_rng(3)


def ids(count: int) -> list[int]:
    return RNG.integers(3, 1500, count).tolist()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.drawn(6) if name in DRAWN else ()) for name in HYBRIDS],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Path:
    place = tmp_path_factory.mktemp("hybrids") / request.param
    spec = DecoderSpec(**{**SPEC, "num_layers": 4, "context_length": 4096, **HYBRIDS[request.param]})
    write_model_folder(
        place, spec, ExportOptions(precision="int4"), RandomWeights(spec, seed=2), tokenizer_dir=bundled_folder
    )
    return place


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(folder, threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[genai.LLM]:
    """The same model; its requests have a salt each, so that every prompt is computed whole."""
    with genai.LLM(folder, threads=2) as llm:
        yield llm


SALTS = map(str, itertools.count())


def check_unused(llm: genai.LLM) -> None:
    decoder = llm.model.decoder
    assert isinstance(decoder, PagedDecoder)
    check_pool(decoder.pool, [])


def ask(llm: genai.LLM, alone: genai.LLM, prompt: list[int]) -> genai.Completion:
    """Return the completion, which equals that of a model that computes the whole prompt."""
    found = llm.generate([prompt], **GREEDY)[0]
    expected = alone.generate([prompt], cache_salt=next(SALTS), **GREEDY)[0]
    assert found.token_ids == expected.token_ids and expected.cached_tokens == 0
    return found


@pytest.mark.parametrize(("shared", "own"), [(1600, 600), (1500, 700), (1021, 400), (300, 90)])
def test_a_second_prompt_reuses_what_it_shares(shared: int, own: int, llm: genai.LLM, alone: genai.LLM) -> None:
    """The prompts diverge where no message ends; a later one also finds the state at the point of divergence."""
    prefix = ids(shared)
    llm.generate([prefix + ids(own)], **GREEDY)
    second, third = (ask(llm, alone, prefix + ids(own)) for _ in range(2))
    assert second.cached_tokens >= (0.9 * shared if shared > 1024 else shared - 127)
    assert third.cached_tokens >= shared - 32
    check_unused(llm)


def test_an_identical_request_computes_at_most_one_block(llm: genai.LLM, alone: genai.LLM) -> None:
    prompt = ids(1234)
    llm.generate([prompt], **GREEDY)
    assert ask(llm, alone, prompt).cached_tokens >= 1234 - 32
    together = llm.generate([prompt, prompt[:-1], prompt], **GREEDY)
    assert all(one.cached_tokens >= 1233 - 127 for one in together)


def test_an_edit_in_the_third_turn_reuses_the_first_two(llm: genai.LLM, alone: genai.LLM) -> None:
    words = ["the cat and the dog " * 9, "once upon a time " * 11, "a house by the sea " * 10]
    messages, whole = [{"role": "system", "content": "You are brief. " * 12}], 0
    for turn, text in enumerate(words):
        messages.append({"role": "user", "content": text})
        whole = llm.chat(messages, **GREEDY).completion.prompt_tokens
        if turn < 2:
            messages.append({"role": "assistant", "content": "Yes, " * 7 + str(turn)})
    edited = [*messages[:-1], {"role": "user", "content": "something else " * 10}]
    found, expected = llm.chat(edited, **GREEDY), alone.chat(edited, cache_salt=next(SALTS), **GREEDY)
    found, expected = found.completion, expected.completion
    assert found.token_ids == expected.token_ids and expected.cached_tokens == 0
    first_two = len(llm.encode(llm.render(messages[:-1])))
    assert first_two - 40 <= found.cached_tokens < whole


def test_a_restored_state_continues_in_another_process_without_the_prompt(
    llm: genai.LLM, folder: Path, tmp_path: Path
) -> None:
    prompt = ids(700)
    whole = llm.generate([prompt], **{**GREEDY, "max_tokens": 40, "temperature": 0.9, "seed": 4})[0]
    with genai.LLM(folder, threads=2) as first:
        half = first.generate([prompt], **{**GREEDY, "max_tokens": 25, "temperature": 0.9, "seed": 4}, keep_state=True)[
            0
        ]
        assert half.state is not None
        half.state.save_state(tmp_path / "state")
        half.state.close()
    with genai.LLM(folder, threads=2) as second:
        state = second.load_state(tmp_path / "state")
        rest = state.resume(max_tokens=15)
        assert half.token_ids + rest.token_ids == whole.token_ids
        assert second.stats().steps <= 16, "the tokens after the last full block are computed, then one for each token"
        state.close()
        check_unused(second)


def test_prefixes_on_disk_serve_the_next_process(folder: Path, alone: genai.LLM, tmp_path: Path) -> None:
    prompt = ids(900)
    for cached in (0, 900 - 127):
        with genai.LLM(folder, threads=2, prefix_cache_dir=tmp_path / "kv") as llm:
            assert ask(llm, alone, prompt).cached_tokens >= cached


def test_guesses_forks_and_prefixes_together(folder: Path, llm: genai.LLM, alone: genai.LLM) -> None:
    """Prompts that repeat themselves, so that guesses are made and rejected; several samples of each."""
    motif = ids(40)
    prompts = [motif * 6 + ids(3), motif * 6 + ids(70), ids(5), motif * 2]
    options = {"max_tokens": 48, "ignore_eos": True, "temperature": 0.7, "seed": 5, "n": 3}
    expected = [
        [one.token_ids for one in alone.generate([prompt], cache_salt=next(SALTS), **options)] for prompt in prompts
    ]
    with genai.LLM(folder, threads=2, speculation="lookup") as guessing:
        for _ in range(2):
            found = guessing.generate(prompts, **options)
            assert [[one.token_ids for one in found[3 * i : 3 * i + 3]] for i in range(4)] == expected
        check_unused(guessing)
    found = llm.generate(prompts, **options)
    assert [one.token_ids for one in found] == [tokens for group in expected for tokens in group]


def test_many_requests_share_a_small_cache(folder: Path, alone: genai.LLM) -> None:
    prompts = [ids(150 + 40 * number) for number in range(5)]
    options = {**GREEDY, "max_tokens": 150}
    expected = [alone.generate([prompt], cache_salt=next(SALTS), **options)[0].token_ids for prompt in prompts]
    with genai.LLM(folder, threads=2) as other:
        decoder = other.model.decoder
        assert isinstance(decoder, PagedDecoder)
        needed = decoder.storage.layout.sequence_bytes(600, 64)
    with genai.LLM(folder, threads=2, cache_bytes=2 * needed, context_size=600) as small:
        assert [one.token_ids for one in small.generate(prompts, **options)] == expected
        check_unused(small)
