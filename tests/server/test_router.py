"""Several models behind one address: names, kinds, states, errors, streams that wait for a load, and memory."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from genai.cli import app
from genai.cli.serve_router import read_duration
from genai.errors import GenaiError, OptionError
from genai.models.folders import bundled_adapter, bundled_model
from genai.server import sse
from genai.server.routed import RoutedModel
from genai.server.router import Router
from genai.server.run import serve_on_thread
from genai.server.serving import ServerOptions

ENCODERS = Path(__file__).parents[1] / "embed" / "models"


def pebble(name: str, **options: Any) -> RoutedModel:
    return RoutedModel(name, bundled_model(), context_size=256, **options)


@pytest.fixture(scope="module")
def router() -> Iterator[tuple[Router, httpx.Client]]:
    """Two models that generate text, of which one fits, a damaged one, and two encoders, of which one is pinned."""
    models = [
        pebble("a", adapters={"words": (bundled_adapter("words"), 1.0)}),
        pebble("b"),
        RoutedModel("gone", Path("/no/such/folder"), context_size=8),
        RoutedModel("bert", ENCODERS / "bert", "embedding", is_pinned=True),
        RoutedModel("scores", ENCODERS / "bert_reranker", "rerank"),
    ]
    memory = int(1.5 * models[0].measure()) + sum(one.measure() for one in models[3:])
    made = Router(models, memory, ServerOptions())
    with serve_on_thread(made) as url, httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        yield made, client
    made.close()


def ask(client: httpx.Client, model: Any = None, number: int = 12, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": f"What is {number} + 7?"}]
    body = {"messages": messages, **fields, **({} if model is None else {"model": model})}
    return client.post("/v1/chat/completions", json=body)


def text(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def test_names_select_models_and_adapters(router: tuple[Router, httpx.Client]) -> None:
    served, client = router
    answers = {name: text(ask(client, name)) for name in (None, "a+words", "words", "b")}
    assert answers == {None: "19", "a+words": "19, nineteen", "words": "19, nineteen", "b": "19"}
    assert served.state_of("a") == "unloaded"  # b needed its memory
    states = {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}
    assert states["b"] == "loaded" and states["a"] == states["words"] == "unloaded" and states["bert"] == "loaded"
    card = client.get("/v1/models/a+words").json()
    assert card["parent"] == "a" and card["max_model_len"] == 256 and "chat" in card["capabilities"]
    assert client.get("/tokenizer_info?model=b").json()["model_max_length"] == 256


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/chat/completions", {"model": "c"}, 404, "the model 'c' does not exist"),
    ("/v1/chat/completions", {"model": "b+words"}, 404, "the model 'b+words' does not exist"),
    ("/v1/chat/completions", {"model": "bert"}, 400, "the model bert computes embeddings"),
    ("/v1/chat/completions", {"model": "gone"}, 503, "the model gone cannot be loaded: gone: there is no such folder"),
    ("/v1/messages", {"model": "gone", "stream": True, "max_tokens": 9}, 503, "the model gone cannot be loaded"),
    ("/v1/embeddings", {"model": "b", "input": "x"}, 400, "the model b generates text"),
    ("/v1/rerank", {"model": "bert", "query": "x", "documents": ["x"]}, 400, "needs one that scores documents: scores"),
    ("/v1/chat/completions", {"model": 3}, 400, "model cannot be used"),
]


@pytest.mark.parametrize(("path", "fields", "status", "said"), WRONG)
def test_wrong_models(
    path: str, fields: dict[str, Any], status: int, said: str, router: tuple[Router, httpx.Client]
) -> None:
    _, client = router
    ask(client, "b")
    response = client.post(path, json={"messages": [{"role": "user", "content": "x"}], **fields})
    assert response.status_code == status and said in response.json()["error"]["message"]
    assert "/no/such" not in response.text
    assert client.post("/v1/chat/completions", content=b"[").status_code == 400


def test_encoders_are_models_too(router: tuple[Router, httpx.Client]) -> None:
    served, client = router
    assert client.post("/v1/embeddings", json={"input": "a cat"}).json()["model"] == "bert"
    found = client.post("/v1/rerank", json={"model": "scores", "query": "x", "documents": ["a", "b"]}).json()
    assert len(found["results"]) == 2 and served.state_of("scores") == "loaded"
    lines = client.get("/metrics").text.splitlines()
    assert 'genai_model_state{model="scores",state="loaded"} 1' in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(names) == len(set(names))


def test_a_stream_waits_for_its_model(router: tuple[Router, httpx.Client], monkeypatch: pytest.MonkeyPatch) -> None:
    served, client = router
    ask(client, "b")
    release, load = threading.Event(), RoutedModel.load

    def slow(self: RoutedModel) -> Any:
        release.wait(30)
        return load(self)

    monkeypatch.setattr(RoutedModel, "load", slow)
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)
    body = {"model": "a", "stream": True, "messages": [{"role": "user", "content": "What is 12 + 7?"}]}
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": ping"
        while client.get("/v1/models/a").json()["state"] != "loading":  # the event loop continues
            assert next(lines) in (": ping", "")
        release.set()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == "19"
    assert not served.residency.residents[0].users


def test_a_stream_that_waits_can_be_read_again(
    router: tuple[Router, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is reloaded while a model is loaded gets its reply."""
    served, client = router
    ask(client, "b")
    release, load = threading.Event(), RoutedModel.load
    monkeypatch.setattr(RoutedModel, "load", lambda self: (release.wait(30), load(self))[1])
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)
    body = {"model": "a", "stream": True, "messages": [{"role": "user", "content": "What is 12 + 7?"}]}
    name = {"x-stream-id": "while-the-model-is-loaded"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=name) as stream:
        assert next(stream.iter_lines()) == ": ping"
    assert client.post("/v1/chat/completions", json=body, headers=name).json()["error"]["code"] == "stream_exists"
    with client.stream("GET", f"/v1/streams/{name['x-stream-id']}") as again:
        lines = again.iter_lines()
        assert next(lines) == ": ping"
        release.set()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == "19"
    assert not served.residency.residents[0].users


