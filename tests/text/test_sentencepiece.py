"""SentencePiece models: ids and texts equal to sentencepiece's, options of the folder, malformed files."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from genai.errors import TokenizerError
from genai.text.sources.parts import ModelFormatError
from genai.text.sources.sentencepiece import parse_model, tokenizer_json
from genai.text.tokenizer import Tokenizer

GOLDENS = Path(__file__).parent / "goldens"
MODELS = sorted(path.stem for path in (GOLDENS / "sentencepiece").glob("*.model"))
TEXTS = json.loads((GOLDENS / "texts.json").read_text(encoding="utf-8"))["torture"]
EXPECTED = json.loads((GOLDENS / "sentencepiece.json").read_text(encoding="utf-8"))


def make_folder(folder: Path, model: str | bytes, **config: Any) -> Path:
    data = (GOLDENS / "sentencepiece" / f"{model}.model").read_bytes() if isinstance(model, str) else model
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [{}, {"legacy": False}, {"legacy": True}])
@pytest.mark.parametrize("model", MODELS)
def test_ids_and_texts_equal_sentencepiece(tmp_path: Path, model: str, config: dict[str, Any]) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path, model, **config))
    golden = EXPECTED[model]
    compared = 0
    for text, ids, decoded, has_unknown in zip(TEXTS, golden["ids"], golden["decoded"], golden["unknown"], strict=True):
        if ids is None:
            continue
        if text.startswith("▁") and config != {"legacy": True} and model in ("unigram", "unigram_rules"):
            # The one known difference: a mark in the text itself is taken for the prefix.
            assert tokenizer.encode(text).tolist() == ids[1:]
            continue
        assert tokenizer.encode(text).tolist() == ids, text
        stream = tokenizer.create_stream()
        whole = tokenizer.decode(ids)
        assert "".join([*map(stream.decode, ids), stream.flush()]) == whole
        if not has_unknown:
            compared += 1
            assert whole == (text if decoded is None else decoded)
    assert compared > 5


def test_the_prefix_behind_special_tokens(tmp_path: Path) -> None:
    once = Tokenizer(make_folder(tmp_path, "llama", legacy=False))
    assert once.encode("<s>the</s>the").tolist() == [
        1,
        *once.encode("<s>the").tolist()[1:],
        2,
        *once.encode("</s>the").tolist()[1:],
    ]
    plain = once.encode("the").tolist()
    assert once.encode("<s>the").tolist()[1:] != plain
    everywhere = Tokenizer(make_folder(tmp_path, "llama", legacy=True))
    assert everywhere.encode("<s>the</s>the").tolist() == [1, *plain, 2, *plain]


def test_add_prefix_space_replaces_the_flag_in_the_model(tmp_path: Path) -> None:
    plain = Tokenizer(make_folder(tmp_path, "llama"))
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    without = Tokenizer(make_folder(tmp_path, "llama", **config))
    assert without.encode(" the").tolist() == plain.encode("the").tolist() != without.encode("the").tolist()
    assert without.decode(without.encode("the cat")) == "the cat"
    assert without.decode(without.encode(" the")) == " the"
    # Mistral's tokenizers are built from the model alone.
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert Tokenizer(tmp_path).encode("the").tolist() == plain.encode("the").tolist()


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_bos_and_eos_are_added_as_the_config_says(tmp_path: Path, bos: bool, eos: bool) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path, "llama", add_bos_token=bos, add_eos_token=eos))
    plain = tokenizer.encode("the cat").tolist()
    tokenizer.update_options(add_special_tokens=True)
    assert tokenizer.encode("the cat").tolist() == [1] * bos + plain + [2] * eos


def test_special_ids_come_from_the_model_where_the_config_names_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path, "llama"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids.tolist()) == (1, [2])
    tokenizer = Tokenizer(make_folder(tmp_path, "gemma", eos_token="<start_of_turn>"))
    assert tokenizer.eos_token_ids.tolist() == [tokenizer.to_token_id("<start_of_turn>")]


def test_added_tokens_of_the_config(tmp_path: Path) -> None:
    size = Tokenizer(make_folder(tmp_path, "llama")).vocab_size
    listed = {str(size): {"content": "<|end|>", "rstrip": True, "special": True}, "5": {"content": "<used>"}}
    tokenizer = Tokenizer(make_folder(tmp_path, "llama", added_tokens_decoder=listed))
    assert tokenizer.encode("<|end|>  <used>").tolist() == [size, 5]
    assert tokenizer.vocab_size == size + 1
    more = {str(size + step): {"content": f"<{step}>"} for step in range(3000)}
    tokenizer = Tokenizer(make_folder(tmp_path, "llama", added_tokens_decoder=more))
    assert tokenizer.encode("<7><2999>").tolist() == [size + 7, size + 2999]
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<older>": size}))
    assert Tokenizer(tmp_path).to_token_id("<older>") == size


@pytest.mark.parametrize(
    "listed",
    [
        [],
        "x",
        {"x": {"content": "a"}},
        {"-1": {"content": "a"}},
        {"99999999999": {"content": "a"}},
        {"500000": {"content": "far away"}},
        {"600": "a"},
        {"600": {"content": ""}},
        {"600": {"content": "a", "special": 1}},
        {"600": {}},
    ],
)
def test_malformed_added_tokens(tmp_path: Path, listed: object) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(make_folder(tmp_path, "llama", added_tokens_decoder=listed))
    assert caught.value.why
    assert caught.value.fix


def field(number: int, data: bytes) -> bytes:
    size, rest = len(data) & 127, len(data) >> 7
    assert rest < 128
    return bytes([number << 3 | 2, *([size | 128, rest] if rest else [size])]) + data


PIECE = field(1, field(1, b"<unk>") + b"\x18\x02")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 pieces"),
        (b"not a model", "not a protobuf message"),
        (b"\x0a", "the file is truncated"),
        (b"\x0a\xff\xff\xff\xff\x0f", "the file is truncated"),
        (b"\xff" * 11, "not a protobuf message"),
        (b"\x08\x01", "0 pieces"),
        (field(1, field(1, b"\xff\xfe")), "not UTF-8"),
        (field(1, b"\x18\x02"), "is empty"),
        (field(1, field(1, b"a") + b"\x15" + struct.pack("<f", float("nan"))), "is not finite"),
        (field(1, field(1, b"a") + b"\x18\x09"), "type of piece 0"),
        (PIECE + field(2, b"\x18\x07"), "model type"),
        (PIECE + field(2, b"\x18\x03"), "WORD"),
        (PIECE + field(2, b"\xc0\x01\x01"), "end of words"),
        (PIECE + field(3, b"\x28\x00"), "not at all"),
        (PIECE + field(2, b"\xc0\x02\x05"), "unk_id is 5"),
        (PIECE + PIECE, "same text"),
        (PIECE + field(1, field(1, b"a" * 513)), "513 bytes"),
        (PIECE + field(1, field(1, b"a") + b"\x18\x05"), "UNUSED"),
    ],
)
def test_what_is_no_model_is_an_error(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: the file is not a SentencePiece model") as caught:
        Tokenizer(make_folder(tmp_path, data))
    assert why in caught.value.why
    assert caught.value.fix


def test_a_corrupt_charsmap_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError):
        Tokenizer(make_folder(tmp_path, PIECE + field(3, field(2, b"\xff\xff\xff\xff\x00"))))


def test_damaged_models_are_read_or_refused() -> None:
    """Every truncation and thousands of changed bytes give a typed error or a model."""
    data = (GOLDENS / "sentencepiece" / "unigram_rules.model").read_bytes()
    rng = random.Random(0)
    damaged = [data[:length] for length in range(0, len(data), 37)]
    for _ in range(1000):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        damaged.append(bytes(changed))
    outcomes = set()
    for case in damaged:
        try:
            tokenizer_json(parse_model(case))
            outcomes.add("read")
        except ModelFormatError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
