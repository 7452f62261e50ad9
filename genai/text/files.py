"""The tokenizer files of a folder: their contents, the tokens that they declare, and the ids with special roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.paths import expanded
from ..common.reading import decoded, json_object
from ..engine.sampling import generation_config
from ..errors import InputError, ModelFolderError, TokenizerError, kind_of
from ..models.config import CONFIG_NAME as GENAI_CONFIG_NAME, Config
from ..models.side_files import (
    ADDED_NAME,
    CONFIG_NAME,
    GENERATION_NAME,
    MODEL_CONFIG_NAME,
    SPECIAL_TOKENS_NAME,
    TOKENIZER_NAME,
    LoadedFolder,
    SideFiles,
)

if TYPE_CHECKING:
    import tokenizers


def read_text(files: SideFiles, name: str) -> str | None:
    """Return a UTF-8 file's text with "\\n" line breaks; None if it is missing. Raise TokenizerError if unreadable."""
    data = files.data(name)
    text = None if data is None else decoded(data, files.path(name), TokenizerError)
    return None if text is None else text.replace("\r\n", "\n").replace("\r", "\n")


def read_object(files: SideFiles, name: str) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing. Raise TokenizerError if it is unreadable or malformed."""
    text = read_text(files, name)
    return {} if text is None else json_object(text, files.path(name), TokenizerError)


_EXTRA_NAMES = ("extra_special_tokens", "additional_special_tokens")


def _side_values(files: SideFiles) -> dict[str, Any]:
    """Return the values about special tokens in tokenizer_config.json and special_tokens_map.json.

    As in transformers 5, special_tokens_map.json takes precedence, except for additional_special_tokens. It is ignored
    if tokenizer_config.json contains added_tokens_decoder, which newer files do.
    """
    config = read_object(files, CONFIG_NAME)
    extra = next((config[name] for name in _EXTRA_NAMES if config.get(name)), None)
    values = {**{key: value for key, value in config.items() if key not in _EXTRA_NAMES}, _EXTRA_NAMES[0]: extra}
    if "added_tokens_decoder" in config:
        return values
    older = read_object(files, SPECIAL_TOKENS_NAME)
    listed = older.get(_EXTRA_NAMES[0])
    if isinstance(listed, list) and isinstance(extra, list):
        listed = [*extra, *listed]
    found = listed or extra or older.get(_EXTRA_NAMES[1])
    return {**values, **{key: value for key, value in older.items() if key != _EXTRA_NAMES[1]}, _EXTRA_NAMES[0]: found}


def special_tokens(files: SideFiles) -> dict[str, str]:
    """Return the special tokens of a folder by name, such as {"eos_token": "<|im_end|>"}.

    The names are all keys that end in _token, and the names in extra_special_tokens.
    """
    values = _side_values(files)
    extra = values.pop(_EXTRA_NAMES[0])
    named = {name: value for name, value in values.items() if name.endswith("_token")}
    if isinstance(extra, Mapping):
        named |= extra
    return {name: content for name, value in named.items() if (content := _content(value))}


def special_token_flags(files: SideFiles) -> dict[str, dict[str, bool]]:
    """Return the flags of the special tokens that are objects, such as {"<pad>": {"lstrip": True}}."""
    values = [value for name, value in _side_values(files).items() if name.endswith("_token")]
    return {
        content: {flag: value[flag] for flag in _FLAGS if flag != "special" and isinstance(value.get(flag), bool)}
        for value in values
        if isinstance(value, Mapping) and (content := _content(value))
    }


def further_special_tokens(files: SideFiles) -> list[str]:
    """Return the special tokens without a name: additional_special_tokens, or extra_special_tokens in newer files."""
    extra = _side_values(files)[_EXTRA_NAMES[0]]
    return [content for value in extra if (content := _content(value))] if isinstance(extra, list) else []


def _content(value: object) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def find_files(source: object) -> tuple[SideFiles, Config | None]:
    """Return the tokenizer files of a model or a folder, and the model's configuration if there is any.

    Args:
        source: a Model or its LoadedFolder, whose files are those that the model was loaded with; or a Config or the
            path of a folder, whose files are those that it has now.
    """
    loaded = getattr(source, "loaded_folder", source)
    if isinstance(loaded, LoadedFolder):
        folder = loaded.config.tokenizer_folder
        return loaded.tokenizer_files or SideFiles(folder), loaded.config
    config = getattr(source, "config", source)
    if not isinstance(config, Config):
        if not isinstance(source, (str, Path)):
            raise InputError(
                f"Tokenizer: the argument is {kind_of(source)}",
                "a Model, a Config or a folder is expected",
                "pass the path of the model folder",
            )
        folder = expanded(source)
        if not folder.is_dir():
            reason = "the path is a file" if folder.exists() else "the folder does not exist"
            raise ModelFolderError(
                f"{folder}: the path is not a folder", reason, f"pass the folder that contains {TOKENIZER_NAME}"
            )
        if not (folder / GENAI_CONFIG_NAME).exists():
            return SideFiles(folder), None
        config = Config(folder)
    return SideFiles(config.tokenizer_folder), config


def cleans_up(files: SideFiles, backend: tokenizers.Tokenizer) -> bool:
    """Return True if decoded text is cleaned up. As in transformers, BPE ignores the setting, to keep text intact."""
    setting = read_object(files, CONFIG_NAME).get("clean_up_tokenization_spaces", False)
    return bool(setting) and type(backend.model).__name__ != "BPE"


@dataclass(frozen=True)
class FolderFacts:
    """The contents of the files beside a tokenizer.

    Attributes:
        files: the files.
        config: tokenizer_config.json.
        declared: arguments of tokenizers.AddedToken by id.
        special: special tokens by role, such as {"eos_token": "</s>"}.
    """

    files: SideFiles
    config: Mapping[str, Any]
    declared: Mapping[int, Mapping[str, Any]]
    special: Mapping[str, str]

    @property
    def model_type(self) -> str:
        """The model_type in config.json; "" if there is none. Raises TokenizerError if the file is malformed."""
        model_type = read_object(self.files, MODEL_CONFIG_NAME).get("model_type")
        return model_type if isinstance(model_type, str) else ""

    @property
    def tokenizer_class(self) -> str:
        """The tokenizer class, such as "Qwen2Tokenizer", without the suffix "Fast"; "" if no class is named."""
        name = self.config.get("tokenizer_class")
        return name.removesuffix("Fast") if isinstance(name, str) else ""


def read_facts(files: SideFiles) -> FolderFacts:
    """Read the files that describe a folder's tokenizer. Raise TokenizerError if one of the files is malformed."""
    return FolderFacts(files, read_object(files, CONFIG_NAME), declared_tokens(files), special_tokens(files))


