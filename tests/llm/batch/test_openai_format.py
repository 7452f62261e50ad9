"""Request bodies and response lines in the format of OpenAI's API."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from genai.engine.sampling.batch import TokenLogprob
from genai.errors import GenaiError, InputError
from genai.llm.batch.openai_format import CHAT, COMPLETIONS, ResponseWriter, read_body
from genai.llm.completion import ChatReply, Completion, Timings
from genai.llm.mapping import Answer
from genai.text.parsing import Reply, ToolCall

MESSAGES = [{"role": "user", "content": "Hi"}]
FORM = ResponseWriter("pebble", SimpleNamespace(decode=lambda ids: f"<{ids[0]}>"))  # type: ignore[arg-type]


def chat(**body: Any) -> dict[str, Any]:
    return read_body({"method": "POST", "url": CHAT, "body": {"model": "m", "messages": MESSAGES, **body}})[0]


def test_bodies() -> None:
    body = {
        "max_completion_tokens": 5, "temperature": 0.5, "stop": ["x"], "n": 2, "seed": 1, "logit_bias": {"12": -1},
        "user": "u", "metadata": {}, "stream": False, "response_format": {"type": "text"}, "top_p": None,
        "logprobs": True, "top_logprobs": 3, "tools": [{"type": "function"}], "chat_template_kwargs": {"thinking": 1},
        "parallel_tool_calls": False, "adapter": None,
    }  # fmt: skip
    assert chat(**body) == {
        "messages": MESSAGES, "tools": [{"type": "function"}], "template": {"thinking": 1}, "logprobs": 3,
        "max_tokens": 5, "temperature": 0.5, "stop": ["x"], "n": 2, "seed": 1, "logit_bias": {12: -1},
        "parallel_tool_calls": False, "adapter": None,
    }  # fmt: skip
    assert chat(logprobs=True) == {"messages": MESSAGES, "logprobs": 0} and chat(logprobs=False) == {
        "messages": MESSAGES
    }
    item, model = read_body({"url": COMPLETIONS, "body": {"model": "gpt", "prompt": ["a", "b"], "logprobs": 2}})
    assert (item, model) == ({"prompt": ["a", "b"], "logprobs": 2}, "gpt")


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True}, {"response_format": {"type": "xml"}}, {"best_of": 2},
        {"max_tokenz": 3}, {"logprobs": 3}, {"top_logprobs": 2}, {"functions": []}, {"logits_processors": []},
    ],
)  # fmt: skip
def test_what_is_not_obeyed_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(GenaiError, match=next(iter(body))) as caught:
        chat(**body)
    assert caught.value.why


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "GET", "body": {"messages": MESSAGES}},
        {"url": "/v1/embeddings", "body": {"input": "x"}},
        {"url": CHAT, "body": {"prompt": "x"}},
        {"url": COMPLETIONS, "body": {"messages": MESSAGES}},
        {"url": CHAT, "body": "x"},
        {"url": CHAT, "body": None},
    ],
)
def test_what_is_no_request(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        read_body(fields)
    assert caught.value.why and caught.value.fix


def completion(text: str, **more: Any) -> Completion:
    return Completion(text, (5, 6), "stop", 2, 9, 4, Timings(), 3, **more)


def test_answers_of_prompts() -> None:
    entries = (TokenLogprob(5, -0.5, ((5, -0.5), (7, -2.0))), TokenLogprob(6, -math.inf))
    both = tuple(
        completion(f"p{prompt}s{sample}", prompt_index=prompt, sample_index=sample, logprobs=entries)
        for prompt in range(2)
        for sample in range(2)
    )
    line = FORM.line("id1", "mine", Answer(0, None, both), 123)
    assert line.endswith(b"}\n") and line.count(b"\n") == 1
    found = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert (found["id"], found["custom_id"], found["error"]) == ("id1", "mine", None)
    assert found["response"]["status_code"] == 200
    body = found["response"]["body"]
    assert (body["object"], body["model"], body["created"]) == ("text_completion", "pebble", 123)
    assert [(one["index"], one["text"]) for one in body["choices"]] == [
        (0, "p0s0"),
        (1, "p0s1"),
        (2, "p1s0"),
        (3, "p1s1"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 18, "completion_tokens": 8, "total_tokens": 26, "prompt_tokens_details": {"cached_tokens": 8},
    }  # fmt: skip
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["<5>", "<6>"], "token_logprobs": [-0.5, -9999.0], "text_offset": [0, 3],
        "top_logprobs": [{"<5>": -0.5, "<7>": -2.0}, {}],
    }  # fmt: skip


def test_answers_of_conversations() -> None:
    call = ToolCall("add", {"a": 1}, "raw")
    replies = (
        ChatReply(Reply("Hello ü", "thought", ()), completion("x", logprobs=(TokenLogprob(5, -0.5, ((5, -0.5),)),))),
        ChatReply(Reply("", "", (call,)), completion("y")),
    )
    answer = Answer(0, None, tuple(one.completion for one in replies), replies)
    body = json.loads(FORM.line("id", "x", answer, 1))["response"]["body"]
    assert body["object"] == "chat.completion"
    first, second = body["choices"]
    assert first["message"] == {"role": "assistant", "content": "Hello ü", "reasoning_content": "thought"}
    assert first["logprobs"]["content"][0]["top_logprobs"] == [{"token": "<5>", "logprob": -0.5, "bytes": None}]
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "tool_calls")
    (made,) = second["message"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 1}'} and made["id"]
    assert second["message"]["content"] is None


def test_ids_of_tool_calls_differ_and_repeat_in_another_run() -> None:
    call = ToolCall("add", {"a": 1}, "raw")
    replies = (ChatReply(Reply("", "", (call, call)), completion("x")),) * 2
    own = (ChatReply(Reply("", "", (ToolCall("add", {"a": 1}, "raw", "9FbUXjq2k"),)), completion("x")),)

    def ids(line_id: str, replies: tuple[ChatReply, ...]) -> list[str]:
        answer = Answer(0, None, tuple(one.completion for one in replies), replies)
        body = json.loads(FORM.line(line_id, "x", answer, 1))["response"]["body"]
        return [call["id"] for choice in body["choices"] for call in choice["message"]["tool_calls"]]

    found = ids("line1", replies) + ids("line2", replies)
    assert len(set(found)) == len(found) == 8 and all(re.fullmatch("call_[0-9a-f]{24}", one) for one in found)
    assert ids("line1", replies) + ids("line2", replies) == found
    assert ids("line1", own) == ["9FbUXjq2k"]


def test_errors_and_odd_texts() -> None:
    line = json.loads(FORM.line("id", "\ud800 x\n", Answer(0, None, error=InputError("w", "y", "f")), 1))
    assert line["response"] is None and line["custom_id"] == "\ud800 x\n"
    assert line["error"] == {"code": "InputError", "message": "w", "why": "y", "fix": "f"}
