"""`genai chat` in a terminal: every command and key."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Open = Callable[..., Any]
STORY = "Tell me a story about Luna and Tom."


def chat(terminal: Open, *arguments: str, **environment: str) -> Any:
    opened = terminal("chat", "-t", "1", *arguments, **environment)
    opened.wait_for("context 1,024 tokens.*>>>", seconds=120)  # kernels may have to be compiled
    return opened


def test_a_conversation_with_its_figures(terminal: Open) -> None:
    one = chat(terminal)
    screen = one.enter("What is 12 + 7?", "19\n.*tok/s")
    assert re.search(r"2 tok · [\d.]+ tok/s · ttft [\d.]+ s · prompt \d+ \(0 cached\) · ctx \d+/1024 · eos", screen)
    one.enter("My name is Mia. Please remember my name, I will ask you for it later.", r"\(0 cached\)")
    screen = one.enter("What is my name?", r"cached\)")
    assert int(re.search(r"\((\d+) cached\)", screen)[1]) >= 32  # type: ignore[index]
    one.enter("/stats", r"· seed \d+ ·")
    one.enter("", "")
    one.type("/bye\r")
    assert one.exit_code() == 0
    assert one.echoes()


def test_help_and_unknown_commands(terminal: Open) -> None:
    one = chat(terminal)
    screen = one.enter("/help", "Ctrl-C stops")
    for command in "help set system model clear retry undo edit save load stats prompt tokens bye".split():
        assert f"/{command} " in screen
    one.enter("/nonsense", "unknown command '/nonsense'.*/help lists")
    one.enter("/sav", "did you mean /save")
    one.enter("/save", "/save without FILE")
    one.enter("/bye now", "/bye takes no argument")
    one.type("\x04")
    assert one.exit_code() == 0


def test_settings(terminal: Open) -> None:
    one = chat(terminal, "--temperature", "0.5")
    assert re.search(r"\* temperature +0.5\n", one.enter("/set", "none, or no limit"))
    one.enter("/set top-p 0.9", r"\(top-p is 0.9\)")
    one.enter("/set temperature 0", "temperature = 0.*contradict|contradicts temperature = 0")
    one.enter("/set top-p default", "default")
    one.enter("/set temperature 0", r"\(temperature is 0\)")
    one.enter("/set max-tokens 1", "is 1")
    one.enter("What is 12 + 7?", "1\n1 tok · .*length")
    one.enter("/set stop-token 1,2", "is 1,2")
    one.enter("/set ignore-eos on", "is on")
    one.enter("/set ignore-eos maybe", "on or off is expected")
    one.enter("/set nonsense 1", "there is no such setting")
    one.enter("/set seed x", "a value of type int")
    one.enter("/set seed", "without a value")
    one.enter("/set stats off", "is off")
    one.enter("/set on-overflow shift", "is shift")
    one.enter("/set on-overflow never", "allowed: error, truncate, shift")
    screen = one.enter("/set", "none, or no limit")
    assert re.search(r"stats +off\n.*on-overflow +shift", screen, re.S)
    assert "tok/s" not in one.enter("What is 12 + 7?", "1\n")
    one.enter("/set prompts on", "is on")
    one.enter("What is 2 + 2?", r"<\|im_start\|>user\nWhat is 2 \+ 2\?<\|im_end\|>.*\[\d+ tokens\] 1 ")


def test_taking_back(terminal: Open) -> None:
    one = chat(terminal)
    one.enter("/undo", "there is no message yet")
    one.enter("/retry", "there is no message yet")
    one.enter("/edit", "there is no message yet")
    one.enter("What is 12 + 7?", "19\n.*tok/s")
    one.enter("/retry", "19\n.*tok/s")
    one.enter("/edit", "")
    one.wait_for(re.escape("What is 12 + 7?"))
    one.enter("\x7f\x7f8?", "20\n.*tok/s")
    assert "12 + 8" in one.enter("/prompt", "assistant\n")
    one.enter("/undo", r"\(taken back: What is 12 \+ 8\?\)")
    one.enter("/undo", "there is no message yet")
    one.enter("What is 12 + 7?", "19\n.*tok/s")
    one.enter("/clear", "forgotten")
    one.enter("/prompt", "messages is empty")


def test_files_and_models(terminal: Open, tmp_path: Path, bundled_folder: Path) -> None:
    one = chat(terminal, "--system", "You are kind.")
    one.enter("What is 12 + 7?", "19\n.*tok/s")
    path = tmp_path / "a b.json"
    one.enter(f"/save {path}", "saved 2 messages")
    saved = json.loads(path.read_text())
    assert saved["system"] == "You are kind."
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    one.enter("/clear", "forgotten")
    one.enter("/system none", "system: none")
    one.enter(f"/load {path}", "loaded 2 messages")
    one.enter("/system", "system: You are kind.")
    assert "19" in one.enter("/prompt", "assistant\n")
    one.enter(f"/save {tmp_path}/no/where.json", "cannot be saved")
    one.enter(f"/load {tmp_path}/none.json", "cannot be read")
    path.write_text('{"format": "other"}')
    one.enter(f"/load {path}", "not a saved conversation")
    one.enter("/model", re.escape(str(bundled_folder)))
    one.enter("/model /etc", "genai_config.json is missing")
    one.enter(f"/model {bundled_folder}", "context 1,024")
    assert "19" in one.enter("/prompt", "assistant\n")
    assert "'1'" in one.enter("/tokens 12", "tokens]")


def test_several_lines_pasting_history_and_completion(terminal: Open) -> None:
    one = chat(terminal)
    one.type('"""\rWhat is\r')
    one.enter('12 + 7?"""', "19\n.*tok/s")
    assert "What is\n12 + 7?<" in one.enter("/prompt", "assistant\n")
    one.enter("/clear", "forgotten")
    one.type("\x1b[200~What is\n10 + 3?\x1b[201~")
    one.enter("", "13\n.*tok/s")
    one.enter("/clear", "forgotten")
    one.type("What is\x1b\r")
    one.enter("10 + 4?", "14\n.*tok/s")
    one.enter("What is 10 + 5?", "15\n.*tok/s")
    one.type("/cle\t")
    one.wait_for("/clear")
    one.enter("", "forgotten")
    one.type("\x1b[A\x1b[A")
    one.enter("", "15\n.*tok/s")
    one.type("\x04")
    assert one.exit_code() == 0
    again = chat(terminal)
    again.enter("\x1b[A", "15\n.*tok/s")


