"""What is made for a model long after it was loaded reads the files that the model was loaded with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.engine.sampling.grammar import Grammar
from genai.errors import ConfigError, ModelFolderError, TokenizerError, VocabularyMismatchError
from genai.evaluate.divergence import check_same_vocabulary
from genai.evaluate.scored_text import encode_prompt
from genai.evaluate.values import onnxruntime_values
from genai.models import side_files
from genai.models.side_files import LoadedFolder, SideFiles
from genai.text.sources.choosing import FORMATS, PATTERNS
from genai.text.tokenizer import Tokenizer
from genai.text.vocabulary import guidance_of

TEXT = "Luna has a red ball. Tom has a blue kite."
MESSAGES = [{"role": "user", "content": "Hi"}]


def replace(path: Path, content: str) -> None:
    """Replace a file by renaming, as tools do that never leave half a file."""
    beside = path.with_name("beside")
    beside.write_text(content)
    beside.replace(path)


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    replace(path, json.dumps(change(json.loads(path.read_text()))))


def rotated(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer with other ids for its ordinary tokens."""
    vocab = tokenizer["model"]["vocab"]
    special = {one["content"] for one in tokenizer["added_tokens"]}
    names = [name for name in vocab if name not in special]
    ids = [vocab[name] for name in names]
    vocab |= dict(zip(names, [*ids[1:], ids[0]], strict=True))
    return tokenizer


def change_all(folder: Path) -> None:
    """Replace every side file, and the configuration."""
    edited(folder / "tokenizer.json", rotated)
    replace(folder / "chat_template.jinja", "another template")
    replace(folder / "generation_config.json", '{"max_new_tokens": 1, "eos_token_id": 7}')
    replace(folder / "tokenizer_config.json", '{"bos_token": "<another>", "chat_template": "a third template"}')
    edited(folder / "genai_config.json", lambda config: {**config, "model": {**config["model"], "eos_token_id": 7}})


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": change_all,
    "deleted": shutil.rmtree,
    "moved": lambda folder: folder.rename(folder.with_name("elsewhere")),
}


@pytest.fixture
def folder(bundled_folder: Path, tmp_path: Path) -> Path:
    made = Path(shutil.copytree(bundled_folder, tmp_path / "m"))
    (made / "generation_config.json").write_text('{"max_new_tokens": 9}')
    return made


