"""/v1/files and /v1/batches: with the SDK, after a restart, cancelled, expired, and with wrong requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import genai
from genai.cli import app
from genai.errors import OptionError, RequestError, StateError
from genai.server import batches as module
from genai.server.calls import Call, JsonReply
from genai.server.encoders import Encoders
from genai.server.forms import read_form
from genai.server.keys import read_keys
from genai.server.serving import Server, ServerOptions

from .conftest import Running
from .test_odd_values import SURROGATE, VALUES

EMBEDDER = Path(__file__).parents[1] / "embed" / "models" / "bert"
CHAT = "/v1/chat/completions"


@pytest.fixture
def serve(llm: genai.LLM, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    known: list[Running] = []

    def begin(**options: Any) -> Running:
        options.setdefault("batch_dir", tmp_path / "batches")
        known.append(Running(Server(llm, ServerOptions(**options), name="pebble")))
        return known[-1]

    yield begin
    for one in known:
        one.close()


def _lines(count: int, url: str = CHAT, **fields: Any) -> bytes:
    body = {"max_tokens": 5, "temperature": 0, **fields}
    requests = [
        {"custom_id": f"q{n}", "method": "POST", "url": url,
         "body": {**body, "messages": [{"role": "user", "content": f"What is {n} + 7?"}]}}
        for n in range(count)
    ]  # fmt: skip
    return "".join(json.dumps(one) + "\n" for one in requests).encode()


def _client(running: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


def _until(client: openai.OpenAI, identifier: str, *states: str) -> Any:
    for _ in range(3000):
        batch = client.batches.retrieve(identifier)
        if batch.status in states:
            return batch
        assert batch.status in module.OPEN, batch
        time.sleep(0.01)
    raise AssertionError(batch)


def _created(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def test_a_batch_with_the_sdk(serve: Callable[..., Running]) -> None:
    running = serve()
    lines = _lines(6, model="words") + json.dumps(
        {"custom_id": "bad", "method": "POST", "url": CHAT, "body": {"messages": [], "model": "gpt-9"}}
    ).encode()  # fmt: skip
    with _client(running) as client:
        batch = _created(client, lines, metadata={"team": "a"})
        assert batch.object == "batch" and batch.status == "validating" and batch.metadata == {"team": "a"}
        done = _until(client, batch.id, "completed")
        assert dict(done.request_counts) == {"total": 7, "completed": 6, "failed": 1}
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
        answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        assert [one["custom_id"] for one in answers] == [f"q{n}" for n in range(6)]
        for one in answers:
            number = one["custom_id"][1:]
            alone = running.chat(f"What is {number} + 7?", max_tokens=5, temperature=0, model="words").json()
            body = one["response"]["body"]
            assert one["error"] is None and one["response"]["status_code"] == 200
            assert body["choices"] == alone["choices"] and body["system_fingerprint"] == alone["system_fingerprint"]
        (failed,) = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
        assert failed["custom_id"] == "bad" and failed["error"]["code"] == "model_not_found"
        assert failed["response"]["status_code"] == 404
        names = {one.id: one.purpose for one in client.files.list()}
        assert names == {done.input_file_id: "batch", done.output_file_id: "batch_output",
                         done.error_file_id: "batch_output"}  # fmt: skip
        assert client.files.retrieve(done.input_file_id).filename == "requests.jsonl"
        assert [one.id for one in client.batches.list()] == [batch.id]
        assert client.files.delete(done.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(done.input_file_id)
    assert running.server.admission.num_requests == 0


def test_a_batch_continues_after_a_restart(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []

    async def handle(call: Call) -> JsonReply:
        text = call.json()["messages"][0]["content"]
        if len(seen) >= 5 and len(seen) < 8:
            await asyncio.sleep(60)
        seen.append(text)
        return JsonReply({"text": text})

    monkeypatch.setitem(module_handlers(), CHAT, handle)
    first = serve()
    with _client(first) as client:
        batch = _created(client, _lines(12))
        while len(seen) < 5:
            time.sleep(0.01)
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
    first.close()
    journal = tmp_path / "batches" / "batches" / f"{batch.id}.jsonl"
    written = journal.read_bytes()
    journal.write_bytes(written + b'{"id": "batch_req_')  # the server was killed while it wrote
    kept = written.count(b"\n")
    assert 1 <= kept <= 5
    seen.extend(["restart"] * 10)
    second = serve()
    with _client(second) as client:
        done = _until(client, batch.id, "completed")
        answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(f"q{n}" for n in range(12))
    assert len(seen) == 5 + 10 + 12 - kept and not journal.exists()


def module_handlers() -> dict[str, Any]:
    from genai.server.wire.batches import HANDLERS

    return HANDLERS


def test_cancelled_and_expired_batches(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 0

    async def handle(call: Call) -> JsonReply:
        nonlocal begun
        begun += 1
        while begun and not released:
            await asyncio.sleep(0.01)
        return JsonReply({})

    released: list[bool] = []
    monkeypatch.setitem(module_handlers(), CHAT, handle)
    running = serve()
    with _client(running) as client:
        batch = _created(client, _lines(40))
        while begun < 16:  # half of the places
            time.sleep(0.01)
        assert client.batches.cancel(batch.id).status == "cancelling"
        released.append(True)
        done = _until(client, batch.id, "cancelled")
        assert begun == 16 and dict(done.request_counts) == {"total": 40, "completed": 16, "failed": 0}
        assert client.files.content(done.output_file_id).text.count("\n") == 16
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        monkeypatch.setattr(running.server.batches, "_set", _expired(running.server.batches))
        late = _until(client, _created(client, _lines(3)).id, "expired")
        errors = [json.loads(line) for line in client.files.content(late.error_file_id).text.splitlines()]
        assert [(one["custom_id"], one["error"]["code"], one["response"]) for one in errors] == [
            (f"q{n}", "batch_expired", None) for n in range(3)
        ]


def _expired(batches: Any) -> Callable[[Any, str], None]:
    set_status = batches._set

    def wrapped(entry: Any, status: str) -> None:
        entry["expires_at"] = 0
        set_status(entry, status)

    return wrapped


def test_a_batch_waits_for_requests_of_people(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_UNTIL_RETRY", 0.02)
    running = serve(max_queue=0)
    admission = running.server.admission
    monkeypatch.setattr(admission, "most_running", 0)  # all places are taken
    with _client(running) as client:
        batch = _created(client, _lines(2))
        refused = admission.refused
        while admission.refused < refused + 3:
            time.sleep(0.01)
        monkeypatch.setattr(admission, "most_running", 4)
        assert _until(client, batch.id, "completed").request_counts.completed == 2


PROBLEMS: list[tuple[bytes, str, str, int | None]] = [
    (b"\n\n", "empty_file", "no requests", None),
    (b"{", "invalid_json_line", "line 1", 1),
    (_lines(1) + _lines(1), "duplicate_custom_id", "'q0' is also the custom_id of line 1", 2),
    (_lines(1, url="/v1/completions"), "invalid_url", CHAT, 1),
    (_lines(1).replace(b"POST", b"GET"), "invalid_method", "POST", 1),
    (b'{"custom_id": 1, "method": "POST", "url": "/v1/chat/completions", "body": {}}', "invalid_custom_id", "text", 1),
    (b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}', "invalid_body", "object", 1),
]


def test_wrong_inputs(serve: Callable[..., Running]) -> None:
    with _client(serve()) as client:
        for content, code, said, line in PROBLEMS:
            failed = _until(client, _created(client, content).id, "failed")
            (error,) = failed.errors.data
            assert (error.code, error.line) == (code, line) and said in error.message
            assert "/" not in error.message or CHAT in error.message


def test_equal_beginnings_are_computed_once(served_folder: Path, tmp_path: Path) -> None:
    """The cache holds four of six beginnings, which take turns in the file. The responses have the file's order."""
    beginnings = [f"Story {n}. " + "Once there was a small boat at sea. " * 12 for n in range(6)]
    lines = [
        {"custom_id": f"q{n}", "method": "POST", "url": CHAT, "body": {"max_tokens": 1, "messages": [
            {"role": "system", "content": beginnings[n % 6]}, {"role": "user", "content": f"What is {n} + 7?"}]}}
        for n in range(24)
    ]  # fmt: skip
    content = "".join(json.dumps(one) + "\n" for one in lines).encode()
    with genai.LLM(served_folder, threads=2, max_sequences=2, cache_bytes=2**20) as small:
        running = Running(Server(small, ServerOptions(batch_dir=tmp_path / "batches"), name="pebble"))
        try:
            with _client(running) as client:
                done = _until(client, _created(client, content).id, "completed")
                answers = client.files.content(done.output_file_id).text.splitlines()
            assert [json.loads(line)["custom_id"] for line in answers] == [f"q{n}" for n in range(24)]
            stats = small.stats()
        finally:
            running.close()
    computed = stats.prompt_tokens - stats.cached_tokens
    assert computed < 0.4 * stats.prompt_tokens  # all, in the order of the file


