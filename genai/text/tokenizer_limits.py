"""What a tokenizer.json may do to a text: its rules are written by strangers, and a few short ones make gigabytes.

How much longer a text can become is known from the rules themselves; the tokenizers library would try, and end the
process where memory runs out.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.reading import json_object
from ..errors import TokenizerError

MAX_FACTOR = 128
"""So many times longer may a text become; the longest expansion in Unicode's normal forms is 18, that to bytes 4."""
MAX_ADDED = 2**16
"""So many characters may be put before or behind a text."""
MAX_STAGES = 64
MAX_VALUES = 2**21
"""So many commas may the file have; a vocabulary of 262,000 with 515,000 merges has 1.3 million."""
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
# A byte of UTF-8 becomes a character.
_BYTES_PER_CHARACTER = 4
# One of the parts, or a letter of ASCII that is written as an escape, which may hide one.
_PARTS_BEHIND = re.compile(rf'"({"|".join(_PARTS)})"\s*:\s*[{{n]|\\u00[4-7]', re.IGNORECASE)


@dataclass(frozen=True)
class Growth:
    """The most characters that n become: factor * n + added; and the number of rules behind that."""

    factor: float = 1.0
    added: float = 0.0
    stages: int = 1

    def then(self, other: Growth) -> Growth:
        """Both, one after the other."""
        added = self.added * other.factor + other.added
        return Growth(self.factor * other.factor, added, self.stages + other.stages)


def check_rules(text: str, path: Path) -> None:
    """Check how far the rules of a tokenizer.json can blow up a text: before the library reads it, which applies them.

    Raises:
        TokenizerError: too far; or a table that the library cannot even read.
    """
    if (count := text.count(",")) > MAX_VALUES:
        why = "the library would take many seconds to read it"
        raise TokenizerError(f"{path}: has {count} commas", why, f"give one with at most {MAX_VALUES}")
    parts = _parts(text, path)
    growth = Growth(stages=0)
    for name in _PARTS:
        # The decoder begins anew, with ids.
        growth = Growth(stages=0) if name == "decoder" else growth
        for stage in _stages(parts.get(name)):
            growth = growth.then(_growth_of_stage(stage, path))
        if growth.factor > MAX_FACTOR or growth.added > MAX_ADDED or growth.stages > MAX_STAGES:
            raise TokenizerError(
                f"{path}: its {name} can make a text {growth.factor:.6g} times longer and add {growth.added:.6g} "
                f"characters, with {growth.stages} rules",
                f"at most {MAX_FACTOR} times, {MAX_ADDED} characters and {MAX_STAGES} rules are allowed",
                "copy the file again from the original model",
            )


def _parts(text: str, path: Path) -> Mapping[str, Any]:
    """The file without its vocabulary where that is possible: it is large, stands last, and is read by the library."""
    end = text.find('"model"')
    if end >= 0 and not _PARTS_BEHIND.search(text, end):
        with contextlib.suppress(TokenizerError):
            return json_object(text[:end] + '"model": null}', path, TokenizerError)
    return json_object(text, path, TokenizerError, MAX_VALUES)


def _stages(rule: Any) -> Iterator[Mapping[str, Any]]:
    """The single rules of a nested sequence of them. Rules may lack their type, and are known by what they have."""
    if not isinstance(rule, Mapping):
        return
    if rule.get("type") != "Sequence":
        yield rule
    if rule.get("type", "Sequence") == "Sequence":
        for name in _LISTS:
            inner = rule.get(name)
            for part in inner if isinstance(inner, list) else ():
                yield from _stages(part)


def _growth_of_stage(stage: Mapping[str, Any], path: Path) -> Growth:
    """What is malformed is left to the library, which refuses it."""
    if "precompiled_charsmap" in stage:
        return Growth(_checked_table(stage["precompiled_charsmap"], path))
    if "prepend" in stage:
        return Growth(added=len(str(stage["prepend"])))
    if "pattern" in stage and "content" in stage:
        return _growth_of_replacement(stage["pattern"], str(stage["content"]))
    if stage.get("type") == "ByteLevel" or "trim_offsets" in stage:
        return Growth(_BYTES_PER_CHARACTER, 1)
    if stage.get("handle_chinese_chars"):
        return Growth(3)
    if isinstance(stage.get("single"), list):
        texts = sum(isinstance(piece, Mapping) and "Sequence" in piece for piece in stage["single"])
        return Growth(max(texts, 1), len(stage["single"]) - texts)
    return Growth(added=1)


def _growth_of_replacement(pattern: Any, content: str) -> Growth:
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(literal, str) or not literal:  # one that matches the empty text does so beside every character
        return Growth(1 + len(content)) if len(content) > 1 else Growth()
    return Growth(max(1.0, len(content) / len(literal)))


def _checked_table(table: Any, path: Path) -> int:
    longest = _longest_entry(table) if isinstance(table, str) else None
    if longest is None:
        raise TokenizerError(
            f"{path}: precompiled_charsmap of the normalizer is damaged",
            "it is the length of a table, the table and the texts that it leads to, as base64",
            "copy the file again from the original model",
        )
    return max(longest, 1)


def _longest_entry(table: str) -> int | None:
    """Characters of the longest text in a table of a SentencePiece normalizer; None if it is no such table."""
    try:
        data = base64.b64decode(table, validate=True)
        (size,) = struct.unpack_from("<I", data)
        texts = data[4 + size :].decode()
    except (binascii.Error, ValueError, struct.error):
        return None
    if size % 4 or 4 + size > len(data):
        return None
    return max(map(len, texts.split("\0")))
