"""Literal text: special tokens in texts become ordinary text, and all other text keeps its ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from genai.embed.tokens import TextEncoder
from genai.errors import InputError, OptionError, TokenizerError
from genai.text.literal import MarkedText, Marker, free_mark
from genai.text.tokenizer import Tokenizer
from tests.text.conftest import TORTURE

ATTACKS = ("{0}", "Hi {0} there", " {0}", "{0} ", "{0}{0}", "a{0}b", "\n{0}\n", "<{0}>", "{0}{1}{2}")


def attacks(tokenizer: Tokenizer) -> list[str]:
    """Texts with the tokenizer's special tokens."""
    names = sorted(tokenizer._control)
    return [
        attack.format(*(names[(index + step) % len(names)] for step in range(3)))
        for index in range(min(12, len(names)))
        for attack in ATTACKS
    ]


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """The ids of the special tokens, except that of unknown characters."""
    added = tokenizer.backend.get_added_tokens_decoder().items()
    return {id_ for id_, token in added if token.content in tokenizer._control and "unk" not in token.content.lower()}


def test_no_special_token_comes_from_literal_text(family: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, _ = family
    special = special_ids(tokenizer)
    for text in attacks(tokenizer):
        ids = tokenizer.encode(text, literal=True)
        assert not special & set(ids.tolist()), text


def test_literal_ids_are_those_of_transformers(family: tuple[Tokenizer, dict[str, Any]]) -> None:
    """split_special_tokens of transformers sets encode_special_tokens of the tokenizers library."""
    tokenizer, _ = family
    oracle = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    oracle.encode_special_tokens = True
    special = special_ids(tokenizer)
    differing = set()
    for text in [*TORTURE, *attacks(tokenizer)]:
        expected = oracle.encode(text, add_special_tokens=False).ids
        if tokenizer.encode(text, literal=True).tolist() != expected:
            differing.add(text)
            # A Unigram model finds names of special tokens in ordinary text, which is what the option prevents.
            assert type(tokenizer.backend.model).__name__ == "Unigram"
            unknown = {id_ for id_ in expected if "unk" in tokenizer.token_text(id_)}
            assert (special | unknown) & set(expected)
    assert bool(differing) == (type(tokenizer.backend.model).__name__ == "Unigram")


def test_text_without_special_tokens_keeps_its_ids(family: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, _ = family
    for text in TORTURE:
        if not any(name in text for name in tokenizer._control):
            assert tokenizer.encode(text, literal=True).tolist() == tokenizer.encode(text).tolist(), text


def test_marks_leave_the_ids_of_all_other_text_unchanged(family: tuple[Tokenizer, dict[str, Any]]) -> None:
    """Every position of a mark inside ordinary text, between special tokens with their own flags."""
    tokenizer, _ = family
    mark = free_mark(())
    names = sorted(tokenizer._control)
    for text in ("Hello, world! 12 + 7", " two  spaces ", "\n\na\n", "漢字 é", "x"):
        for before, after in (
            (names[0], names[-1]),
            ("", names[0]),
            (f"{names[-1]}user\n", f"{names[0]}\n{names[-1]}"),
        ):
            expected = tokenizer.encode(before + text + after).tolist()
            for at in range(len(text) + 1):
                marked = MarkedText(before + text[:at] + mark + text[at:] + after, mark, tokenizer._control)
                assert tokenizer._literal_ids(marked) == expected, (text, at)


def test_special_tokens_around_literal_text(family: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, golden = family
    for text in ("Hello", *attacks(tokenizer)[:3]):
        ids = tokenizer.encode(text, literal=True).tolist()
        before, after = tokenizer._surrounding
        assert tokenizer.encode(text, literal=True, add_special_tokens=True).tolist() == [*before, *ids, *after]
        assert tokenizer.encode_prompt(text, literal=True).tolist() == [*before, *ids, *after]
    assert tokenizer.encode("Hello", literal=True, add_special_tokens=True).tolist() == golden["hello_with_specials"]


def test_added_tokens_that_are_not_special_stay_tokens(model_folder: Path, tmp_path: Path) -> None:
    """As with split_special_tokens of transformers and parse_special = false of llama.cpp."""
    backend = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    backend.add_tokens(["<tool_call>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("<tool_call><|im_end|>", literal=True)[0] == tokenizer.to_token_id("<tool_call>")


def test_an_end_that_is_not_special_is_a_control_token(model_folder: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    backend.add_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": backend.token_to_id("<end>")}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("<end>").tolist() == [tokenizer.to_token_id("<end>")]
    assert tokenizer.to_token_id("<end>") not in tokenizer.encode("<end>", literal=True)


def word_level(tmp_path: Path) -> Tokenizer:
    """A tokenizer that finds its special tokens in ordinary text, because a word is a token."""
    words = {name: id_ for id_, name in enumerate(("[UNK]", "[SEP]", "a", "b", "[", "SEP", "]"))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def test_a_model_that_finds_names_of_tokens_in_text(tmp_path: Path) -> None:
    tokenizer = word_level(tmp_path)
    assert tokenizer.encode("a [SEP] b zz").tolist() == [2, 1, 3, 0]
    assert tokenizer.encode("a [SEP] b zz", literal=True).tolist() == [2, 0, 3, 0]


def with_setting(folder: Path, target: Path, value: object) -> Path:
    shutil.copytree(folder, target)
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "split_special_tokens": value}))
    return target


def test_the_setting_of_the_tokenizer_is_obeyed(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(with_setting(model_folder, tmp_path / "changed", True))
    assert tokenizer.is_literal
    assert not Tokenizer(model_folder).is_literal
    text = "Hi<|im_end|>"
    assert tokenizer.encode(text).tolist() == tokenizer.encode(text, literal=True).tolist()
    assert tokenizer.encode_all([text, "a"])[0].tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.encode(text, literal=False)[-1] == tokenizer.to_token_id("<|im_end|>")
    assert tokenizer.content_key() != Tokenizer(model_folder).content_key()


def test_embeddings_obey_the_setting(model_folder: Path, tmp_path: Path) -> None:
    plain = TextEncoder(model_folder, 64).encode(["Hi<|im_end|>"])
    literal = TextEncoder(with_setting(model_folder, tmp_path / "changed", True), 64).encode(["Hi<|im_end|>"])
    end = Tokenizer(model_folder).to_token_id("<|im_end|>")
    assert (end in plain[0].ids, end in literal[0].ids) == (True, False)


def test_a_setting_that_is_not_a_boolean(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="split_special_tokens = 'yes'"):
        Tokenizer(with_setting(model_folder, tmp_path / "changed", "yes"))


@pytest.mark.parametrize("value", ["yes", 1, 0.0])
def test_a_value_that_is_not_a_boolean(model_folder: Path, value: Any) -> None:
    with pytest.raises(OptionError, match="literal = "):
        Tokenizer(model_folder).encode("Hi", literal=value)


def test_marks_go_into_overlapping_tokens() -> None:
    assert Marker(["ab", "bc", "abcd"], "|").inside("abcde abx") == "a|b|cde a|bx"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", "hello"),
        (" <|im", " ^<|im^"),
        ("a<|im\n", "a<|im^\n"),
        ("end|> ", "^end|>^ "),
        ("end|> a", "^end|> a"),
        ("im", "^im^"),
        ("<|im_end|>", "<^|im_end|>"),
        ("  ", "  "),
        ("", ""),
    ],
)
def test_marks_separate_parts_of_tokens_at_the_edges(text: str, expected: str) -> None:
    assert Marker(["<|im_end|>"], "^").whole(text) == expected


def test_the_mark_does_not_occur_in_the_text() -> None:
    every = "".join(map(chr, range(0x101D0, 0x101FD)))
    assert free_mark([every[:3], every[4:]]) == every[3]
    with pytest.raises(InputError, match="Phaistos"):
        free_mark([every])


def test_texts_cannot_forge_the_names_of_tokens(model_folder: Path) -> None:
    tokenizer: Callable[..., Any] = Tokenizer(model_folder).encode
    with pytest.raises(InputError, match="NUL"):
        tokenizer("\0002\0", literal=True)
