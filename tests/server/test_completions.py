"""Completions of raw texts and token ids, with the log-probabilities that evaluation tools read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import genai

from .conftest import Running

TEXT = "Once upon a time"
GAP = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_completion_is_that_of_the_model(client: openai.OpenAI, llm: genai.LLM) -> None:
    own = llm.generate(TEXT, max_tokens=16, ignore_eos=True)[0]
    options: Any = {"model": "pebble", "seed": 1, "extra_body": {"ignore_eos": True}}
    made = client.completions.create(prompt=TEXT, **options)
    assert made.choices[0].text == own.text and made.choices[0].finish_reason == own.finish_reason == "length"
    assert made.usage is not None and made.usage.completion_tokens == 16
    assert client.completions.create(prompt=llm.encode(TEXT), **options).choices[0].text == own.text
    parts = list(client.completions.create(prompt=TEXT, stream=True, **options))
    assert "".join(part.choices[0].text for part in parts) == own.text
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == ["length"]


def test_several_prompts_and_samples(client: openai.OpenAI) -> None:
    prompts = [TEXT, "The cat", "A dog"]
    options: Any = {"model": "pebble", "n": 2, "temperature": 1, "seed": 4, "max_tokens": 6, "echo": True}
    made = client.completions.create(prompt=prompts, **options)
    assert [choice.index for choice in made.choices] == [*range(6)]
    for index, prompt in enumerate(prompts):
        alone = client.completions.create(prompt=prompt, **options)
        pair = made.choices[2 * index : 2 * index + 2]
        assert [choice.text for choice in alone.choices] == [choice.text for choice in pair]
        assert alone.choices[0].text.startswith(prompt)
    texts = [""] * 6
    for chunk in client.completions.create(prompt=prompts, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in made.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities(running: Running, llm: genai.LLM, stream: bool) -> None:
    """lm-eval sends token ids with echo, logprobs = 1 and max_tokens = 1, and reads these lists."""
    ids = llm.encode(f"{TEXT} there was a cat. " * 4)
    own = llm.generate(ids, max_tokens=1, logprobs=1, prompt_logprobs=1)[0]
    assert own.prompt_logprobs is not None and own.logprobs is not None
    body = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream, "seed": 1}
    answer = running.post("/v1/completions", body)
    assert not stream or answer.text.endswith("data: [DONE]\n\n")
    choice = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))["choices"][0]
    lists = choice["logprobs"]
    scored = [one.logprob for one in own.prompt_logprobs[1:] if one is not None]
    assert lists["token_logprobs"] == [None, *scored, own.logprobs[0].logprob]
    assert "".join(lists["tokens"]) == choice["text"] and lists["top_logprobs"][0] is None
    assert all(len(top) == 1 for top in lists["top_logprobs"][1:])
    offsets = [sum(map(len, lists["tokens"][:index])) for index in range(len(lists["tokens"]))]
    assert lists["text_offset"] == offsets and len(lists["tokens"]) == len(ids) + 1


def test_only_the_prompt(running: Running, llm: genai.LLM) -> None:
    body = {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = running.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == TEXT and len(choice["logprobs"]["tokens"]) == len(llm.encode(TEXT))


def test_streamed_log_probabilities(running: Running) -> None:
    body = {"prompt": TEXT, "logprobs": 2, "max_tokens": 8, "seed": 1}
    whole = running.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    lines = running.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
    parts = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines if line.startswith("data: {")]
    for name, values in whole.items():
        assert [value for part in parts if part for value in part[name]] == values


def test_text_in_a_gap(running: Running, llm: genai.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.server.gaps.FORMS", (("<no>", "<|im_end|>", "<no>"), GAP))
    own = llm.generate(f"{GAP[0]}{TEXT}{GAP[1]}The end.{GAP[2]}", max_tokens=8)[0]
    choice = running.post("/v1/completions", {"prompt": TEXT, "suffix": "The end.", "max_tokens": 8}).json()["choices"][
        0
    ]
    assert choice["text"] == own.text
    empty = running.post("/v1/completions", {"prompt": TEXT, "suffix": "", "echo": True, "max_tokens": 1})
    assert empty.json()["choices"][0]["text"].startswith(TEXT)


def test_adapters_and_schemas(running: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    body = {"prompt": TEXT, "model": "words", "response_format": form, "max_tokens": 9}
    assert json.loads(running.post("/v1/completions", body).json()["choices"][0]["text"]) in ("yes", "no")


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "prompt", "missing"),
    ({"prompt": 5}, "prompt", "str"),
    ({"prompt": []}, "prompt", "1 to 2,048"),
    ({"prompt": ["a"] * 3000}, "prompt", "1 to 2,048"),
    ({"prompt": ["a", 5]}, "prompt", "neither"),
    ({"prompt": [[1, True]]}, "prompt", "neither"),
    ({"prompt": ""}, None, "no tokens"),
    ({"prompt": [[10**9]]}, None, "1000000000"),
    ({"prompt": TEXT, "logprobs": 30}, "logprobs", "0 to 20"),
    ({"prompt": TEXT, "suffix": "end"}, "suffix", "no tokens for the gap"),
    ({"prompt": TEXT, "suffix": "end", "echo": True}, "suffix", "without echo"),
    ({"prompt": TEXT, "suffix": "end", "literal": True}, "suffix", "without echo and literal"),
    ({"prompt": [5], "suffix": "end"}, "suffix", "as a text"),
    ({"prompt": TEXT, "best_of": 3}, "best_of", "samples"),
    ({"prompt": "word " * 3000}, "prompt", "maximum context length"),
]


@pytest.mark.parametrize(("body", "param", "said"), BAD)
def test_wrong_requests(running: Running, body: dict[str, Any], param: str | None, said: str) -> None:
    answer = running.post("/v1/completions", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and said in error["message"], error
