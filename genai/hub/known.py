"""Short names of models: the table in configs/models.json, which maps each name to a repository on the hub."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import genai.configs

BUNDLED_MODEL = "pebble"
# Memory of the process and of activations, in addition to the weights and the cache.
PROCESS_BYTES = 200_000_000
CACHED_TOKENS = 4096


@dataclass(frozen=True)
class KnownModel:
    """A model in the table of short names.

    Attributes:
        name: the short name, in lower case.
        repository: "org/name" on the hub.
        parameters: number of parameters.
        download_bytes: size of the files to download.
        size_bytes: size of the model at the default quantisation (int4), which is also the number of bytes that one
            token reads.
        cache_bytes_per_token: size of one token in an fp16 KV cache.
        context: maximum number of tokens.
        license: licence that the model card names.
        gated: True if the authors require an agreement first.
        good_for: a line about the tasks that the model is good for.
        offered: True if `genai chat` offers the model when it starts without a model.
    """

    name: str
    repository: str
    parameters: int
    download_bytes: int
    size_bytes: int
    cache_bytes_per_token: int
    context: int
    license: str
    gated: bool
    good_for: str
    offered: bool

    @property
    def memory_bytes(self) -> int:
        """An estimate of the memory for the weights, a cache of 4,096 tokens, and the process."""
        return self.size_bytes + CACHED_TOKENS * self.cache_bytes_per_token + PROCESS_BYTES


def names_of_family(text: str) -> list[str]:
    """Return the short names that begin with a text, such as "llama3.2" or "smollm2:135m", apart from punctuation."""
    begin = re.sub("[^a-z0-9]", "", text.lower())
    return [name for name in known_models() if begin and re.sub("[^a-z0-9]", "", name).startswith(begin)]


def configs_folder() -> Path:
    """Return the installed configs/ folder."""
    return Path(next(iter(genai.configs.__path__))).resolve()


@cache
def known_models() -> MappingProxyType[str, KnownModel]:
    """Return the models in the table by short name, the smallest first."""
    table = json.loads((configs_folder() / "models.json").read_text(encoding="utf-8"))
    return MappingProxyType({name: KnownModel(name=name, **facts) for name, facts in table.items()})


def known_model(name: str) -> KnownModel | None:
    """Return the model with a short name, in upper or lower case; None if the table has no such name."""
    return known_models().get(name.lower())


def bundled_model() -> Path:
    """Return the folder of the model that ships with the package."""
    return configs_folder() / "models" / BUNDLED_MODEL
