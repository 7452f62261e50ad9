"""Token types, ends of replies and removed white space, by the texts of a GGUF file's tokens.

Many converters write the type NORMAL for marks such as <|im_end|>, or no types. llama.cpp therefore overrides the types
of known texts, and adds attributes that the file format lacks for some models. The rules and texts are llama.cpp's
(MIT, src/llama-vocab.cpp, as of version 0.3.36 of llama-cpp-python).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...text.sources.sentencepiece import ADDED_TYPES, PieceType

_BYTE = re.compile("<0x[0-9A-F]{2}>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
# Tokens that end a reply.
_ENDS = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜>
    [e~[""".split()
)
# Keys of the metadata whose tokens also end a reply.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Roles for filling in the middle of a text: the keys of the metadata (the last key takes precedence), and the texts of
# which one has the role if the metadata has none of the keys.
_MIDDLE_ROLES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "prefix": (
        ("fim_pre_token_id", "prefix_token_id"),
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    ),
    "suffix": (
        ("fim_suf_token_id", "suffix_token_id"),
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    ),
    "middle": (
        ("fim_mid_token_id", "middle_token_id"),
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    ),
    "pad": (("fim_pad_token_id",), "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    "repository": (("fim_rep_token_id",), "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "file": (("fim_sep_token_id",), "<|file_sep|>"),
}
_ENDING_ROLES = ("pad", "repository", "file")
# Marks of a reply's parts that are always visible.
_VISIBLE = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class TokenTypes:
    """The types of a vocabulary's tokens by id, and the ids of the tokens that end a reply."""

    types: list[PieceType]
    ends: list[int]


def typed_by_text(
    tokens: Sequence[str], types: Sequence[PieceType], named: Callable[[str], int | None], *, has_bytes: bool
) -> TokenTypes:
    """Return the types of tokens, with llama.cpp's corrections of the types in a file.

    Args:
        tokens: texts of the tokens.
        types: types of the tokens in the file.
        named: a function that returns the id of a key in the metadata, or None.
        has_bytes: True for tokenizers that look for the tokens of unknown characters' bytes by their texts.
    """
    ids = {token: id_ for id_, token in enumerate(tokens)}
    corrected = _typed_bytes(tokens, types) if has_bytes or ids.keys() >= frozenset(BYTES) else list(types)
    roles: dict[str, int | None] = {}
    for role, (keys, texts) in _MIDDLE_ROLES.items():
        listed = [id_ for key in keys if (id_ := named(key)) is not None]
        roles[role] = listed[-1] if listed else None
        if not listed and (found := [ids[text] for text in texts.split() if text in ids]):
            # If several texts are present, llama.cpp's choice depends on the order of a hash table.
            roles[role] = min(found)
            corrected[min(found)] = PieceType.CONTROL
    marks = sorted(ids[text] for text in _ENDS if text in ids)
    for id_ in marks:
        corrected[id_] = PieceType.CONTROL
    for text in _VISIBLE:
        if text in ids:
            corrected[ids[text]] = PieceType.USER_DEFINED
    chosen = [*map(named, _END_KEYS), *marks, *(roles[role] for role in _ENDING_ROLES)]
    ends = list(dict.fromkeys(id_ for id_ in chosen if id_ is not None))
    for text, type_ in _not_ends({tokens[id_] for id_ in ends}).items():
        ends.remove(ids[text])
        corrected[ids[text]] = type_
    return TokenTypes(corrected, ends)


def _typed_bytes(tokens: Sequence[str], types: Sequence[PieceType]) -> list[PieceType]:
    """Return types in which the tokens for bytes are those with the texts <0x00> to <0xFF>, whatever the file says."""

    def corrected(token: str, type_: PieceType) -> PieceType:
        if _BYTE.fullmatch(token):
            return PieceType.BYTE
        return PieceType.NORMAL if type_ == PieceType.BYTE else type_

    return [corrected(token, type_) for token, type_ in zip(tokens, types, strict=True)]


def _not_ends(ends: set[str]) -> dict[str, PieceType]:
    """Return the tokens among `ends` that do not end a reply beside other tokens in `ends`, and their types."""
    excluded = {}
    calls = ends & {"<|call|>", "<|calls|>"}
    if "<|end|>" in ends and calls and ends & {"<|return|>", "<|flush|>"}:
        # The end of a part of the reply, in the formats of gpt-oss and Solar.
        excluded["<|end|>"] = PieceType.USER_DEFINED
    if "</s>" in ends and ends & {"<|tool_response>", "<|plamo:eos|>"}:
        excluded["</s>"] = PieceType.NORMAL
    return excluded


def stripped(
    tokens: Sequence[str], types: Sequence[PieceType], *, name: str, architecture: str, pre: str
) -> dict[int, dict[str, bool]]:
    """Return the ids of tokens that remove the white space before (lstrip) or after (rstrip) them in texts.

    Args:
        tokens, types: texts and corrected types of the tokens.
        name, architecture, pre: general.name, general.architecture and tokenizer.ggml.pre.
    """
    added = {token: id_ for id_, token in enumerate(tokens) if types[id_] in ADDED_TYPES}
    name = name.lower()
    if _contains(pre, "jina-v2-de", "jina-v2-es", "jina-v2-code") or _contains(
        architecture, "nomic-bert-moe", "jina-bert-v3"
    ):
        return {added["<mask>"]: {"lstrip": True}} if "<mask>" in added else {}
    if _contains(name, "phi-3", "phi3"):
        kept = {"<unk>", "<s>", "<|endoftext|>"}
        return {id_: {"rstrip": True} for token, id_ in added.items() if token not in kept}
    if _contains(name, "modern-bert"):
        return {added["[MASK]"]: {"lstrip": True}} if "[MASK]" in added else {}
    return {}


def _contains(text: str, *parts: str) -> bool:
    return any(part in text for part in parts)