def test_streams_are_refused(serve: Callable[..., Running]) -> None:
    with _client(serve()) as client:
        done = _until(client, _created(client, _lines(1, stream=True)).id, "completed")
        (error,) = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
        assert "stream cannot be used in a batch" in error["error"]["message"]


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "input_file_id is missing"),
    ({"endpoint": "/v1/images"}, 400, "endpoint = '/v1/images'"),
    ({"completion_window": "soon"}, 400, "completion_window = 'soon'"),
    ({"input_file_id": "../../etc/passwd"}, 404, "there is no file"),
    ({"input_file_id": "file-" + "0" * 24}, 404, "there is no file"),
]


def test_wrong_requests(serve: Callable[..., Running]) -> None:
    running = serve()
    for fields, status, said in WRONG:
        body = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h", **fields}
        answer = running.post("/v1/batches", body if fields else {"endpoint": CHAT})
        assert answer.status_code == status and said in answer.json()["error"]["message"]
    with running.http as client:
        for path in ("/v1/files/..%2f..%2fkeys", "/v1/files/x/content", "/v1/batches/x"):
            assert client.get(path).status_code == 404
        for query, said in (("limit=0", "limit"), ("after=x", "after"), ("order=up", "order")):
            answer = client.get(f"/v1/files?{query}")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == said
        for files, data, said in (
            ({"file": b"x"}, {}, "purpose is missing"),
            ({}, {"purpose": "batch", "a": "b"}, "multipart/form-data"),
            ({"file": b"x"}, {"purpose": "assistants"}, "purpose = 'assistants'"),
            ({"file": b""}, {"purpose": "batch"}, "the file is empty"),
        ):
            answer = client.post("/v1/files", files=files, data=data)  # type: ignore[arg-type]
            assert answer.status_code in (400, 415) and said in answer.json()["error"]["message"]
        named = {
            "file": ("../../evil.jsonl", b"{}"),
            "purpose": (None, b"batch"),
            "expires_after[anchor]": (None, b"x"),
        }
        answer = client.post("/v1/files", files=named)
        assert answer.json()["filename"].endswith("evil.jsonl")
        assert answer.headers["x-ignored-fields"] == "expires_after[anchor]"


