"""Prepare the text: three parts, a tokenizer trained on the first part, and the first part's tokens.

The folder holds `tokenizer/`, `train.npy` (uint16 tokens), `train_starts.npy` (the starts of the documents and the end
of the last document), `calibration.txt`, `evaluation.txt`, and `manifest.json`, which lists the files of every part.
"""

import hashlib
import json
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.bundled_model.tokenizer import PAD_ID, save_tokenizer, train_bpe

from .parts import Part, part_of, sample_text
from .sources import Document, documents

VOCAB_SIZE = 8192
BATCH = 64


def prepare(folder: Path, found: list[Document], vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """Write the folder for the documents; return the manifest, which is written last."""
    parts: dict[Part, list[Document]] = {"train": [], "calibration": [], "evaluation": []}
    for document in found:
        parts[part_of(document.name)].append(document)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_bpe((document.text for document in parts["train"]), vocab_size)
    save_tokenizer(tokenizer, folder / "tokenizer")
    tokens, starts = encode(tokenizer, parts["train"])
    np.save(folder / "train.npy", tokens)
    np.save(folder / "train_starts.npy", starts)
    held_out: tuple[Part, ...] = ("calibration", "evaluation")
    for part in held_out:
        text = sample_text(parts[part])
        (folder / f"{part}.txt").write_text(text, encoding="utf-8", newline="")
    manifest: dict[str, Any] = {"python": platform.python_version(), "train_tokens": len(tokens)}
    for part, members in parts.items():
        manifest[part] = _description(members)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def encode(tokenizer: Tokenizer, members: list[Document]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Return all documents' tokens, each document followed by <|endoftext|>, and their starts and the last end."""
    pieces: list[NDArray[np.uint16]] = []
    for first in range(0, len(members), BATCH):
        batch = [document.text for document in members[first : first + BATCH]]
        pieces += [np.array([*encoded.ids, PAD_ID], np.uint16) for encoded in tokenizer.encode_batch_fast(batch)]
    starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return np.concatenate(pieces), starts


def _description(members: list[Document]) -> dict[str, Any]:
    kinds = Counter[str]()
    for document in members:
        kinds[document.name.split("/")[0]] += len(document.text)
    return {
        "sha256": hashlib.sha256("\0".join(document.text for document in members).encode()).hexdigest(),
        "characters": dict(kinds),
        "files": [document.name for document in members],
    }


def prepared(folder: Path, seed: int) -> Path:
    """Return the data folder; prepare the folder if its manifest is missing."""
    if not (folder / "manifest.json").exists():
        prepare(folder, documents(seed))
    return folder
