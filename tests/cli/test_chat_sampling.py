"""The sampling options of `genai chat` on models whose files name none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genai.cli.app import run as run_here
from genai.llm.chat import ChatSession
from genai.llm.llm import LLM
from genai.llm.requests import CHAT_DEFAULTS

STORY = "Tell me a story."


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Path:
    """The bundled model without generation_config.json."""
    folder = tmp_path_factory.mktemp("models") / "unnamed"
    shutil.copytree(bundled_folder, folder)
    (folder / "generation_config.json").unlink()
    return folder


@pytest.fixture(scope="module")
def drawing(unnamed: Path) -> Any:
    with LLM(unnamed) as llm:
        yield llm


def test_only_a_chat_that_draws_has_the_defaults(drawing: LLM) -> None:
    assert drawing.chat_defaults == CHAT_DEFAULTS
    params = ChatSession(drawing, draws=True).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert ChatSession(drawing).params.temperature == drawing.params().temperature == 0
    assert drawing.chat("What is 12 + 7?").text == "19"


def test_requests_override_them(drawing: LLM) -> None:
    assert drawing.chat_params(temperature=0.0).top_k == 0
    params = drawing.chat_params(top_k=5, min_p=0.2)
    assert (params.temperature, params.top_k, params.min_p, params.top_p) == (0.8, 5, 0.2, 0.95)
    assert drawing.chat_params(mirostat=2).top_k == 0
    chat = ChatSession(drawing, draws=True, temperature=0.0)
    assert chat.ask("What is 12 + 7?").text == "19"
    chat.set_options(temperature=None)
    assert chat.params.temperature == 0.8


def test_the_same_seed_gives_the_same_reply(drawing: LLM) -> None:
    replies = [ChatSession(drawing, draws=True, seed=seed, max_tokens=24).ask(STORY).text for seed in (1, 1, 2, 3)]
    assert replies[0] == replies[1] and len(set(replies)) > 1


@pytest.mark.parametrize(
    ("generation", "search", "temperature"),
    [
        (None, {}, 0.8),
        ({"eos_token_id": [2, 0], "repetition_penalty": 1.1, "max_new_tokens": 9}, {}, 0.8),
        ({"do_sample": False}, {}, 0.0),
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}, 0.6),
        ({"temperature": 0.6}, {}, 0.0),
        ({"do_sample": True, "top_k": 20}, {"do_sample": True, "top_k": 20}, 1.0),
        (None, {"do_sample": True, "temperature": 0.7}, 0.7),
        (None, {"temperature": 0.7, "top_k": 9}, 0.8),
    ],
)
def test_files_that_name_sampling(
    generation: Any, search: Any, temperature: float, unnamed: Path, tmp_path: Path
) -> None:
    """Exports always write the search section, so only its do_sample counts."""
    folder = tmp_path / "model"
    shutil.copytree(unnamed, folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((folder / "genai_config.json").read_text())
    config["search"] |= search
    (folder / "genai_config.json").write_text(json.dumps(config))
    with LLM(folder) as llm:
        params = llm.chat_params()
        assert params.temperature == temperature
        assert bool(llm.chat_defaults) == (temperature == 0.8)
        assert params.top_k == (40 if temperature == 0.8 else llm.params().top_k)
        assert params.repetition_penalty == llm.params().repetition_penalty


def test_the_command(unnamed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(command: str, *arguments: str) -> str:
        assert run_here([command, str(unnamed), "-p", STORY, "-n", "24", *arguments]) == 0
        return capsys.readouterr().out

    greedy = reply("chat", "--greedy")
    assert greedy == reply("chat", "--temperature", "0") == reply("generate") == reply("generate", "--greedy")
    assert reply("chat", "--seed", "1") == reply("chat", "--seed", "1")
    assert {reply("chat", "--seed", str(seed)) for seed in range(3)} != {greedy}
    assert run_here(["chat", "-p", "Hi", "--greedy", "--temperature", "0.5"]) == 2
    assert "--greedy cannot be used with --temperature 0.5" in capsys.readouterr().err


def test_warnings_of_the_library_are_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["generate", "-p", "Hi", "-n", "1", "--seed", "1"]) == 0
    assert capsys.readouterr().err.startswith("genai: the seed has no effect, because this model selects")


def test_settings_show_the_source(terminal: Callable[..., Any], unnamed: Path, bundled_folder: Path) -> None:
    one = terminal("chat", str(unnamed), "-t", "1", "-n", "4")
    one.wait_for("context 1,024 tokens.*>>>")
    one.enter("/set", r"temperature +0\.8.*temperature, top-k, top-p, min-p: defaults of genai chat.*files name no")
    one.enter("/set temperature", r"temperature is 0\.8, the default of genai chat for this model")
    one.enter("/set top-k 3", r"\(top-k is 3\)")
    one.enter("/set", r"\* top-k +3.*temperature, top-p, min-p: defaults of genai chat")
    one.enter("/set top-k default", r"top-k is default")
    one.enter("/set temperature 0", r"temperature is 0")
    assert "defaults of genai chat" not in one.enter("/set", r"\* temperature +0.*model's defaults")
    one.enter("/set temperature default", r"temperature is default")
    one.enter(f"/model {bundled_folder}", "pebble · context 1,024 tokens")
    assert "defaults of genai chat" not in one.enter("/set", r"model's defaults")
    one.type("/bye\r")
    assert one.exit_code() == 0
