"""What a folder says about its tokenizer: its files, the tokens that they declare, and ids with a role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.paths import expanded
from ..common.reading import file_text, json_object
from ..errors import ConfigError, InputError, ModelFolderError, TokenizerError, kind_of
from ..models.config import CONFIG_NAME as GENAI_CONFIG_NAME, Config

if TYPE_CHECKING:
    import tokenizers


TOKENIZER_NAME = "tokenizer.json"
MODEL_CONFIG_NAME = "config.json"
CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"


def read_text(path: Path) -> str | None:
    """A UTF-8 text file, with line breaks as "\\n"; None if there is none. Raises TokenizerError: it cannot be read."""
    text = file_text(path, TokenizerError, TokenizerError)
    return None if text is None else text.replace("\r\n", "\n").replace("\r", "\n")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file. Raises TokenizerError: unreadable, not JSON, or not an object."""
    text = read_text(path)
    return {} if text is None else json_object(text, path, TokenizerError)


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens a folder names, such as {"eos_token": "<|im_end|>"}: every key that ends in _token."""
    tokens: dict[str, str] = {}
    for source in (read_object(folder / SPECIAL_TOKENS_NAME), read_object(folder / CONFIG_NAME)):
        named = ((name, _content(value)) for name, value in source.items() if name.endswith("_token"))
        tokens |= {name: content for name, content in named if content is not None}
    return tokens


def further_special_tokens(folder: Path) -> list[str]:
    """Special tokens without a role: additional_special_tokens, or extra_special_tokens as newer files call them."""
    tokens: list[str] = []
    for source in (read_object(folder / SPECIAL_TOKENS_NAME), read_object(folder / CONFIG_NAME)):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            entries = source.get(name)
            values = entries.values() if isinstance(entries, Mapping) else entries if isinstance(entries, list) else ()
            tokens += [content for value in values if (content := _content(value)) is not None]
    return tokens


def _content(value: object) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def find_folder(source: object) -> tuple[Path, Config | None]:
    """The folder of the tokenizer files of a Model, a Config or a folder, and the model's configuration if any."""
    config = getattr(source, "config", source)
    if not isinstance(config, Config):
        if not isinstance(source, (str, Path)):
            raise InputError(
                f"Tokenizer: got {kind_of(source)}",
                "a Model, a Config or a folder is expected",
                "pass the path of the model folder",
            )
        folder = expanded(source)
        if not folder.is_dir():
            reason = "it is a file" if folder.exists() else "there is no such folder"
            raise ModelFolderError(f"{folder}: not a folder", reason, f"give the folder that holds {TOKENIZER_NAME}")
        if not (folder / GENAI_CONFIG_NAME).exists():
            return folder, None
        config = Config(folder)
    name = config.raw["model"].get("tokenizer_dir", "")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(
            f"model.tokenizer_dir = {name!r} in {GENAI_CONFIG_NAME}",
            "the tokenizer must lie inside the model folder",
            "give a relative folder name",
        )
    return config.folder / name, config


def cleans_up(folder: Path, backend: tokenizers.Tokenizer) -> bool:
    """Whether decoded texts are cleaned up: as in transformers, BPE ignores the setting, which would spoil it."""
    setting = read_object(folder / CONFIG_NAME).get("clean_up_tokenization_spaces", False)
    return bool(setting) and type(backend.model).__name__ != "BPE"


@dataclass(frozen=True)
class FolderFacts:
    """What the files beside a tokenizer say about it.

    Attributes:
        folder: where it lies.
        config: tokenizer_config.json.
        declared: the arguments of tokenizers.AddedToken by id.
        special: special tokens by role, such as {"eos_token": "</s>"}.
    """

    folder: Path
    config: Mapping[str, Any]
    declared: Mapping[int, Mapping[str, Any]]
    special: Mapping[str, str]

    @property
    def model_type(self) -> str:
        """That of config.json; "" where there is none. Raises TokenizerError: it is malformed."""
        model_type = read_object(self.folder / MODEL_CONFIG_NAME).get("model_type")
        return model_type if isinstance(model_type, str) else ""

    @property
    def tokenizer_class(self) -> str:
        """Such as "Qwen2Tokenizer", without the "Fast" that some have behind it; "" where none is named."""
        name = self.config.get("tokenizer_class")
        return name.removesuffix("Fast") if isinstance(name, str) else ""


