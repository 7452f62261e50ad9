"""Log-probabilities, compared with float64 computed from the Generator's logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genai

PROMPT = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday, Thursday,"


@pytest.fixture(scope="module")
def completion(llm: genai.LLM) -> genai.Completion:
    options: dict[str, Any] = {"temperature": 1.2, "seed": 1, "top_p": 0.9, "repetition_penalty": 1.3}
    (found,) = llm.generate(PROMPT, logprobs=4, prompt_logprobs=3, max_tokens=20, ignore_eos=True, **options)
    return found


@pytest.fixture(scope="module")
def expected(bundled: genai.Model, llm: genai.LLM, completion: genai.Completion) -> np.ndarray:
    """Return float64 [prompt + output - 1, V]; row i is for token i + 1."""
    ids = [*llm.tokenizer.encode(PROMPT).tolist(), *completion.token_ids]
    rows = []
    with genai.Generator(bundled, genai.GeneratorParams(bundled)) as generator:
        for token in ids[:-1]:
            generator.append_tokens([token])
            rows.append(generator.get_logits()[0, 0].astype(np.float64))
    logits = np.array(rows)
    return (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )


def check(found: Any, token: int, row: np.ndarray, top: int) -> None:
    assert found.token == token
    assert found.logprob == pytest.approx(row[token], abs=1e-4)
    best = np.argsort(-row, kind="stable")[:top]
    assert [one for one, _ in found.top] == best.tolist()
    assert [value for _, value in found.top] == pytest.approx(row[best].tolist(), abs=1e-4)


def test_output(completion: genai.Completion, expected: np.ndarray) -> None:
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids) == 20
    rows = expected[completion.prompt_tokens - 1 :]
    for found, token, row in zip(completion.logprobs, completion.token_ids, rows, strict=True):
        check(found, token, row, 4)


def test_prompt(llm: genai.LLM, completion: genai.Completion, expected: np.ndarray) -> None:
    ids = llm.tokenizer.encode(PROMPT).tolist()
    assert completion.prompt_logprobs is not None and len(completion.prompt_logprobs) == len(ids)
    assert completion.prompt_logprobs[0] is None
    for found, token, row in zip(completion.prompt_logprobs[1:], ids[1:], expected, strict=False):
        check(found, token, row, 3)


def test_a_prompt_of_one_token_and_none_asked(llm: genai.LLM) -> None:
    (one,) = llm.generate([[5]], prompt_logprobs=2, max_tokens=1)
    assert one.prompt_logprobs == (None,) and one.logprobs is None
    (none,) = llm.generate([[5]], max_tokens=1)
    assert none.prompt_logprobs is None and none.logprobs is None


def test_a_prompt_longer_than_a_step(bundled_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt logits are computed in chunks, and each chunk is stored in its place, also in a batch."""
    import genai.engine.engine as engine

    ids = np.random.default_rng(0).integers(3, 1500, 100).tolist()
    with genai.LLM(bundled_folder) as llm:
        (whole,) = llm.generate([ids], prompt_logprobs=1, max_tokens=1, temperature=0)
        monkeypatch.setattr(engine, "_PROMPT_LOGITS_BYTES", 4 * 1536 * 7)
        pieces, other = llm.generate(
            [ids, ids[:50]],
            [
                genai.SamplingParams(prompt_logprobs=1, max_tokens=1, temperature=0),
                genai.SamplingParams(max_tokens=5, temperature=0),
            ],
        )
        assert whole.prompt_logprobs is not None and pieces.prompt_logprobs is not None
        for one, two in zip(whole.prompt_logprobs[1:], pieces.prompt_logprobs[1:], strict=True):
            assert one is not None and two is not None
            assert one.token == two.token and one.logprob == pytest.approx(two.logprob, abs=1e-4)
        assert other.token_ids == llm.generate([ids[:50]], temperature=0, max_tokens=5)[0].token_ids


def test_all_samples_have_the_prompt_logprobs(llm: genai.LLM) -> None:
    found = llm.generate(PROMPT, n=3, temperature=1, prompt_logprobs=1, max_tokens=2)
    assert found[0].prompt_logprobs == found[1].prompt_logprobs == found[2].prompt_logprobs