def test_ctrl_c_keeps_the_reply_and_twice_leaves(terminal: Open) -> None:
    one = chat(terminal, "--temperature", "1", "--ignore-eos")
    one.type(STORY + "\r")
    one.wait_for(r"Tom\.\s+\S+ ")
    one.type("\x03")
    one.wait_for(r"\(stopped\)\n.*interrupted.*>>>")
    partial = one.enter("/prompt", "assistant\n")
    assert re.search(r"assistant\n\S+", partial)
    one.type("half a line\x03")
    one.enter("/stats", "interrupted")
    one.type("\x03")
    one.wait_for(r"to leave\)\n>>>")
    # What is typed and cleared between two of them makes the second the first again.
    one.type("x\x03\x03")
    one.wait_for(r"to leave\)\n>>>")
    one.type("\x03")
    assert one.exit_code() == 0
    assert one.echoes()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_ctrl_c_at_random_moments_leaves_terminal_and_engine_sane(terminal: Open, seed: int) -> None:
    rng = random.Random(seed)
    one = chat(terminal)
    for _ in range(10):
        one.type(STORY + "\r")
        time.sleep(rng.random() * 0.25)
        os.kill(one.pid, signal.SIGINT) if rng.random() < 0.5 else one.type("\x03")
        # Whatever was hit, a command is obeyed again.
        one.type("\r")
        time.sleep(0.05)
        one.enter("/clear", "forgotten")
    one.enter("What is 12 + 7?", "19\n.*tok/s")
    one.type("/bye\r")
    assert one.exit_code() == 0
    assert one.echoes()


def test_a_window_that_changes_its_size(terminal: Open) -> None:
    one = chat(terminal)
    one.type("What is ")
    for columns, rows in ((20, 5), (200, 60), (1, 1), (80, 24)):
        one.resize(columns, rows)
        time.sleep(0.05)
    one.enter("12 + 7?", "19\n.*tok/s")


def test_a_full_context(terminal: Open) -> None:
    question = "Tell me a story. " * 40
    one = chat(terminal)
    one.enter(question, "tok · ")
    one.enter("/set min-tokens 600", "is 600")
    screen = one.enter("Tell me more.", "tok · ")
    assert re.search("length|nearly full|is full", screen)
    one.enter(question * 2, "error: the conversation has .*context holds 1024.*fix: ")
    one.enter("/set min-tokens 0", "is 0")
    one.enter("/set on-overflow truncate", "is truncate")
    one.enter(question, "the first 4 messages are left out|the first 2 messages are left out")


def test_markdown_is_rendered_on_request(terminal: Open) -> None:
    one = chat(terminal, "--markdown")
    one.enter("What is 12 + 7?", "19")
    one.enter("/set markdown off", "is off")
    one.enter("What is 12 + 7?", "19\n")


def test_a_terminal_without_abilities(terminal: Open) -> None:
    one = chat(terminal, TERM="dumb")
    one.type("What is 12 + 7?\r")
    one.wait_for("19\n.*tok/s.*>>>")
    one.type("\x04")
    assert one.exit_code() == 0
