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

from genai.engine.sampling.option_rules import DEFAULT_ORDER
from genai.models.folders import bundled_adapter

Open = Callable[..., Any]
STORY = "Tell me a story about Luna and Tom."


def chat(terminal: Open, *arguments: str, slowly: bool = False, **environment: str) -> Any:
    """With `slowly`, a reply that fills the context takes seconds instead of a quarter second, so Ctrl-C is in time."""
    device = ("--device", "reference") if slowly else ("-t", "1")
    opened = terminal("chat", *device, *arguments, **environment)
    opened.wait_for("context 1,024 tokens.*>>>", seconds=120)  # kernels may have to be compiled first
    return opened


def test_a_conversation_with_its_figures(terminal: Open) -> None:
    one = chat(terminal)
    screen = one.enter("What is 12 + 7?", "19\n.*tok/s")
    assert re.search(r"2 tok · [\d.]+ tok/s · ttft [\d.]+ s · prompt \d+ \(0 cached\) · ctx \d+/1024 · eos", screen)
    one.enter("My name is Mia. Please remember my name, I will ask you for it later.", r"\(0 cached\)")
    screen = one.enter("What is my name?", r"cached\)")
    assert int(re.search(r"\((\d+) cached\)", screen)[1]) >= 32  # type: ignore[index]
    one.enter("/stats", r"·\s+seed\s+\d+\s+·")
    one.enter("", "")
    one.type("/bye\r")
    assert one.exit_code() == 0
    assert one.echoes()


def test_help_and_unknown_commands(terminal: Open) -> None:
    one = chat(terminal)
    screen = one.enter("/help", "Ctrl-C stops")
    for command in "help set system model lora clear retry undo edit save load stats prompt tokens bye".split():
        assert f"/{command} " in screen
    one.enter("/nonsense", "unknown command '/nonsense'.*/help lists")
    one.enter("/sav", "did you mean /save")
    one.enter("/exi", "did you mean /exit")
    one.enter("/info", "fix: /help lists the commands")
    one.enter("/save", "/save needs FILE")
    one.enter("/save /", "cannot be saved")
    one.enter("/bye now", "/bye takes no argument")
    one.type("\x04")
    assert one.exit_code() == 0


def test_what_stands_in_quotes_is_a_message(terminal: Open) -> None:
    """This includes text that would be a command or a farewell; editing it keeps the quotes."""
    one = chat(terminal, "-n", "4", "--ignore-eos")
    one.enter('"""/stats"""', "tok/s")
    one.enter('"""exit"""', "tok/s")
    one.enter("/tokens", "exit")
    one.type("/edit\r")
    one.wait_for('>>> """exit"""')
    one.type("\x03")
    one.enter("/undo", r"\(removed: /stats\)")
    one.type('"""\r/bye\r"""\r')
    one.wait_for("tok/s")
    one.enter("/set json-schema /no/such/file", "/no/such/file.*\n.*why")
    one.enter("/set logit-bias 5=abc", "/set logit-bias is '5=abc'.*\n.*ID=NUMBER")
    one.enter("/set sequence-bias 5:6=1,7=-inf", r"\(sequence-bias is 5:6=1,7=-inf\)")
    one.enter("/set sequence-bias", r"\(sequence-bias is 5:6=1.0,7=-inf: ID:ID=NUMBER")
    one.enter("/set sequence-bias 5:6", "/set sequence-bias is '5:6'.*\n.*ID:ID=NUMBER")
    one.type("exit\r")
    assert one.exit_code() == 0


def test_a_setting_that_changes_others(terminal: Open) -> None:
    chat(terminal).enter("/set top-k 40", r"\(top-k is 40; temperature is 1\.0 now\)")


