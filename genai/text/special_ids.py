"""Ids with a role, and the sampling that a model's makers recommend: what the configuration files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError
from .files import read_object

if TYPE_CHECKING:
    import tokenizers

    from ..config import Config

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
    """Ids with a role: begin a text, end a generation, fill short rows."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json says.

    Attributes:
        ids: None or empty where the file names none.
        sampling: the values of SAMPLING_NAMES that are set, by transformers' names.
    """

    ids: SpecialIds
    sampling: Mapping[str, bool | int | float]


def configured_ids(config: Config) -> SpecialIds:
    """The special ids that genai_config.json gives."""
    model = config.model
    return _with_padding(model.bos_token_id, model.eos_token_ids, model.pad_token_id)


def folder_ids(folder: Path, names: Mapping[str, str], backend: tokenizers.Tokenizer) -> SpecialIds:
    """The special ids of a folder without genai_config.json.

    generation_config.json comes first, as it lists every id that ends a reply; then the special tokens by name.
    """
    bos, eos, pad = (
        backend.token_to_id(names[name]) if name in names else None for name in ("bos_token", "eos_token", "pad_token")
    )
    given = generation_defaults(folder).ids
    return _with_padding(
        bos if given.bos is None else given.bos,
        given.eos or (() if eos is None else (eos,)),
        pad if given.pad is None else given.pad,
    )


def generation_defaults(folder: Path) -> GenerationDefaults:
    """The ids and the sampling of generation_config.json; empty if there is no such file.

    Raises:
        TokenizerError: the file is malformed.
    """
    path = folder / GENERATION_NAME
    values = read_object(path)
    eos = values.get("eos_token_id")
    ids = SpecialIds(
        _id(path, "bos_token_id", values.get("bos_token_id")),
        tuple(id_ for each in _listed(eos) if (id_ := _id(path, "eos_token_id", each)) is not None),
        _id(path, "pad_token_id", values.get("pad_token_id")),
    )
    sampling = {name: values[name] for name in SAMPLING_NAMES if values.get(name) is not None}
    for name, value in sampling.items():
        if not isinstance(value, (int, float)):
            raise _malformed(path, name, value, "a number or a boolean")
    return GenerationDefaults(ids, sampling)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _id(path: Path, name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_ID:
        raise _malformed(path, name, value, "a token id, which is a whole number and not negative,")
    return value


def _malformed(path: Path, name: str, value: object, wanted: str) -> TokenizerError:
    return TokenizerError(
        f"{path}: {name} = {value!r:.80}", f"{wanted} is expected", "correct the file, or remove the key"
    )


def _with_padding(bos: int | None, eos: tuple[int, ...], pad: int | None) -> SpecialIds:
    return SpecialIds(bos, eos, eos[0] if pad is None and eos else pad)