def splits_special_tokens(facts: FolderFacts) -> bool:
    """Return split_special_tokens of tokenizer_config.json. Raise TokenizerError if it is not a boolean."""
    value = facts.config.get("split_special_tokens")
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(
            f"{facts.files.path(CONFIG_NAME)}: split_special_tokens = {value!r:.40}",
            "true or false is expected",
            "correct the file, or copy it again from the original model",
        )
    return bool(value)


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def declared_tokens(files: SideFiles) -> dict[int, dict[str, Any]]:
    """Return the arguments of tokenizers.AddedToken by id, from added_tokens_decoder or the older added_tokens.json.

    Raises:
        TokenizerError: an entry is malformed.
    """
    path = files.path(CONFIG_NAME)
    tokens = read_object(files, CONFIG_NAME).get("added_tokens_decoder")
    if tokens is None:
        path = files.path(ADDED_NAME)
        special = {*special_tokens(files).values(), *further_special_tokens(files)}
        return {
            _id(path, id_): {"content": content, "special": content in special, "normalized": content not in special}
            for content, id_ in read_object(files, ADDED_NAME).items()
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
        "ids must be whole numbers, and tokens must be objects with content and boolean flags",
        "copy the file again from the original model",
    )


_MAX_ID = 2**31


@dataclass(frozen=True)
class SpecialIds:
    """Token ids with roles: the start of a text, the end of a generation, and padding (default: the first end id)."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None

    @classmethod
    def padded(cls, bos: int | None, eos: tuple[int, ...], pad: int | None) -> SpecialIds:
        return cls(bos, eos, eos[0] if pad is None and eos else pad)


@dataclass(frozen=True)
class GenerationDefaults:
    """The contents of generation_config.json.

    Attributes:
        ids: the token ids.
        sampling: the keys that set defaults of requests (`generation_config.OBEYED` and `FURTHER`), and their values.
        unsupported: the keys that change replies in transformers and are not obeyed here.
    """

    ids: SpecialIds
    sampling: Mapping[str, Any]
    unsupported: tuple[str, ...] = ()


def configured_ids(config: Config) -> SpecialIds:
    """Return the special ids in genai_config.json."""
    return SpecialIds.padded(config.model.bos_token_id, config.model.eos_token_ids, config.model.pad_token_id)


def folder_ids(files: SideFiles, named: Callable[[str], int | None]) -> SpecialIds:
    """Return the special ids of a folder without genai_config.json.

    generation_config.json takes precedence over the special tokens by name, and over config.json. An id that ends a
    reply is an end in addition to the tokenizer's eos_token: a fine-tune often changes the tokenizer's files only.

    Args:
        named: returns the id of the tokenizer's special token with a role, such as "eos_token", or None.
    """
    defaults = generation_defaults(files).ids
    ends = (*(defaults.eos or _model_ends(files)), named("eos_token"))
    return SpecialIds.padded(
        named("bos_token") if defaults.bos is None else defaults.bos,
        tuple(dict.fromkeys(id_ for id_ in ends if id_ is not None)),
        named("pad_token") if defaults.pad is None else defaults.pad,
    )


def _model_ends(files: SideFiles) -> list[int]:
    """Return the ids that end a reply according to config.json, which is not checked as a whole here."""
    declared = read_object(files, MODEL_CONFIG_NAME).get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    return [id_ for id_ in ids if type(id_) is int and 0 <= id_ < _MAX_ID]


def older_generation_values(source: Path | SideFiles) -> dict[str, Any]:
    """Return the keys of generation_config.json that are in config.json, where older versions of transformers wrote
    them, except for token ids. As in transformers, the configuration of the decoder completes the outer one.
    """
    outer = read_object(SideFiles.of(source), MODEL_CONFIG_NAME)
    inner: Any = next((outer[name] for name in ("decoder", "generator", "text_config") if outer.get(name)), {})
    merged: dict[str, Any] = {}
    for values in (inner if isinstance(inner, dict) else {}, outer):
        merged |= {name: value for name, value in values.items() if value is not None}
    names = {*generation_config.OBEYED, *generation_config.NOT_SUPPORTED}
    # 20 is the default of transformers, not a limit of the model.
    return {name: value for name, value in merged.items() if name in names and (name, value) != ("max_length", 20)}


def generation_defaults(source: Path | SideFiles) -> GenerationDefaults:
    """Return the ids and sampling options in generation_config.json. If the file is missing, return the sampling
    options in config.json. Raise TokenizerError if the file is malformed.
    """
    files = SideFiles.of(source)
    path, values = files.path(GENERATION_NAME), read_object(files, GENERATION_NAME)
    if not files.is_file(GENERATION_NAME):
        path, values = files.path(MODEL_CONFIG_NAME), older_generation_values(files)

    def check(name: str, value: Any, sound: bool, expected: str) -> Any:
        if not sound:
            raise TokenizerError(
                f"{path}: {name} = {value!r:.80}", f"{expected} is expected", "correct or remove the key in the file"
            )
        return value

    def ids(name: str) -> list[int]:
        declared, expected = values.get(name), "a token id, a non-negative whole number,"
        declared = declared if isinstance(declared, list) and name == "eos_token_id" else [declared]
        sound = ((id_, type(id_) is int and 0 <= id_ < _MAX_ID) for id_ in declared if id_ is not None)
        return [check(name, id_, is_sound, expected) for id_, is_sound in sound]

    bos, eos, pad = (ids(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id"))
    sampling = {
        name: check(name, values[name], fits(values[name]), expected)
        for name, (fits, expected) in (*generation_config.OBEYED.items(), *generation_config.FURTHER.items())
        if values.get(name) is not None
    }
    special = SpecialIds(next(iter(bos), None), tuple(eos), next(iter(pad), None))
    return GenerationDefaults(special, sampling, generation_config.unsupported(values))
