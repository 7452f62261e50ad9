"""`genai chat --session`, the prefix cache on disk, and beams on the command line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.errors import InputError
from genai.llm.chat import ChatSession
from tests.cli.processes import run


def test_a_session_goes_on_with_what_it_has_read(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    name = "My name is Mia. Please remember my name, I will ask you for it later."
    first = run("chat", "--session", "one", "-p", name, "--stats", **home)
    assert first.returncode == 0 and "(0 cached)" in first.stderr
    folder = tmp_path / "genai" / "sessions"
    assert sorted(path.name for path in folder.iterdir()) == ["one.json", "one.json.state"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    second = run("chat", "--session", "one", "-p", "What is my name?", "--stats", **home)
    assert "Mia" in second.stdout and "(session one: 2 messages)" in second.stderr
    assert int(re.search(r"\((\d+) cached\)", second.stderr)[1]) >= 32  # type: ignore[index]
    assert len(json.loads((folder / "one.json").read_text())["messages"]) == 4
    other = run("chat", "--session", "one", "-p", "What is my name?", "--kv-type", "int8", **home)
    assert (
        other.returncode == 0
        and "the prompt must be processed again" in other.stderr
        and "another arithmetic" in other.stderr
    )
    (folder / "one.json").write_text("{}")
    damaged = run("chat", "--session", "one", "-p", "Hi", **home)
    assert damaged.returncode != 0 and "not a saved conversation" in damaged.stderr
    assert (folder / "one.json").read_text() == "{}"
    for wrong in ("a/b", "..", "", "x" * 101):
        refused = run("chat", "--session", wrong, "-p", "Hi", **home)
        assert refused.returncode != 0 and "why:" in refused.stderr
    (tmp_path / "file").write_text("x")
    nowhere = run("chat", "--session", "one", "-p", "Hi", XDG_STATE_HOME=str(tmp_path / "file"))
    assert nowhere.returncode != 0 and "cannot be saved" in nowhere.stderr


def test_a_terminal_keeps_its_session(terminal: Callable[..., Any], tmp_path: Path) -> None:
    for seen in ("context 1,024 tokens.*>>>", r"session two: 2 messages.*>>>"):
        one = terminal("chat", "-t", "1", "--session", "two", XDG_STATE_HOME=str(tmp_path))
        one.wait_for(seen, seconds=120)
        one.enter("What is 12 + 7?", "19\n.*tok/s")
        assert (tmp_path / "genai" / "sessions" / "two.json").exists()  # saved after every reply
        one.type("/bye\r")
        assert one.exit_code() == 0
    saved = json.loads((tmp_path / "genai" / "sessions" / "two.json").read_text())
    assert len(saved["messages"]) == 4


def test_one_chat_at_a_time_goes_on_with_a_session(terminal: Callable[..., Any], tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    one = terminal("chat", "-t", "1", "--session", "two", **home)
    one.wait_for("context 1,024 tokens.*>>>", seconds=120)
    refused = run("chat", "-t", "1", "--session", "two", "-p", "Hi", **home)
    assert refused.returncode == 1 and "using this session" in refused.stderr and "fix:" in refused.stderr
    assert run("chat", "-t", "1", "--session", "three", "-p", "Hi", **home).returncode == 0
    one.close()  # kills the process
    one.pid, one.fd = 0, os.open(os.devnull, os.O_RDONLY)
    assert run("chat", "-t", "1", "--session", "two", "-p", "Hi", **home).returncode == 0
    names = {path.name for path in (tmp_path / "genai" / "sessions").iterdir()}
    assert names == {"two.json", "two.json.state", "three.json", "three.json.state"}


def test_a_conversation_goes_on_to_the_bit(bundled_folder: Path, tmp_path: Path) -> None:
    def chat(llm: genai.LLM) -> ChatSession:
        return ChatSession(llm, temperature=0.8, seed=3, max_tokens=60)

    with genai.LLM(bundled_folder, threads=1) as llm:
        one = chat(llm)
        one.ask("Tell me a story about Luna and Tom.")
        one.save(tmp_path / "a.json")
        expected = one.ask("Tell me more of it, please.")
        one.save(tmp_path / "b.json", with_state=False)
        assert not (tmp_path / "b.json.state").exists()
    with genai.LLM(bundled_folder, threads=1) as llm:
        again = chat(llm)
        again.load(tmp_path / "a.json")
        assert again.state_problem is None
        reply = again.ask("Tell me more of it, please.")
        assert reply.completion.token_ids == expected.completion.token_ids
        assert reply.completion.cached_tokens == expected.completion.cached_tokens > 32
        again.clear()
        again.save(tmp_path / "a.json")
        assert not (tmp_path / "a.json.state").exists()
        with pytest.raises(InputError, match="cannot be saved"):
            again.save(tmp_path / "no" / "where.json")


def test_a_later_run_finds_the_beginning_of_its_prompt(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Luna and Tom went to the park. " * 12)
    command = ["generate", "--raw", "-f", str(prompt), "-n", "3", "--stats", "--prefix-cache", str(tmp_path / "kept")]
    assert "(0 cached)" in run(*command).stderr
    assert re.search(r"\((6[4-9]|[7-9]\d|1\d\d) cached\)", run(*command, "--prefix-cache-size", "0.01").stderr)
    for wrong in (["--prefix-cache-size", "1"], ["--prefix-cache", str(prompt)]):
        refused = run("generate", "-p", "Hi", *wrong)
        assert refused.returncode != 0 and "why:" in refused.stderr
    refused = run("generate", "-p", "Hi", "--prefix-cache", str(tmp_path), "--prefix-cache-size", "-1")
    assert refused.returncode != 0 and "GiB" in refused.stderr


def test_beams() -> None:
    question = ["generate", "--chat", "-p", "What is 12 + 7?"]
    best = run(*question, "--beams", "3")
    assert best.stdout == "19\n", best.stderr
    options = ["--beams", "4", "--samples", "2", "--length-penalty", "0.5", "--early-stopping", "never"]
    found = run(*question, *options, "--json", "--logprobs", "1", "-n", "6")
    first, second = map(json.loads, found.stdout.splitlines())
    assert first["text"] == "19" and first["score"] >= second["score"] and "state" not in first
    for wrong in (
        ["--length-penalty", "1"],
        ["--early-stopping", "true"],
        ["--beams", "2", "--early-stopping", "maybe"],
        ["--beams", "2", "--samples", "3"],
        ["--beams", "2", "--temperature", "0.5"],
        ["--timeout", "0"],
    ):
        refused = run(*question, *wrong)
        assert refused.returncode != 0 and "why:" in refused.stderr, wrong
    late = run(*question, "--timeout", "1e-9")
    assert late.returncode != 0 and "the request's timeout expired before its first token" in late.stderr
