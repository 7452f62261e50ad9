"""Tokenizer folders in the publishers' own formats.

They are made from a small byte-level vocabulary, a WordPiece vocabulary and two SentencePiece models in
tests/text/goldens/sources.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
SOURCES = Path(__file__).resolve().parents[2] / "tests" / "text" / "goldens" / "sources"
TOKENS = SOURCES / "byte_level.tiktoken"
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RESERVED = 30
"""The number of ids that precede the tokens of a tekken.json."""
_GLM4 = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>")


def tokens() -> list[bytes]:
    """Return the byte-level vocabulary: the 256 bytes, followed by the merged tokens in order."""
    return [base64.b64decode(line.split()[0]) for line in TOKENS.read_bytes().splitlines()]


def merges() -> list[tuple[bytes, bytes]]:
    """Return, for each merged token, the pair of tokens that training merged."""
    return [(base64.b64decode(a), base64.b64decode(b)) for a, b in json.loads((SOURCES / "merges.json").read_text())]


def characters(token: bytes) -> str:
    """Return bytes in the notation of GPT-2's files: printable Latin-1 unchanged, other bytes from U+0100 upwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return "".join(chr(byte) if byte in plain else chr(0x100 + others.index(byte)) for byte in token)


def tekken(special: Sequence[str] | None = None, version: str = "v3") -> Json:
    """Return the contents of a tekken.json."""
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": _text(token)}
        for rank, token in enumerate(tokens())
    ]
    config = {"pattern": TEKKEN_PATTERN, "num_vocab_tokens": len(listed), "version": version}
    # As in published files, the file contains more tokens than the model uses.
    sizes = {"default_vocab_size": len(listed) + RESERVED - 5, "default_num_special_tokens": RESERVED}
    value: Json = {"config": {**config, **sizes}, "vocab": listed}
    if special is not None:
        entries = [
            {"rank": rank, "token_str": token, "is_control": not token.startswith("<think")}
            for rank, token in enumerate(special)
        ]
        value["special_tokens"] = entries
    return value


def _text(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def _vocab_merges(folder: Path, config: Json, extra: Sequence[str] = ("<|endoftext|>",)) -> None:
    names = [*map(characters, tokens()), *extra]
    (folder / "vocab.json").write_text(json.dumps({name: id_ for id_, name in enumerate(names)}), encoding="utf-8")
    lines = [f"{characters(left)} {characters(right)}" for left, right in merges()]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _ranked(folder: Path, name: str, config: Json | None = None, model_type: str = "") -> None:
    shutil.copyfile(TOKENS, folder / name)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def _glm4() -> Json:
    listed = {str(len(tokens()) + place): {"content": name, "special": True} for place, name in enumerate(_GLM4)}
    return {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": listed}


def _tekken(folder: Path, value: Json) -> None:
    (folder / "tekken.json").write_text(json.dumps(value), encoding="utf-8")


def _words(folder: Path, lowercase: bool) -> None:
    shutil.copyfile(SOURCES / "vocab.txt", folder / "vocab.txt")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


_TEKKEN_13 = "<unk> <s> </s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CALLS] [ARGS] <think>".split()
_COHERE = ("<PAD>", "<UNK>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")
FORMATS = {
    "llama3": lambda folder: _ranked(folder, "tokenizer.model", None, "llama"),
    "qwen": lambda folder: _ranked(folder, "qwen.tiktoken", {"tokenizer_class": "QWenTokenizer"}),
    "cl100k_base": lambda folder: _ranked(folder, "cl100k_base.tiktoken"),
    "o200k_base": lambda folder: _ranked(folder, "o200k_base.tiktoken"),
    "r50k_base": lambda folder: _ranked(folder, "r50k_base.tiktoken"),
    "kimi": lambda folder: _ranked(folder, "tiktoken.model", {"tokenizer_class": "TikTokenTokenizer"}),
    "glm4": lambda folder: _ranked(folder, "tokenizer.model", _glm4(), "chatglm"),
    "tekken": lambda folder: _tekken(folder, tekken()),
    "tekken_13": lambda folder: _tekken(folder, tekken(_TEKKEN_13, "v13")),
    "gpt2": lambda folder: _vocab_merges(folder, {"tokenizer_class": "GPT2Tokenizer"}),
    "gpt2_prefix": lambda folder: _vocab_merges(
        folder, {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}
    ),
    "qwen2": lambda folder: _vocab_merges(folder, {"tokenizer_class": "Qwen2Tokenizer"}),
    "gpt_neox": lambda folder: _vocab_merges(folder, {"tokenizer_class": "GPTNeoXTokenizer"}),
    "cohere": lambda folder: _vocab_merges(folder, {"tokenizer_class": "CohereTokenizer"}, _COHERE),
    "bert": lambda folder: _words(folder, True),
    "bert_cased": lambda folder: _words(folder, False),
    "sentencepiece_bpe": lambda folder: shutil.copyfile(SOURCES / "bpe.model", folder / "tokenizer.model"),
    "sentencepiece_unigram": lambda folder: shutil.copyfile(SOURCES / "unigram.model", folder / "spiece.model"),
}


def write_form(name: str, folder: Path) -> Path:
    """Write a folder in the layout of a format's publisher; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    FORMATS[name](folder)
    return folder
