"""Conversion of a GGUF file's vocabulary to tokenizer.json and its companion files.

Token ids are the same as in llama.cpp.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...engine.sampling.generation_config import GGUF_PREFIX
from ...engine.sampling.option_rules import SAMPLERS, parse_order
from ...engine.sampling.params import DRAWING, checked_option
from ...errors import ChatTemplateError, OptionError, TokenizerError, UnsupportedModelError
from ...text.sources.parts import (
    MAX_TOKENS,
    Json,
    ModelFormatError,
    added_token,
    byte_pairs,
    cut_by,
    surrounded,
    tokenizer_text,
    word_pieces,
)
from ...text.sources.sentencepiece import (
    ADDED_TYPES,
    ModelType,
    Piece,
    PieceType,
    SentencePieceModel,
    tokenizer_json,
)
from ...weight_files.gguf import GgufModel
from .pre_tokenizers import PRE_TOKENIZERS
from .token_types import BYTES, stripped, typed_by_text

_KEY = "tokenizer.ggml."
_MOST_MERGES, _MOST_TEMPLATE, _MOST_TOKEN = 1 << 20, 1 << 20, 1 << 16
_MARK = "\u2581"
_BRACKETS = re.compile(rf"{_MARK}?(<.+>|\[.+\])", re.DOTALL)
# Roles of special tokens: the name in transformers, and the key in the metadata.
_ROLES = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id", "pad_token": "padding_token_id", "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}  # fmt: skip
# llama.cpp's defaults for roles that the metadata omits, by kind of tokenizer.
_DEFAULT_ROLES: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    "t5": {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0},
}
# Keys of sampling defaults without their prefix, and the options of SamplingParams.
_SAMPLING = {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
    **{name: name for name in "top_k top_p min_p xtc_probability xtc_threshold penalty_last_n".split()},
    **{name: name for name in "mirostat mirostat_tau mirostat_eta".split()},
}
_ORDER = f"{GGUF_PREFIX}sequence"
# Other names of samplers in llama.cpp.
_OTHER_SAMPLERS = {"temp": "temperature", "nucleus": "top_p", "typical": "typical_p", "typ": "typical_p"}
# llama.cpp's defaults.
_TEMPERATURE, _LAST_N = 0.8, 64


class Vocabulary:
    """The tokens of a GGUF file by id, and their properties in its metadata.

    Attributes:
        kind: "gpt2" (byte-level BPE), "llama" (SentencePiece BPE), "gemma4" (BPE with marks for spaces), "t5" (unigram)
            or "bert" (WordPiece).
        tokens: texts of the tokens.
        types: types of the tokens, corrected as in llama.cpp; see PieceType and `typed_by_text`.
        ends: ids of the tokens that end a reply.
        strips: flags of the tokens that remove white space beside them, by id; see `stripped`.

    Raises:
        TokenizerError: the vocabulary is missing or malformed.
        UnsupportedModelError: the kind of the vocabulary is not supported.
    """

    def __init__(self, model: GgufModel, size: int) -> None:
        self._values, self._path = model.metadata, model.path
        self.kind = self._text("model", "")
        self.tokens = self._strings("tokens")
        if not self.kind or not self.tokens:
            self._fail("the vocabulary is missing", f"{_KEY}model and {_KEY}tokens are required")
        if self.kind not in _WRITERS:
            raise UnsupportedModelError(
                f"{self._path}: the tokenizer type {self.kind!r:.40} is not supported",
                f"the supported types are {', '.join(_WRITERS)}",
                "use another model, or build the model from the Hugging Face checkpoint",
            )  # fmt: skip
        if len(self.tokens) > min(MAX_TOKENS, size):
            self._fail(
                f"the tokenizer has {len(self.tokens)} tokens",
                f"the model has embeddings for {size} tokens, and at most {MAX_TOKENS} tokens are supported",
            )
        for id_, token in enumerate(self.tokens):
            if not token or len(token) > _MOST_TOKEN or any("\ud800" <= one <= "\udfff" for one in token):
                self._fail(
                    f"token {id_} is {token!r:.60}", f"a token must have 1 to {_MOST_TOKEN} characters of valid UTF-8"
                )
        if len(set(self.tokens)) < len(self.tokens):
            twice = Counter(self.tokens).most_common(1)[0][0]
            self._fail(f"two tokens have the text {twice!r:.60}", "each token must have a unique text")
        found = typed_by_text(self.tokens, self._file_types(), self.id_of, has_bytes=self.kind == "llama")
        self.types, self.ends = found.types, found.ends
        name = model.metadata.get("general.name")
        self.strips = stripped(
            self.tokens,
            self.types,
            name=name if isinstance(name, str) else "",
            architecture=model.architecture,
            pre=self._text("pre", ""),
        )

    def _file_types(self) -> list[PieceType]:
        """Return the types in the file, without llama.cpp's corrections."""
        types = self._numbers("token_type", "iu")
        if types is None:
            return [PieceType.NORMAL] * len(self.tokens)
        known = set(PieceType)
        if not all(int(number) in known for number in types):
            self._fail(
                f"{_KEY}token_type contains an unknown number", f"token types are integers from 1 to {max(known)}"
            )
        return [PieceType(int(number)) for number in types]

    def _fail(self, problem: str, why: str) -> NoReturn:
        raise TokenizerError(
            f"{self._path}: {problem}", why, "convert the model again, or build it from the Hugging Face checkpoint"
        )

    def _text(self, name: str, default: str) -> str:
        value = self._values.get(_KEY + name, default)
        if not isinstance(value, str):
            self._fail(f"{_KEY}{name} is {value!r:.40}", "the value must be a string")
        return value

    def _strings(self, name: str) -> list[str]:
        value = self._values.get(_KEY + name, [])
        if not isinstance(value, list):
            self._fail(f"{_KEY}{name} is {value!r:.40}", "the value must be a list of strings")
        return value

    def _numbers(self, name: str, kinds: str) -> NDArray[Any] | None:
        """Return an array with one number per token, or None."""
        value = self._values.get(_KEY + name)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) != len(self.tokens):
            self._fail(
                f"{_KEY}{name} has the wrong type or length",
                f"the value must be an array of {len(self.tokens)} numbers, one per token",
            )
        return value

    def scores(self) -> list[float]:
        """Return each token's score. Raise TokenizerError if scores are missing or not finite."""
        scores = self._numbers("scores", "f")
        if scores is None or not np.isfinite(scores).all():
            self._fail(
                f"{_KEY}scores is missing or contains NaN or infinity",
                f"a tokenizer of type {self.kind} needs a score for each token",
            )
        return [float(score) for score in scores]

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(_KEY + name, default)
        if not isinstance(value, bool):
            self._fail(f"{_KEY}{name} is {value!r:.40}", "the value must be true or false")
        return value

    def id_of(self, name: str) -> int | None:
        """Return the id of the token with a role, or None if neither the file nor llama.cpp's defaults name a token."""
        value = self._values.get(_KEY + name)
        default = _DEFAULT_ROLES.get(self.kind, {}).get(name)
        if value is None and default is not None and default < len(self.tokens):
            return default
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            self._fail(f"{_KEY}{name} is {value!r:.40}", f"token ids are integers from 0 to {len(self.tokens) - 1}")
        return value

    def charsmap(self) -> bytes:
        """Return the compiled table for character normalisation, or b""."""
        value = self._values.get(f"{_KEY}precompiled_charsmap")
        if value is None:
            return b""
        if not isinstance(value, np.ndarray) or value.dtype.itemsize != 1:
            self._fail(f"{_KEY}precompiled_charsmap is {value!r:.40}", "the value must be an array of bytes")
        return bytes(value.tobytes())

    def added(self) -> list[Json]:
        """Return the special and user-defined tokens, which are matched as a whole in texts."""
        special = (PieceType.UNKNOWN, PieceType.CONTROL)
        return [
            added_token(id_, token, special=kind in special, **self.strips.get(id_, {}))
            for id_, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in ADDED_TYPES
        ]

    def is_mark(self, id_: int) -> bool:
        """Return False for ordinary text, which some files use for roles, such as "!" for padding.

        The tokens in tokenizer_config.json are special: decoded texts omit them.
        """
        return self.types[id_] in ADDED_TYPES or _BRACKETS.fullmatch(self.tokens[id_]) is not None

    def merges(self) -> list[list[str]]:
        """Return the pairs of tokens to merge, in order of priority."""
        entries = self._strings("merges")
        if not entries or len(entries) > _MOST_MERGES:
            self._fail(f"{_KEY}merges has {len(entries)} entries", f"byte-level BPE needs 1 to {_MOST_MERGES} merges")
        known, pairs = set(self.tokens), []
        for merge in entries:
            left, _, right = merge[0:1] + merge[1:].partition(" ")[0], "", merge[1:].partition(" ")[2]
            # Skip merges that do not result in a token, as llama.cpp does.
            if {left, right, left + right} <= known:
                pairs.append([left, right])
        return pairs

    def pre_tokenizer(self) -> str:
        """Return the pre-tokenizer's name. Raise UnsupportedModelError if it is not supported."""
        name = self._text("pre", "default")
        if name not in PRE_TOKENIZERS:
            raise UnsupportedModelError(
                f"{self._path}: {_KEY}pre is {name!r:.60}", f"the supported names are {', '.join(PRE_TOKENIZERS)}",
                "build the model from the Hugging Face checkpoint",
            )  # fmt: skip
        return name


