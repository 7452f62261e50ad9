"""Python logits processors through the whole stack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genai
from genai.errors import LogitsProcessorError, StateError

PROMPT = "What is 12 + 7?"
OPTIONS: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


def test_forced_tokens(llm: genai.LLM) -> None:
    wanted = llm.tokenizer.encode("forced words").tolist()
    prompt_length = len(llm.tokenizer.encode(PROMPT))

    def force(token_ids: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        only = np.full_like(logits, -np.inf)
        place = len(token_ids) - prompt_length
        only[wanted[place] if place < len(wanted) else 2] = 0.0
        return only

    (completion,) = llm.generate(PROMPT, logits_processors=[force], temperature=1.5)
    assert completion.text == "forced words" and completion.stopped_by == 2


def test_sees_the_sequence_and_the_models_logits(llm: genai.LLM, bundled: genai.Model) -> None:
    seen: list[tuple[tuple[int, ...], np.ndarray]] = []

    def look(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
        seen.append((token_ids, logits.copy()))

    (completion,) = llm.generate(PROMPT, logits_processors=look, logit_bias={7: -5.0}, **OPTIONS)
    ids = llm.tokenizer.encode(PROMPT).tolist()
    assert [tokens for tokens, _ in seen][:12] == [(*ids, *completion.token_ids[:i]) for i in range(len(seen))]
    with genai.Generator(bundled, genai.GeneratorParams(bundled)) as generator:
        generator.append_tokens(ids)
        np.testing.assert_allclose(seen[0][1], generator.get_logits()[0, 0], atol=1e-4)


def raising(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
    raise KeyError("mine")


def misshapen(token_ids: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
    return logits[:-1]


def double(token_ids: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
    return logits.astype(np.float64)


def infinite(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
    logits[3] = np.inf


def resizing(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
    logits.resize(3, refcheck=False)


def reshaping(token_ids: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
    logits.shape = (2, -1)
    return logits


def retyping(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
    logits.dtype = np.int32  # type: ignore[misc]


@pytest.mark.parametrize(
    "processor",
    [raising, misshapen, double, infinite, lambda ids, logits: "text", resizing, reshaping, retyping],
)
def test_a_failing_one_ends_its_own_request_only(llm: genai.LLM, processor: Any) -> None:
    (expected,) = llm.generate(PROMPT, ignore_eos=True, **OPTIONS)
    good = llm.stream(PROMPT, ignore_eos=True, **OPTIONS)
    bad = llm.stream(PROMPT, logits_processors=processor, **OPTIONS)
    with pytest.raises(LogitsProcessorError) as raised:
        list(bad)
    assert raised.value.what and raised.value.why and raised.value.fix
    assert "".join(good) == expected.text
    with pytest.raises(LogitsProcessorError):
        llm.generate([PROMPT, PROMPT], [genai.SamplingParams(), genai.SamplingParams(logits_processors=processor)])


def test_the_cause_is_kept(llm: genai.LLM) -> None:
    with pytest.raises(LogitsProcessorError, match="raising raised KeyError") as raised:
        llm.generate(PROMPT, logits_processors=raising)
    assert isinstance(raised.value.__cause__, KeyError)


def test_one_that_masks_all(llm: genai.LLM) -> None:
    def nothing(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
        logits[:] = -np.inf

    with pytest.raises(genai.GenaiError, match="no next token"):
        llm.generate(PROMPT, logits_processors=nothing)


def test_one_that_calls_its_own_llm_is_told_so(llm: genai.LLM) -> None:
    """The call would wait for itself forever."""
    inner = llm.stream(PROMPT, **OPTIONS)
    found: list[Exception] = []

    def recursive(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
        for call in (lambda: llm.generate("A", max_tokens=1), lambda: next(inner), inner.close):
            try:
                call()
            except StateError as error:
                found.append(error)

    llm.generate(PROMPT, logits_processors=recursive, max_tokens=1)
    assert len(found) == 3
    inner.close()


def test_one_may_call_another_llm(llm: genai.LLM, bundled: genai.Model) -> None:
    answers: list[str] = []
    with genai.LLM(bundled) as other:

        def consult(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
            answers.append(other.chat("What is 12 + 7?", temperature=0).text)

        llm.generate(PROMPT, logits_processors=consult, **{**OPTIONS, "max_tokens": 2, "ignore_eos": True})
    assert answers == ["19"] * 2