def test_settings(terminal: Open) -> None:
    one = chat(terminal, "--temperature", "0.5")
    assert re.search(r"\* temperature +0.5\n", one.enter("/set", r"limit\)"))
    one.enter("/set top-p 0.9", r"\(top-p is 0.9\)")
    one.enter("/set temperature 0", "contradicts temperature 0")
    one.enter("/set top-p default", "default")
    one.enter("/set temperature 0", r"\(temperature is 0\)")
    one.enter("/set max-tokens 1", "is 1")
    one.enter("What is 12 + 7?", "1\n1 tok · .*length")
    one.enter("/set stop-token 1,2", "is 1,2")
    one.enter("/set ignore-eos on", "is on")
    one.enter("/set ignore-eos maybe", "on or off is expected")
    one.enter("/set nonsense 1", "no setting has this name")
    one.enter("/set seed x", "a value of type int")
    one.enter("/set seed", r"\(seed is -: random seed")
    one.enter("/set stats", r"\(stats is on\)")
    one.enter("/set temperatur", "did you mean temperature")
    one.enter("/set stats off", "is off")
    one.enter("/set on-overflow shift", "is shift")
    one.enter("/set on-overflow never", "allowed: error, truncate, shift, auto")
    screen = one.enter("/set", r"limit\)")
    assert re.search(r"stats +off\n.*on-overflow +shift", screen, re.S)
    assert "tok/s" not in one.enter("What is 12 + 7?", "1\n")
    one.enter("/set prompts on", "is on")
    one.enter("What is 2 + 2?", r"<\|im_start\|>user\nWhat is 2 \+ 2\?<\|im_end\|>.*\[\d+ tokens\] 1 ")


@pytest.mark.parametrize("columns", [60, 120])
def test_settings_at_any_width(terminal: Open, columns: int) -> None:
    one = chat(terminal, "--stop", "one two", "--stop", "three")
    one.resize(columns, 60)
    lines = one.enter("/set", r"limit\)").split("\n")
    assert max(map(len, lines)) < columns
    assert re.search(r"\* stop +one two,three\n", "\n".join(lines))
    first = next(index for index, line in enumerate(lines) if line.startswith("  samplers "))
    last = next(index for index, line in enumerate(lines) if line.startswith("  seed "))
    order = " ".join(" ".join(lines[first:last]).split()[1:])
    assert order.split("; ") == list(DEFAULT_ORDER)
    one.enter(f"/set samplers {order}", "samplers is ")


def test_taking_back(terminal: Open) -> None:
    one = chat(terminal)
    one.enter("/prompt", "no prompt has been sent yet")
    one.enter("/tokens", "no prompt has been sent yet")
    one.enter("/undo", "there is no message yet")
    one.enter("/retry", "there is no message yet")
    one.enter("/edit", "there is no message yet")
    one.enter("What is 12 + 7?", "19\n.*tok/s")
    one.enter("/retry", "19\n.*tok/s")
    one.enter("/edit", r"\(the last message and its reply were removed; edit the message")
    one.wait_for(re.escape("What is 12 + 7?"))
    one.enter("\x7f\x7f8?", "20\n.*tok/s")
    assert "12 + 8?<|im_end|>\n<|im_start|>assistant\n\n>>>" in one.enter("/prompt", "assistant\n")
    one.enter("/undo", r"\(removed: What is 12 \+ 8\?\)")
    one.enter("/undo", "there is no message yet")
    one.enter("What is 12 + 7?", "19\n.*tok/s")
    one.enter("/clear", "conversation cleared")


def test_files_and_models(terminal: Open, tmp_path: Path, bundled_folder: Path) -> None:
    one = chat(terminal, "--system", "You are kind.")
    one.resize(300, 40)
    one.enter("What is 12 + 7?", "19\n.*tok/s")
    path = tmp_path / "a b.json"
    one.enter(f"/save {path}", "saved 2 messages")
    saved = json.loads(path.read_text())
    assert saved["system"] == "You are kind."
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    one.enter("/clear", "conversation cleared")
    one.enter("/system none", "system: none")
    one.enter(f"/load {path}", r"loaded 2 messages.*>>> What is 12 \+ 7\?\n19")
    one.enter("/system", "system: You are kind.")
    one.enter("And 12 + 8?", "tok/s")
    assert "19<|im_end|>" in one.enter("/prompt", "assistant\n"), "what was loaded was sent"
    before = path.read_text()
    for answer in ("", "n", "\x03", "\x04", "maybe"):
        one.type(f"/save {path}\r")
        one.wait_for(r"exists\.\s+Overwrite\s+it\?\n\[y/N\]")
        one.enter(answer, "not saved")
    assert path.read_text() == before
    one.type(f"/save {path}\r")
    one.wait_for(r"\[y/N\]")
    one.enter("y", "saved 4 messages")
    assert path.read_text() != before
    one.enter(f"/save {tmp_path}/no/where.json", "cannot be saved")
    one.enter(f"/load {tmp_path}/none.json", "cannot be read")
    path.write_text('{"format": "other"}')
    one.enter(f"/load {path}", "not a saved conversation")
    one.enter("/model", re.escape(str(bundled_folder)))
    one.enter("/model /etc", "genai_config.json is missing")
    one.enter(f"/model {bundled_folder}", "context 1,024")
    one.enter("What is 2 + 2?", "ttft")
    assert "19<|im_end|>" in one.enter("/prompt", "assistant\n")
    assert "'1'" in one.enter("/tokens 12", "tokens]")


