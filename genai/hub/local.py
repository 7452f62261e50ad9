"""Lookup of a model, only on the local disk: a path, or a name in the cache."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from shlex import quote

from ..common.paths import expanded
from ..errors import ModelFolderError
from .choosing import ONNX
from .references import parse
from .store import PulledModel, find


def pulled_model(name: str | Path) -> PulledModel | None:
    """Return the cached model with this name; None for a path that exists, or a name that is not in the cache.

    Raises:
        ModelFolderError: if the model's record is damaged, several models match, or the name is a malformed reference.
    """
    text = str(name)
    reference = parse(text)
    if (reference is None or not reference.explicit) and exists(Path(text)):
        return None
    head = re.split("[:@]", text, maxsplit=1)[0]
    if "\0" in text or (reference is None and Path(head).name != head):
        return None
    return find(text if reference is None else reference.name)


def model_folder_of(reference: str | Path) -> Path:
    """Return the folder to load: the model's folder for a name in the cache, otherwise the path itself.

    Raises:
        ModelFolderError: if the model is in the cache but has not been built yet; see also `pulled_model`.
    """
    pulled = pulled_model(reference)
    if pulled is None:
        return expanded(reference)
    if pulled.kind == ONNX:
        return pulled.path
    for folder in pulled.built():
        return folder
    raise ModelFolderError(
        f"{pulled.name} is in the cache, but has not been built yet",
        f"a {'GGUF file' if pulled.path.is_file() else 'checkpoint'} must be converted to an ONNX model first",
        f"to build it, run `genai chat {quote(pulled.name)}`, or call genai.LLM({pulled.name!r}) in Python",
    )


def exists(path: Path) -> bool:
    """Return True if a path exists; paths that the system rejects do not exist."""
    with suppress(OSError, ValueError, RuntimeError):
        return path.expanduser().exists()
    return False
