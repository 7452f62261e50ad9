"""Which part of the text a document belongs to: a hash of its name, so that no list is kept and no file is in two."""

import hashlib
from collections.abc import Iterable
from typing import Literal

from .sources import END_OF_TEXT, Document

Part = Literal["train", "calibration", "evaluation"]
EVALUATION_PERCENT = CALIBRATION_PERCENT = 4
EXCERPT = 8000  # characters


def part_of(name: str) -> Part:
    """The part of the document called `name`."""
    place = int.from_bytes(_digest(name), "little") % 100
    if place < EVALUATION_PERCENT:
        return "evaluation"
    return "calibration" if place < EVALUATION_PERCENT + CALIBRATION_PERCENT else "train"


def sample_text(documents: Iterable[Document]) -> str:
    """The beginnings of documents (up to EXCERPT characters, whole lines), in an order that mixes their kinds.

    Long files do not outweigh the others, and the beginning of the text is a sample of all of it.
    """
    ordered = sorted(documents, key=lambda document: _digest("order:" + document.name))
    return "".join(excerpt(document.text) + END_OF_TEXT for document in ordered)


def excerpt(text: str) -> str:
    """The first whole lines of `text` that fit into EXCERPT characters."""
    if len(text) <= EXCERPT:
        return text
    return text[: text.rfind("\n", 0, EXCERPT) + 1] or text[:EXCERPT]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
