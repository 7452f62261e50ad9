"""The bytes of each token, for tokenizers of every kind, and the tokenisation of texts that grammars force."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from genai.errors import TokenizerError
from genai.text.tokenizer import Tokenizer
from genai.text.vocabulary import token_bytes

TEXTS = (
    '{"name": "Zoë", "n": [1, 2.5]}',
    "def f(x):\n\treturn x",
    "a  b   c",
    "日本語 🙂 é",
    "\u0301 naïve",
    "it's ok.",
)
# What their decoders do to a token depends on the tokens beside it.
REFUSED = {"many_parts", "word_piece"}


def test_the_bytes_of_tokens_are_the_text(kind_folder: Path, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer(kind_folder)
    kind = request.node.callspec.params["kind_folder"]
    if kind in REFUSED:
        with pytest.raises(TokenizerError, match="grammars cannot be used"):
            token_bytes(tokenizer)
        return
    known = token_bytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        joined = b"".join(known.tokens[id_] for id_ in ids if id_ not in known.special)
        # The first token may lose the space that the tokenizer put there, and the last one that of a word's end.
        assert joined.strip(b" ") == tokenizer.decode(ids).encode().strip(b" ")


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_a_text_is_cut_as_the_tokenizer_does(kind: str, folder_of: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer(folder_of(kind))
    known = token_bytes(tokenizer)
    for text in TEXTS[:3]:
        ids = known.encode(text)
        assert b"".join(known.tokens[id_] for id_ in ids) == text.encode()
        whole = tokenizer.encode(text).tolist()
        assert ids in (whole, ids[: len(ids) - len(whole) + 1] + whole[1:])


def test_a_text_that_the_tokenizer_changes_is_cut_greedily(folder_of: Callable[[str], Path]) -> None:
    """If its ids decode to another text, or contain special tokens."""
    tokenizer = Tokenizer(folder_of("byte_level"))
    known = token_bytes(tokenizer)
    assert known.special
    marker = known.tokens[known.special[0]].decode()
    ids = known.encode(f"a {marker} b\0")
    assert b"".join(known.tokens[id_] for id_ in ids) == f"a {marker} b\0".encode()
    assert not set(ids) & set(known.special)
