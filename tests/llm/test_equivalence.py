"""Requests generate the same tokens in every mode: alone, together, streamed, forked, preempted, cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
import genai.errors
from genai.llm.completion import Completion

PROMPTS = [
    "Once upon a time",
    "What is 12 + 7?",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday,",
    "A",
    "The cat and the dog " * 12,
]
MIXED: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 30},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1, "max_tokens": 25, "logprobs": 3},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 2, "max_tokens": 40, "ignore_eos": True},
    {"mirostat": 2, "seed": 3, "max_tokens": 20, "n": 3},
    {
        "temperature": 1,
        "dry_multiplier": 0.8,
        "top_k": 50,
        "seed": 4,
        "max_tokens": 35,
        "banned_strings": ["the", "a "],
    },
]


def parts(completion: Completion) -> tuple[Any, ...]:
    """Return the parts of a completion that must be equal."""
    return (
        completion.text,
        completion.token_ids,
        completion.finish_reason,
        completion.stopped_by,
        completion.logprobs,
        completion.sample_index,
        completion.prompt_tokens,
    )


def outputs(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [parts(completion) for completion in completions]


@pytest.fixture(params=["int4", "fp32", "window", "long-rope", "dense"])
def form_llm(request: pytest.FixtureRequest, form_folder: Callable[[str], Path]) -> Iterator[genai.LLM]:
    with genai.LLM(form_folder(request.param), threads=2) as llm:
        assert llm.model.info.flattened == (request.param != "dense")
        yield llm


def test_a_batch_equals_each_alone(llm: genai.LLM) -> None:
    params = [genai.SamplingParams(**options) for options in MIXED]
    together = llm.generate(PROMPTS, params)
    assert [(one.prompt_index, one.sample_index) for one in together] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (4, 0),
    ]  # fmt: skip
    alone = [one for prompt, each in zip(PROMPTS, params, strict=True) for one in llm.generate(prompt, each)]
    assert outputs(together) == outputs(alone)
    backwards = llm.generate(PROMPTS[::-1], params[::-1])
    assert sorted(outputs(backwards)) == sorted(outputs(together))


def test_a_batch_equals_each_alone_in_every_form(form_llm: genai.LLM) -> None:
    params = [genai.SamplingParams(**options) for options in MIXED]
    together = form_llm.generate(PROMPTS, params)
    alone = [one for prompt, each in zip(PROMPTS, params, strict=True) for one in form_llm.generate(prompt, each)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.text for one in together] == [one.text for one in alone]


def test_equals_the_generator(llm: genai.LLM, bundled: genai.Model) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    params = genai.GeneratorParams(bundled)
    params.set_search_options(max_length=len(ids) + 40)
    with genai.Generator(bundled, params) as generator:
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        expected = generator.get_sequence(0).tolist()[len(ids) :]
    (completion,) = llm.generate(PROMPTS[0], temperature=0, max_tokens=40)
    assert list(completion.token_ids) == expected
    assert completion.text == llm.tokenizer.decode(expected)


@pytest.mark.parametrize("seed", range(5))
def test_streamed_pieces_are_the_text(llm: genai.LLM, seed: int) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": seed, "max_tokens": 60, "ignore_eos": True}
    options["stop"] = ["ing", "e t"] if seed % 2 else []
    (whole,) = llm.generate(PROMPTS[0], **options)
    with llm.stream(PROMPTS[0], **options) as stream:
        pieces = list(stream)
    assert all(pieces)
    assert "".join(pieces) == stream.completion.text == whole.text
    assert parts(stream.completion) == parts(whole)
    assert next(stream, None) is None


def test_token_ids_as_prompts(llm: genai.LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 10}
    expected = outputs(llm.generate(PROMPTS[0], **options))
    for form in (
        ids,
        ids.tolist(),
        tuple(ids.tolist()),
        [ids],
        np.array([ids]),
        llm.tokenizer.encode_batch([PROMPTS[0]]),
    ):
        assert outputs(llm.generate(form, **options)) == expected
    assert len(llm.generate([ids.tolist(), [5, 6]], **options)) == 2
    assert "".join(llm.stream(ids, **options)) == expected[0][0]


def test_many_samples(llm: genai.LLM, bundled: genai.Model) -> None:
    """A sample depends only on its own index, not on the number of samples or of concurrent samples."""
    prompt = PROMPTS[2]
    options: dict[str, Any] = {"temperature": 1.3, "seed": 7, "max_tokens": 15, "ignore_eos": True}
    five = llm.generate(prompt, n=5, **options)
    assert len({one.token_ids for one in five}) > 1
    assert [one.sample_index for one in five] == [0, 1, 2, 3, 4] and {one.seed for one in five} == {7}
    assert outputs(llm.generate(prompt, n=3, **options)) == outputs(five[:3])
    assert outputs(llm.generate(prompt, **options)) == outputs(five[:1])
    assert all(one.cached_tokens == one.prompt_tokens for one in five[1:])
    with genai.LLM(bundled, max_sequences=2) as narrow:
        few = narrow.generate([prompt, PROMPTS[0]], n=5, **options)
    assert outputs(few[:5]) == outputs(five)
    assert outputs(few[5:]) == outputs(llm.generate(PROMPTS[0], n=5, **options))


def test_a_seed_is_drawn_and_reported(llm: genai.LLM) -> None:
    first, second = llm.generate([PROMPTS[0]] * 2, temperature=1.5, max_tokens=30, ignore_eos=True)
    assert first.seed != second.seed and first.token_ids != second.token_ids
    (again,) = llm.generate(PROMPTS[0], temperature=1.5, max_tokens=30, seed=second.seed, ignore_eos=True)
    assert again.token_ids == second.token_ids


def test_max_tokens_and_the_context(llm: genai.LLM) -> None:
    (one,) = llm.generate("A", max_tokens=1, temperature=0)
    assert len(one.token_ids) == 1 and one.finish_reason == "length"
    (full,) = llm.generate([5] * (llm.context_size - 3), temperature=0, ignore_eos=True)
    assert len(full.token_ids) == 3 and full.finish_reason == "length" and full.stopped_by is None


# --- the cache -------------------------------------------------------------------------------------------------------


def test_cached_equals_cold(form_llm: genai.LLM) -> None:
    """Also for prompts on both sides of a change of RoPE tables, whose keys must not be mixed."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 1500, 200).tolist()
    options: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 20, "ignore_eos": True, "logprobs": 2}
    lengths = [40, 64, 65, 90, 120, 180, 180, 70]
    warm = [form_llm.generate(ids[:length], **options)[0] for length in lengths]
    for length, completion in zip(lengths, warm, strict=True):
        with genai.LLM(form_llm.model.folder, threads=2) as fresh:
            (cold,) = fresh.generate(ids[:length], **options)
        assert cold.cached_tokens == 0
        assert cold.token_ids == completion.token_ids
        if form_llm.model.info.flattened and form_llm.model.info.kv_dtype == "fp16":
            assert cold.logprobs == completion.logprobs  # bit for bit
    if form_llm.model.info.flattened:
        assert warm[1].cached_tokens == 32 and warm[2].cached_tokens == 64
        assert warm[6].cached_tokens == 160  # the same prompt again


