"""`genai chat` without a model: the list of models on a terminal, and the bundled model elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import genai
from genai.cli.chat import offer
from genai.errors import AccessError, DownloadError
from genai.hub.built import models_folder, note_build
from genai.hub.known import known_models
from genai.hub.offers import cached_offers, lookup, new_offers
from genai.kernels.cpu.jit.native import LIBRARY
from tests.cli.conftest import Terminal
from tools.local_hub import Fault, LocalHub

PROMPT = r"Model \[1-\d, a name, or Enter for pebble\]: "
QWEN, GEMMA, SMALL = "Qwen/Qwen3-0.6B", "google/gemma-3-1b-it", "HuggingFaceTB/SmolLM2-360M-Instruct"


@pytest.fixture
def models(hub: LocalHub, chatting: dict[str, bytes]) -> LocalHub:
    """A hub with two models and a gated model of the table; the others do not exist."""
    hub.add(QWEN, chatting)
    hub.add(GEMMA, chatting, gated=True)
    hub.add(SMALL, {"README.md": b"no model"})
    return hub


@pytest.fixture
def chat(cache: Path) -> Iterator[Callable[..., Terminal]]:
    """Return a function that opens `genai chat` on a terminal of a number of columns."""
    opened: list[Terminal] = []
    kernels = LIBRARY.folder.path
    assert kernels is not None
    cache.parent.mkdir(parents=True, exist_ok=True)
    (cache.parent / "kernels").symlink_to(kernels.parent)  # kernels are not compiled again

    def start(*arguments: str, columns: int = 200, **extra: str) -> Terminal:
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **extra}
        environment.pop("GENAI_MODEL", None)
        opened.append(Terminal("chat", *arguments, environment=environment))
        opened[-1].resize(columns, 40)
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def downloads(hub: LocalHub) -> list[str]:
    return [path for path in hub.paths() if "/resolve/" in path]


def test_a_number_asks_before_the_download(models: LocalHub, chat: Callable[..., Terminal]) -> None:
    one = chat("-t", "1")
    shown = one.wait_for(PROMPT)
    assert "1  qwen3-0.6b: small, many languages" in shown
    assert "download 8.8 MB, memory 1.1 GB, about " in shown and " tokens/s" in shown
    assert "Speeds are estimates" in shown and "small demonstration" in shown
    on_one_line = "".join(shown.split())  # the terminal may have had 80 columns when the list was printed
    assert "gemma-3-1b-it" in shown and f"acceptthelicenceat{models.url}/{GEMMA}" in on_one_line
    for hidden in ("smollm2-360m-instruct", "llama-3.2-1b-instruct", "qwen3-4b"):  # not there, or nothing to run
        assert hidden not in shown
    one.type("7\r")
    assert "there is no number 7; the numbers are 1 to 2" in one.wait_for(PROMPT)
    one.type("1\r")
    one.wait_for(r"Download Qwen/Qwen3-0.6B \(8.8 MB\)\? \[Y/n\] ")
    assert downloads(models) == []
    one.type("n\r")
    one.wait_for("was not pulled")
    assert one.exit_code() == 1 and downloads(models) == []


def test_a_number_downloads_and_chats(models: LocalHub, chat: Callable[..., Terminal]) -> None:
    one = chat("-t", "1")
    one.wait_for(PROMPT)
    one.type("1\r")
    one.wait_for(r"\[Y/n\] ")
    one.type("y\r")
    one.wait_for(">>>")
    one.enter("What is 12 + 7?", "19")
    opened = chat("-t", "1", HF_HUB_OFFLINE="1")
    shown = opened.wait_for(PROMPT)
    assert "HF_HUB_OFFLINE disables network access" in shown and "in the cache, memory" in shown
    assert "gemma" not in shown
    opened.type("1\r")
    opened.wait_for("Qwen3-0.6B-int4.*>>>")


def test_enter_takes_the_bundled_model(models: LocalHub, chat: Callable[..., Terminal]) -> None:
    one = chat("-t", "1", columns=60)
    one.wait_for(PROMPT)
    one.type("\r")
    one.wait_for("pebble .*>>>")
    assert downloads(models) == []


def test_a_name_and_the_end_of_the_input(models: LocalHub, chat: Callable[..., Terminal]) -> None:
    one = chat()
    one.wait_for(PROMPT)
    for typed, said in (("pebble+pirat", "did you mean 'pirate'"), ("peble", "did you mean pebble")):  # asks again
        one.type(f"{typed}\r")
        one.wait_for(said)
        one.wait_for(PROMPT)
    one.type("\x04")
    one.wait_for("no model was chosen")
    assert one.exit_code() == 1 and downloads(models) == []


def test_without_a_hub(cache: Path, chat: Callable[..., Terminal]) -> None:
    one = chat("-t", "1", HF_HUB_OFFLINE="1")
    shown = one.wait_for("pebble .*>>>")
    assert "HF_HUB_OFFLINE disables network access" in shown and "starting pebble, the bundled model" in shown


def test_a_pipe_uses_the_bundled_model(models: LocalHub) -> None:
    command = [sys.executable, "-m", "genai", "chat", "-t", "1"]
    done = subprocess.run(command, input="What is 12 + 7?", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "19" and "choose" not in done.stderr
    assert models.requests == []


def test_offers(models: LocalHub, checkpoint: dict[str, bytes]) -> None:
    offers, unreachable = new_offers(lookup().results())
    assert [offer.name for offer in offers] == ["qwen3-0.6b", "gemma-3-1b-it"] and not unreachable
    assert "HF_TOKEN" in offers[1].note and not offers[0].note
    models.add("org/mine", checkpoint)
    genai.pull("org/mine", quiet=True)
    decoder, encoder = (models_folder() / name for name in ("local-1a2b", "encoder-3c4d"))
    for file in (decoder / "genai_config.json", encoder / "onnx" / "model.onnx"):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    note_build(decoder, Path("mine.gguf"), "kept")
    mine, built = cached_offers()
    assert mine.name == "org/mine" and mine.download_bytes == 0 and 0 < mine.size_bytes < mine.memory_bytes
    assert (built.name, built.note, built.size_bytes) == ("local-1a2b", "built from mine.gguf", 2)


def test_hubs_that_do_not_respond(models: LocalHub) -> None:
    assert new_offers({}) == ([], "the hub cannot be reached: it does not respond")
    offered = [model for model in known_models().values() if model.offered]
    broken = DownloadError("the download failed", "connection refused", "check the connection")
    offers, unreachable = new_offers({model.repository: broken for model in offered})
    assert not offers and unreachable == "the hub cannot be reached: connection refused"
    denied = AccessError("not found", "it is private", "set HF_TOKEN")
    assert new_offers({model.repository: denied for model in offered}) == ([], "")
    models.faults["/api/"] = [Fault(status=500)] * 40
    assert new_offers(lookup().results(30))[1].startswith("the hub cannot be reached")


def test_no_hub_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert new_offers(lookup().results()) == ([], "HF_HUB_OFFLINE disables network access")


def test_models_that_do_not_fit_are_hidden(
    models: LocalHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("genai.common.memory_limits.available_memory", lambda: 1_070_000_000)
    offers, _ = offer._offers()
    assert [one.name for one in offers] == ["gemma-3-1b-it"]  # its cache is small
    assert "1 model needs more memory than the 1.1 GB free" in capsys.readouterr().err
