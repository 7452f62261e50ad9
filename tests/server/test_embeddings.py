"""/v1/embeddings and /v1/rerank: the models' vectors and scores, the clients' forms, and errors."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import genai
from genai.cli import app
from genai.server.encoders import Encoders, parts
from genai.server.fields import field_table
from genai.server.keys import read_keys
from genai.server.serving import Server, ServerOptions

from .conftest import Running
from .test_command import Process, start  # noqa: F401
from .test_odd_values import SURROGATE, VALUES

MODELS = Path(__file__).parents[1] / "embed" / "models"
TEXTS = ["The cat sits on a mat.", "A dog runs in the park.", "Numbers: 1 2 3"]


@pytest.fixture(scope="module")
def embedder() -> Iterator[genai.Embedder]:
    with genai.Embedder(MODELS / "bert", threads=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def reranker() -> Iterator[genai.Reranker]:
    with genai.Reranker(MODELS / "bert_reranker", threads=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def encoding(embedder: genai.Embedder, reranker: genai.Reranker) -> Iterator[Callable[..., Running]]:
    known: list[Running] = []

    def begin(llm: genai.LLM | None = None, **options: Any) -> Running:
        known.append(Running(Server(llm, ServerOptions(**options), encoders=Encoders(embedder, reranker))))
        return known[-1]

    yield begin
    for one in known:
        one.close()


@pytest.fixture(scope="module")
def running(encoding: Callable[..., Running], llm: genai.LLM) -> Running:
    return encoding(llm)


def _vectors(answer: Any) -> np.ndarray[Any, Any]:
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]], np.float32)


def test_vectors_equal_those_of_the_embedder(running: Running, embedder: genai.Embedder) -> None:
    expected = embedder.embed(TEXTS)
    answer = running.post("/v1/embeddings", {"input": TEXTS, "model": "bert"})
    assert (_vectors(answer) == expected).all()
    body = answer.json()
    assert body["object"] == "list" and body["model"] == "bert" and [one["index"] for one in body["data"]] == [0, 1, 2]
    tokens = sum(embedder.count_tokens(text) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    coded = running.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json()
    read = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    assert (read == expected[0]).all()


def test_token_ids(running: Running, embedder: genai.Embedder) -> None:
    ids = [[2, 5, 6, 3], [2, 7, 3]]
    expected = embedder.embed(ids)
    assert (_vectors(running.post("/v1/embeddings", {"input": ids})) == expected).all()
    assert (_vectors(running.post("/v1/embeddings", {"input": ids[0]})) == expected[:1]).all()


def test_dimensions_and_prompts(running: Running, embedder: genai.Embedder) -> None:
    found = _vectors(running.post("/v1/embeddings", {"input": TEXTS, "dimensions": 8}))
    assert (found == embedder.embed(TEXTS, dimensions=8)).all()
    assert np.allclose(np.linalg.norm(found, axis=1), 1) == np.allclose(
        np.linalg.norm(embedder.embed(TEXTS), axis=1), 1
    )
    for fields, options in (
        ({"prompt": "query: "}, {"prompt": "query: "}),
        ({"prompt_name": "query"}, {"prompt_name": "query"}),
        ({"input_type": "search_document"}, {"prompt_name": "document"}),
        ({"normalize": True}, {"normalize": True}),
    ):
        found = _vectors(running.post("/v1/embeddings", {"input": TEXTS[:1], **fields}))
        assert (found == embedder.embed(TEXTS[:1], **options)).all()  # type: ignore[arg-type]


def test_an_input_type_without_a_prompt_is_named(
    running: Running, embedder: genai.Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(embedder), "prompts", {})
    answer = running.post("/v1/embeddings", {"input": "a", "input_type": "query", "user": "me"})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "user, input_type"


WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "input is missing", "input"),
    ({"input": []}, "input is empty", "input"),
    ({"input": [1, "a"]}, "input mixes token ids and texts", "input"),
    ({"input": [True]}, "input[0] cannot be used", "input"),
    ({"input": {"a": 1}}, "input cannot be used", "input"),
    ({"input": [[]]}, "input[0] has no tokens", "input"),
    ({"input": ["a", [10**6]]}, "input[1] has the token id 1000000", "input"),
    ({"input": [[-1]]}, "input[0] has the token id -1", "input"),
    ({"input": ["a"] * 2049}, "input has 2,049 texts", "input"),
    ({"input": "a", "dimensions": 0}, "dimensions = 0", "dimensions"),
    ({"input": "a", "dimensions": 10**6}, "dimensions = 1000000", "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format cannot be used", "encoding_format"),
    ({"input": "a", "input_type": "image"}, "input_type = 'image'", "input_type"),
    ({"input": "a", "prompt_name": "none"}, "none", None),
    ({"input": "a", "prompt": "x", "prompt_name": "query"}, "prompt_name and prompt contradict", "prompt_name"),
    ({"input": "a", "dimension": 8}, "did you mean 'dimensions'", "dimension"),
    ({"input": "a", "output_dtype": "int8"}, "output_dtype cannot be used", "output_dtype"),
]


@pytest.mark.parametrize(("body", "said", "param"), WRONG)
def test_wrong_requests(running: Running, body: dict[str, Any], said: str, param: str | None) -> None:
    answer = running.post("/v1/embeddings", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"]
    assert param is None or error["param"] == param


def test_long_texts_are_refused_unless_truncated(running: Running, embedder: genai.Embedder) -> None:
    long = "word " * 3000
    answer = running.post("/v1/embeddings", {"input": ["a"] * 300 + [long]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == "input"
    assert error["message"].startswith(f"This model's maximum context length is {embedder.max_length} tokens.")
    assert "input[300] has" in error["message"] and "set truncate to true" in error["message"]
    answer = running.post("/v1/embeddings", {"input": long, "truncate": True})
    assert (_vectors(answer)[0] == embedder.embed(long)).all()


def test_the_sdk(running: Running, embedder: genai.Embedder) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(input=TEXTS, model="bert")  # asks for base64
        assert (np.array([one.embedding for one in found.data], np.float32) == embedder.embed(TEXTS)).all()
        with pytest.raises(openai.NotFoundError) as caught:
            client.embeddings.create(input="a", model="text-embedding-3-small")
        assert caught.value.code == "model_not_found" and "bert" in str(caught.value)
        names = {one.id: one.model_dump()["capabilities"] for one in client.models.list()}
        assert names["bert"] == ["embedding"] and names["bert_reranker"] == ["rerank"] and "pebble-tools" in names
        assert client.models.retrieve("bert").id == "bert"


def test_many_callers_share_steps(running: Running, embedder: genai.Embedder) -> None:
    texts = [f"{text} {index}" for index in range(40) for text in TEXTS]
    expected = embedder.embed(texts)
    sizes: list[int] = []
    run = embedder._encoder.run

    def noted(sequences: Any) -> Any:
        sizes.append(len(sequences))
        return run(sequences)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(32) as pool:
        patch.setattr(embedder._encoder, "run", noted)
        found = list(pool.map(lambda text: _vectors(running.post("/v1/embeddings", {"input": text}))[0], texts))
    assert (np.stack(found) == expected).all() and sum(sizes) == len(texts) > len(sizes)


def test_a_client_that_leaves(
    encoding: Callable[..., Running], embedder: genai.Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, begun, go = encoding(), threading.Event(), threading.Event()
    calls: list[int] = []
    embed = embedder.embed_counted

    def slow(texts: Any, **options: Any) -> Any:
        calls.append(len(texts))
        begun.set()
        assert go.wait(30)
        return embed(texts, **options)

    monkeypatch.setattr(embedder, "embed_counted", slow)
    with pytest.raises(openai.APITimeoutError):
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=0.5) as client:
            client.embeddings.create(input=["a"] * 600, model="bert")
    assert begun.is_set()
    for _ in range(1000):
        if not running.server.admission.num_requests:
            break
        threading.Event().wait(0.01)
    assert running.server.admission.num_requests == 0
    go.set()
    running.close()
    running.server.encoders._threads.shutdown(wait=True)
    assert calls == [256]  # the other parts are not computed


def test_limits(encoding: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice {'a' * 20}\n", encoding="utf-8")
    running = encoding(keys=read_keys(tmp_path / "keys"), max_per_key=1, timeout=0.2)
    assert running.post("/v1/embeddings", {"input": "a"}).status_code == 401
    key = {"authorization": f"Bearer {'a' * 20}"}
    with running.server.admission.seat("alice"):
        assert running.post("/v1/embeddings", {"input": "a"}, **key).status_code == 429
    go = threading.Event()
    embedder = running.server.encoders.embedder(None)[1]
    monkeypatch.setattr(embedder, "embed_counted", lambda *_, **__: go.wait(30))
    answer = running.post("/v1/embeddings", {"input": "a"}, **key)
    go.set()
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
    running.server.admission.is_draining = True
    assert running.post("/v1/embeddings", {"input": "a"}, **key).status_code == 503


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(running: Running, reranker: genai.Reranker, path: str) -> None:
    body = {"query": "Where is the cat?", "documents": TEXTS, "model": "bert_reranker"}
    expected = reranker.rank("Where is the cat?", TEXTS)
    answer = running.post(path, body).json()
    assert answer["results"] == [{"index": one.index, "relevance_score": one.score} for one in expected]
    assert answer["model"] == "bert_reranker" and answer["usage"]["total_tokens"] > 0
    body |= {"documents": [{"text": text} for text in TEXTS], "top_n": 1, "return_documents": True}
    best = expected[0]
    assert running.post(path, body).json()["results"] == [
        {"index": best.index, "relevance_score": best.score, "document": {"text": best.document}}
    ]


def test_many_documents_equal_few(running: Running, reranker: genai.Reranker) -> None:
    documents = [f"{TEXTS[index % 3]} {index}" for index in range(600)]
    answer = running.post("/v1/rerank", {"query": "a cat", "documents": documents}).json()["results"]
    expected = reranker.rank("a cat", documents)
    assert [(one["index"], one["relevance_score"]) for one in answer] == [(one.index, one.score) for one in expected]


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"documents": []}, "documents has 0 documents", "documents"),
        ({"documents": ["a", {"title": "b"}]}, "documents[1] has no text", "documents"),
        ({"top_n": 0}, "top_n = 0", "top_n"),
        ({"query": 1}, "query cannot be used", "query"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc cannot be used", "max_tokens_per_doc"),
        ({"documents": ["a", "word " * 3000]}, "documents[1] has", "documents"),
    ],
)
def test_wrong_rerank_requests(running: Running, fields: dict[str, Any], said: str, param: str) -> None:
    answer = running.post("/v1/rerank", {"query": "a", "documents": TEXTS, **fields})
    body = answer.json()
    assert answer.status_code == 400 and said in body["error"]["message"] and body["error"]["param"] == param
    assert body["message"] == body["error"]["message"]  # where clients of Cohere's API read it


def test_a_server_without_encoders_or_without_a_chat_model(encoding: Callable[..., Running], llm: genai.LLM) -> None:
    alone = encoding()
    answer = alone.chat()
    assert answer.status_code == 404 and "no model that generates text" in answer.json()["error"]["message"]
    with alone.http as client:
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["bert", "bert_reranker"]
        assert 'genai_encoder_requests_waiting{model="bert"} 0' in client.get("/metrics").text
    plain = Running(Server(llm, ServerOptions()))
    for path, option in (("/v1/embeddings", "--embedder"), ("/v1/rerank", "--reranker")):
        body = {"input": "a"} if option == "--embedder" else {"query": "a", "documents": ["a"]}
        answer = plain.post(path, body)
        assert answer.status_code == 404 and option in answer.json()["error"]["message"]
    plain.close()


ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddings": ("/v1/embeddings", {"input": "a"}),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["b"]}),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_odd_values_of_fields(running: Running, endpoint: str) -> None:
    path, begin = ENDPOINTS[endpoint]
    table = field_table(endpoint)
    with running.http as client:
        for name in sorted({*table.obeyed, *table.refused, "user"}):
            texts = [json.dumps(value) for value in VALUES]
            for text in (
                *texts,
                SURROGATE,
                f"[{SURROGATE}]",
                "[1e400]",
                "[[99999999999999999999]]",
                "[9223372036854775807]",
            ):
                content = json.dumps({**begin, name: 0}).replace(f'"{name}": 0', f'"{name}": {text}')
                answer = client.post(path, content=content.encode(), headers={"content-type": "application/json"})
                assert answer.status_code in (200, 400, 404), (content, answer.text)


def test_parts() -> None:
    assert list(parts([])) == [] and list(parts(["a", "b"])) == [(0, ["a", "b"])]
    assert [(begin, len(part)) for begin, part in parts(["a" * 20_000] * 5)] == [(0, 2), (2, 2), (4, 1)]
    assert [begin for begin, _ in parts([[1] * 5000] * 4)] == [0, 2]


def test_the_command_with_an_encoder(start: Callable[..., Process]) -> None:  # noqa: F811
    served = start(str(MODELS / "bert"), "--reranker", str(MODELS / "bert_reranker"))
    assert "genai serve: bert at" in served.line
    answer = served.client.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 200 and str(MODELS) not in answer.text
    assert served.client.post("/rerank", json={"query": "a", "documents": ["b"]}).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([str(MODELS / "bert"), "--embedder", str(MODELS / "bert")], "both are models for the same endpoint"),
        ([str(MODELS / "bert"), "--ctx-size", "100"], "--ctx-size cannot be used"),
        ([str(MODELS / "bert"), "--max-sequences", "8"], "--max-sequences cannot be used"),
        ([str(MODELS / "bert"), "--keep-headers"], "--keep-headers cannot be used"),
        (["--embedder", "missing/model/folder"], "missing/model/folder"),
        (["--embedder", str(MODELS / "bert_reranker")], "use genai.Reranker"),
    ],
)
def test_errors_of_the_command(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["serve", "--port", "0", *arguments]) in (1, 2)
    assert said in capsys.readouterr().err
