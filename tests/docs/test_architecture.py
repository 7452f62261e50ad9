"""The pages about the architecture agree with the code: the call path, the glossary, the places to extend."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tools.source_links import LINK, with_lines

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
PATH = (DOCS / "reference" / "call-path.md").read_text(encoding="utf-8")
EXTEND = (DOCS / "how-to" / "extend.md").read_text(encoding="utf-8")


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without backticks."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


WALK = table(PATH, "One token, from `genai chat` to the kernel and back")


def called(file: str, function: str) -> set[str]:
    """Return the names of everything that a function calls."""
    node: ast.AST = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for name in function.split("."):
        kinds = ast.ClassDef | ast.FunctionDef
        (node,) = (one for one in ast.iter_child_nodes(node) if isinstance(one, kinds) and one.name == name)
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {one.attr for one in calls if isinstance(one, ast.Attribute)} | {
        one.id for one in calls if isinstance(one, ast.Name)
    }


def test_every_function_calls_the_next() -> None:
    wrong = [
        f"{file}: {function} does not call {name}"
        for file, function, name, _ in WALK
        if name not in called(file, function)
    ]
    for (file, _, name, then), (_, following, *_) in pairwise(WALK):
        owner, _, own = following.rpartition(".")
        if not then and name not in (own, *([owner] if own == "__init__" else [])):
            wrong.append(f"{file}: {name} is not {following}")
    assert WALK and not wrong, wrong


def test_the_glossary_says_the_nearest_word() -> None:
    words = table(PAGE, "Glossary")
    assert words and all(len(row) == 3 and all(row) for row in words)
    assert len({word for word, *_ in words}) == len(words)


def test_what_is_to_be_added_names_places_that_exist() -> None:
    text = EXTEND.split("\n## How to add …\n")[1].split("\n## ")[0]
    for what in (
        "an activation or another row-wise function",
        "a session operator",
        "a model architecture",
        "a device",
        "a quantised format",
        "a sampler",
        "a CLI flag",
        "a reply format",
    ):
        paragraph = text.split(f"**{what}**: ")[1].split("\n\n**")[0]
        places = re.findall(r"`((?:genai|kernels|quant|cli|tests)/[\w/.]*)`", paragraph)
        assert places and all((ROOT / place).exists() for place in places), (what, places)


def test_the_files_of_a_path_are_those_that_it_passes() -> None:
    section = PATH.split("\n## The files that it passes\n")[1].split("\n## ")[0]
    traced = subprocess.run(
        [sys.executable, "-m", "tools.trace_path"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("one decode step")
    for rows, path in zip(re.findall(r"(?m)^\|---\|---\|\n((?:\|.*\n)+)", section), traced, strict=True):
        named = re.findall(r"`([\w/]+\.py)`", rows)
        passed = re.findall(r"(?m)^  ([\w/]+\.py):", path)
        assert passed
        assert not [file for file in passed if not any(f"/{file}".endswith(f"/{name}") for name in named)]
        assert not [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in passed)]


def test_links_to_source_lines_lead_to_the_definitions() -> None:
    pages = [(page, page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")]
    assert [page.name for page, text in pages if with_lines(text, page.parent) != text] == []
    assert sum(len(LINK.findall(text)) for _, text in pages) >= 10
    with pytest.raises(ValueError, match="no definition of Nothing"):
        with_lines("[`Nothing`](../genai/errors.py#L1)", DOCS)