def test_several_lines_pasting_history_and_completion(terminal: Open) -> None:
    one = chat(terminal)
    one.type('"""\rWhat is\r')
    one.enter('12 + 7?"""', "19\n.*tok/s")
    assert "What is\n12 + 7?<" in one.enter("/prompt", "assistant\n")
    one.enter("/clear", "conversation cleared")
    one.type("\x1b[200~What is\n10 + 3?\x1b[201~")
    one.enter("", "13\n.*tok/s")
    one.enter("/clear", "conversation cleared")
    one.type("What is\x1b\r")
    one.enter("10 + 4?", "14\n.*tok/s")
    one.enter("What is 10 + 5?", "15\n.*tok/s")
    one.type("/cle\t")
    one.wait_for("/clear")
    one.enter("", "conversation cleared")
    one.type("/set top-\t")
    one.wait_for("top-p")
    one.type("\x03/set on-overflow tr\t")
    one.wait_for(r"tr\s*uncate")  # drawn in two parts if the completion arrived late
    one.enter("", "on-overflow is truncate")
    one.type("\x1b[A\x1b[A\x1b[A")
    one.enter("", "15\n.*tok/s")
    one.type("\x04")
    assert one.exit_code() == 0
    again = chat(terminal)
    again.enter("\x1b[A", "15\n.*tok/s")


def test_adapters(terminal: Open, tmp_path: Path) -> None:
    words, pirate = bundled_adapter("words"), bundled_adapter("pirate")
    one = chat(terminal, "--lora", f"words={words}")
    one.enter("What is 12 + 7?", "19, nineteen")
    one.enter("/lora off", "adapter: none; loaded: words")
    one.enter("What is 12 + 8?", r"20\n.*tok/s")
    one.enter(f"/lora pirate={pirate}", "adapter: pirate; loaded: words, pirate")
    one.enter("What is 12 + 9?", r"21, matey! Arr!")
    one.enter("/lora wrods", "Adapter not found: wrods.*did you mean 'words'")
    one.enter(f"/lora off={words}", "/lora off disables adapters")
    one.enter(f"/lora x={tmp_path / 'none'}", "not an adapter")
    one.enter(f"/lora x={words}:nan", "scale of adapter 'x' = nan")
    one.type("/lora wo\t")
    one.wait_for("/lora words")
    one.enter("", "adapter: words; loaded: words, pirate")
    (tmp_path / "some-folder").mkdir()
    one.type(f"/lora z={tmp_path}/so\t")
    one.wait_for("some-folder")
    one.type("\x03\x04")
    assert one.exit_code() == 0


def test_ctrl_c_keeps_the_reply_and_twice_leaves(terminal: Open) -> None:
    one = chat(terminal, "--temperature", "1", "--ignore-eos", slowly=True)
    one.type(STORY + "\r")
    one.wait_for(r"Tom\.\s+\S+ ")
    one.type("\x03")
    one.wait_for(r"\(stopped\)\n.*interrupted.*>>>")
    partial = one.enter("/prompt", "assistant\n")
    assert re.search(r"Tom\.<\|im_end\|>\n<\|im_start\|>assistant\n\n>>>", partial), "what was sent, not what came back"
    one.type("half a line\x03")
    one.enter("/stats", "interrupted")
    one.type("\x03")
    one.wait_for(r"type /bye\)\n>>>")
    # Text that is typed and cleared between two presses makes the second press count as the first.
    one.type("x\x03\x03")
    one.wait_for(r"type /bye\)\n>>>")
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
        # Whatever the interrupt hit, the chat still obeys a command.
        one.type("\r")
        time.sleep(0.05)
        one.enter("/clear", "conversation cleared")
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