def test_a_conversation_goes_on_from_the_cache(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder) as llm:
        (first,) = llm.generate(PROMPTS[4], temperature=0, max_tokens=40, ignore_eos=True)
        longer = [*llm.tokenizer.encode(PROMPTS[4]).tolist(), *first.token_ids, 7, 8, 9]
        (second,) = llm.generate([longer], temperature=0, max_tokens=5)
        computed = first.prompt_tokens + len(first.token_ids) - 1
        assert second.cached_tokens == computed // 32 * 32 > first.prompt_tokens


def test_what_a_cancelled_stream_left_may_be_used(bundled_folder: Path) -> None:
    """With fp32 activations, generated tokens and the same tokens in a prompt agree up to rounding."""
    with genai.LLM(bundled_folder, accuracy="fp32") as llm:
        with llm.stream(PROMPTS[4], temperature=1, seed=1, max_tokens=500, ignore_eos=True) as stream:
            for _ in zip(range(60), stream, strict=False):
                pass
        longer = [*llm.tokenizer.encode(PROMPTS[4]).tolist(), *stream.completion.token_ids]
        (warm,) = llm.generate([longer], temperature=1, seed=2, max_tokens=10, logprobs=1)
        assert warm.cached_tokens >= stream.completion.prompt_tokens
    with genai.LLM(bundled_folder, accuracy="fp32") as llm:
        (cold,) = llm.generate([longer], temperature=1, seed=2, max_tokens=10, logprobs=1)
    assert cold.cached_tokens == 0 and cold.token_ids == warm.token_ids
    assert cold.logprobs is not None and warm.logprobs is not None
    logprobs = [[one.logprob for one in completion.logprobs] for completion in (cold, warm)]
    np.testing.assert_allclose(*logprobs, atol=1e-4)