def read_facts(folder: Path) -> FolderFacts:
    """What the files of a folder say about its tokenizer. Raises TokenizerError: one of them is malformed."""
    return FolderFacts(folder, read_object(folder / CONFIG_NAME), declared_tokens(folder), special_tokens(folder))


ADDED_NAME = "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def declared_tokens(folder: Path) -> dict[int, dict[str, Any]]:
    """By id the arguments of a tokenizers.AddedToken, from added_tokens_decoder or the older added_tokens.json.

    Raises:
        TokenizerError: an entry is malformed.
    """
    path = folder / CONFIG_NAME
    tokens = read_object(path).get("added_tokens_decoder")
    if tokens is None:
        path, special = folder / ADDED_NAME, set(special_tokens(folder).values())
        return {
            _id(path, id_): {"content": content, "special": content in special, "normalized": content not in special}
            for content, id_ in read_object(path).items()
        }
    if not isinstance(tokens, Mapping):
        raise _malformed(path, "added_tokens_decoder", tokens)
    return {_id(path, id_): _token(path, entry) for id_, entry in tokens.items()}


def _id(path: Path, id_: Any) -> int:
    text = str(id_)
    if isinstance(id_, (bool, float)) or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _malformed(path, "the id of an added token", id_)
    return int(text)


def _token(path: Path, entry: Any) -> dict[str, Any]:
    content = entry.get("content") if isinstance(entry, Mapping) else None
    if not isinstance(content, str) or not content:
        raise _malformed(path, "an added token", entry)
    flags = {name: entry[name] for name in _FLAGS if name in entry}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _malformed(path, f"a flag of the added token {content!r}", flags)
    return {"content": content, **flags}


def _malformed(path: Path, key: str, value: object) -> TokenizerError:
    return TokenizerError(
        f"{path}: {key} is {value!r:.80}",
        "ids are whole numbers, tokens are objects with content and flags",
        "copy the file again from the original model",
    )


GENERATION_NAME = "generation_config.json"
SAMPLING_NAMES = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
)
_MAX_ID = 2**31


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role: begin a text, end a generation, fill short rows (with the first that ends one, if not said)."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None

    @classmethod
    def padded(cls, bos: int | None, eos: tuple[int, ...], pad: int | None) -> SpecialIds:
        return cls(bos, eos, eos[0] if pad is None and eos else pad)


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json says: ids, and the values of SAMPLING_NAMES that are set."""

    ids: SpecialIds
    sampling: Mapping[str, bool | int | float]


def configured_ids(config: Config) -> SpecialIds:
    """The special ids that genai_config.json gives."""
    return SpecialIds.padded(config.model.bos_token_id, config.model.eos_token_ids, config.model.pad_token_id)


def folder_ids(folder: Path, names: Mapping[str, str], backend: tokenizers.Tokenizer) -> SpecialIds:
    """The special ids of a folder without genai_config.json.

    generation_config.json comes first, as it lists every id that ends a reply; then the special tokens by name.
    """
    bos, eos, pad = (
        backend.token_to_id(names[name]) if name in names else None for name in ("bos_token", "eos_token", "pad_token")
    )
    defaults = generation_defaults(folder).ids
    return SpecialIds.padded(
        bos if defaults.bos is None else defaults.bos,
        defaults.eos or (() if eos is None else (eos,)),
        pad if defaults.pad is None else defaults.pad,
    )


def generation_defaults(folder: Path) -> GenerationDefaults:
    """The ids and the sampling of generation_config.json; empty without it, TokenizerError if it is malformed."""
    path = folder / GENERATION_NAME
    values = read_object(path)

    def check(name: str, value: Any, sound: bool, expected: str) -> Any:
        if not sound:
            raise TokenizerError(
                f"{path}: {name} = {value!r:.80}", f"{expected} is expected", "correct the file, or remove the key"
            )
        return value

    def ids(name: str) -> list[int]:
        declared, expected = values.get(name), "a token id, which is a whole number and not negative,"
        declared = declared if isinstance(declared, list) and name == "eos_token_id" else [declared]
        sound = ((id_, type(id_) is int and 0 <= id_ < _MAX_ID) for id_ in declared if id_ is not None)
        return [check(name, id_, is_sound, expected) for id_, is_sound in sound]

    bos, eos, pad = (ids(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id"))
    sampling = {
        name: check(name, values[name], isinstance(values[name], (int, float)), "a number or a boolean")
        for name in SAMPLING_NAMES
        if values.get(name) is not None
    }
    return GenerationDefaults(SpecialIds(next(iter(bos), None), tuple(eos), next(iter(pad), None)), sampling)
