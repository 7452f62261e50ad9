"""Limits on the rules of a tokenizer.json. Rules are untrusted, and a few short rules can expand text to gigabytes.

The maximum growth of text is computed from the rules. The tokenizers library would simply apply them, and the process
would be killed when memory runs out.
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
"""Maximum factor by which text may grow. The largest factor of Unicode's normal forms is 18, and of bytes it is 4."""
MAX_ADDED = 2**16
"""Maximum number of characters that may be added before or after the text."""
MAX_STAGES = 64
MAX_VALUES = 2**21
"""Maximum number of commas in the file; a vocabulary of 262,000 tokens with 515,000 merges has 1.3 million."""
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
# Each UTF-8 byte becomes a character.
_BYTES_PER_CHARACTER = 4
# A key of a part, or an escaped ASCII letter, which may hide such a key.
_PARTS_BEHIND = re.compile(rf'"({"|".join(_PARTS)})"\s*:\s*[{{n]|\\u00[4-7]', re.IGNORECASE)


@dataclass(frozen=True)
class Growth:
    """The maximum growth of text by rules: n characters become at most factor * n + added.

    Attributes:
        factor: the factor.
        added: the number of added characters.
        stages: the number of rules.
    """

    factor: float = 1.0
    added: float = 0.0
    stages: int = 1

    def then(self, other: Growth) -> Growth:
        """Return the growth by these rules followed by the other rules."""
        added = self.added * other.factor + other.added
        return Growth(self.factor * other.factor, added, self.stages + other.stages)


def check_rules(text: str, path: Path) -> None:
    """Check how much the rules of a tokenizer.json can expand text before the library reads and applies the rules.

    Raises:
        TokenizerError: the growth exceeds a limit, or a table is malformed.
    """
    if (count := text.count(",")) > MAX_VALUES:
        why = "the library would need many seconds to read the file"
        raise TokenizerError(
            f"{path}: the file has {count} commas", why, f"use a file with at most {MAX_VALUES} commas"
        )
    parts = _parts(text, path)
    growth = Growth(stages=0)
    for name in _PARTS:
        # The decoder is counted separately, because it starts from ids.
        growth = Growth(stages=0) if name == "decoder" else growth
        for stage in _stages(parts.get(name)):
            growth = growth.then(_growth_of_stage(stage, path))
        if growth.factor > MAX_FACTOR or growth.added > MAX_ADDED or growth.stages > MAX_STAGES:
            raise TokenizerError(
                f"{path}: the {name} can make text {growth.factor:.6g} times longer and add {growth.added:.6g} "
                f"characters, with {growth.stages} rules",
                f"the limits are {MAX_FACTOR} times, {MAX_ADDED} characters and {MAX_STAGES} rules",
                "copy the file again from the original model",
            )


def _parts(text: str, path: Path) -> Mapping[str, Any]:
    """Return the file, if possible without its vocabulary, which is large and last and which the library reads."""
    end = text.find('"model"')
    if end >= 0 and not _PARTS_BEHIND.search(text, end):
        with contextlib.suppress(TokenizerError):
            return json_object(text[:end] + '"model": null}', path, TokenizerError)
    return json_object(text, path, TokenizerError, MAX_VALUES)


def _stages(rule: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the individual rules of nested sequences. A rule without a type is identified by its fields."""
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
    """Return the growth by one rule. Malformed rules are accepted here, because the library rejects them."""
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
    if not isinstance(literal, str) or not literal:  # the empty string matches beside every character
        return Growth(1 + len(content)) if len(content) > 1 else Growth()
    return Growth(max(1.0, len(content) / len(literal)))


def _checked_table(table: Any, path: Path) -> int:
    longest = _longest_entry(table) if isinstance(table, str) else None
    if longest is None:
        raise TokenizerError(
            f"{path}: the normalizer's precompiled_charsmap is not valid",
            "precompiled_charsmap must be base64 data: the length of a table, the table, and the texts that the "
            "table refers to",
            "copy the file again from the original model",
        )
    return max(longest, 1)


def _longest_entry(table: str) -> int | None:
    """Return the length of the longest text in a SentencePiece normalizer's table; None if the table is malformed."""
    try:
        data = base64.b64decode(table, validate=True)
        (size,) = struct.unpack_from("<I", data)
        texts = data[4 + size :].decode()
    except (binascii.Error, ValueError, struct.error):
        return None
    if size % 4 or 4 + size > len(data):
        return None
    return max(map(len, texts.split("\0")))
