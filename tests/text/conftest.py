"""Small tokenizers of every common kind, trained on the spot, and text that is hard to tokenise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from genai.text import tokenizer as core
from tests.text.families import FAMILIES, GOLDENS, read

TORTURE = (
    "",
    " ",
    "  two  spaces  ",
    "Hello, world! It's 12 + 7 = 19; don't do not ' quote '.",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 1️⃣",
    "e\u0301 n\u0303 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍ algo",
    "漢字とひらがなとカタカナ、한국어 텍스트。中文字符！",
    "שלום עולם مرحبا بالعالم \u202egnirts lanoitceridib\u202c",
    "def f(x):\n\tif x >= 1:\r\n\t\treturn {'a': [x ** 2, \"b\\n\"]}\n\n\n",
    "\x01\x02\x1b[31mred\x1b[0m\x7f\u0085\u200b\ufeff",
    "𝕬𝖇𝖈 𐍈 𓀀 ﷽ ẞ ﬁ",
    "ไทย हिन्दी தமிழ் ქართული Ελληνικά Кириллица",
    "<|im_start|>user\nHi<|im_end|>\n<s>[INST] x </s><0x41>▁##ing",
    "\u2581 \u0120 Ġ ▁▁ ##",
    "�\ufffd�",
    "a" * 100 + "é" * 50,
)
CORPUS = [
    *TORTURE,
    "the cat sat on the mat and the dog ran over there; the end of the story is near",
    "I am walking, talking and singing while counting 1 2 3 4 5 6 7 8 9 10",
] * 5
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level() -> str:
    """Byte-level BPE as in Qwen2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=_special(*CHAT_MARKS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>", "ﷺ"])
    return tokenizer.to_str()


def _fallback_bpe(decoder: object) -> str:
    """SentencePiece's BPE: marks for spaces, and byte tokens for characters outside the vocabulary."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        limit_alphabet=90,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["▁" + text.replace(" ", "▁") for text in CORPUS], trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] not in byte_tokens]
    return json.dumps(saved)


def llama() -> str:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _fallback_bpe(decoders.Sequence(parts))


def gemma() -> str:
    return _fallback_bpe(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def _metaspace(scheme: str) -> str:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def metaspace() -> str:
    return _metaspace("always")


def metaspace_first() -> str:
    return _metaspace("first")


def metaspace_never() -> str:
    return _metaspace("never")


def _word_piece(decoder: object) -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoder
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def word_piece() -> str:
    return _word_piece(decoders.WordPiece(cleanup=True))


def word_piece_plain() -> str:
    return _word_piece(decoders.WordPiece(cleanup=False))


def no_decoder() -> str:
    return _word_piece(None)


def word_suffix() -> str:
    """The format of the first GPT: a suffix marks the ends of words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def many_parts() -> str:
    """Rarer decoders: strips per token and for the whole text, and a regular expression."""
    parts = [
        decoders.Strip("a", 2, 0),
        decoders.Replace(Regex("t+|h"), "<>"),
        decoders.ByteFallback(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Strip(" ", 3, 0),
    ]
    return _fallback_bpe(decoders.Sequence(parts))


KINDS: dict[str, Callable[[], str]] = {
    maker.__name__: maker
    for maker in (
        byte_level,
        llama,
        gemma,
        metaspace,
        metaspace_first,
        metaspace_never,
        word_piece,
        word_piece_plain,
        no_decoder,
        word_suffix,
        many_parts,
    )
}


@pytest.fixture(scope="session")
def torture() -> tuple[str, ...]:
    return TORTURE


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a folder with the tokenizer.json of a kind, created once."""
    folders: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            (folders[kind] / "tokenizer.json").write_text(KINDS[kind](), encoding="utf-8")
        return folders[kind]

    return make


@pytest.fixture(params=sorted(KINDS))
def kind_folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    """Every kind in turn."""
    return folder_of(request.param)


GENAI_CONFIG = {
    "model": {
        "type": "llama",
        "vocab_size": 512,
        "context_length": 128,
        "bos_token_id": 0,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "decoder": {
            "filename": "model.onnx",
            "head_size": 8,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 1,
        },
    }
}


@pytest.fixture
def model_folder(tmp_path: Path, folder_of: Callable[[str], Path]) -> Path:
    """Return a separate folder with the byte-level tokenizer, tokenizer_config.json and genai_config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((folder_of("byte_level") / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": {"content": "<|endoftext|>"}}))
    (folder / "genai_config.json").write_text(json.dumps(GENAI_CONFIG))
    return folder


@pytest.fixture(scope="module")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's folder with the files of its publisher."""
    vocabularies = read("vocabularies")

    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        for name, value in read(family)["files"].items():
            if name == "tokenizer.json":
                value["model"] |= vocabularies[value["model"].pop("vocabulary")]
            (folder / name).write_text(json.dumps(value), encoding="utf-8")
        for source in (GOLDENS / "templates").glob(f"{family}.*jinja"):
            named = source.name.split(".")[1:-1]
            target = folder / (f"additional_chat_templates/{named[0]}.jinja" if named else "chat_template.jinja")
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(source.read_bytes())
        return folder

    return make


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, family_folder: Callable[[str], Path]
) -> tuple[core.Tokenizer, dict[str, Any]]:
    return core.Tokenizer(family_folder(request.param)), read(request.param)
