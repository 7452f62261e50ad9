"""The four vocabularies that the families share, trained on a few sentences."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from .texts import CORPUS

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_all() -> dict[str, dict[str, Any]]:
    """Return, by vocabulary name, the "vocab" (and "merges") of the model in tokenizer.json."""
    return {
        "byte_level": _byte_level(),
        "sentencepiece_bpe": _sentencepiece_bpe(),
        "unigram": _unigram(),
        "word_piece": _word_piece(),
    }


def _parts(tokenizer: Tokenizer) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    return {name: model[name] for name in ("vocab", "merges") if name in model}


def _byte_level() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _parts(tokenizer)


def _sentencepiece_bpe() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trainer = trainers.BpeTrainer(
        vocab_size=460,
        limit_alphabet=90,
        special_tokens=["<unk>", "<s>", "</s>", *BYTE_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["▁" + text.replace(" ", "▁") for text in CORPUS], trainer)
    return _parts(tokenizer)


def _unigram() -> dict[str, Any]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=330,
        special_tokens=[AddedToken(name) for name in ("<pad>", "</s>", "<unk>")],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    parts = _parts(tokenizer)
    return {"vocab": [[piece, round(score, 4)] for piece, score in parts["vocab"]]}


def _word_piece() -> dict[str, Any]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=420, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _parts(tokenizer)
