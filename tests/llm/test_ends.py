"""The end of an output, and text that it must not contain: stop strings, banned strings, minimum lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
import genai.errors
from genai.errors import SamplingError

PROMPT = "<|im_start|>user\nTell me a story about Luna and Tom.<|im_end|>\n<|im_start|>assistant\n"
FREE: dict[str, Any] = {"temperature": 0.9, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module", params=range(2))
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def free(llm: genai.LLM, seed: int) -> str:
    """Return a text without any limit."""
    (completion,) = llm.generate(PROMPT, seed=seed, **FREE)
    assert len(completion.text) > 60
    return completion.text


# --- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", range(5, 50, 9))
@pytest.mark.parametrize("length", [1, 3, 13])
def test_a_stop_string_anywhere_in_the_text(llm: genai.LLM, free: str, seed: int, start: int, length: int) -> None:
    """Substrings of the text cross token boundaries in every way."""
    stop = free[start : start + length]
    (completion,) = llm.generate(PROMPT, seed=seed, stop=stop, **FREE)
    assert completion.text == free[: free.index(stop)]
    assert (completion.finish_reason, completion.stopped_by) == ("stop", stop)
    whole = llm.tokenizer.decode(list(completion.token_ids))
    assert stop in whole and stop not in llm.tokenizer.decode(list(completion.token_ids[:-1]))
    with llm.stream(PROMPT, seed=seed, stop=stop, **FREE) as stream:
        assert "".join(stream) == completion.text


def test_a_stop_string_that_never_comes_is_held_back_only_for_a_while(llm: genai.LLM, free: str, seed: int) -> None:
    almost = [free[10:30] + "\x01", free[-3:] + "\x01", free[-1] + "\x02"]
    with llm.stream(PROMPT, seed=seed, stop=almost, **FREE) as stream:
        assert "".join(stream) == free
    assert (stream.completion.finish_reason, stream.completion.stopped_by) == ("length", None)


def test_the_stop_string_at_the_very_end_counts(llm: genai.LLM, free: str, seed: int) -> None:
    (completion,) = llm.generate(PROMPT, seed=seed, stop=free[-4:], **FREE)
    assert completion.finish_reason == "stop"


def test_eos_and_stop_tokens(llm: genai.LLM) -> None:
    (natural,) = llm.generate(PROMPT, temperature=0)
    assert natural.finish_reason == "stop" and natural.stopped_by in llm.tokenizer.eos_token_ids
    third = natural.token_ids[2]
    (cut,) = llm.generate(PROMPT, temperature=0, stop_token_ids=[np.int32(third)])
    assert cut.token_ids == natural.token_ids[: natural.token_ids.index(third)]
    assert cut.stopped_by == third
    (longer,) = llm.generate(PROMPT, temperature=0, ignore_eos=True, max_tokens=len(natural.token_ids) + 5)
    assert longer.token_ids[: len(natural.token_ids)] == natural.token_ids
    assert natural.stopped_by in longer.token_ids


def test_minimum_lengths(llm: genai.LLM) -> None:
    (natural,) = llm.generate(PROMPT, temperature=0)
    least = len(natural.token_ids) + 4
    for options in ({"min_tokens": least}, {"min_length": natural.prompt_tokens + least}):
        (longer,) = llm.generate(PROMPT, temperature=0, max_tokens=least + 40, **options)
        assert len(longer.token_ids) >= least
        assert not set(longer.token_ids[:least]) & set(llm.tokenizer.eos_token_ids.tolist())


def test_stop_strings_wait_for_min_tokens(llm: genai.LLM, free: str, seed: int) -> None:
    stop = free[8]
    (late,) = llm.generate(PROMPT, seed=seed, stop=stop, min_tokens=30, **FREE)
    assert len(late.token_ids) >= 30 and late.finish_reason in ("stop", "length")
    if late.finish_reason == "stop":
        before = llm.tokenizer.decode(list(late.token_ids[:29]))
        assert late.text.startswith(before) and stop not in late.text[len(before) :]


# --- banned strings --------------------------------------------------------------------------------------------------


def banned_in(free: str) -> list[str]:
    words = free.split()
    return [" ".join(words[2:4]), words[5], free[20:24], "e"]


@pytest.mark.parametrize("which", range(4))
def test_banned_strings_never_come(llm: genai.LLM, free: str, seed: int, which: int) -> None:
    banned = banned_in(free)[which]
    assert banned in free
    options: dict[str, Any] = {**FREE, "seed": seed, "banned_strings": banned, "logprobs": 1}
    (completion,) = llm.generate(PROMPT, **options)
    assert banned not in completion.text
    assert completion.text == llm.tokenizer.decode(list(completion.token_ids))
    assert len(completion.token_ids) == FREE["max_tokens"]
    assert completion.logprobs is not None
    assert [one.token for one in completion.logprobs] == list(completion.token_ids)
    shared = free[: free.index(banned)]
    common = sum(1 for _ in iter_common(shared, completion.text))
    assert common >= len(shared) - 12  # the token that began it holds a few characters more
    with llm.stream(PROMPT, **options) as stream:
        shown = ""
        for piece in stream:
            shown += piece
            assert banned not in shown
    assert shown == completion.text


def iter_common(first: str, second: str) -> list[str]:
    result = []
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        result.append(a)
    return result


def test_banned_strings_in_samples(llm: genai.LLM, free: str, seed: int) -> None:
    banned = [*banned_in(free)[:2], "Tom"]
    together = llm.generate(PROMPT, seed=seed, n=4, banned_strings=banned, **FREE)
    assert not any(string in one.text for one in together for string in banned)
    alone = llm.generate(PROMPT, seed=seed, banned_strings=banned, **FREE)
    assert alone[0].token_ids == together[0].token_ids


def test_logprobs_after_going_back_are_those_of_the_tokens_kept(bundled_folder: Path, seed: int) -> None:
    """Compared with a prompt of the same tokens, with fp32 activations, which do not depend on batching."""
    with genai.LLM(bundled_folder, accuracy="fp32") as llm:
        (free,) = llm.generate(PROMPT, seed=seed, **FREE)
        banned = banned_in(free.text)
        (completion,) = llm.generate(PROMPT, seed=seed, banned_strings=banned, logprobs=0, **FREE)
        ids = [*llm.tokenizer.encode(PROMPT).tolist(), *completion.token_ids]
        (teacher,) = llm.generate([ids], prompt_logprobs=0, max_tokens=1)
    assert teacher.prompt_logprobs is not None and completion.logprobs is not None
    forced = [one.logprob for one in teacher.prompt_logprobs[completion.prompt_tokens :] if one is not None]
    np.testing.assert_allclose([one.logprob for one in completion.logprobs], forced, atol=1e-4)


def test_stop_and_banned_strings_together(llm: genai.LLM, free: str, seed: int) -> None:
    banned = free[12:15]
    (without,) = llm.generate(PROMPT, seed=seed, banned_strings=banned, **FREE)
    stop = without.text[25:31]
    (completion,) = llm.generate(PROMPT, seed=seed, banned_strings=banned, stop=stop, **FREE)
    assert completion.text == without.text[: without.text.index(stop)]
    assert completion.stopped_by == stop


def test_a_stop_string_ends_the_output_although_a_banned_one_may_have_begun(
    llm: genai.LLM, free: str, seed: int
) -> None:
    """The "b" of the stop string "ab" starts the banned "bc": the output ends, and no further token is computed."""
    stop = free[30:36]
    (plain,) = llm.generate(PROMPT, seed=seed, stop=stop, **FREE)
    (both,) = llm.generate(PROMPT, seed=seed, stop=stop, banned_strings=stop[-2:] + "\x01", **FREE)
    assert (both.text, both.token_ids, both.stopped_by) == (plain.text, plain.token_ids, stop)


def test_a_place_where_every_token_is_banned(llm: genai.LLM) -> None:
    """Only that request ends, with an error that gives the reason."""
    few = [300, 301, 302]

    def only_a_few(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
        rest = np.ones(len(logits), bool)
        rest[few] = False
        logits[rest] = -np.inf

    good = llm.stream(PROMPT, temperature=0, max_tokens=60, ignore_eos=True)
    texts = [llm.tokenizer.decode([token]) for token in few]
    doomed = llm.stream(PROMPT, banned_strings=texts, logits_processors=only_a_few, max_tokens=5)
    with pytest.raises(SamplingError, match="no next token"):
        list(doomed)
    assert doomed.completion.text == ""
    assert len(list(good)) and len(good.completion.token_ids) == 60


def test_banned_strings_are_searched_where_the_output_ends(llm: genai.LLM) -> None:
    """The last token's unfinished character counts as text: U+FFFD."""
    half = next(t for t in range(3, 300) if llm.tokenizer.decode([t]) == "\ufffd")

    def force(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
        best = logits.argmax()
        logits[:] = -20.0
        logits[half], logits[best] = 20.0, 10.0

    options: dict[str, Any] = {"logits_processors": force, "max_tokens": 3, "temperature": 0}
    (free,) = llm.generate(PROMPT, **options)
    assert "\ufffd" in free.text
    (completion,) = llm.generate(PROMPT, banned_strings="\ufffd", **options)
    assert "\ufffd" not in completion.text and len(completion.token_ids) == 3


def test_blocks_come_back_after_going_back(
    llm: genai.LLM, free: str, seed: int, assert_all_given_back: Callable[[genai.Model], None]
) -> None:
    llm.generate([PROMPT] * 3, seed=seed, banned_strings=banned_in(free), n=2, **FREE)
    assert_all_given_back(llm.model)