def write_tokenizer(model: GgufModel, size: int, folder: Path) -> Json:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json to a folder.

    Args:
        size: number of rows of the embeddings, which is also the maximum number of tokens.

    Returns:
        The ids of special tokens, by the names of their keys in config.json.

    Raises:
        TokenizerError, UnsupportedModelError: the vocabulary is missing, malformed, or of an unsupported kind.
        ChatTemplateError: a chat template is not a string or is too long.
    """
    vocabulary = Vocabulary(model, size)
    try:
        text = _WRITERS[vocabulary.kind](vocabulary)
    except ModelFormatError as error:
        vocabulary._fail("the vocabulary cannot be used", str(error))
    roles = {role: id_ for role, name in _ROLES.items() if (id_ := vocabulary.id_of(name)) is not None}
    config: Json = {role: vocabulary.tokens[id_] for role, id_ in roles.items() if vocabulary.is_mark(id_)}
    config |= {"clean_up_tokenization_spaces": False, **_templates(model)}
    ids: Json = {"eos_token_id": vocabulary.ends}
    ids |= {
        name: roles[role]
        for role, name in (("bos_token", "bos_token_id"), ("pad_token", "pad_token_id"))
        if role in roles
    }
    generation = {**ids, **sampling_of(model.metadata)}
    contents = {"tokenizer.json": text, "tokenizer_config.json": config, "generation_config.json": generation}
    for name, content in contents.items():
        written = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (folder / name).write_text(written, encoding="utf-8")
    return ids


def _templates(model: GgufModel) -> Json:
    """Return the chat template, or several templates by name. Their limits are applied when they are rendered."""
    names = model.metadata.get("tokenizer.chat_templates", [])
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    keys = {"default": "tokenizer.chat_template", **{name: f"tokenizer.chat_template.{name}" for name in names}}
    templates = {name: model.metadata[key] for name, key in keys.items() if key in model.metadata}
    for name, template in templates.items():
        if (
            not isinstance(template, str)
            or len(template) > _MOST_TEMPLATE
            or "\udc80" <= max(template, default="") <= "\udcff"
        ):
            raise ChatTemplateError(
                f"{model.path}: {keys[name]} is {template!r:.60}",
                f"a chat template must be valid UTF-8 of at most {_MOST_TEMPLATE} characters",
                "convert the model again",
            )  # fmt: skip
    if len(templates) > 1:
        return {"chat_template": [{"name": name, "template": template} for name, template in templates.items()]}
    return {"chat_template": templates["default"]} if "default" in templates else {}


def sampling_of(metadata: Mapping[str, Any]) -> Json:
    """Return the contents of generation_config.json for the sampling defaults of a GGUF file, as llama.cpp uses them.

    Keys that cannot be obeyed keep their names, so that they are reported when the model is loaded.
    """
    found: Json = {}
    ignored: Json = {}
    for key, value in metadata.items():
        if not key.startswith(GGUF_PREFIX) or key == _ORDER:
            continue
        name = _SAMPLING.get(key.removeprefix(GGUF_PREFIX))
        if name == "penalty_last_n" and value == -1:  # the whole context, which is the default
            found.setdefault(name, None)
        elif name == "top_k" and isinstance(value, int) and value < 0:
            found[name] = 0
        elif name is None or not _is_sampling_value(name, value):
            ignored[key] = value if isinstance(value, (str, int)) else str(value)[:80]
        else:
            found[name] = value
    if (order := metadata.get(_ORDER)) is not None:
        names = _sampler_names(order, found)
        found, ignored = (
            (found | {"samplers": names}, ignored) if names else (found, ignored | {_ORDER: str(order)[:200]})
        )
    if found.get("temperature", 1) <= 0:
        found["do_sample"] = False
    elif not found.keys().isdisjoint({"temperature", *DRAWING}):
        found = {"do_sample": True, "temperature": _TEMPERATURE, **found}
    if found.get("repetition_penalty", 1) != 1:
        found.setdefault("penalty_last_n", _LAST_N)
    return {name: value for name, value in found.items() if value is not None} | ignored


def _sampler_names(order: Any, values: Json) -> str:
    """Return the names of the samplers of a file; "" if one is unknown, or if the sampler of a value is absent."""
    words = [word.strip().replace("-", "_") for word in str(order).split(";")]
    try:
        names = parse_order([_OTHER_SAMPLERS.get(word, word) for word in words])
    except OptionError:
        return ""
    missing = (option for sampler, options in SAMPLERS.items() if sampler not in names for option in options)
    return "" if any(values.get(option) is not None for option in missing) else ";".join(names)


def _is_sampling_value(name: str, value: Any) -> bool:
    """Return True if a value of a GGUF file is valid for the option of `SamplingParams`."""
    try:
        if name == "penalty_last_n" and value == 0:  # no penalties
            return True
        checked_option(name, value)
    except OptionError:
        return False
    return True


def _surrounded(vocabulary: Vocabulary, before: Sequence[str], after: Sequence[str]) -> Json | None:
    """Return a post-processor that inserts the tokens with these roles before and after the text."""

    def named(names: Sequence[str]) -> dict[str, int]:
        ids = [id_ for name in names if (id_ := vocabulary.id_of(name)) is not None]
        return {vocabulary.tokens[id_]: id_ for id_ in ids}

    return surrounded(named(before), named(after))


def _ends_of_texts(vocabulary: Vocabulary, *, bos: bool, eos: bool = False) -> Json | None:
    before = ["bos_token_id"] if vocabulary.flag("add_bos_token", bos) else []
    return _surrounded(vocabulary, before, ["eos_token_id"] if vocabulary.flag("add_eos_token", eos) else [])


def _byte_level(vocabulary: Vocabulary) -> str:
    kind = PRE_TOKENIZERS[vocabulary.pre_tokenizer()]
    return byte_pairs(
        {token: id_ for id_, token in enumerate(vocabulary.tokens)},
        vocabulary.merges(),
        added=vocabulary.added(),
        pre_tokenizer=cut_by(kind.expressions),
        post_processor=_ends_of_texts(vocabulary, bos=kind.add_bos),
        ignore_merges=kind.ignore_merges,
    )


def _pieces(vocabulary: Vocabulary, kind: ModelType) -> str:
    """Return the tokenizer.json of a SentencePiece model assembled from its parts."""
    # llama.cpp also produces unused tokens.
    pieces = tuple(
        Piece(token, score, PieceType.NORMAL if type_ == PieceType.UNUSED else type_)
        for token, score, type_ in zip(vocabulary.tokens, vocabulary.scores(), vocabulary.types, strict=True)
    )
    is_bpe = kind == ModelType.BPE
    trainer = SimpleNamespace(
        unk_id=vocabulary.id_of("unknown_token_id"),
        byte_fallback=PieceType.BYTE in vocabulary.types,
        treat_whitespace_as_suffix=False,
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    normalizer = SimpleNamespace(
        precompiled_charsmap=vocabulary.charsmap(),
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=vocabulary.flag("remove_extra_whitespaces", False),
        escape_whitespaces=True,
    )
    model = SentencePieceModel(pieces, kind, trainer, normalizer)
    # llama.cpp also inserts a space after every special token.
    ends = _ends_of_texts(vocabulary, bos=is_bpe, eos=not is_bpe)
    return tokenizer_json(model, prefix_everywhere=True, strips=vocabulary.strips, post_processor=ends)


def _word_pieces(vocabulary: Vocabulary) -> str:
    """Convert the file's marks at the start of words to tokenizer.json's ## marks for continuations."""

    def piece(token: str, kind: PieceType) -> str:
        if kind != PieceType.NORMAL:
            return token
        return token.removeprefix(_MARK) if token.startswith(_MARK) else f"##{token}"

    names = [piece(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)]
    unknown = vocabulary.id_of("unknown_token_id")
    if unknown is None:
        vocabulary._fail(f"{_KEY}unknown_token_id is missing", "WordPiece needs a token for unknown words")
    return word_pieces(
        {name: id_ for id_, name in enumerate(names)},
        names[unknown],
        added=vocabulary.added(),
        normalizer={
            "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": vocabulary.flag("normalizer.lowercase", True),
        },
        post_processor=_surrounded(vocabulary, ["bos_token_id"], ["seperator_token_id"]),
    )  # fmt: skip


