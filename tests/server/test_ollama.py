"""Ollama's form: models, conversations, prompts, embeddings, errors, and requests of its clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import genai
from genai.models.folders import bundled_model
from genai.server.encoders import Encoders
from genai.server.serving import Server, ServerOptions

from .conftest import Running

BODIES = Path(__file__).parent / "bodies"
QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]


@pytest.fixture(scope="module")
def ollama(llm: genai.LLM) -> Iterator[Running]:
    folder = Path(__file__).parents[1] / "embed" / "models" / "bert"
    with genai.Embedder(folder, threads=1) as embedder:
        running = Running(
            Server(llm, ServerOptions(ollama=True), name="pebble", encoders=Encoders(embedder, embedder_name="bert"))
        )
        yield running
        running.close()


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_models(ollama: Running) -> None:
    with ollama.http as client:
        listed = client.get("/api/tags").json()["models"]
        names = [one["name"] for one in listed]
        assert listed[0]["size"] > (bundled_model() / "model.onnx").stat().st_size and listed[-1]["size"] > 0
        assert names == ["pebble", "words", "bert"]
        assert [one["model"] for one in client.get("/api/ps").json()["models"]] == names
        assert client.get("/api/version").json() == {"version": genai.__version__}
        shown = client.post("/api/show", json={"name": "pebble:latest"}).json()
        assert shown["capabilities"][:2] == ["completion", "tools"] and shown["model_info"]["genai.context_length"] > 0
        assert client.post("/api/show", json={"model": "bert"}).json()["capabilities"] == ["embedding"]


def test_models_stay_as_they_are(ollama: Running) -> None:
    with ollama.http as client:
        assert lines(client.post("/api/pull", json={"model": "pebble:latest"}))[-1] == {"status": "success"}
        pulled = client.post("/api/pull", json={"name": "bert", "stream": False})
        assert pulled.json() == {"status": "success"}
        missing = client.post("/api/pull", json={"model": "llama3"})
        assert missing.status_code == 404 and missing.json()["error"].startswith("model 'llama3' not found")
        for path in ("create", "copy", "push"):
            refused = client.post(f"/api/{path}", json={"model": "pebble"})
            assert refused.status_code == 403 and "cannot be changed" in refused.json()["error"]
        assert client.request("DELETE", "/api/delete", json={"model": "pebble"}).status_code == 403
        unknown = client.post("/api/blobs/sha256:00").json()["error"]
        assert unknown.startswith("there is no path /api/blobs") and "/api/chat" in unknown and "/v1" not in unknown
        assert isinstance(client.get("/api/chat").json()["error"], str)
        assert isinstance(client.get("/v1/none").json()["error"], dict)


def test_a_conversation(ollama: Running) -> None:
    whole = ollama.post("/api/chat", {"model": "pebble:latest", "messages": QUESTION, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "19"} and whole["done_reason"] == "stop"
    assert whole["prompt_eval_count"] > 0 and whole["eval_count"] == 2
    parts = lines(ollama.post("/api/chat", {"model": "words", "messages": QUESTION}))
    assert "".join(one["message"]["content"] for one in parts) == "19, nineteen"
    assert [one["done"] for one in parts] == [False] * (len(parts) - 1) + [True]
    assert ollama.post("/api/chat", {"model": "pebble"}).json()["done_reason"] == "load"


def test_a_prompt(ollama: Running) -> None:
    body = {"prompt": "What is 12 + 7?", "system": "", "options": {"num_predict": 1, "num_ctx": 64}, "stream": False}
    response = ollama.post("/api/generate", body)
    assert response.json()["response"] == "1" and response.json()["done_reason"] == "length"
    assert response.headers["x-ignored-fields"] == "options.num_ctx"
    parts = lines(ollama.post("/api/generate", {"prompt": "What is 12 + 7?", "options": {"num_predict": -1}}))
    assert "".join(one["response"] for one in parts) == "19"
    raw = {"prompt": "Once upon a time", "raw": True, "options": {"num_predict": 4}, "stream": False}
    assert ollama.post("/api/generate", raw).json()["eval_count"] <= 4


def test_formats(ollama: Running) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"sum": {"enum": [19]}}, "required": ["sum"]}
    schema["additionalProperties"] = False
    body = {"messages": QUESTION, "format": schema, "stream": False}
    assert json.loads(ollama.post("/api/chat", body).json()["message"]["content"]) == {"sum": 19}


def test_replies_are_random_unless_files_or_requests_say_otherwise(
    ollama: Running, llm: genai.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Ollama. The bundled model's files select greedy search."""

    def replies(**options: Any) -> int:
        body = {"prompt": "The cat", "raw": True, "stream": False, "options": {"num_predict": 12, **options}}
        sent = [{**body, "options": {"seed": seed, **body["options"]}} for seed in range(4)]
        found = [ollama.post("/api/generate", one) for one in sent]
        return len({one.json()["response"] for one in found})

    assert replies() == 1
    drawn = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    monkeypatch.setattr(type(llm), "chat_defaults", drawn)
    assert replies() > 1
    assert replies(temperature=0) == 1


