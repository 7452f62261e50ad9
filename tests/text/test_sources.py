"""Tokenizers in their publishers' formats: ids equal to those of their libraries (tools/make_source_goldens.py), roles
of special tokens, precedence of formats, and errors for damaged files."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genai.common import reading
from genai.errors import TokenizerError
from genai.text.sources import choosing, parts, ranks, tekken as tekken_form, vocab_merges, word_piece
from genai.text.tokenizer import Tokenizer
from tools.text_goldens.forms import FORMATS, RESERVED, SOURCES, tekken, tokens, write_form

GOLDEN = json.loads((SOURCES / "goldens.json").read_text(encoding="utf-8"))
TEXTS: list[str] = GOLDEN["texts"]
COMPOSED = ("qwen", "qwen2", "gpt_neox", "cohere")
SIZE = len(tokens())


@pytest.mark.parametrize("name", FORMATS)
def test_ids_are_those_of_the_form_s_own_library(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer(write_form(name, tmp_path))
    tokenizer.update_options(skip_special_tokens=False)
    for text, ids in zip(TEXTS, GOLDEN["ids"][name], strict=True):
        found = tokenizer.encode(text).tolist()
        if name == "sentencepiece_unigram":  # see docs/reference/tokenizer-agreement.md
            found, ids = sorted(found), sorted(ids[1:] if text.startswith("▁") else ids)
        assert found == ids, text
        if name == "bert":
            assert tokenizer.decode(ids) == GOLDEN["decoded_bert"][TEXTS.index(text)]
        elif name not in ("bert_cased", "sentencepiece_bpe", "sentencepiece_unigram"):
            expected = unicodedata.normalize("NFC", text) if name in COMPOSED else text
            before = " " if name == "gpt2_prefix" and text and not text.startswith(" ") else ""
            assert tokenizer.decode(ids) == before + expected


def test_every_form_has_goldens_in_twenty_scripts() -> None:
    assert set(GOLDEN["ids"]) == set(FORMATS)
    names = {unicodedata.name(character, "?").split()[0] for text in TEXTS for character in text if character.isalpha()}
    assert (
        len(
            names
            & set(
                """LATIN GREEK CYRILLIC ARMENIAN GEORGIAN HEBREW ARABIC DEVANAGARI BENGALI TAMIL TELUGU THAI
        LAO TIBETAN MYANMAR KHMER ETHIOPIC HANGUL HIRAGANA KATAKANA CJK CHEROKEE MONGOLIAN GOTHIC""".split()
            )
        )
        == 24
    )


ROLES: list[tuple[str, int | None, list[int], list[int]]] = [
    # bos, eos, and what stands before the text where special tokens are added.
    ("llama3", SIZE, [SIZE + 1], [SIZE]),
    ("qwen", None, [SIZE], []),
    ("cl100k_base", None, [SIZE + 1], []),
    ("glm4", None, [SIZE], []),
    ("tekken", 1, [2], [1]),
    ("tekken_13", 1, [2], [1]),
    ("gpt2", SIZE, [SIZE], []),
    ("qwen2", None, [SIZE], []),
    ("cohere", SIZE + 2, [SIZE + 3], []),
    ("sentencepiece_bpe", 1, [2], []),
]


@pytest.mark.parametrize(("name", "bos", "eos", "before"), ROLES)
def test_roles_of_special_tokens(tmp_path: Path, name: str, bos: int | None, eos: list[int], before: list[int]) -> None:
    tokenizer = Tokenizer(write_form(name, tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids.tolist()) == (bos, eos)
    plain = tokenizer.encode("the cat").tolist()
    tokenizer.update_options(add_special_tokens=True)
    assert tokenizer.encode("the cat").tolist() == before + plain
    assert tokenizer.decode([*before, *plain, *eos]) == "the cat"
    config = json.loads(file.read_text()) if (file := tmp_path / "tokenizer_config.json").exists() else {}
    file.write_text(json.dumps({**config, "add_bos_token": False, "add_eos_token": True}))
    tokenizer = Tokenizer(tmp_path)
    tokenizer.update_options(add_special_tokens=True)
    assert tokenizer.encode("the cat").tolist() == plain + eos


def test_special_tokens_in_texts(tmp_path: Path) -> None:
    llama = Tokenizer(write_form("llama3", tmp_path / "a"))
    assert llama.encode("<|start_header_id|>\n\n<|eot_id|><|reserved_special_token_247|>").tolist() == [
        SIZE + 6, *llama.encode("\n\n"), SIZE + 9, SIZE + 255,
    ]  # fmt: skip
    assert llama.vocab_size == SIZE + 256
    mistral = Tokenizer(write_form("tekken_13", tmp_path / "b"))
    assert mistral.encode("[INST]<think>[TOOL_CALLS]<SPECIAL_29>").tolist() == [3, 9, 7, 29]
    assert mistral.decode([3, 9, 7]) == "<think>"  # no control token
    assert Tokenizer(write_form("tekken", tmp_path / "c")).encode("[SYSTEM_PROMPT]").tolist() == [17]
    bert = Tokenizer(write_form("bert", tmp_path / "d"))
    bert.update_options(add_special_tokens=True)
    assert bert.encode("[MASK]").tolist() == [2, 4, 3]


def test_tokens_that_the_folder_declares(tmp_path: Path) -> None:
    """Declared tokens replace reserved ones, and may follow a gap."""
    folder = write_form("llama3", tmp_path)
    declared = {SIZE + 2: "<|mine|>", SIZE + 1000: "<|far|>", SIZE + 9: "<|eot_id|>"}
    listed = {str(id_): {"content": token, "special": True, "rstrip": True} for id_, token in declared.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed, "eos_token": "<|mine|>"}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("<|mine|>  <|far|><|eot_id|> x").tolist()[:3] == list(declared)
    assert tokenizer.to_token_id("<|reserved_special_token_0|>") == -1
    assert tokenizer.eos_token_ids.tolist() == [SIZE + 2]
    listed = {"5": {"content": "<|mine|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(TokenizerError, match=r"tokenizer.model") as caught:
        Tokenizer(folder)
    assert "'<|mine|>' has the id 5, which belongs to another token" in caught.value.why


def test_which_form_counts(tmp_path: Path) -> None:
    """tokenizer.json, then tekken, tiktoken, SentencePiece, pairs, word pieces."""
    order = ("bert", "gpt2", "sentencepiece_bpe", "cl100k_base", "tekken")
    sizes = [Tokenizer(write_form(name, tmp_path / name)).vocab_size for name in order]
    assert len(set(sizes)) == len(order)
    everything = tmp_path / "all"
    for name, size in zip(order, sizes, strict=True):
        write_form(name, everything)
        (everything / "tokenizer_config.json").unlink(missing_ok=True)
        if name == "gpt2":
            (everything / "config.json").write_text('{"model_type": "gpt2"}')
        assert Tokenizer(everything).vocab_size == size
    (everything / "tokenizer.json").write_text(Tokenizer(tmp_path / "gpt2").backend.to_str(), encoding="utf-8")
    assert Tokenizer(everything).vocab_size == sizes[1]


def test_the_class_is_known_by_the_model(tmp_path: Path) -> None:
    folder = write_form("qwen2", tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    tokenizer = Tokenizer(folder)
    assert [tokenizer.encode(text).tolist() for text in TEXTS] == GOLDEN["ids"]["qwen2"]


def test_mistral_s_older_name_for_sentencepiece(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model.v3").write_bytes((SOURCES / "bpe.model").read_bytes())
    expected = Tokenizer(write_form("sentencepiece_bpe", tmp_path / "again"))
    assert Tokenizer(tmp_path).encode("the cat").tolist() == expected.encode("the cat").tolist()


LINES = (SOURCES / "byte_level.tiktoken").read_bytes().splitlines(keepends=True)


def without_token(token: bytes) -> list[bytes]:
    """Return lines without a token, and without a gap in the ranks."""
    kept = [line.split()[0] for line in LINES if base64.b64decode(line.split()[0]) != token]
    return [b"%s %d\n" % (line, rank) for rank, line in enumerate(kept)]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([*LINES[:700], b"!!!! 700\n", *LINES[701:]], "the token of line 701: b'!!!!' is not base64"),
        ([*LINES[:700], b"QUJD= 700\n"], "is not base64"),
        ([*LINES[:700], b" 700\n"], "the token of line 701 has 0 bytes"),
        ([*LINES[:700], b"QUJD\n"], "line 701 is b'QUJD', but a token in base64 and its rank are expected"),
        ([*LINES[:700], b"QUJD -7\n"], "line 701 is"),
        ([*LINES[:700], b"QUJD 12345678901\n"], "line 701 is"),
        ([*LINES[:700], base64.b64encode(b"x" * 513) + b" 700\n"], "has 513 bytes, but a token must have 1 to 512"),
        (LINES[:300] + LINES[301:], "1 of the ranks below 799 are missing, starting with 300"),
        ([*LINES, b"%s 800\n" % LINES[300].split()[0]], "occurs twice, with the ranks 300 and 800"),
        ([*LINES, b"eHl6enk= 300\n"], "two tokens have the rank 300"),
        (without_token(b"\xe3"), "1 byte values have no token, starting with 0xE3"),
        (without_token(b"\xff"), ""),  # no text has it
        ([*LINES, b"eHl6enk= 999999999\n"], "has the rank 999999999, but ranks must be below 524288"),
    ],
)
def test_damaged_tiktoken_files(tmp_path: Path, lines: list[bytes], why: str) -> None:
    (tmp_path / "cl100k_base.tiktoken").write_bytes(b"".join(lines))
    if not why:
        assert Tokenizer(tmp_path).encode("the cat").size
        return
    refused(tmp_path, r"cl100k_base\.tiktoken: the file is not a tiktoken file that can be read", why)


def refused(folder: Path, what: str, why: str) -> None:
    with pytest.raises(TokenizerError, match=what) as caught:
        Tokenizer(folder)
    assert why in caught.value.why, caught.value.why
    assert caught.value.fix


def test_files_whose_model_is_not_known(tmp_path: Path) -> None:
    for name, config in (("x.tiktoken", {}), ("tokenizer.model", {"model_type": "mamba"})):
        folder = tmp_path / name.split(".")[1]
        folder.mkdir()
        (folder / name).write_bytes(b"".join(LINES))
        (folder / "config.json").write_text(json.dumps(config))
        refused(folder, "tiktoken file", "unknown for tokenizer_class ''")
    folder = write_form("gpt2", tmp_path / "pairs")
    for config in ({}, {"tokenizer_class": "PreTrainedTokenizerFast"}):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        refused(folder, r"vocab\.json", "known for the classes GPT2Tokenizer")
    folder = write_form("bert", tmp_path / "words")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertJapaneseTokenizer"}')
    refused(folder, r"vocab\.txt", "tokenizer_class is 'BertJapaneseTokenizer'")


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda value: value["vocab"][400].update(token_bytes="@@"), "token 400: '@@' is not base64"),
        (lambda value: value["vocab"][400].update(token_bytes="YQ=é"), "is not base64"),
        (lambda value: value["vocab"][400].update(token_bytes=7), "vocab[400] is"),
        (lambda value: value["vocab"].pop(400), "vocab[400] is"),
        (lambda value: value["vocab"].__setitem__(400, []), "vocab[400] is []"),
        (lambda value: value["vocab"][400].update(token_bytes="dGhl", rank=400), "occurs twice"),
        (lambda value: value["vocab"][200].update(token_bytes="dGhlIGNhdCBhbmQ="), "no token, starting with 0xC8"),
        (lambda value: value.update(vocab=None), "vocab has 0 tokens"),
        (lambda value: value["config"].update(default_vocab_size=SIZE + 31), f"default_vocab_size is {SIZE + 31}"),
        (lambda value: value["config"].update(default_vocab_size=30), "default_vocab_size is 30"),
        (lambda value: value["config"].update(default_vocab_size=2**40), "config.default_vocab_size is 1099511627776"),
        (lambda value: value["config"].update(default_num_special_tokens=-1), "config.default_num_special_tokens"),
        (lambda value: value["config"].update(default_num_special_tokens=True), "config.default_num_special_tokens"),
        (lambda value: value["config"].update(default_num_special_tokens=3), "no rank below 3"),
        (lambda value: value["config"].update(pattern=None), "config.pattern is None"),
        (lambda value: value["config"].update(pattern=r"\p{N}{1,3}+|\s"), "config.pattern has '}+'"),
        (lambda value: value["config"].update(pattern=r"\s+$|.[$^]\$"), "config.pattern has '$'"),
        (lambda value: value["config"].update(pattern="x" * 5000), "config.pattern is"),
        (lambda value: value.update(config=[]), "config is []"),
        (lambda value: value.update(special_tokens={}), "special_tokens is {}"),
        (lambda value: value["special_tokens"].append({"rank": 30, "token_str": "x"}), "no rank below 30"),
        (lambda value: value["special_tokens"].append({"rank": 12, "token_str": ""}), "or no token_str"),
        (lambda value: value["special_tokens"].append("x"), "or no token_str"),
        (lambda value: value["special_tokens"].append({"rank": 3, "token_str": "x"}), "have the rank 3"),
        (lambda value: value["special_tokens"].append({"rank": 12, "token_str": "<s>"}), "the same text"),
        (lambda value: value["special_tokens"].append({"rank": 12, "token_str": "the"}), "belongs to another token"),
    ],
)
def test_damaged_tekken_files(tmp_path: Path, change: Change, why: str) -> None:
    value = tekken(["<unk>", "<s>", "</s>", "[INST]"], "v13")
    change(value)
    (tmp_path / "tekken.json").write_text(json.dumps(value), encoding="utf-8")
    refused(tmp_path, r"tekken\.json: the file is not a tekken file that can be read", why)


def test_tekken_files_that_are_no_json(tmp_path: Path) -> None:
    for data, what in ((b"{", "is not JSON"), (b"[]", "is a list"), (b"\xff", "is not a tekken file")):
        (tmp_path / "tekken.json").write_bytes(data)
        with pytest.raises(TokenizerError, match=what):
            Tokenizer(tmp_path)
    value = tekken()
    value["config"]["pattern"] = r"(\p{L}+"
    (tmp_path / "tekken.json").write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(TokenizerError, match="not a usable tokenizer"):
        Tokenizer(tmp_path)
    assert value["config"]["default_num_special_tokens"] == RESERVED


Write = Callable[[Path], object]


def pairs_with(
    vocab: Callable[[str], str] = str, merges: Callable[[str], str | None] = str
) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        write_form("gpt2", folder)
        path = folder / "vocab.json"
        path.write_text(vocab(path.read_text(encoding="utf-8")), encoding="utf-8")
        changed = merges((folder / "merges.txt").read_text(encoding="utf-8"))
        if changed is None:
            (folder / "merges.txt").unlink()
        else:
            (folder / "merges.txt").write_text(changed, encoding="utf-8")

    return write


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (pairs_with(lambda text: text[:-9]), "the file is not JSON"),
        (pairs_with(lambda text: f"[{text}]"), "an object that maps tokens to ids is expected"),
        (pairs_with(lambda text: "[" * 100_000), "the file is not JSON"),
        (pairs_with(lambda text: "{}"), "the file has no tokens"),
        (pairs_with(lambda text: text.replace(": 5,", ': "5",')), "is '5', but ids must be numbers below"),
        (pairs_with(lambda text: text.replace(": 5,", ": 5.0,")), "is 5.0, but ids must be numbers below"),
        (pairs_with(lambda text: text.replace(": 5,", ": {},")), "is [], but ids must be numbers below"),
        (
            pairs_with(lambda text: text.replace(": 5,", ": 4294967296,")),
            "is 4294967296, but ids must be numbers below",
        ),
        (pairs_with(lambda text: text.replace(": 5,", ": 6,")), "two tokens have the id 6"),
        (pairs_with(lambda text: text.replace('"the": ', '"th": ')), "the token 'th' occurs twice, with the ids"),
        (pairs_with(lambda text: text.replace(": 5,", ": 5000,")), "ids below 5000 are missing, starting with 5"),
        (
            pairs_with(lambda text: text.replace('"a": 97', '"aa-": 97')),
            "1 byte values have no token, starting with 0x61",
        ),
        (pairs_with(merges=lambda text: None), "merges.txt, which defines the merges, is missing"),
        (pairs_with(merges=lambda text: text + "a b c\n"), "is 'a b c', but two tokens are expected"),
        (pairs_with(merges=lambda text: text + "a \n"), "is 'a ', but two tokens are expected"),
        (pairs_with(merges=lambda text: text + "Q Z\n"), "has 'QZ', which is not a token"),
        (pairs_with(merges=lambda text: text + "QZ Q\n"), "has 'QZ', which is not a token"),
    ],
)
def test_damaged_pairs(tmp_path: Path, write: Write, why: str) -> None:
    write(tmp_path)
    refused(tmp_path, r"vocab\.json: the file is not a byte-level vocabulary that can be read", why)


@pytest.mark.parametrize(
    ("lines", "config", "why"),
    [
        (["[UNK]", "a", "", "b"], {}, "line 3 is ''"),
        (["[UNK]", "a", "b", "a"], {}, "the token 'a' occurs twice, on lines 2 and 4"),
        (["a", "b"], {}, "the file has no '[UNK]', the token for unknown words"),
        (["[UNK]", "a"], {"unk_token": "<unk>"}, "the file has no '<unk>'"),
        (["[UNK]", "a"], {"do_lower_case": "yes"}, "do_lower_case in tokenizer_config.json is 'yes'"),
        (["[UNK]", "a" * 600], {}, "line 2 is"),
        ([""], {}, "the file has 0 lines"),
        (["[UNK]", "\udcff"], {}, "the file is not UTF-8"),
    ],
)
def test_damaged_word_pieces(tmp_path: Path, lines: list[str], config: dict[str, Any], why: str) -> None:
    (tmp_path / "vocab.txt").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    refused(tmp_path, r"vocab\.txt: the file is not a WordPiece vocabulary that can be read", why)


def test_files_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("cl100k_base", "tekken", "gpt2", "bert", "sentencepiece_bpe")
    folders = {name: write_form(name, tmp_path / name) for name in names}
    with monkeypatch.context() as small:
        for module in (ranks, tekken_form, vocab_merges, word_piece, choosing.convert_sentencepiece.__globals__):
            setting = small.setattr if not isinstance(module, dict) else small.setitem
            setting(module, "MAX_TOKENS", 600)
        for name, why in zip(names, ("below 600", "up to 600", "below 600", "1 to 600", "1 to 600"), strict=True):
            refused(folders[name], "that can be read", why)
    with monkeypatch.context() as small:
        small.setattr(ranks, "MAX_BYTES", 1000)
        small.setitem(choosing.convert_sentencepiece.__globals__, "MAX_BYTES", 1000)
        for name in ("cl100k_base", "tekken", "sentencepiece_bpe"):
            refused(folders[name], "that can be read", "more than 1000")
    monkeypatch.setattr(reading, "_MOST_BYTES", 2**12)
    monkeypatch.setattr(reading, "_PIECE", 2**11)
    for folder in folders.values():
        with pytest.raises(TokenizerError, match="cannot be read"):
            Tokenizer(folder)
    assert parts.MAX_TOKENS >= 2**19


def test_sentencepiece_without_some_of_its_bytes(tmp_path: Path) -> None:
    data = (SOURCES / "bpe.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data.replace(b"<0x41>", b"<0x4X>"))
    refused(tmp_path, "SentencePiece", "1 of the 256 byte pieces are missing, starting with <0x41>")