def _marked_pairs(vocabulary: Vocabulary) -> str:
    """Return a BPE of lines whose spaces are marks, with tokens for the bytes of unknown characters (Gemma 4)."""
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    if missing := [name for name in BYTES if name not in ids]:
        vocabulary._fail(
            f"{len(missing)} of the 256 tokens for bytes are missing, starting with {missing[0]}",
            "unknown characters are written as bytes",
        )
    unknown = vocabulary.id_of("unknown_token_id")
    model = {
        "type": "BPE", "dropout": None, "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
        "ignore_merges": False, "vocab": ids, "merges": vocabulary.merges(),
    }  # fmt: skip
    parts = {"Regex": r"[^\n]+|\n+"}
    decoders = [{"type": "Replace", "pattern": {"String": _MARK}, "content": " "}, {"type": "ByteFallback"}]
    return tokenizer_text(
        vocabulary.added(),
        {"type": "Replace", "pattern": {"String": " "}, "content": _MARK},
        {"type": "Split", "pattern": parts, "behavior": "Isolated", "invert": False},
        _surrounded(vocabulary, ["bos_token_id"], ["eos_token_id"] if vocabulary.flag("add_eos_token", False) else []),
        {"type": "Sequence", "decoders": [*decoders, {"type": "Fuse"}]},
        model,
    )


_WRITERS = {
    "gpt2": _byte_level,
    "gemma4": _marked_pairs,
    "llama": lambda vocabulary: _pieces(vocabulary, ModelType.BPE),
    "t5": lambda vocabulary: _pieces(vocabulary, ModelType.UNIGRAM),
    "bert": _word_pieces,
}
