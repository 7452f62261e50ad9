"""Large requests do not block the event loop, and lists that would take minutes or fill the memory are refused."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

import genai
from genai.errors import RequestError
from genai.server.agents import VOLATILE_HEADERS, without_header
from genai.server.fields import read_fields
from genai.server.turns import RunningTurn

from .conftest import Running
from .test_odd_values import QUESTION

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LARGE = "x" * 2**17
# The last field is wrong, so that nothing is generated.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION, "user": LARGE, "n": 0},
    COMPLETIONS: {"prompt": "Hi", "user": LARGE, "n": 0},
    "/v1/messages": {"messages": QUESTION, "metadata": {"user_id": LARGE}, "max_tokens": 0, "thinking": {"type": "x"}},
    "/v1/messages/count_tokens": {"messages": [*QUESTION, {"role": "assistant", "content": LARGE}]},
    "/v1/responses": {"input": "Hi", "user": LARGE, "previous_response_id": "x"},
    "/v1/responses/input_tokens": {"input": "Hi", "user": LARGE, "previous_response_id": "x"},
    "/v1/embeddings": {"input": LARGE},
    "/v1/rerank": {"query": LARGE, "documents": []},
    "/tokenize": {"content": LARGE, "model": "x"},
    "/detokenize": {"tokens": [1] * 2**17, "model": "x"},
    "/apply-template": {"messages": [{"role": "user", "content": LARGE}], "chat_template_kwargs": {"no_such": 1}},
}


@pytest.mark.parametrize("path", BODIES)
def test_large_bodies_are_decoded_on_another_thread(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads: list[str] = []
    from genai.server.calls import Call

    decode = Call.json

    def noted(call: Call) -> Any:
        threads.append(threading.current_thread().name)
        return decode(call)

    monkeypatch.setattr(Call, "json", noted)
    answer = running.post(path, BODIES[path])
    assert answer.status_code in (400, 404), answer.text
    assert len(threads) == 1 and threads[0].startswith("genai-long")


def test_large_replies_are_written_on_another_thread(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": QUESTION, "max_tokens": 10, "ignore_eos": True, "logprobs": True, "top_logprobs": 2, "n": 8}
    body |= {"temperature": 0}
    count = RunningTurn.num_logprobs
    counts: list[Any] = []

    def noted(turn: RunningTurn) -> Any:
        counts.append(count.__get__(turn))
        return counts[-1]

    monkeypatch.setattr(RunningTurn, "num_logprobs", property(noted))
    many = running.post(CHAT, body).json()["choices"]
    (one,) = running.post(CHAT, {**body, "n": 1}).json()["choices"]
    assert [{**choice, "index": 0} for choice in many] == [one] * 8
    assert counts == [240, 30]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": QUESTION, "dry_sequence_breakers": ["a"] * 1001}, "dry_sequence_breakers has too many"),
    (COMPLETIONS, {"prompt": [[5]] * 2049}, "prompt has 2,049 prompts"),
    (COMPLETIONS, {"prompt": [[5] * 500] * 500, "echo": True, "logprobs": 20}, "5,418,000 log-probabilities"),
    (CHAT, {"messages": QUESTION, "n": 128, "logprobs": True, "top_logprobs": 20}, "log-probabilities: the limit is"),
    (
        CHAT,
        {"messages": QUESTION, "n": 128, "temperature": 0, "logprobs": True, "top_logprobs": 20},
        "log-probabilities: the limit is",
    ),
]


@pytest.mark.parametrize(("path", "body", "said"), REFUSED)
def test_refused_lists(running: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, said: str) -> None:
    if said.startswith("log-"):
        monkeypatch.setattr("genai.server.turns._MOST_LOGPROBS", 2**21)
    answer = running.post(path, body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_many_volatile_headers() -> None:
    removed: list[str] = []
    assert without_header(f"{VOLATILE_HEADERS[0]}: 1\n" * 100_000 + "Hi", removed) == "Hi"
    assert len(removed) == 100_000


def test_names_of_many_fields() -> None:
    fields = read_fields("chat", {f"{index}": 1 for index in range(500)}, strict=False)
    assert len(fields.ignored) == 500
    with pytest.raises(RequestError, match="501 fields"):
        read_fields("chat", {f"{index}": 1 for index in range(501)}, strict=False)


def test_the_limit_of_tokenizing(running: Running, llm: genai.LLM) -> None:
    """Requests without generation also count towards the limits of the queue."""
    running.server.admission.is_draining = True
    try:
        for path, body in (("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [1]})):
            answer = running.post(path, body)
            assert answer.status_code == 503 and json.loads(answer.text)["error"]["code"] == "stopping"
    finally:
        running.server.admission.is_draining = False