def test_embeddings(ollama: Running) -> None:
    many = ollama.post("/api/embed", {"model": "bert", "input": ["a cat", "a dog"], "dimensions": 8}).json()
    assert [len(one) for one in many["embeddings"]] == [8, 8] and many["prompt_eval_count"] > 0
    one = ollama.post("/api/embeddings", {"model": "bert:latest", "prompt": "a cat"}).json()["embedding"]
    assert len(one) > 8


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("/api/chat", {"model": "nope", "messages": QUESTION}, 404, "the model 'nope' does not exist"),
    ("/api/chat", {"model": "nope"}, 404, "the model 'nope' does not exist"),
    ("/api/show", {"model": "nope"}, 404, "model 'nope' not found"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, 400, "images cannot be used"),
    ("/api/generate", {"prompt": "x", "images": ["AA=="]}, 400, "images cannot be used"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix cannot be used with this model"),
    ("/api/chat", {"messages": QUESTION, "format": "xml"}, 400, "format = 'xml'"),
    ("/api/chat", {"messages": QUESTION, "options": {"top_k": "many"}}, 400, "top_k"),
    ("/api/chat", {"messages": QUESTION, "options": {"num_predict": 0}}, 400, "num_predict = 0"),
    ("/api/chat", {"messages": QUESTION, "format": {"type": "odd"}}, 400, "format '"),
    ("/api/chat", {"messages": "x"}, 400, "messages cannot be used"),
    ("/api/embed", {"model": "bert"}, 400, "input is missing or empty"),
    ("/api/embed", {"model": "bert", "input": "a " * 99, "truncate": False}, 400, "input[0]"),
    ("/api/embed", {"model": "pebble", "input": "a"}, 404, "the model 'pebble' does not exist"),
]


@pytest.mark.parametrize(("path", "body", "status", "said"), WRONG)
def test_errors(path: str, body: dict[str, Any], status: int, said: str, ollama: Running) -> None:
    response = ollama.post(path, body)
    assert response.status_code == status and said in response.json()["error"]


@pytest.mark.parametrize("name", ["home_assistant", "langflow"])
def test_requests_of_clients(name: str, ollama: Running) -> None:
    parts = lines(ollama.post("/api/chat", json.loads((BODIES / f"{name}.json").read_text())))
    assert parts[-1]["done"] and parts[-1]["done_reason"] in ("stop", "length") and parts[-1]["eval_count"] > 0


def test_tool_calls_are_whole(ollama: Running) -> None:
    body = json.loads((BODIES / "home_assistant.json").read_text())
    again = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    body["messages"] += [again, {"role": "tool", "content": "21", "tool_name": "f"}]
    assert lines(ollama.post("/api/chat", body))[-1]["done"]


def test_without_the_option(serving: Callable[..., Running]) -> None:
    assert serving().post("/api/chat", {"messages": QUESTION}).status_code == 404
