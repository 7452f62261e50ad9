"""Help pages and usage errors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genai.cli.app import command, run
from genai.cli.short_help import SHORT_HELP

Capture = pytest.CaptureFixture[str]


def leaves(one: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(one, "commands", {})
    yield names, one
    for name, child in children.items():
        yield from leaves(child, (*names, name))


@pytest.mark.parametrize("columns", ["52", "60", "80", "120"])
def test_help_at_any_width(columns: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for names, one in leaves(command()):
        is_group = hasattr(one, "commands")
        for option in ("--help", *(() if is_group else ("--help-all",))):
            assert run([*names, option]) == 0
            page = capsys.readouterr().out
            text = "\n".join(line for line in page.splitlines() if not line.startswith("  genai "))  # an example
            assert max(map(len, text.splitlines())) <= int(columns)
            assert "..." not in re.sub(r"[\[{](?:ARGS|MODEL|URL)[\]}]\.\.\.", "", page), "nothing is cut"
            assert not re.search(r"\w-$", page, re.M), "no line ends inside a word"
            assert not re.search(r"env var|<\w", page)
            said = re.sub(r"\s+", "", page)
            if is_group or option == "--help-all":
                for parameter in one.params:
                    is_hidden = getattr(parameter, "hidden", False)  # an earlier name
                    assert (re.sub(r"\s+", "", parameter.help) in said) is not is_hidden


def test_short_help_has_an_example_and_ten_options_at_most(capsys: Capture) -> None:
    commands = {" ".join(("genai", *names)): one for names, one in leaves(command()) if not hasattr(one, "commands")}
    assert set(SHORT_HELP) == set(commands)
    for path, short in SHORT_HELP.items():
        known = {name for parameter in commands[path].params for name in parameter.opts}
        assert set(short.options) <= known and len(short.options) <= 10
        assert short.options or len(known) <= 24, f"{path} has many options: name those that most people need"
        assert run([*path.split()[1:], "-h"]) == 0
        page = capsys.readouterr().out
        assert f"Example:\n  {short.example}\n" in page
        shown = set(re.findall(r"(?<![\w-])--[\w-]+", page.split("\nOptions:\n")[1].split("\n\n")[0]))
        assert set(short.options) <= shown
        if short.options:
            assert f"{path} --help-all lists all" in re.sub(r"\s+", " ", page)


def test_examples_are_understood() -> None:
    for path, short in SHORT_HELP.items():
        words = shlex.split(short.example)[1:]
        found: Any = command()
        while hasattr(found, "commands"):
            found = found.commands[words.pop(0)]
        assert found.make_context(path, words, resilient_parsing=False) is not None


def test_help_has_groups(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["chat", "--help-all"]) == 0
    page = capsys.readouterr().out
    heads = re.findall(r"^(\w.*):$", page, re.M)
    groups = [f"{name} options" for name in ("Model", "Sampling", "Output", "Advanced")]
    assert heads == ["Example", "Arguments", "Options", *groups]
    parts = re.split(r"^\w.*:$", page, flags=re.M)
    for index, flag in ((4, "--threads N"), (5, "--temperature NUMBER"), (6, "--quiet"), (7, "--dry-base")):
        assert flag in parts[index]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "--temprature", "1"], "did you mean --temperature?"),
        (["chat", "--max_tokens", "3"], "did you mean --max-tokens or"),
        (["chat", "--temp", "1"], "did you mean --temperature?"),
        (["chat", "--max-new-tokens", "1"], "did you mean --max-tokens?"),
        (["chat", "--ctx", "1"], "did you mean --ctx-size or"),
        (["chat", "--thread", "1"], "did you mean --threads?"),
        (["chat", "--verbos"], "did you mean --verbose?"),
        (["chat", "-m", "pebble", "-p", "x"], "use `genai chat MODEL`"),
        (["embed", "--model", "x"], "use `genai embed MODEL`"),
        (["chat", "-p", "x", "--json-schema", '{"type": "object"}'], "write the text to a file, and pass its path"),
        (["chat", "-p", "x", "--grammar", 'root ::= "a"'], "write the text to a file, and pass its path"),
        (["generate", "--xyzzy"], "fix: `genai generate -h` shows the options"),
        (["chat", "What", "is", "this?"], 'genai chat -p "What is this?"'),
        (["chat", "pebble", "Tell me more"], 'genai chat pebble -p "Tell me more"'),
        (["generate", "org/name", "one", "two"], 'genai generate org/name -p "one two"'),
        (["generate", "-n", "x"], "'--max-tokens': a whole number is expected"),
        (["generate", "--top-p", "x"], "'--top-p': a number is expected"),
        (["batch", "a", "-o", "b", "--window", "0"], "'--window': the value must be greater than or equal to 1"),
        (["chat", "-temperature", "0"], "fix: use --temperature"),
        (["chat", "-p", "-seed", "-seed=5"], "genai chat has no option -seed"),
        (["generate", "-n_predict", "5"], "fix: use --max-tokens"),
        (
            ["chat", "-p", "x", "--lora", "."],
            "'.'\n  why: NAME=PATH or NAME=PATH:SCALE is expected\n  fix: name the adapter",
        ),
        (["evalute"], "did you mean `genai eval"),
        (["perplexity"], "did you mean `genai eval`? "),
        (["help"], "did you mean `genai --help`? "),
        (["version"], "did you mean `genai --version`? "),
        (["build"], "Missing argument 'CHECKPOINT'"),
        (["launch"], "Client: codex, claude, opencode or openwebui"),
        (["generate", "-t"], "error: genai generate: Option '-t' requires an argument"),
        (["chat", "--session"], "`genai chat -h` shows"),
        (["chat", "--stats=5"], "`genai chat -h` shows"),
        (["eval", "ppl", "-f"], "`genai eval ppl -h` shows"),
        (["lora", "ls", "--json=1"], "`genai lora ls -h` shows"),
        (["info", "a", "b"], "unexpected extra argument"),
    ],
)
def test_usage_errors_say_what_to_type(arguments: list[str], text: str, capsys: Capture) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(r"^error: .+\n  why: .+\n  fix: .+", captured.err)
    assert text in captured.err


def test_a_group_alone_shows_its_help(capsys: Capture) -> None:
    for arguments in ([], ["bench"], ["eval"]):
        assert run(arguments) == 2
        captured = capsys.readouterr()
        assert "Commands:" in captured.out + captured.err


def test_what_the_system_refuses_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "x" * 5000, "-p", "Hello"]) == 1
    assert "too long" in capsys.readouterr().err
    assert run(["build", ".", "-o", "x" * 5000]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "\n  why: " in shown and "\n  fix: " in shown


def test_options_of_a_comparison_alone(bundled_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(["quantize", str(bundled_folder), "-o", str(tmp_path / "out"), "--max-kld", "0.1"]) != 0
    said = capsys.readouterr().err
    assert (
        "--max-kld 0.1 cannot be used without --compare" in said
        and "why: --max-kld limits" in said
        and "fix: add" in said
    )


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["generate", "-p", "x", "--draft", "nope"], "error: --draft nope: not a model folder", "name of a model"),
        (
            ["generate", "-p", "x", "-c", "4096"],
            "--ctx-size 4096",
            "--ctx-size from 1 to 1024, or leave --ctx-size out",
        ),
        (["chat", "nosuch", "-p", "x"], "error: nosuch: not a model folder", "name of a model"),
        (
            ["generate", "-p", "hi " * 2000],
            "the prompt has ",
            "fix: shorten the prompt; the model supports no larger context\n",
        ),
    ],
)
def test_errors_name_options_and_advise_what_is_possible(
    arguments: list[str], what: str, fix: str, capsys: Capture
) -> None:
    assert run(arguments) != 0
    said = capsys.readouterr().err
    assert what in said and fix in said and "use -p to ask" not in said


def test_an_empty_text_is_named(bundled_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty.txt").touch()
    assert run(["eval", "kld", str(bundled_folder), "-f", str(tmp_path / "empty.txt"), "--other-kv-type", "int8"]) != 0
    assert "empty.txt is empty" in capsys.readouterr().err


def test_errors_name_the_variable_that_gave_the_model(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Only the argument is replaced; the other words of the error stay unchanged."""
    monkeypatch.setenv("GENAI_MODEL", "/no/such/model")
    assert run(["info"]) == 1
    by_variable = capsys.readouterr().err
    assert run(["info", "/no/such/model"]) == 1
    assert by_variable.replace(" (set by GENAI_MODEL)", "", 1) == capsys.readouterr().err != by_variable


