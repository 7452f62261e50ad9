"""Small tokenizer.json files with and without a space before the text. The same code recorded prefix_space.json."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "<mask>", "<|endoftext|>", "[CLS]", "[SEP]", "<s>NOTUSED", "</s>NOTUSED"]
_MARK = "\u2581"
_WORDS = [_MARK, *"abcdefgh!", f"{_MARK}b", f"{_MARK}a"]
_PIECES = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]


def byte_level(adds: bool) -> Tokenizer:
    vocab = {token: id_ for id_, token in enumerate([*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    vocab |= {"Ġb": len(vocab), "Ġa": len(vocab) + 1}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "b"), ("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return backend


def split(adds: bool) -> Tokenizer:
    """A byte-level tokenizer with the regular expression of Qwen2."""
    backend = byte_level(adds)
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    pattern = Regex(rf"{words}|\s*[\r\n]+|\s+(?!\S)|\s+")
    levels = pre_tokenizers.ByteLevel(add_prefix_space=adds, use_regex=False)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), levels])
    return backend


def _llama(adds: bool) -> Tokenizer:
    vocab = {token: id_ for id_, token in enumerate(_PIECES)}
    merges = [(_MARK, "b"), (_MARK, "a")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    strip = [decoders.Strip(" ", 1, 0)] if adds else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens(["<s>"])
    return backend


def prepend(adds: bool) -> Tokenizer:
    backend = _llama(adds)
    before = [normalizers.Prepend(_MARK)] if adds else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _MARK)])
    return backend


def metaspace(adds: bool) -> Tokenizer:
    backend = _llama(adds)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if adds else "never", split=False)
    return backend


def unigram(adds: bool) -> Tokenizer:
    backend = Tokenizer(models.Unigram([(piece, -float(id_)) for id_, piece in enumerate(_PIECES)], unk_id=2))
    scheme = "always" if adds else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["<s>"])
    return backend


def words(adds: bool) -> Tokenizer:
    backend = unigram(adds)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])
    return backend


KINDS: dict[str, Callable[[bool], Tokenizer]] = {
    "byte_level": byte_level,
    "split": split,
    "prepend": prepend,
    "metaspace": metaspace,
    "unigram": unigram,
    "words": words,
}
"""The builders by name; the argument is True to add a space (a mark) before the text."""
