"""Commands, options and names in messages exist: all texts are compared with the command line and the API."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import genai
from cli.chat.commands import COMMANDS
from genai.cli.app import command
from tools.command_table import _leaves

ROOT = Path(__file__).resolve().parents[1]
HOLE = "…"  # in place of a value that is only known when the message is made
# Options of other programs: pip, hf, ray, llama.cpp's converter; and names of options in other programs.
OTHERS = {"--force-reinstall", "--local-dir", "--head", "--bigendian", "--version"}
FILES_OF_OTHER_NAMES = {
    "cli/help_page.py",
    "genai/server/metrics.py",
    "genai/engine/sampling/ecma_regex.py",
    "genai/common/svg.py",
}
# For files whose messages concern certain commands: these commands. A bare option must exist on one of them.
COMMANDS_OF = {
    "genai/quantize/": ["quantize", "quantize-onnx"],
    "genai/llm/batch/": ["batch"],
    "genai/embed/": ["embed", "rerank", "build"],
    "genai/session/": ["run"],
    "genai/evaluate/": ["eval ppl", "eval kld", "eval diff", "eval tasks"],
    "genai/convert/": ["build", "chat", "generate", "batch", "pull", "info"],
    "genai/lora/": ["chat", "generate", "batch", "lora check", "lora convert", "lora merge", "lora info"],
    "genai/models/": ["chat", "generate", "batch", "info", "run", "eval kld"],
    "genai/doctor/": ["doctor", "chat"],
    "genai/bench/": ["bench decode", "bench session", "bench embed", "bench lora", "bench startup", "bench serve"],
}
# Keyword arguments of other packages, and attributes of ONNX nodes and of files, that messages write as name=value.
OTHER_ARGUMENTS = {"safe_serialization", "errors", "swiglu_fusion", "group", "offset_group", "mode", "spatial", "shape",
                   "min_gram_length", "max_gram_length", "max_skip_count", "type", "bytes"}  # fmt: skip


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a module other than docstrings, with `HOLE` for values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    within: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            within.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            within |= {id(part) for part in node.values}
            parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
            yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            yield node.lineno, node.value


@cache
def _messages() -> list[tuple[str, int, str]]:
    """All texts of the packages that consist of several words: file, line and text."""
    paths = [
        path for folder in ("genai", "cli", "kvcache", "quant", "kernels") for path in (ROOT / folder).rglob("*.py")
    ]
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    names = {name: path for name, path in names.items() if not re.match("genai/(cli|kernels|kvcache|quant)/", name)}
    return [(name, line, text) for name, path in sorted(names.items()) for line, text in _texts(path) if " " in text]


@cache
def _options() -> dict[str, set[str]]:
    """The options of each command."""
    found = {}
    for name, one in _leaves(command(), ""):
        names = {option for parameter in one.params for option in (*parameter.opts, *parameter.secondary_opts)}
        found[name] = names | {"--help", "--help-all"}
    return found


def test_commands_in_messages_exist() -> None:
    """A command in backquotes has the options that follow it."""
    options, missing = _options(), []
    for file, line, text in _messages():
        for shown in re.findall(r"`genai ([^`]+)`", text):
            words = shown.split()
            name = next((one for one in (" ".join(words[:2]), words[0]) if one in options), None)
            if name is None:
                if not any(one.startswith(f"{words[0]} ") for one in options) or len(words) > 1:
                    missing.append(f"{file}:{line}: genai {shown}")
                continue
            missing += [
                f"{file}:{line}: {option} of genai {name}"
                for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", shown)
                if option not in options[name]
            ]
    assert not missing, "\n".join(missing)


def test_options_in_messages_exist() -> None:
    """An option outside a command in backquotes is an option of one of the commands that the message concerns."""
    options, missing, seen = _options(), [], 0
    known = set().union(*options.values()) | OTHERS
    for file, line, text in _messages():
        if file in FILES_OF_OTHER_NAMES:
            continue
        fitting = next((names for folder, names in COMMANDS_OF.items() if file.startswith(folder)), None)
        allowed = known if fitting is None else OTHERS.union(*(options[name] for name in fitting))
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", re.sub("`[^`]*`", "", text)):
            seen += 1
            if option not in allowed:
                missing.append(f"{file}:{line}: {option}: {text[:80]}")
    assert not missing, "\n".join(missing)
    assert seen > 100


def test_commands_of_chats_in_messages_exist() -> None:
    missing = [
        f"{file}:{line}: {name}"
        for file, line, text in _messages()
        if file.startswith(("cli/chat/", "genai/llm/"))
        for name in re.findall(r"(?<![\w/.`<…*])(/[a-z]{3,})(?=[ ,;.:]|$)", text)
        if name not in COMMANDS and name not in ("/exit", "/quit")
    ]
    assert not missing, "\n".join(missing)


def _resolve(path: str) -> bool:
    """True if a name such as genai.models.folders exists."""
    parts = path.split(".")
    found: Any = genai
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:index]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def test_names_of_the_library_in_messages_exist() -> None:
    missing = []
    for file, line, text in _messages():
        paths = re.findall(r"(?<![\w./`])(genai(?:\.[A-Za-z_]\w*)+)(?![\w/]|\.(?:md|py))", text)
        missing += [
            f"{file}:{line}: {path}" for path in paths if not path.endswith((".md", ".py")) and not _resolve(path)
        ]
        for owner, name in re.findall(r"(?<![\w.])(LLM|Tokenizer|Embedder|Reranker|Model)\.([a-z_]+)", text):
            if not hasattr(getattr(genai, owner), name):
                missing.append(f"{file}:{line}: {owner}.{name}")
    assert not missing, "\n".join(missing)


@cache
def _arguments() -> set[str]:
    """The arguments of all functions, the fields of all classes, and the attributes of all calls in the packages."""
    found: set[str] = set(genai.SamplingParams.__dataclass_fields__)
    for path in (path for folder in ("genai", "cli") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                found |= {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                found |= {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
            if isinstance(node, ast.ClassDef):
                found |= {
                    one.target.id
                    for one in node.body
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                }
    return found


def test_arguments_in_messages_exist() -> None:
    known, missing = _arguments() | OTHER_ARGUMENTS, []
    options = set(getattr(genai.ModelOptions, "__annotations__", ()))
    for file, line, text in _messages():
        if re.search(r"<.*>|\n", text) or file in FILES_OF_OTHER_NAMES:  # markup and code
            continue
        outside = re.sub(r"--\S+ \S+", "", text)
        names = re.findall(r"""(?<![\w.`&?/-])([a-z_]{3,})=(?=[A-Z"'0-9\[…])""", outside)
        missing += [f"{file}:{line}: {name}=: {text[:80]}" for name in names if name not in known]
        for owner, inside in re.findall(r"(?<![\w.])(LLM|Embedder|Reranker|Model)\((?!…)([^)]*)\)", text):
            taken = set(inspect.signature(getattr(genai, owner)).parameters) | options
            names = re.findall(r"([a-z_]+)=", inside)
            missing += [f"{file}:{line}: {owner}({name}=)" for name in names if name not in taken]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("text", ["genai.LLM", "genai.models.folders.bundled_adapter"])
def test_names_that_exist_resolve(text: str) -> None:
    assert _resolve(text) and not _resolve(f"{text}_none")