def test_odd_values_of_fields(serve: Callable[..., Running]) -> None:
    running = serve()
    begin = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
    with running.http as client:
        for name in (*begin, "metadata", "output_expires_after"):
            for text in (*(json.dumps(value) for value in VALUES), SURROGATE, f"[{SURROGATE}]"):
                content = json.dumps({**begin, name: 0}).replace(f'"{name}": 0', f'"{name}": {text}')
                answer = client.post("/v1/batches", content=content, headers={"content-type": "application/json"})
                assert answer.status_code in (400, 404), (content, answer.text)
        for query in ("limit=%00", "limit=9" * 30, "after=%ff", "&" * 50, "order=%ed%a0%80", "limit=\u0661"):
            assert client.get(f"/v1/batches?{query}").status_code in (200, 400)


def test_forms() -> None:
    kind = 'multipart/form-data; boundary="a b"'
    body = b'--a b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n1\r\n2\r\n\r\n--a b--\r\n'
    part = read_form(kind, body)["file"]
    assert part.data == b"1\r\n2\r\n" and part.filename == "x"
    for wrong in (b"", body[:-6], b"--a b\r\n\r\n--a b--", b"--a b\r\nx: y\r\n\r\n1\r\n--a b--", b"--a b\r\n" * 99):
        with pytest.raises(RequestError):
            read_form(kind, wrong)
    for content_type in ("", "application/json", "multipart/form-data", "multipart/form-data; boundary=\n"):
        with pytest.raises(RequestError):
            read_form(content_type, body)


