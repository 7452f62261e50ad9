"""Fixtures: servers over the bundled model with a template for tools and reasoning, and clients."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import genai
from genai.models.folders import bundled_adapter
from genai.server.app import build_app
from genai.server.serving import Server, ServerOptions

# The bundled model's form of conversations, with tools as in templates of Qwen 2.5, or with reasoning as in Qwen 3.
MESSAGES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
TOOLS = "{# <tool_call> #}" + MESSAGES + "{{ '' }}"  # a line break at the end would be removed
THINKING = "{# <tool_call> <think> #}" + MESSAGES + "{% if enable_thinking %}<think>\n{% endif %}"


def _folder(folder: Path, bundled: Path, template: str) -> Path:
    shutil.copytree(bundled, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Path:
    """A folder with the bundled model and a template for tools."""
    return _folder(tmp_path_factory.mktemp("served") / "pebble-tools", bundled_folder, TOOLS)


@pytest.fixture(scope="session")
def llm(served_folder: Path) -> Iterator[genai.LLM]:
    """A model with an adapter."""
    with pytest.MonkeyPatch.context() as patch:
        # The model has not learned when to end a list of calls.
        patch.setattr("genai.text.parsing.calls.MOST_CALLS", 2)
        with genai.LLM(served_folder, threads=2, lora=True) as loaded:
            loaded.load_adapter(bundled_adapter("words"), "words")
            yield loaded


@pytest.fixture(scope="module")
def thinking_llm(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Iterator[genai.LLM]:
    """A model whose template reads enable_thinking."""
    folder = _folder(tmp_path_factory.mktemp("served") / "pebble-thinking", bundled_folder, THINKING)
    with genai.LLM(folder, threads=2) as loaded:
        yield loaded


class Running:
    """A server on a thread, at a free port."""

    def __init__(self, server: Server, app: Any = None) -> None:
        self.server = server
        self._http = uvicorn.Server(
            uvicorn.Config(
                app or build_app(server), port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1
            )
        )
        self._http.capture_signals = _no_signals  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait(30)
        self.url = f"http://127.0.0.1:{self._http.servers[0].sockets[0].getsockname()[1]}"

    def _run(self) -> None:
        async def live() -> None:
            serving = asyncio.create_task(self._http.serve())
            while not self._http.started and not serving.done():
                await asyncio.sleep(0.01)
            self._ready.set()
            await serving

        asyncio.run(live())

    def close(self) -> None:
        self._http.should_exit = True
        self._thread.join()
        self.server.close()

    @property
    def http(self) -> httpx.Client:
        """A new client; close it."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Post JSON with a new connection."""
        with self.http as client:
            return client.post(path, json=body, headers=headers)

    def chat(self, text: str = "What is 12 + 7?", **fields: Any) -> httpx.Response:
        """Ask a question."""
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.post("/v1/chat/completions", body)


@contextmanager
def _no_signals() -> Iterator[None]:
    yield


@pytest.fixture(scope="module")
def serving(llm: genai.LLM) -> Iterator[Callable[..., Running]]:
    """serving(**options): a running server with these options; it is stopped after the module's tests."""
    known: list[Running] = []

    def start(model: genai.LLM | None = None, **options: Any) -> Running:
        known.append(Running(Server(model or llm, ServerOptions(**options), name="pebble")))
        return known[-1]

    yield start
    for running in known:
        running.close()


@pytest.fixture(scope="module")
def running(serving: Callable[..., Running]) -> Running:
    """A server with the default options."""
    return serving()
