"""Byte-level BPE with ranked byte sequences, as in tiktoken: among the adjacent pairs in a piece of text, the pair
whose concatenation has the lowest rank is merged, until no such pair is left. The rank is also the id.

A tokenizer.json lists merged pairs instead, so every split of a token into two tokens becomes a pair. Pairs are sorted
by the rank of the merged token; pairs that form the same token are sorted by their ids.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..detokenizer import ByteLevel
from .parts import MAX_BYTES, MAX_TOKEN_BYTES, MAX_TOKENS, Json, ModelFormatError, added_token, byte_pairs, cut_by

_CHARACTERS = {byte: character for character, byte in ByteLevel.BYTES.items()}
# The bytes that never occur in UTF-8 text, which need no token.
_IN_TEXTS = [byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5]


def printable_bytes(data: bytes) -> str:
    """Return bytes in the form of a tokenizer.json: one printable character per byte."""
    return "".join([_CHARACTERS[byte] for byte in data])


def decoded(text: str | bytes, where: str) -> bytes:
    """Return a token's bytes from base64. Raise ModelFormatError if they are malformed, empty or too long."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ModelFormatError(f"{where}: {text!r:.60} is not base64: {error}") from error
    if base64.b64encode(data) != (text if isinstance(text, bytes) else text.encode()):
        raise ModelFormatError(f"{where}: {text!r:.60} is not base64: its end is malformed")
    if not 0 < len(data) <= MAX_TOKEN_BYTES:
        raise ModelFormatError(f"{where} has {len(data)} bytes, but a token must have 1 to {MAX_TOKEN_BYTES}")
    return data


def checked_ranks(entries: Iterable[tuple[bytes, int]], special: Mapping[int, str]) -> dict[bytes, int]:
    """Return ranks by token.

    Raises:
        ModelFormatError: there are no tokens or too many tokens, a token or rank is duplicated or missing, or a byte
            has no token.
    """
    ranks: dict[bytes, int] = {}
    tokens: dict[int, bytes] = {}
    total = 0
    for token, rank in entries:
        total += len(token)
        if total > MAX_BYTES:
            raise ModelFormatError(f"the tokens have more than {MAX_BYTES} bytes in total")
        if token in ranks:
            raise ModelFormatError(f"the token {token!r:.60} occurs twice, with the ranks {ranks[token]} and {rank}")
        if rank in tokens:
            raise ModelFormatError(f"two tokens have the rank {rank}: {tokens[rank]!r:.60} and {token!r:.60}")
        if rank >= MAX_TOKENS:
            raise ModelFormatError(f"the token {token!r:.60} has the rank {rank}, but ranks must be below {MAX_TOKENS}")
        ranks[token], tokens[rank] = rank, token
    if not ranks:
        raise ModelFormatError("the file has no tokens")
    if missing := first_missing(tokens, special):
        count, first = missing
        raise ModelFormatError(f"{count} of the ranks below {max(tokens)} are missing, starting with {first}")
    if bytes_missing := [byte for byte in _IN_TEXTS if bytes([byte]) not in ranks]:
        raise ModelFormatError(_missing_bytes(bytes_missing))
    return ranks


def first_missing(ids: Iterable[int], others: Iterable[int]) -> tuple[int, int] | None:
    """Return the number of missing ids below the largest of `ids`, and the first missing id; None if there is none."""
    known = set(ids)
    missing = set(range(max(known, default=0))).difference(known, others)
    return (len(missing), min(missing)) if missing else None


def require_bytes(vocab: Mapping[str, int]) -> None:
    """Raise ModelFormatError if a byte that may occur in texts is missing from a byte-level vocabulary."""
    if missing := [byte for byte in _IN_TEXTS if _CHARACTERS[byte] not in vocab]:
        raise ModelFormatError(_missing_bytes(missing))


def _missing_bytes(missing: Sequence[int]) -> str:
    return (
        f"{len(missing)} byte values have no token, starting with 0x{missing[0]:02X}; texts with these bytes "
        "cannot be encoded"
    )


def ranked_tokenizer(
    ranks: Mapping[bytes, int],
    added: Sequence[Json],
    expression: str,
    *,
    before: int = 0,
    normalizer: Json | None = None,
) -> str:
    """Return the text of a tokenizer.json.

    Args:
        ranks: see `checked_ranks`.
        added: added tokens with their ids; see `added_token`.
        expression: expression that splits texts into pieces; no token crosses the boundaries of pieces.
        before: number of ids that precede the ids of the ranks.
        normalizer: part of the tokenizer.json.

    Raises:
        ModelFormatError: an added token has the id of another token.
    """
    vocab = {printable_bytes(token): rank + before for token, rank in ranks.items()}
    used_ids = set(vocab.values())
    for token in added:
        if vocab.setdefault(token["content"], token["id"]) != token["id"] or token["id"] in used_ids:
            raise ModelFormatError(f"{token['content']!r:.60} has the id {token['id']}, which belongs to another token")
        used_ids.add(token["id"])
    return byte_pairs(
        vocab, _merges(ranks), added=added, pre_tokenizer=cut_by([expression]), normalizer=normalizer,
        ignore_merges=True,
    )  # fmt: skip


def _merges(ranks: Mapping[bytes, int]) -> list[list[str]]:
    written = {token: printable_bytes(token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += [[written[left], written[right]] for _, _, left, right in sorted(pairs)]
    return merges


def declared_token(id_: int, declared: Mapping[str, Any]) -> Json:
    """Return an added token with its flags in tokenizer_config.json."""
    special = declared.get("special", False)
    return added_token(id_, **{"normalized": not special, **declared, "special": special})
