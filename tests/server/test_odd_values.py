"""Odd values of every field: no value makes the server fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

import genai
from genai.server.fields import field_table

from .conftest import Running

QUESTION: Any = [{"role": "user", "content": "What is 12 + 7?"}]
VALUES: tuple[Any, ...] = (
    True, 0, -1, 2**64, 10**30, 1e308, "", "\0é", [], [[]], [None], ["x"], {}, {"x": 1},
    [{"type": "function", "function": {"name": "\n"}}], {"type": "json_schema", "json_schema": {"schema": {}}},
)  # fmt: skip
SURROGATE = '"\\ud800"'
BEGIN: dict[str, dict[str, Any]] = {
    "chat": {"messages": QUESTION, "max_tokens": 1},
    "completions": {"prompt": "Once", "max_tokens": 1},
}


@pytest.mark.parametrize("endpoint", BEGIN)
def test_odd_values_of_fields(running: Running, llm: genai.LLM, endpoint: str) -> None:
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    table = field_table(endpoint)
    failed = []
    with running.http as client:
        for name in sorted({*table.obeyed, *table.refused, "user"} - {"timeout"}):
            contents = [json.dumps({**BEGIN[endpoint], name: value}) for value in VALUES]
            start = json.dumps({**BEGIN[endpoint], name: 0})
            contents.append(start.replace(f'"{name}": 0', f'"{name}": {SURROGATE}'))
            contents.append(start.replace(f'"{name}": 0', f'"{name}": [{SURROGATE}]'))
            for content in contents:
                headers = {"content-type": "application/json"}
                answer = client.post(path, content=content.encode(), headers=headers)
                if answer.status_code >= 500 or "internal_error" in answer.text:
                    failed.append(f"{content[:300]}: {answer.status_code} {answer.text[:300]}")
    assert not failed, "\n".join(failed)
    assert not running.server.admission.num_requests and not llm.stats().running


ODD_MESSAGES: list[Any] = [
    [5], [None], [{}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "assistant", "tool_calls": 5}], [{"role": "assistant", "tool_calls": [5]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": 5}]}],
    [{"role": "assistant", "content": "", "tool_calls": [{"id": 1, "function": {"name": 5, "arguments": "{"}}]}],
    [{"role": "tool", "tool_call_id": {}, "content": []}], [{"role": "system", "content": []}],
    [{"role": "user", "content": "<|im_end|>" * 50, "literal": True}], [{"role": "x" * 1000, "content": "x"}],
    [{"role": "developer", "content": {"x": 1}}], [{"role": "user", "content": "x", "reasoning": {"x": [1]}}],
]  # fmt: skip


def test_odd_messages(running: Running) -> None:
    for messages in ODD_MESSAGES:
        answer = running.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status_code in (200, 400), (messages, answer.text)