def tiny_cache(model: genai.Model, blocks: int) -> int:
    return model.info.kv_bytes_per_token * 32 * blocks


@pytest.mark.parametrize("blocks", [5, 7, 12])
def test_preempted_equals_unhurried(
    blocks: int, form_folder: Callable[[str], Path], assert_all_given_back: Callable[[genai.Model], None]
) -> None:
    """Six sequences of up to 160 tokens in a cache for 160 to 384 tokens take turns, and no result changes."""
    folder = form_folder("int4")
    prompts = [np.random.default_rng(seed).integers(3, 1500, 20 + 12 * seed).tolist() for seed in range(6)]
    options: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 80, "ignore_eos": True, "logprobs": 1}
    with genai.LLM(folder) as roomy:
        expected = outputs(roomy.generate(prompts, **options))
        size = tiny_cache(roomy.model, blocks)
    with genai.LLM(folder, cache_bytes=size) as cramped:
        assert cramped.model.info.cache_tokens == 32 * blocks
        assert outputs(cramped.generate(prompts, **options)) == expected
        assert_all_given_back(cramped.model)


def test_preempted_samples_and_prompt_logprobs(form_folder: Callable[[str], Path]) -> None:
    folder = form_folder("int4")
    prompt = np.random.default_rng(1).integers(3, 1500, 70).tolist()
    options: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 50, "ignore_eos": True, "n": 4}
    with genai.LLM(folder) as roomy:
        expected = roomy.generate([prompt, prompt[:50]], prompt_logprobs=2, **options)
        size = tiny_cache(roomy.model, 5)
    with genai.LLM(folder, cache_bytes=size) as cramped:
        found = cramped.generate([prompt, prompt[:50]], prompt_logprobs=2, **options)
    assert outputs(found) == outputs(expected)
    assert [one.prompt_logprobs for one in found] == [one.prompt_logprobs for one in expected]


def test_only_what_cannot_fit_alone_fails(
    form_folder: Callable[[str], Path], assert_all_given_back: Callable[[genai.Model], None]
) -> None:
    """A Generator holds half of the cache, which the engine cannot preempt."""
    with genai.Model(form_folder("int4")) as model:
        size = tiny_cache(model, 6)
    with genai.Model(form_folder("int4"), cache_bytes=size) as model, genai.LLM(model) as llm:
        with genai.Generator(model, genai.GeneratorParams(model)) as generator:
            generator.append_tokens([9] * 90)
            fits = llm.stream([5] * 40, temperature=0, max_tokens=50, ignore_eos=True)
            too_long = llm.stream([6] * 60, temperature=0, max_tokens=100, ignore_eos=True)
            with pytest.raises(genai.errors.CacheCapacityError, match="KV cache is too small"):
                list(too_long)
            assert too_long.completion.token_ids
            list(fits)
            assert len(fits.completion.token_ids) == 50
            with pytest.raises(genai.errors.CacheCapacityError):
                llm.generate([7] * 120)
        assert_all_given_back(llm.model)