@pytest.mark.parametrize("word", ["/exit", "/quit", "exit", "quit", "Exit "])
def test_ways_to_leave(terminal: Open, word: str) -> None:
    one = chat(terminal)
    one.type(f"{word}\r")
    assert one.exit_code() == 0
    assert one.echoes()


def test_what_is_typed_while_loading_is_sent(terminal: Open) -> None:
    """As in a shell, also what is typed while a reply is generated."""
    one = terminal("chat", "-t", "1")
    one.type("What is 10 + 1?\rWhat is 10 + 2?\rWhat is")
    one.wait_for("context 1,024 tokens.*>>>.*11\n.*tok/s.*>>>.*12\n.*tok/s.*>>> What is", seconds=120)
    one.enter(" 12 + 7?", "19\n.*tok/s")


@pytest.mark.parametrize("columns", [30, 60, 120])
def test_words_stay_whole_at_any_width(terminal: Open, columns: int) -> None:
    one = terminal("chat", "-t", "1")
    one.resize(columns, 60)
    one.wait_for("exit.*>>>", seconds=120)
    for text, end in (("/help", "exits\\."), (STORY, "tok/s")):
        screen = one.enter(text, end)
        screen = re.sub(r"[-\\|/] (Processing the prompt|Generating) *", "", screen)  # shown on a slow machine
        lines = [line for line in screen.split("\n") if ">>>" not in line and text not in line]
        assert len(lines) > 3 and all(len(line.rstrip()) <= columns for line in lines)
    story = [line for line in lines if "·" not in line]
    assert max(map(len, story)) > columns * 0.6


def test_no_colours_where_none_are_wanted(terminal: Open) -> None:
    one = terminal("info", "/nonsense", NO_COLOR="1", TERM="dumb")
    one.wait_for("no such folder")
    assert "\x1b" not in one.seen


def test_a_full_context(terminal: Open) -> None:
    question = "Tell me a story. " * 40
    one = chat(terminal, "--on-overflow", "error")
    one.enter(question, "tok · ")
    one.enter("/set min-tokens 600", "is 600")
    screen = one.enter("Tell me more.", "tok · ")
    assert re.search("length|nearly full|is full", screen)
    one.enter(question * 2, "error: the conversation has .*limited to 1024.*fix: ")
    one.enter("/set min-tokens 0", "is 0")
    one.enter("/set on-overflow truncate", "is truncate")
    one.enter(question, "the first 4 messages are omitted|the first 2 messages are omitted")


def test_a_full_context_goes_on_and_is_said_once(terminal: Open) -> None:
    one = chat(terminal, "--ignore-eos", "-n", "600")
    one.enter("My name is Mia.", "600 tok · ")
    one.enter("Tell me a story.", "the context is full: [^>]*dropped[^>]*from now on[^>]*/set on-overflow error")
    assert "full" not in one.enter("Tell me a story.", "600 tok · ")
    one.enter("/set on-overflow error", "is error")
    one.enter("Tell me a story.", "the conversation has [^>]*tokens")


def test_markdown_is_rendered_on_request(terminal: Open) -> None:
    one = chat(terminal, "--markdown")
    one.enter("What is 12 + 7?", "19")
    one.enter("/set markdown off", "is off")
    one.enter("What is 12 + 7?", "19\n")


def test_a_terminal_without_abilities(terminal: Open) -> None:
    one = chat(terminal, TERM="dumb")
    one.type("What is 12 + 7?\r")
    one.wait_for("19\n.*tok/s.*>>>")
    for line in ('"""Say', 'hello."""'):
        one.type(f"{line}\r")
    one.wait_for("\\.\\.\\. .*tok/s.*>>>")
    one.enter("/edit", "hello\\.")
    one.enter("", "tok/s")
    one.type("\x04")
    assert one.exit_code() == 0 and "\x1b" not in one.seen


