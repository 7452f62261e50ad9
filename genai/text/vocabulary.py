"""A tokenizer's vocabulary as the bytes that each token adds to a text, for grammars."""

from __future__ import annotations

import json
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..common.single import Single
from ..engine.sampling.guidance import Guidance, TokenBytes
from ..errors import GenaiError, TokenizerError
from .detokenizer import ByteLevel, decoder_parts
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..models.model import Model

_BYTE_TOKEN = len("<0x00>")
# Cache of encoded texts: the maximum number of texts, and of characters in each.
_MOST_KEPT, _LONGEST_KEPT = 4096, 256
# A prefix for texts, for tokenizers that otherwise add a space at the start. No text contains the prefix.
_BEFORE = "\x02"


def guidance_of(model: Model, tokenizer: Tokenizer | None = None) -> Guidance:
    """Return the grammar compiler of a model, which all users of the model share.

    Args:
        model: the model.
        tokenizer: the tokenizer of the model's folder; None = the tokenizer is loaded for the first grammar.
    """
    guidance = _KNOWN.get(model)
    if guidance is None:
        known = model.config.model
        # A reference to the model would keep it alive forever, because it is the key of a weak dictionary.
        loaded, folder = tokenizer, model.loaded_folder
        make = partial(token_bytes, loaded) if loaded is not None else lambda: token_bytes(Tokenizer(folder))
        guidance = _KNOWN[model] = Guidance(make, known.vocab_size, known.eos_token_ids)
    return guidance


_KNOWN: weakref.WeakKeyDictionary[Single, Guidance] = weakref.WeakKeyDictionary()


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return the bytes of each token in the middle of a text, without special treatment of a text's first token.

    Raises:
        TokenizerError: the bytes of a token depend on the adjacent tokens.
    """
    backend = tokenizer.backend
    special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
    read = _reader(backend.decoder)
    entries = backend.get_vocab(with_added_tokens=True)
    tokens = [b""] * (1 + max(entries.values(), default=-1))
    for text, id_ in entries.items():
        tokens[id_] = text.encode() if id_ in special else read(text)
    return TokenBytes(tokens, sorted(special), Encoding(tokenizer, tokens, special))


class Encoding:
    """Encodes a part of a longer text, with the tokenizer if the ids decode to the same text, else greedily."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes], special: set[int]) -> None:
        self._tokenizer, self._tokens, self._special = tokenizer, tokens, special
        self._by_bytes: dict[bytes, int] | None = None
        # Requests with the same grammar are forced to write the same texts, and encoding is slow, so texts are cached.
        self._known: OrderedDict[str, list[int]] = OrderedDict()

    def __call__(self, text: str) -> list[int]:
        ids = self._known.get(text)
        if ids is None:
            ids = self._encoded(text)
            if len(text) <= _LONGEST_KEPT:
                self._known[text] = ids
                if len(self._known) > _MOST_KEPT:
                    self._known.popitem(last=False)
        return ids

    def _encoded(self, text: str) -> list[int]:
        for before in ("", _BEFORE):
            try:
                ids = self._tokenizer.encode(before + text, add_special_tokens=False).tolist()
            except GenaiError:
                break  # the tokenizer is too slow, or rejects the text
            if (rest := self._rest(ids, before.encode(), text.encode())) is not None:
                return rest
        return self._greedy(text.encode())

    def _rest(self, ids: list[int], before: bytes, text: bytes) -> list[int] | None:
        """Return the ids that follow the ids of `before`, if they decode to exactly `text`."""
        if self._special.intersection(ids):
            return None
        start, prefix = 0, b""
        while before and before not in prefix and start < len(ids):
            prefix += self._tokens[ids[start]]
            start += 1
        exact = (not before or prefix.endswith(before)) and b"".join(self._tokens[id_] for id_ in ids[start:]) == text
        return ids[start:] if exact else None

    def _greedy(self, text: bytes) -> list[int]:
        """Return the longest matching token at each position, up to the first position without a match."""
        if self._by_bytes is None:
            pairs = ((token, id_) for id_, token in enumerate(self._tokens) if token and id_ not in self._special)
            self._by_bytes = dict(pairs)
        longest, ids, position = max(map(len, self._by_bytes), default=0), [], 0
        while position < len(text):
            lengths = range(min(longest, len(text) - position), 0, -1)
            length = next((n for n in lengths if text[position : position + n] in self._by_bytes), 0)
            if not length:
                break
            ids.append(self._by_bytes[text[position : position + length]])
            position += length
        return ids


def _reader(decoder: Any) -> Callable[[str], bytes]:
    """Return a function from vocabulary entries to bytes, according to the decoder of a tokenizer.json."""
    if decoder is None:
        return lambda text: f" {text}".encode()
    parts = [*decoder_parts(json.loads(decoder.__getstate__()))]
    if any(part["type"] == "ByteLevel" for part in parts):
        return _from_byte_level
    fused = next((index for index, part in enumerate(parts) if part["type"] == "Fuse"), len(parts))
    for index, part in enumerate(parts):
        if _changes_text(part) or (index > fused and part["type"] == "Replace"):
            raise TokenizerError(
                f"grammars cannot be used with this tokenizer: its decoder {part['type']!r} changes the text",
                "the text of a token depends on the adjacent tokens",
                "omit the grammar, or use a model with a byte-level or SentencePiece tokenizer",
            )
    return partial(_from_parts, parts)


def _changes_text(part: Mapping[str, Any]) -> bool:
    """Return True if a decoder does more than map each token to the token's text."""
    return (part["type"] == "Replace" and "String" not in part["pattern"]) or (
        part["type"] == "WordPiece" and part["cleanup"]
    )


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes([ByteLevel.BYTES[character] for character in text])
    except KeyError:
        return text.encode()


def _from_parts(parts: Sequence[Mapping[str, Any]], text: str) -> bytes:
    for part in parts:
        kind = part["type"]
        if kind == "ByteFallback" and len(text) == _BYTE_TOKEN and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        elif kind == "Metaspace":
            text = text.replace(part["replacement"], " ")
        elif kind == "Replace" and "String" in part["pattern"]:
            text = text.replace(part["pattern"]["String"], part["content"])
        elif kind == "WordPiece":
            text = text.removeprefix(part["prefix"]) if text.startswith(part["prefix"]) else f" {text}"
        elif kind == "BPEDecoder":
            text = text.replace(part["suffix"], " ")
    return text.encode()