def facts(tokenizer: Tokenizer) -> list[Any]:
    return [
        tokenizer.encode(TEXT).tolist(),
        tokenizer.eos_token_ids.tolist(),
        tokenizer.bos_token_id,
        tokenizer.apply_chat_template(MESSAGES),
        tokenizer.content_key(),
        tokenizer.templates_key(),
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_tokenizers_and_requests_made_later(folder: Path, change: str) -> None:
    with genai.LLM(folder, threads=1, quiet=True) as llm:
        expected, defaults = facts(llm.tokenizer), llm.params()
        (reply,) = llm.generate(TEXT, temperature=0)
    with genai.Model(folder, threads=1, quiet=True) as model:
        CHANGES[change](folder)
        assert facts(Tokenizer(model)) == expected
        assert facts(genai.Tokenizer(model)) == expected
        np.testing.assert_array_equal(encode_prompt(model, TEXT), expected[0])
        grammar = guidance_of(model).matcher(Grammar("choice", json.dumps([TEXT])))  # loads a tokenizer of its own
        assert grammar.num_allowed(expected[0]) == len(expected[0])
        with genai.LLM(model) as llm:
            assert facts(llm.tokenizer) == expected and llm.params() == defaults
            assert llm.generate(TEXT, temperature=0)[0].token_ids == reply.token_ids


def test_a_conversation_keeps_its_template(folder: Path) -> None:
    with genai.LLM(folder, threads=1, quiet=True) as llm:
        prompt = llm.render("Hi")
        change_all(folder)
        assert llm.render("Hi") == prompt
        assert genai.Tokenizer(folder).apply_chat_template(MESSAGES) == "another template"


def test_the_engine_of_onnxruntime_genai(folder: Path) -> None:
    """It loads its tokenizer when a stop string needs it."""
    ids = genai.Tokenizer(folder).encode(TEXT)
    with genai.Model(folder, threads=1, quiet=True) as model:
        change_all(folder)
        engine = genai.Engine(model)
        stream = engine._stream(ids[:-1])
        assert stream.decode(int(ids[-1])) == "."


def test_drafts_and_comparisons(folder: Path, tmp_path: Path) -> None:
    """Two loads of one path have different vocabularies if the files were replaced in between."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    with genai.Model(folder, threads=1, quiet=True) as first, genai.Model(other, threads=1, quiet=True) as second:
        assert first.loaded_folder.same_as(second.loaded_folder)
        edited(folder / "tokenizer.json", rotated)
        edited(other / "tokenizer.json", rotated)
        check_same_vocabulary(first, second)
        with genai.Model(folder, threads=1, quiet=True) as third:
            with pytest.raises(VocabularyMismatchError, match=r"token \d+ is"):
                check_same_vocabulary(first, third)
            with (
                pytest.raises(VocabularyMismatchError, match="the draft model has a different vocabulary"),
                genai.LLM(first, speculation=genai.Speculation(draft=folder)),
            ):
                pass
            with genai.Model(other, threads=1, quiet=True) as fourth:
                check_same_vocabulary(third, fourth)


def test_values_of_a_graph_that_was_replaced_are_refused(folder: Path) -> None:
    pytest.importorskip("onnxruntime")
    with genai.Model(folder, threads=1, quiet=True) as model:
        graph = (folder / "model.onnx").read_bytes()
        (folder / "new").write_bytes(graph + b"\x72\x00")
        (folder / "new").replace(folder / "model.onnx")
        with pytest.raises(ModelFolderError, match="was replaced after the model was loaded"):
            onnxruntime_values(model, np.arange(3, 9), {"logits"})


def test_a_tokenizer_in_a_folder_of_its_own(folder: Path) -> None:
    (folder / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).rename(folder / "words" / name)
    edited(
        folder / "genai_config.json", lambda config: {**config, "model": {**config["model"], "tokenizer_dir": "words"}}
    )
    expected = facts(Tokenizer(folder))
    with genai.Model(folder, threads=1, quiet=True) as model:
        edited(folder / "words" / "tokenizer.json", rotated)
        replace(folder / "words" / "chat_template.jinja", "another template")
        assert facts(Tokenizer(model)) == expected
        with genai.LLM(model) as llm:
            assert llm.params().max_tokens == 9
    edited(folder / "genai_config.json", lambda config: {**config, "model": {**config["model"], "tokenizer_dir": ".."}})
    with genai.Model(folder, threads=1, quiet=True) as model, pytest.raises(ConfigError, match="tokenizer_dir"):
        Tokenizer(model)


def test_a_file_that_cannot_be_read_fails_when_it_is_needed(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"\xff")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with genai.Model(folder, threads=1, quiet=True) as model:
        shutil.rmtree(folder)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: the file is not UTF-8 text"):
            Tokenizer(model)


def test_a_device_among_the_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    files = SideFiles(tmp_path).keep()
    with pytest.raises(TokenizerError, match="cannot be read") as raised:
        files.data("tokenizer.json")
    assert "pipe or a device" in raised.value.why
    assert files.data("config.json") is None and not files.is_file("tokenizer.json")


def test_files_that_are_kept(tmp_path: Path) -> None:
    """All files that a tokenizer may read, but other formats only without a tokenizer.json."""
    (tmp_path / "additional_chat_templates").mkdir()
    names = [
        "tokenizer.model",
        "a.tiktoken",
        "merges.txt",
        "tokenizer_config.json",
        "additional_chat_templates/a.jinja",
    ]
    for name in (*names, "model.onnx", "README.md"):
        (tmp_path / name).write_text(name)
    kept = SideFiles(tmp_path).keep()
    assert kept.names("*") == sorted(names) and kept.names("additional_chat_templates/*.jinja") == names[-1:]
    assert [kept.data(name) for name in names] == [name.encode() for name in names]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert SideFiles(tmp_path).keep().names("*") == sorted({"tokenizer.json", *names[3:]})
    assert kept.data("tokenizer.json") is None
    assert not kept.same_as(SideFiles(tmp_path).keep()) and not kept.same_as(SideFiles(tmp_path))


def test_every_format_is_kept() -> None:
    assert set(PATTERNS) == {side_files.TOKENIZER_NAME, *side_files.OTHER_FORMATS}
    assert {pattern for one in FORMATS for pattern in one.patterns} <= set(side_files.OTHER_FORMATS)


def test_a_configuration_that_changes_later(folder: Path) -> None:
    config = genai.Config(str(folder))
    loaded = LoadedFolder.read(config)
    config.overlay('{"model": {"eos_token_id": 7}}')
    assert Tokenizer(config).eos_token_ids.tolist() == [7]
    assert Tokenizer(loaded).eos_token_ids.tolist() != [7]
