"""The split of the documents by a hash of their names, so that no list is stored and no file is in two parts."""

import hashlib
from collections.abc import Iterable
from typing import Literal

from .sources import END_OF_TEXT, Document

Part = Literal["train", "calibration", "evaluation"]
EVALUATION_PERCENT = CALIBRATION_PERCENT = 4
EXCERPT = 8000  # characters


def part_of(name: str) -> Part:
    """Return the part that a document belongs to, by its name."""
    place = int.from_bytes(_digest(name), "little") % 100
    if place < EVALUATION_PERCENT:
        return "evaluation"
    return "calibration" if place < EVALUATION_PERCENT + CALIBRATION_PERCENT else "train"


def sample_text(documents: Iterable[Document]) -> str:
    """Return the beginnings of documents (whole lines, up to EXCERPT characters) in an order that mixes all kinds.

    Therefore long files do not outweigh others, and the beginning of the text is a sample of the whole text.
    """
    ordered = sorted(documents, key=lambda document: _digest("order:" + document.name))
    return "".join(excerpt(document.text) + END_OF_TEXT for document in ordered)


def excerpt(text: str) -> str:
    """Return the first whole lines of `text` that fit into EXCERPT characters."""
    if len(text) <= EXCERPT:
        return text
    return text[: text.rfind("\n", 0, EXCERPT) + 1] or text[:EXCERPT]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
