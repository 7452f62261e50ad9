"""Tiny SentencePiece models of the kinds that publishers use, and the library's results on difficult texts."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece

from .texts import CORPUS, TORTURE

_LLAMA = {
    "model_type": "bpe",
    "vocab_size": 480,
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
_UNIGRAM = {"model_type": "unigram", "vocab_size": 300}
# Normalisation rules in the form "from, tab, to", in hexadecimal: ligature fi, half-width katakana, capital A to small
# a, no-break space, line break, Angstrom sign.
_RULES = "FB01\t66 69\nFF76 FF9E\t30AC\nFF76\t30AB\n41\t61\nA0\t20\nA\t20\n212B\tC5\n"
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "gemma": {
        **_LLAMA,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<start_of_turn>", "\n\n", "▁▁"],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
    },
    "unigram": {**_UNIGRAM, "normalization_rule_name": "identity", "user_defined_symbols": ["<sep>"]},
    "unigram_rules": {**_UNIGRAM, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "unigram_bytes": {
        **_UNIGRAM,
        "vocab_size": 560,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
}


def train_all(folder: Path) -> None:
    """Train a model of every kind and write it as NAME.model."""
    lines = [line for text in CORPUS for line in text.split("\n") if line.strip()] * 3
    folder.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8") as rules:
        rules.write(_RULES)
        rules.flush()
        for name, options in MODELS.items():
            written = io.BytesIO()
            extra = {"normalization_rule_tsv": rules.name} if name == "unigram_rules" else {}
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=written,
                hard_vocab_limit=False,
                character_coverage=0.985,
                num_threads=1,
                minloglevel=2,
                **options,
                **extra,
            )
            (folder / f"{name}.model").write_bytes(written.getvalue())


def golden(path: Path) -> dict[str, Any]:
    """Return the ids and the decoded text of every difficult text; ids are None if a text contains a control piece."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    controls = [processor.id_to_piece(id_) for id_ in range(len(processor)) if processor.is_control(id_)] + ["<unk>"]
    ids = [None if any(name in text for name in controls) else processor.encode(text) for text in TORTURE]
    decoded = [None if row is None or processor.unk_id() in row else processor.decode(row) for row in ids]
    return {
        "ids": ids,
        "decoded": [None if text == TORTURE[index] else text for index, text in enumerate(decoded)],
        "unknown": [row is not None and processor.unk_id() in row for row in ids],
    }
