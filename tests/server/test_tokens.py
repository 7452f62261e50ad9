"""/tokenize, /detokenize, /tokenizer_info and /apply-template."""

from __future__ import annotations

from typing import Any

import pytest

import genai

from .conftest import Running

QUESTION: Any = [{"role": "user", "content": "What is 12 + 7?"}]


def test_tokens_of_a_text(running: Running, llm: genai.LLM) -> None:
    text = "What is 12 + 7? é"
    answer = running.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == llm.encode(text) and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024 and len(answer["token_strs"]) == answer["count"]
    assert running.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text, "content": text}
    pieces = running.post("/tokenize", {"content": "12 + 7", "with_pieces": True}).json()["tokens"]
    assert "".join(one["piece"] for one in pieces) == "12 + 7"


def test_tokens_of_a_conversation(running: Running, llm: genai.LLM) -> None:
    prompt = llm.render(QUESTION)
    assert running.post("/apply-template", {"messages": QUESTION}).json() == {"prompt": prompt}
    assert running.post("/tokenize", {"messages": QUESTION}).json()["tokens"] == llm.encode(prompt)
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert "add" in running.post("/apply-template", {"messages": QUESTION, "tools": tools}).json()["prompt"]


def test_facts_about_the_tokenizer(running: Running, llm: genai.LLM) -> None:
    with running.http as client:
        info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["vocab_size"] == llm.tokenizer.vocab_size
    assert info["chat_template"] == llm.tokenizer.template_text() and info["model_max_length"] == 1024


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "x", "model": "other"}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [10**12]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/apply-template", {"messages": []}),
        ("/apply-template", {"messages": QUESTION, "chat_template_kwargs": {"unknown": 1}}),
    ],
)
def test_wrong_requests(running: Running, path: str, body: dict[str, Any]) -> None:
    answer = running.post(path, body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["message"]