def test_keys_have_their_own_files(serve: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice {'a' * 20}\nbob {'b' * 20}\n", encoding="utf-8")
    (tmp_path / "fewer").write_text(f"bob {'b' * 20}\n", encoding="utf-8")
    first = serve(keys=read_keys(tmp_path / "keys"), max_per_key=1)
    with _client(first, "a" * 20) as alice, _client(first, "b" * 20) as bob:
        batch = _created(alice, _lines(3))
        for call in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        for read in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                read(batch.input_file_id)
        assert [*bob.files.list()] == [] == [*bob.batches.list()]
        assert _until(alice, batch.id, "completed").request_counts.completed == 3
        queued = first.server.batches
        assert queued is not None
        waiting = queued.entries.get(batch.id)
        assert waiting is not None
        queued.entries.write({**waiting, "status": "in_progress"})  # it had not ended when the server stopped
        owner = waiting["owner"]
    first.close()
    second = serve(keys=read_keys(tmp_path / "fewer"))
    with _client(second, "b" * 20) as bob:
        assert bob.batches.list().data == []  # starts the task
        batches = second.server.batches
        assert batches is not None
        for _ in range(1000):
            if batches.entries.find(batch.id, owner)["status"] == "failed":
                break
            time.sleep(0.01)
        assert batches.entries.find(batch.id, owner)["errors"]["data"][0]["code"] == "key_removed"


def test_the_folder(serve: Callable[..., Running], llm: genai.LLM, tmp_path: Path) -> None:
    running = serve()
    folder = tmp_path / "batches"
    assert folder.stat().st_mode & 0o777 == 0o700
    with _client(running) as client:
        made = client.files.create(file=("a", b"{}"), purpose="batch")
    assert (folder / "files" / f"{made.id}.data").stat().st_mode & 0o077 == 0
    with pytest.raises(StateError, match="used by another server"):
        Server(llm, ServerOptions(batch_dir=folder))
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(OptionError, match="other users can read the folder"):
        ServerOptions(batch_dir=tmp_path / "open")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be used"):
        ServerOptions(batch_dir=tmp_path / "file")


def test_a_server_without_a_folder(serve: Callable[..., Running]) -> None:
    running = serve(batch_dir=None)
    for path in ("/v1/files", "/v1/batches"):
        with running.http as client:
            answer = client.get(path)
        assert answer.status_code == 404 and "--batch-dir" in answer.json()["error"]["message"]


def test_responses_and_completions(serve: Callable[..., Running]) -> None:
    running = serve()
    with _client(running) as client:
        for url, body in (
            ("/v1/responses", {"input": "What is 12 + 7?", "max_output_tokens": 16}),
            ("/v1/completions", {"prompt": "Once", "max_tokens": 3}),
        ):
            line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": {**body, "temperature": 0}})
            done = _until(client, _created(client, line.encode(), url).id, "completed")
            found = json.loads(client.files.content(done.output_file_id).text)["response"]["body"]
            if url == "/v1/responses":
                assert found["object"] == "response" and found["store"] is False
                with pytest.raises(openai.NotFoundError):
                    client.responses.retrieve(found["id"])
            else:
                assert found["object"] == "text_completion"


def test_embeddings(tmp_path: Path) -> None:
    with genai.Embedder(EMBEDDER, threads=2) as embedder:
        running = Running(Server(None, ServerOptions(batch_dir=tmp_path / "b"), encoders=Encoders(embedder)))
        content = b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "A cat."}}\n'
        with _client(running) as client:
            done = _until(client, _created(client, content, "/v1/embeddings").id, "completed")
            found = json.loads(client.files.content(done.output_file_id).text)["response"]["body"]
        assert found["data"][0]["embedding"] == embedder.embed("A cat.").tolist()
        running.close()


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    assert app.run(["serve", "--port", "0", "--batch-dir", str(tmp_path / "open")]) in (1, 2)
    said = capsys.readouterr().err
    assert "--batch-dir" in said and "chmod 700" in said
