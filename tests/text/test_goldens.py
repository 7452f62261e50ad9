"""Ids, texts and prompts of every model family equal those of transformers (written by tools/make_text_goldens.py)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from genai.errors import ChatTemplateError
from genai.text.tokenizer import Tokenizer
from tests.text.families import FAMILIES, read

# AutoTokenizer replaces the pipeline of these files by its class's own; this toolkit follows the file.
REBUILT = {"llama2": "leading spaces and text behind special tokens", "starcoder2": "numbers digit by digit"}


TEXTS = read("texts")


def test_every_family_has_a_golden() -> None:
    assert len(FAMILIES) == 18


def test_ids(family: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, golden = family
    assert [tokenizer.encode(text).tolist() for text in TEXTS["torture"]] == golden["ids"]


def test_special_tokens_around_the_text(family: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, golden = family
    tokenizer.update_options(add_special_tokens=True)
    assert tokenizer.encode("Hello").tolist() == golden["hello_with_specials"]
    tokenizer.update_options(add_special_tokens=False)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_texts_whole_and_streamed(family: tuple[Tokenizer, dict[str, Any]], skip_special_tokens: bool) -> None:
    tokenizer, golden = family
    tokenizer.update_options(skip_special_tokens=skip_special_tokens)
    shown = zip(golden["ids"], TEXTS["torture"], golden["decoded"], golden["decoded_with_special"], strict=True)
    for ids, text, decoded, with_special in shown:
        expected = text if decoded is None else decoded
        if not skip_special_tokens and with_special is not None:
            expected = with_special
        assert tokenizer.decode(ids) == expected
        stream = tokenizer.create_stream()
        assert "".join([*(stream.decode(id_) for id_ in ids), stream.flush()]) == expected
    tokenizer.update_options(skip_special_tokens=True)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_random_ids_stream_as_they_decode(family: tuple[Tokenizer, dict[str, Any]], skip_special_tokens: bool) -> None:
    tokenizer, _ = family
    tokenizer.update_options(skip_special_tokens=skip_special_tokens)
    rng = random.Random(3)
    for _ in range(150):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))]
        stream = tokenizer.create_stream()
        pieces = [*(stream.decode(id_) for id_ in ids), stream.flush()]
        assert "".join(pieces) == tokenizer.decode(ids), ids
    tokenizer.update_options(skip_special_tokens=True)


def test_prompts(family: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, golden = family
    for name, expected in golden["prompts"].items():
        options = dict(TEXTS["conversations"][name])
        options.setdefault("add_generation_prompt", False)
        if expected is None:
            with pytest.raises(ChatTemplateError):
                tokenizer.apply_chat_template(**options)
        else:
            assert tokenizer.apply_chat_template(**options) == expected, name


def test_prompts_of_named_templates(family: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, golden = family
    everything = {**TEXTS["conversations"]["tool call"], **TEXTS["conversations"]["documents"]}
    for name, expected in golden["named_prompts"].items():
        assert tokenizer.apply_chat_template(**everything, template_name=name) == expected


def test_where_transformers_leaves_the_file_behind() -> None:
    """No other family has such texts, and the comparison with the file's own pipeline hides none."""
    assert {name for name in FAMILIES if read(name)["rebuilt"]} == set(REBUILT)
    for name in REBUILT:
        golden = read(name)
        assert all(golden["ids"][int(index)] != other for index, other in golden["rebuilt"].items())
