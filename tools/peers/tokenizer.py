"""A byte-level BPE tokenizer trained on the sources of Python's standard library, padded to the model's vocabulary."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|begin|>", "<|end|>")
_LEARNED = 8000
_TRAINING_FILES = 60


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; ids beyond the trained vocabulary never occur in texts."""
    learned = _train(min(_LEARNED, vocab_size))
    definition: dict[str, Any] = json.loads(learned.to_str())
    vocabulary = definition["model"]["vocab"]
    vocabulary |= {f"<unused {number}>": number for number in range(len(vocabulary), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(definition, ensure_ascii=False), encoding="utf-8")
    begin, end = SPECIAL_TOKENS
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _train(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_TRAINING_FILES]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in files], trainer)
    return tokenizer
