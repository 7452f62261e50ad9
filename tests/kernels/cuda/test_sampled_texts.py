"""The bundled model on the emulated GPU: whatever looks at logits gives what it gives on the reference device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.logits import DeviceLogits, LogitsBlock, LogitsMemory
from genai.models import loading

from .host_driver import HostDriver

pytestmark = pytest.mark.gpu

PROMPT = "Name a city."
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "nucleus": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "rare": {"temperature": 1.0, "typical_p": 0.9, "top_n_sigma": 3.0, "xtc_probability": 0.5, "dry_multiplier": 0.8},
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0},
    "bias": {"temperature": 0.7, "logit_bias": {100: 5.0, 5: -100.0}, "min_tokens": 3},
    "choice": {"temperature": 1.0, "choice": ["Paris", "London", "Nora"]},
    "regex": {"temperature": 1.0, "regex": "[a-z ]{3,9}"},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2},
    "processors": {"temperature": 0.8, "logits_processors": [lambda tokens, logits: np.roll(logits, 1)]},
}


@pytest.fixture(scope="module")
def reference(bundled_folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(bundled_folder, device="reference", context_size=256) as llm:
        yield llm


@pytest.fixture
def open_llm(driver: Any, bundled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., genai.LLM]:
    """An LLM on the emulated GPU."""
    monkeypatch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(driver, threads))

    def opened(**options: Any) -> genai.LLM:
        given = {"accuracy": "fp32", "context_size": 256, "cache_bytes": 4 << 20, "quiet": True}
        return genai.LLM(bundled_folder, **given, **options)

    return opened


def compare(found: Any, expected: Any) -> None:
    assert found.token_ids == expected.token_ids and found.text == expected.text
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = (getattr(one, name) or [] for one in (found, expected))
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            if a is None or b is None:
                assert a is b
                continue
            assert a.token == b.token and abs(a.logprob - b.logprob) < 2e-5
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


def test_requests_of_all_kinds_at_once(open_llm: Callable[..., genai.LLM], reference: genai.LLM, driver: Any) -> None:
    """Greedy rows, rows with histories and rows with masks share their steps."""
    prompts = [reference.render(PROMPT)] * len(OPTIONS)
    options = [genai.SamplingParams(max_tokens=4, seed=11, **one) for one in OPTIONS.values()]
    expected = reference.generate(prompts, options)
    with open_llm() as llm:
        for ours, theirs in zip(llm.generate(prompts, options), expected, strict=True):
            compare(ours, theirs)
    driver.check()


@pytest.mark.parametrize("options", [{"logprobs": 2}, {"repetition_penalty": 1.2}], ids=str)
def test_beams(open_llm: Callable[..., genai.LLM], reference: genai.LLM, options: dict[str, Any]) -> None:
    prompt, given = reference.render(PROMPT), {"num_beams": 3, "temperature": 0, "max_tokens": 4, **options}
    expected = reference.generate([prompt], **given)
    with open_llm() as llm:
        compare(llm.generate([prompt], **given)[0], expected[0])


def test_sequences_and_first_tokens(open_llm: Callable[..., genai.LLM], reference: genai.LLM) -> None:
    """The tokens that come otherwise are forbidden: the first one, and one after those before it."""
    prompt = reference.render(PROMPT)
    free = reference.generate([prompt], max_tokens=6, temperature=0, ignore_eos=True)[0].token_ids
    options = [
        genai.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, **one)
        for one in (
            {"begin_suppress_tokens": free[:1]},
            {"sequence_bias": {free[1:4]: -np.inf, (free[0], free[1]): 1.0}},
            {"sequence_bias": {free[:2]: -np.inf}, "begin_suppress_tokens": [5], "logprobs": 2},
        )
    ]
    expected = reference.generate([prompt] * 3, options)
    assert [one.token_ids[index] != free[index] for one, index in zip(expected, (0, 3, 1), strict=True)] == [True] * 3
    assert expected[1].token_ids[:3] == free[:3]
    with open_llm() as llm:
        for ours, theirs in zip(llm.generate([prompt] * 3, options), expected, strict=True):
            compare(ours, theirs)


def test_guessed_tokens(open_llm: Callable[..., genai.LLM], reference: genai.LLM) -> None:
    prompts, options = ["one two three one two three one two"], {"max_tokens": 8, "temperature": 0.5, "seed": 5}
    expected = reference.generate(prompts, **options)
    with open_llm(speculation="lookup") as llm:
        compare(llm.generate(prompts, **options)[0], expected[0])


def test_logits_stay_on_the_device(
    open_llm: Callable[..., genai.LLM], driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tokens come back; and nobody holds logits for longer than the step that gave them."""
    largest, kept = [0], [0]
    download, keep = type(driver).download, LogitsBlock.keep

    def counted(self: Any, array: Any) -> Any:
        largest[0] = max(largest[0], array.nbytes)
        return download(self, array)

    def noted(self: LogitsBlock) -> None:
        kept[0] += 1
        keep(self)

    monkeypatch.setattr(type(driver), "download", counted)
    monkeypatch.setattr(LogitsBlock, "keep", noted)
    with open_llm() as llm:
        prompts, drawn = [PROMPT, "one"], {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 1}
        llm.generate(prompts, max_tokens=3, temperature=0)
        llm.generate(prompts, max_tokens=3, logprobs=3, **drawn)
    assert largest[0] < 1024
    assert kept[0] == 0


