"""The end of an output, and text that it must not contain: stop strings, banned strings, minimum lengths."""

from __future__ import annotations

import json
import shutil
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


# --- strings that name special tokens --------------------------------------------------------------------------------

MARK, MARK_TEXT = 1, "<|im_start|>"  # a special token that has no text in outputs and ends none


def forced(llm: genai.LLM, parts: list[str | int]) -> dict[str, Any]:
    """Return options that force an output; at a position where its token is forbidden, "z" follows."""
    prompt = llm.encode("Hi")
    ids = [id_ for part in parts for id_ in ([part] if isinstance(part, int) else llm.tokenizer.encode(part).tolist())]
    other = llm.tokenizer.encode("z").tolist()[0]

    def force(tokens: np.ndarray, logits: np.ndarray) -> None:
        position = len(tokens) - len(prompt)
        logits[:] = -1e6
        logits[other] = -1e3
        logits[ids[position]] = 0

    return {"prompts": [prompt], "temperature": 0, "max_tokens": len(ids), "logits_processors": [force]}


SPELLED = [*MARK_TEXT]  # the characters, one token each


@pytest.mark.parametrize(
    ("parts", "stop", "text", "num_tokens"),
    [
        (["a", MARK, "b"], MARK_TEXT, "a", 2),
        (["a", MARK, "b"], "a" + MARK_TEXT, "", 2),
        (["q", "a", MARK, "b", "c"], MARK_TEXT + "b", "qa", 4),
        (["q", "a", MARK, "b", "c"], "a" + MARK_TEXT + "b", "q", 4),
        (["a", MARK, MARK, "b"], MARK_TEXT * 2, "a", 3),
        (["a", MARK, "a", MARK, "b", "c"], "a" + MARK_TEXT + "b", "a", 5),
        ([MARK, "b"], [MARK_TEXT, "b"], "", 1),
        # The reader sees no hidden token, so it does not separate the characters of a stop string.
        (["a", MARK, "b", "c"], "ab", "", 3),
        # The text of the token, spelled by other tokens.
        (["a", *SPELLED, "b"], MARK_TEXT, "a", 1 + len(SPELLED)),
        # A part of the token's text is not in the output.
        (["a", MARK, "b"], "im_start", "ab", 3),
        (["a", MARK, "b"], "<", "ab", 3),
        (["a", MARK, "b"], "<|im_end|>", "ab", 3),
        (["a", MARK, "b"], "b" + MARK_TEXT, "ab", 3),
    ],
)
def test_a_stop_string_that_names_a_special_token(
    llm: genai.LLM, parts: list[str | int], stop: str | list[str], text: str, num_tokens: int
) -> None:
    options = forced(llm, parts)
    (completion,) = llm.generate(**options, stop=stop)
    assert (completion.text, len(completion.token_ids)) == (text, num_tokens)
    stopped = (num_tokens < options["max_tokens"]) or completion.finish_reason == "stop"
    assert completion.stopped_by == ((stop if isinstance(stop, str) else stop[0]) if stopped else None)
    prompt = options.pop("prompts")[0]
    with llm.stream(prompt, stop=stop, **options) as stream:
        assert "".join(stream) == text
    # Banned strings that never occur hold text back, but do not change it.
    (completion,) = llm.generate([prompt], stop=stop, banned_strings=["a!", "q!"], **options)
    assert (completion.text, len(completion.token_ids)) == (text, num_tokens)


def test_min_tokens_and_ends_with_a_special_stop_string(llm: genai.LLM) -> None:
    options = forced(llm, ["a", MARK, "b", MARK, "c"])
    (completion,) = llm.generate(**options, stop=MARK_TEXT, min_tokens=3)
    assert (completion.text, len(completion.token_ids)) == ("ab", 4)
    (completion,) = llm.generate(**forced(llm, ["a", 2, "c"]), stop="<|im_end|>", ignore_eos=True)
    assert (completion.text, completion.stopped_by) == ("a", "<|im_end|>")
    # The end of a sequence is not part of the output, so it ends the output under its own id.
    (completion,) = llm.generate(**forced(llm, ["a", 2, "c"]), stop="<|im_end|>")
    assert (completion.text, completion.stopped_by) == ("a", 2)


@pytest.mark.parametrize(
    ("parts", "banned", "ids"),
    [
        (["a", MARK, "b"], MARK_TEXT, ["a", "z", "b"]),
        (["a", MARK, "b"], "a" + MARK_TEXT, ["z", MARK, "b"]),
        (["a", MARK, "b"], MARK_TEXT + "b", ["a", "z", "b"]),
        (["a", MARK, MARK], MARK_TEXT * 2, ["a", "z", MARK]),
        # The token before a banned string is not the one that began it.
        (["a", MARK, "b"], "b", ["a", MARK, "z"]),
        (["a", MARK, "b"], "ab", ["z", MARK, "b"]),
        (["a", MARK, "b"], "im_start", ["a", MARK, "b"]),
        (["a", *SPELLED], MARK_TEXT, ["a", "z", *SPELLED[1:]]),
    ],
)
def test_a_banned_string_that_names_a_special_token(
    llm: genai.LLM, parts: list[str | int], banned: str, ids: list[str | int]
) -> None:
    right = [one if isinstance(one, int) else llm.tokenizer.to_token_id(one) for one in ids]
    options = forced(llm, parts)
    (completion,) = llm.generate(**options, banned_strings=banned)
    assert list(completion.token_ids) == right
    assert completion.text == llm.tokenizer.decode(right)
    prompt = options.pop("prompts")[0]
    with llm.stream(prompt, banned_strings=banned, **options) as stream:
        assert "".join(stream) == llm.tokenizer.decode(right)


def test_text_that_a_tokenizer_holds_back_precedes_a_special_stop_string(
    tmp_path: Path, form_folder: Callable[[str], Path]
) -> None:
    """The bytes of a character are certain only when another token follows, which may be the hidden one."""
    folder = tmp_path / "model"
    shutil.copytree(form_folder("fp32"), folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    bytes_of = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    content["model"] |= {"vocab": {**dict.fromkeys(()), **bytes_of}, "merges": [], "byte_fallback": True}
    content["model"]["vocab"] |= {"a": 300, "z": 301, **{t["content"]: t["id"] for t in content["added_tokens"]}}
    content |= {"pre_tokenizer": None}
    content["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with genai.LLM(folder) as llm:
        for stop, text in ((MARK_TEXT, "aé"), ("é" + MARK_TEXT, "a"), ("aé" + MARK_TEXT, "")):
            (completion,) = llm.generate(**forced(llm, ["a", "é", MARK, "a"]), stop=stop)
            assert (completion.text, completion.stopped_by) == (text, stop)
        (completion,) = llm.generate(**forced(llm, ["a", "é", MARK, "a"]), banned_strings="é" + MARK_TEXT)
        assert completion.token_ids[:2] == (300, 301)
