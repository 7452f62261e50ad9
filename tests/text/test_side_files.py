"""Files beside tokenizer.json that contradict it: what transformers 5.24 does, or a typed error.

side_files.json stores each case's files, and the results of AutoTokenizer for them. The tokenizer is a
byte-level BPE with the merges "he" and "ll", the special tokens <s>, </s> and <im>, and the added token <tool>.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from genai.errors import TokenizerError
from genai.text.backend import load_tokenizer

GOLDENS = json.loads((Path(__file__).parent / "side_files.json").read_text(encoding="utf-8"))
# transformers assigns another id than the file declares. The embedding of the declared id would never be used.
REFUSED = {
    "decoder other content": ("'<new>' has the id 260 in tokenizer_config.json", "next free id, 262"),
    "decoder other content special": ("'<new>' has the id 261 in tokenizer_config.json", "next free id, 262"),
    "decoder new gap": ("'<new>' has the id 280 in tokenizer_config.json", "next free id, 262"),
    "decoder vocab entry wrong id": ("'he' has the id 100 in tokenizer_config.json", "assigns 256"),
    "added json gap": ("'<new>' has the id 280 in added_tokens.json", "next free id, 262"),
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id_ for id_, token in enumerate([*bytes_, "he", "ll"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.add_special_tokens([AddedToken("<im>", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", sorted(GOLDENS["cases"].keys() - REFUSED.keys()))
def test_as_in_transformers(name: str, tmp_path: Path) -> None:
    case = GOLDENS["cases"][name]
    backend = load_tokenizer(write(tmp_path, case["files"])).backend
    ids = [backend.encode(text, add_special_tokens=False).ids for text in GOLDENS["texts"]]
    assert ids == case["ids"]
    assert [backend.decode(row) for row in ids] == case["decoded"]
    added = backend.get_added_tokens_decoder().values()
    assert sorted(token.content for token in added if token.special) == sorted(case["special"])
    assert backend.get_vocab_size() == case["size"]


@pytest.mark.parametrize("name", REFUSED)
def test_ids_of_other_tokens_are_refused(name: str, tmp_path: Path) -> None:
    what, why = REFUSED[name]
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(write(tmp_path, GOLDENS["cases"][name]["files"]))
    assert what in caught.value.what and why in caught.value.why and caught.value.fix