# --- logits of a device ----------------------------------------------------------------------------------------------


def block(driver: Any, rows: np.ndarray) -> LogitsBlock:
    return LogitsBlock(LogitsMemory(driver), driver.upload(rows.astype(np.float32)))


def test_rows_are_cut_and_put_together_where_they_lie(driver: Any) -> None:
    rng = np.random.default_rng(0)
    memory = LogitsMemory(driver)
    first, second = rng.normal(size=(2, 3, 7)).astype(np.float32)
    a, b = (DeviceLogits.of(LogitsBlock(memory, driver.upload(rows))) for rows in (first, second))
    both = np.concatenate([a[1:], b])
    assert isinstance(both, DeviceLogits) and both.shape == (5, 7) and len(both) == 5
    assert np.array_equal(np.asarray(both), np.concatenate([first[1:], second]))
    mixed = np.stack([a[2], b[0], a[-1]])
    assert isinstance(mixed, DeviceLogits)
    assert np.array_equal(np.asarray(mixed), np.stack([first[2], second[0], first[2]]))
    assert np.array_equal(np.asarray(a[0]), first[0]) and a[0].shape == (7,)
    assert np.array_equal(np.asarray(a[0][None]), first[:1])
    assert np.array_equal(np.stack([a[0], first[1]]), first[:2])
    which = np.array([[0, 6], [3, 3]])
    assert np.array_equal(both[np.array([[0], [4]]), which], np.asarray(both)[np.array([[0], [4]]), which])
    assert np.array_equal(np.asarray(both[np.array([4, 0])]), np.asarray(both)[[4, 0]])
    assert both[np.empty(0, int), np.empty(0, int)].shape == (0,)
    for wrong in ((np.array([5]), np.array([0])), (np.array([0]), np.array([7]))):
        with pytest.raises(IndexError, match=r"out of range for logits of shape \[5, 7\]"):
            both[wrong]
    with pytest.raises(TypeError, match=r"use np\.asarray"):
        a["x"]
    with pytest.raises(TypeError):
        np.sort(a)


def test_rows_that_are_held_move_before_they_are_written_over(driver: Any) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    memory = driver.upload(rows)
    own = LogitsBlock(LogitsMemory(driver), memory)
    held = DeviceLogits.of(own)[1:]
    own.keep()
    driver.write(memory, np.zeros_like(rows))
    assert np.array_equal(np.asarray(held), rows[1:])


def test_logits_of_another_driver_go_over_the_host(driver: Any) -> None:
    from .test_sampling import Batch, sampler_of

    if not isinstance(driver, HostDriver):
        pytest.skip("there is one GPU")
    rows = np.random.default_rng(1).normal(size=(2, 9)).astype(np.float32)
    batch = Batch(9)
    batch.add(1, TEMPERATURE=0)
    foreign = DeviceLogits.of(block(HostDriver(), rows))
    assert sampler_of(driver, 9).sample(foreign, batch.made())[0].tolist() == [rows[1].argmax()]
    both = np.concatenate([foreign, DeviceLogits.of(block(driver, rows))])
    assert both[np.array([0, 3]), np.array([2, 2])].tolist() == [rows[0, 2], rows[1, 2]]