def test_a_wait_has_a_time_limit(router: tuple[Router, httpx.Client], monkeypatch: pytest.MonkeyPatch) -> None:
    served, client = router
    ask(client, "b")
    release, load = threading.Event(), RoutedModel.load
    monkeypatch.setattr(RoutedModel, "load", lambda self: (release.wait(30), load(self))[1])
    late = ask(client, "a", timeout=0.01)
    assert late.status_code == 504 and "while its model was loaded" in late.json()["error"]["message"]
    release.set()
    assert text(ask(client, "a")) == "19" and not served.admission.num_requests


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("signals", [1, 2])
def test_requests_that_wait_end_when_the_server_stops(
    router: tuple[Router, httpx.Client], monkeypatch: pytest.MonkeyPatch, signals: int, is_stream: bool
) -> None:
    served, client = router
    ask(client, "b")
    release, load = threading.Event(), RoutedModel.load
    monkeypatch.setattr(RoutedModel, "load", lambda self: (release.wait(30), load(self))[1])
    loop = served.residency._loop
    assert loop is not None
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, client, "a", stream=is_stream)
        while served.state_of("a") != "loading":
            time.sleep(0.001)
        (served.drain if signals == 1 else lambda: loop.call_soon_threadsafe(served.stop_running))()
        reply = waiting.result()
    assert (
        reply.status_code == 503 and reply.json()["error"]["code"] == "stopping" and served.state_of("a") == "loading"
    )
    served.admission.is_draining = served._is_stopped = False
    release.set()
    assert text(ask(client, "a")) == "19" and not served.admission.num_requests


def test_three_models_in_the_memory_of_one_and_a_half() -> None:
    models = [
        pebble("a"),
        pebble("b"),
        pebble("c"),
        RoutedModel("bert", ENCODERS / "bert", "embedding", is_pinned=True),
    ]
    memory, choose = int(1.5 * models[0].measure()) + models[3].measure(), random.Random(1).choice
    served = Router(models, memory, ServerOptions())
    turns = [(choose("abc"), number % 20 + 1) for number in range(200)]
    with serve_on_thread(served) as url, httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        limits = httpx.Limits(max_connections=200)
        with ThreadPoolExecutor(200) as threads, httpx.Client(base_url=url, timeout=600, limits=limits) as many:
            found = [*threads.map(lambda turn: text(ask(many, *turn)), turns)]
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200
    assert found == [str(number + 7) for _, number in turns]
    loads = {one.name: one.loads for one in served.residency.residents}
    assert loads.pop("bert") == 1 and sum(loads.values()) <= 2 * 3
    served.close()