def test_a_model_s_variable_is_not_blamed_for_other_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, bundled_folder: Path, tmp_path: Path
) -> None:
    """The variable's value may be a letter that occurs in any word."""
    (tmp_path / "m").symlink_to(bundled_folder)
    monkeypatch.chdir(tmp_path / "m")
    for value, folder in (("m", tmp_path), (".", tmp_path / "m"), ("e", tmp_path), ("model", tmp_path)):
        if not (folder / value).exists():
            (folder / value).symlink_to(bundled_folder)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("GENAI_MODEL", value)
        for wrong in ("--temperature=-1", "--ctx-size=99999", "--lookup-file=/no/file", "--draft=other"):
            assert run(["chat", "-p", "x", wrong]) != 0
            assert "GENAI_MODEL" not in capsys.readouterr().err


def test_errors_name_the_model_s_variable(monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    for value in ("m", ".", "no", "is this a question?", str(tmp_path / "m"), str(tmp_path / "no")):
        monkeypatch.setenv("GENAI_MODEL", value)
        assert run(["chat", "-p", "x"]) == 1
        assert " (set by GENAI_MODEL)\n" in capsys.readouterr().err
    monkeypatch.setenv("GENAI_MODEL", str(tmp_path / "with space"))
    assert run(["serve"]) == 1
    assert f"error: {tmp_path / 'with space'}: not a model folder (set by GENAI_MODEL)" in capsys.readouterr().err
    monkeypatch.setenv("GENAI_MODEL", "m")
    assert run(["bench", "kernels", "--formats"]) == 2
    assert "--formats cannot be used with the model 'm' (set by GENAI_MODEL)" in capsys.readouterr().err
    (tmp_path / "m" / "genai_config.json").write_text("{")
    assert run(["info"]) == 1
    assert "(set by GENAI_MODEL)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "variable", "value", "flag"),
    [
        (["chat", "-p", "x"], "GENAI_CTX_SIZE", "99999", "--ctx-size"),
        (["info"], "GENAI_CTX_SIZE", "99999", "--ctx-size"),
        (["chat", "folder", "-p", "x"], "GENAI_PRECISION", "int3", "--precision"),
        (["chat", "-p", "x"], "GENAI_DRAFT", "/no/draft", "--draft"),
        (["chat", "-p", "x"], "GENAI_DRAFT", "draft", "--draft"),
        (["chat", "-p", "x"], "GENAI_LORA", "a=/no/lora", "--lora"),
        (["chat", "-p", "x"], "GENAI_LORA", "a=lora:0.5", "--lora"),
        (["chat", "-p", "x"], "GENAI_LORA", "lora", "--lora"),
        (["chat", "-p", "x"], "GENAI_LOOKUP_FILE", "no.txt", "--lookup-file"),
        (["chat", "-p", "x"], "GENAI_PREFIX_CACHE", "/proc/x", "--prefix-cache"),
        (["chat", "-p", "x"], "GENAI_JSON_SCHEMA", "no.json", "--json-schema"),
        (["chat", "-p", "x"], "GENAI_JSON_SCHEMA", "{", "--json-schema"),
        (["chat", "-p", "x"], "GENAI_GRAMMAR", "/no/grammar", "--grammar"),
        (["chat", "-p", "x"], "GENAI_REGEX", "(", "--regex"),
        (["generate"], "GENAI_FILE", "no.txt", "--file"),
        (["eval", "ppl"], "GENAI_FILE", "no.txt", "--file"),
        (["bench", "speculation"], "GENAI_FILE", "in.txt no.txt", "--file"),
        (["batch", "in.txt"], "GENAI_OUTPUT", "/no/out", "--output"),
        (["generate", "-p", "x"], "GENAI_TEMPERATURE", "-1", "--temperature"),
        (["generate", "-p", "x"], "GENAI_SAMPLERS", "bad", "--samplers"),
        (["generate", "-p", "x"], "GENAI_SAMPLERS", "top_k;top_k", "--samplers"),
    ],
)
def test_errors_about_what_a_variable_gave_name_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    tmp_path: Path,
    arguments: list[str],
    variable: str,
    value: str,
    flag: str,
) -> None:
    """This includes errors that call the option by its Python name, or that mention only a path."""
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("Hello\n")
    Path("folder").mkdir()
    Path("folder", "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setenv(variable, value)
    assert run(arguments) != 0
    what, _, fix = capsys.readouterr().err.split("\n", 2)
    assert variable in what
    assert f"{flag} overrides the environment variable {variable}" in fix
    monkeypatch.delenv(variable)
    assert run([*arguments, *(f"{flag}={one}" for one in value.split())]) != 0
    assert variable not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "variable", "value", "flag"),
    [
        (["info", "graph.onnx"], "GENAI_DEVICE", "auto", "--device"),
        (["info", "graph.onnx"], "GENAI_CTX_SIZE", "5", "--ctx-size"),
        (["info"], "GENAI_DEVICE", "tpu", "--device"),
        (["info"], "GENAI_KV_TYPE", "int1", "--kv-type"),
        (["info"], "GENAI_CTX_SIZE", "0", "--ctx-size"),
        (["batch", "in.txt", "-o", "out.jsonl"], "GENAI_RAY_WORKERS", "2", "--ray-workers"),
        (["generate", "-p", "x"], "GENAI_LOGPROBS", "2", "--logprobs"),
        (["generate", "-p", "x"], "GENAI_LENGTH_PENALTY", "1.5", "--length-penalty"),
        (["generate", "-p", "x"], "GENAI_LOGIT_BIAS", "x", "--logit-bias"),
        (["generate", "-p", "x"], "GENAI_PREFIX_CACHE_SIZE", "-1", "--prefix-cache-size"),
        (["generate", "-p", "x"], "GENAI_TOP_K", "-1", "--top-k"),
        (["chat", "-p", "x"], "GENAI_CTX_KEEP", "5", "--ctx-keep"),
        (["chat", "-p", "x"], "GENAI_SPECULATE", "no", "--speculate"),
        (["chat", "-p", "x"], "GENAI_SESSION", "/", "--session"),
    ],
)
def test_errors_name_the_variable_that_gave_an_option(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    tmp_path: Path,
    arguments: list[str],
    variable: str,
    value: str,
    flag: str,
) -> None:
    """An error does not name an option that the user did not type. If the option was typed, the error names it."""
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("Hello\n")
    monkeypatch.setenv(variable, value)
    assert run(arguments) == 2
    what, _, fix = capsys.readouterr().err.split("\n", 2)
    assert variable in what and flag not in what
    assert f"{flag} overrides the environment variable {variable}" in fix
    assert run([*arguments, f"{flag}={value}"]) == 2
    assert variable not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["chatt"], "did you mean `genai chat`? "),
        (["download", "x"], "did you mean `genai pull`? "),
        (["xyzzy"], "`genai -h` describes the commands"),
        (["lora", "show"], "did you mean `genai lora info`? "),
        (["lora", "list"], "did you mean `genai lora ls`? "),
    ],
)
def test_unknown_commands(arguments: list[str], fix: str, capsys: Capture) -> None:
    assert run(arguments) == 2
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert f"has no command {next(name for name in reversed(arguments) if name != 'x')!r} why: the commands are" in said
    assert f" fix: {fix}" in said


def test_the_bundled_model_is_not_in_the_cache(capsys: Capture) -> None:
    assert run(["show", "pebble"]) == 1
    assert "fix: `genai info pebble` describes the model" in capsys.readouterr().err
