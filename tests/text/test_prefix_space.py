"""add_prefix_space of tokenizer_config.json against tokenizer.json: the ids and texts of transformers 5.24.

prefix_space.json stores each case's files, and the results of AutoTokenizer for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.errors import TokenizerError
from genai.text.backend import load_tokenizer
from genai.text.tokenizer import Tokenizer
from tests.text.prefix_files import KINDS

GOLDENS = json.loads((Path(__file__).parent / "prefix_space.json").read_text(encoding="utf-8"))
# Without the key, transformers applies a default of these classes that differs between its versions.
NO_DEFAULT = (
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "BlenderbotTokenizer",
    "LayoutLMv3Tokenizer",
)


def write(folder: Path, case: dict[str, Any]) -> Path:
    KINDS[case["kind"]](case["adds"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(case["config"]))
    if "model" in case:
        (folder / "config.json").write_text(json.dumps(case["model"]))
    return folder


def is_kept(case: dict[str, Any]) -> bool:
    return "add_prefix_space" not in case["config"] and case["config"].get("tokenizer_class") in NO_DEFAULT


def name_of(case: dict[str, Any]) -> str:
    words = [case["kind"], case["adds"], *case["config"].values(), *case.get("model", {}).values()]
    return "-".join(map(str, words))


@pytest.mark.parametrize("case", [case for case in GOLDENS["cases"] if not is_kept(case)], ids=name_of)
def test_as_in_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    backend = load_tokenizer(write(tmp_path, case)).backend
    ids = [backend.encode(text, add_special_tokens=False).ids for text in GOLDENS["texts"]]
    assert ids == case["ids"]
    assert [backend.decode(row) for row in ids] == case["decoded"]


@pytest.mark.parametrize("case", [case for case in GOLDENS["cases"] if is_kept(case)], ids=name_of)
def test_without_the_key_the_file_decides(case: dict[str, Any], tmp_path: Path) -> None:
    backend, unchanged = load_tokenizer(write(tmp_path, case)).backend, KINDS[case["kind"]](case["adds"])
    for text in GOLDENS["texts"]:
        assert backend.encode(text).ids == unchanged.encode(text).ids


@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_other_values_are_refused(value: object, tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": value}
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(write(tmp_path, {"kind": "byte_level", "adds": True, "config": config}))
    assert "add_prefix_space" in caught.value.what and "true or false" in caught.value.why and caught.value.fix


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
def test_streams_decode_as_the_changed_rule(kind: str, adds: bool, tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": adds}
    tokenizer = Tokenizer(write(tmp_path, {"kind": kind, "adds": not adds, "config": config}))
    ids = tokenizer.encode("b a b!").tolist()
    stream = tokenizer.create_stream()
    assert "".join([*map(stream.decode, ids), stream.flush()]) == tokenizer.decode(ids)


def test_python_sees_the_rule(tmp_path: Path) -> None:
    rules = {
        "kind": "prepend",
        "adds": True,
        "config": {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
    }
    tokenizer = genai.Tokenizer(write(tmp_path, rules))
    assert tokenizer.decode(tokenizer.encode("b a")) == "b a"
    assert tokenizer.decode(tokenizer.encode(" b")) == " b"