def test_long_work_says_how_far_it_is(terminal: Open, tmp_path: Path) -> None:
    question = {"task": "sum", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "answer": "19"}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({**question, "match": "number"}))
    one = terminal("eval", "tasks", "-f", str(path), "-t", "1")
    screen = one.wait_for(r"sum +1 / 1 +100.0 % ± 39.7.*right answers, by task.*###", seconds=120)
    assert re.search(r"Evaluating \[-+\]   0%  0 of 1", screen)
    one = terminal("bench", "decode", "-n", "8", "-c", "8", "-r", "3", "-t", "1")
    assert re.search(r"Measuring \[#+-+\]  \d+%  [123] of 4", one.wait_for("tokens per second", seconds=120))


def test_a_line_longer_than_the_window(terminal: Open) -> None:
    """The start of a line is edited after the line was wrapped and the window became narrower."""
    one = terminal("chat", "-t", "1")
    one.resize(30, 24)
    one.wait_for("exit.*>>>", seconds=120)
    words = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    one.type(f"at is {words}?")
    one.wait_for(r"fifteen\?")
    one.resize(23, 24)
    one.type("\x01Wh\x05\x7f and 12 + 7?")  # to the start of the line, and back to its end
    one.enter("", r"tok/s")
    one.resize(120, 24)
    assert f"user\nWhat is {words} and 12 + 7?<|im_end|>" in one.enter("/prompt", "assistant\n")


def test_a_long_text_that_is_pasted(terminal: Open) -> None:
    """More lines than the window has, with tabs, slashes and control characters, form one message."""
    lines = [f"{number}\tof /many, [{chr(97 + number)}]" for number in range(26)]
    one = chat(terminal)
    one.resize(40, 10)
    one.type(f"\x1b[200~{chr(10).join(lines)}\x1b[201~")
    one.enter("", "tok · ")
    one.resize(120, 40)
    shown = one.enter("/prompt", "assistant\n")
    assert re.sub(r"[\t ]+", " ", "\n".join(lines)) in re.sub(r"[\t ]+", " ", shown)
    assert shown.count("<|im_start|>user") == 1


@pytest.mark.parametrize("policy", ["error", "truncate", "shift"])
def test_a_reply_that_meets_the_end_of_the_context(terminal: Open, policy: str) -> None:
    """A truncated reply is reported. When it continues, omitted messages are reported, and `/prompt` shows them."""
    one = chat(terminal, "--on-overflow", policy, "--ignore-eos", "-n", "100")
    one.enter("/set max-tokens 700", "is 700")
    one.enter("My name is Mia.", "tok · ")
    one.resize(300, 40)
    screen = one.enter(STORY, "messages are omitted" if policy == "shift" else "cut off; /clear starts over")
    if policy == "shift":
        assert "700 tok" in screen and "was cut" not in screen
        assert "(the context is full, so the first 2 messages are omitted)" in screen
        assert "Mia" not in one.enter("/prompt", "assistant\n")
    else:
        assert "(the context of 1024 tokens is full, so the reply was cut" in screen
        assert "Mia" in one.enter("/prompt", "assistant\n")


def test_keys_and_sizes_while_a_reply_comes(terminal: Open) -> None:
    one = chat(terminal, "--temperature", "1", "--ignore-eos", "--on-overflow", "truncate", slowly=True)
    one.type(STORY + "\r")
    one.wait_for(r"Tom\.\s+\S+ ")
    for columns, rows in ((20, 5), (200, 60), (100, 40)):
        one.resize(columns, rows)
        time.sleep(0.05)
    one.type("\x03\x03\x03")  # repeated presses
    one.wait_for(">>>")
    one.type("\r")
    one.enter("/clear", "conversation cleared")
    one.type(STORY + "\r")
    one.wait_for(r"Tom\.\s+\S+ ")
    one.type("\x03")
    one.wait_for(r"\(stopped\)\n.*>>>")
    one.type("no end\x04")  # deletes the character to the right: there is none
    one.enter("\x15/stats", "interrupted")
    one.type("\x04")
    assert one.exit_code() == 0
    assert one.echoes()


def test_a_terminal_that_knows_ascii_alone(terminal: Open) -> None:
    plain = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1"}
    one = terminal("chat", "-t", "1", **plain)
    one.wait_for("context 1,024 tokens.*>>>", seconds=120)
    screen = one.enter("What is 12 + 7?", "19\n.*tok/s")
    assert screen.isascii() and "tok - " in screen
    one.type("\x04")
    assert one.exit_code() == 0