MODELS = """
[models.calc]
model = "pebble"
pinned = true
keep = "10m"
ctx-size = 256
cache = "2MB"
prefix-cache = "prefixes"
lora = { words = "ADAPTER" }
[models.bert]
model = "BERT"
"""
BAD_FILES = [
    ("x = [", "is not a TOML file"),
    ("", "has no models"),
    ("[models.a]\npined = true", "[models.a]: unknown key 'pined'"),
    ("[models.a]\nctx-size = true", "ctx-size = True"),
    ("[models.a]\nmodel = 'pebble'\nkeep = 'soon'", "keep is 'soon'"),
    ("[models.a]\nmodel = 'pebble'\ncache = 'big'", "[models.a]: target size 'big'"),
    ("[models.a]\nmodel = 'no-such-model-anywhere'", "no-such-model-anywhere"),
    ("[models.a]\nmodel = 'pebble'\nlora = {x = 'no/such'}", "no/such"),
    ("[models.a]\nmodel = 'pebble'\nlora = {x = 3}", "lora.x = 3"),
    (f"[models.a]\nmodel = '{ENCODERS / 'bert'}'\nprefix-cache = 'x'", "[models.a]: prefix-cache is set"),
    ("[models.a]\nmodel = 'pebble'\nctx-size = 0", "[models.a]: ctx-size = 0"),
    ("[models.a]\nmodel = 'pebble'\nctx-size = 1025", "the context length of the model is 1024 tokens"),
    ("[models.a]\nmodel = 'pebble'\nmax-sequences = -1", "[models.a]: max-sequences = -1"),
    ("[models.'a+b']\nmodel = 'pebble'", "a plus sign separates"),
]


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> list[Router]:
    """The routers that the command would run."""
    found: list[Router] = []
    monkeypatch.setattr("genai.server.run.serve", lambda server, *_: found.append(server))
    return found


def test_the_command_reads_a_file(routers: list[Router], tmp_path: Path) -> None:
    content = MODELS.replace("ADAPTER", str(bundled_adapter("words"))).replace("BERT", str(ENCODERS / "bert"))
    (tmp_path / "models.toml").write_text(content)
    assert app.run(["serve", "--port", "0", "--models", str(tmp_path / "models.toml"), "--memory", "1GB"]) == 0
    calc, bert = routers[0].models.values()
    assert (calc.name, calc.is_pinned, calc.keep, calc.limit, calc.cache_bytes) == ("calc", True, 600, 256, 2_000_000)
    assert calc.options["prefix_cache_dir"] == tmp_path / "prefixes"
    assert [*calc.adapters] == ["words"] and bert.kind == "embedding" and routers[0].residency.memory == 10**9


def test_the_command_pins_models_of_a_file(routers: list[Router], tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text("[models.pebble]\npinned = false\n")
    assert app.run(["serve", "--port", "0", "--models", str(tmp_path / "models.toml"), "--pin", "pebble"]) == 0
    assert routers[0].models["pebble"].is_pinned


def test_the_command_lists_models(routers: list[Router]) -> None:
    bert = str(ENCODERS / "bert")
    assert app.run(["serve", "--port", "0", "pebble+words", bert, "--keep", "90s", "--pin", "bert", "-c", "64"]) == 0
    text_model, encoder = routers[0].models.values()
    assert [*text_model.adapters] == ["words"] and text_model.limit == 64 and text_model.keep == 90
    assert encoder.is_pinned and not text_model.is_pinned and routers[0].title == "2 models (pebble, bert)"


@pytest.mark.parametrize(("content", "said"), BAD_FILES)
def test_wrong_files(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models.toml").write_text(content)
    assert app.run(["serve", "--port", "0", "--models", str(tmp_path / "models.toml")]) in (1, 2)
    assert said in capsys.readouterr().err


BAD_OPTIONS = [
    (["pebble", "pebble"], "two models have the name 'pebble'"),
    (["--keep", "soon"], "--keep is 'soon'"),
    (["--memory", "much"], "--memory is 'much'"),
    (["--keep", "1m", "--pin", "other"], "--pin other: there is no such model"),
    (["--keep", "1m", "--name", "x"], "--name x cannot be used with several models"),
    (["--keep", "1m", "--lora", "x=y"], "--lora cannot be used with several models"),
    (["--keep", "1m", "--draft", "x"], "serve the model that needs --draft alone"),
    (["--keep", "1m", "--prefix-cache", "x"], "use prefix-cache in the file of --models"),
    (["--keep", "1m", "--adapter-dir", "."], "--adapter-dir cannot be used with several models"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD_OPTIONS)
def test_wrong_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["serve", "--port", "0", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "make",
    [
        lambda: Router([], 1),
        lambda: Router([pebble("a"), pebble("a")], 1),
        lambda: pebble("a", keep=0),
        lambda: RoutedModel("a", ENCODERS / "bert", "embedding", context_size=4),
        lambda: RoutedModel("a", Path("/no/such")),
        lambda: read_duration("0s", "keep"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any]) -> None:
    with pytest.raises(GenaiError):
        make()


def test_durations() -> None:
    assert [read_duration(one, "keep") for one in ("90", "1.5h", "2d")] == [90, 5400, 172800]
    with pytest.raises(OptionError, match="keep is '-1'"):
        read_duration("-1", "keep")
