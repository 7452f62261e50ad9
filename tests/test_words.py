"""One meaning per word: no class name stands for two things, and words that were given up do not return."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    path for room in ("kernels", "quant", "kvcache", "genai", "cli") for path in sorted((ROOT / room).rglob("*.py"))
]
# What the field calls thread pool, program, barrier and binding; decode and prefill; logits rows; cu_seqlens_q.
GIVEN_UP = {"walker", "crew", "team", "tape", "replay", "hole", "few", "wanted_rows", "query_start"}
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def classes(tree: ast.AST) -> list[str]:
    """Classes, those that a call of IntEnum makes included."""
    made = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Enum")]
    return made + [str(ast.literal_eval(node.args[0])) for node in calls if len(node.args) > 1]


def given_up(name: str) -> set[str]:
    """The words of an identifier that were given up, in singular or plural; MANY as the name of a kind of rows."""
    parts = [part.lower() for part in PARTS.findall(name)]
    pairs = [f"{first}_{second}" for first, second in pairwise(parts)]
    found = {word for word in (*parts, *pairs) if word in GIVEN_UP or word.removesuffix("s") in GIVEN_UP}
    return found | ({"many"} if parts[:1] == ["many"] else set())


def test_no_class_name_stands_for_two_things() -> None:
    found = defaultdict(list)
    for path in FILES:
        for name in classes(ast.parse(path.read_text(encoding="utf-8"))):
            if not name.startswith("_"):
                found[name].append(str(path.relative_to(ROOT)))
    assert len(found) > 100
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_words_that_were_given_up_do_not_return() -> None:
    wrong = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        names = {
            token.string
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.NAME
        }
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in sorted({*names, path.stem}) if given_up(name)]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "name", ["Walkers", "_tape", "FEW_SPLITS", "ManyArguments", "many", "wanted_rows", "QueryStart"]
)
def test_words_that_were_given_up_are_seen(name: str) -> None:
    assert given_up(name)


@pytest.mark.parametrize(
    "name", ["fewer", "steamed", "how_many", "too_many_nodes", "whole", "wanted", "query", "taped"]
)
def test_other_words_are_not(name: str) -> None:
    assert not given_up(name)


def test_classes_are_seen() -> None:
    assert classes(ast.parse('class A: pass\nB = IntEnum("B", "ONE TWO", start=0)\ndef f():\n    class C: pass')) == [
        "A",
        "C",
        "B",
    ]
