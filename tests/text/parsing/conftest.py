"""A tokenizer that has the markers of all parsers."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import genai
from genai.text.parsing import PARSERS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> genai.Tokenizer:
    """Bytes, and every marker of every parser as a special token."""
    folder = tmp_path_factory.mktemp("markers")
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    markers = sorted({marker for parser in PARSERS.values() for marker in parser.markers})
    backend.add_special_tokens([AddedToken(name, special=True) for name in (*markers, "<pad>")])
    backend.save(str(folder / "tokenizer.json"))
    return genai.Tokenizer(folder)
