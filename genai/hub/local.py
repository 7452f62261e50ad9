"""Lookup of a model, only on the local disk: a path, a name in the cache, or the bundled model."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from shlex import quote

from ..common.paths import expanded
from ..errors import ModelFolderError
from .built import find_build
from .choosing import ONNX
from .known import BUNDLED_MODEL, bundled_model
from .references import parse
from .store import PulledModel, find


def pulled_model(name: str | Path) -> PulledModel | None:
    """Return the cached model with this name; None for a path that exists, or a name that is not in the cache.

    Raises:
        ModelFolderError: if the model's record is damaged, several models match, the name is a malformed reference, or
            a string is both a path and a name (see `check_unambiguous`). A Path that exists is always a path.
    """
    text = str(name)
    reference = parse(text)
    if (reference is None or not reference.explicit) and exists(Path(text)):
        if isinstance(name, str):
            check_unambiguous(text)
        return None
    return _cached(text)


def _cached(text: str) -> PulledModel | None:
    reference = parse(text)
    head = re.split("[:@]", text, maxsplit=1)[0]
    if "\0" in text or (reference is None and Path(head).name != head):
        return None
    return find(text if reference is None else reference.name)


def has_form_of_path(text: str) -> bool:
    """Return True if a text can only be a path: it is absolute, or begins with ./, ../ or ~, or ends with /."""
    plain = text.replace(os.sep, "/")
    return (
        Path(text).is_absolute()
        or plain in (".", "..")
        or plain.startswith(("./", "../", "~"))
        or (plain.endswith("/") and "://" not in plain)
    )


def check_unambiguous(text: str) -> None:
    """Raise ModelFolderError if a text is an existing path, and also a short name or the name of a cached model."""
    if has_form_of_path(text) or not exists(Path(text)):
        return
    reference = parse(text)
    if reference is not None and reference.explicit:
        return
    if reference is not None and "/" not in re.split("[:@]", text, maxsplit=1)[0]:
        model = reference.name
    else:
        found = None
        with suppress(ModelFolderError):  # the path is used, so a damaged record does not matter
            found = _cached(text)
        if found is None:
            return
        model = found.name
    raise ModelFolderError(
        f"{text} is both a path and the name of a model",
        f"the path is {Path(text).absolute()}, and the model is {model}",
        f"for the path, write {quote('./' + text)}; for the model, write {quote('hf:' + model)}",
    )


def named_or(path: Path) -> Path:
    """Return a path; if it does not exist, and is the name of the bundled model or a built model, return its folder.

    Raises:
        ModelFolderError: several built models have the name.
    """
    if len(path.parts) != 1 or exists(path):
        return path
    if str(path) == BUNDLED_MODEL:
        return bundled_model()
    built = find_build(str(path))
    return path if built is None else built.folder


def may_be_model(text: str) -> bool:
    """Return True if a text is a path, the name of a model on the local disk, or has the form of a name on the hub.

    Raises:
        ModelFolderError: see `pulled_model`.
    """
    return exists(named_or(Path(text))) or parse(text) is not None or pulled_model(text) is not None


def model_folder_of(reference: str | Path) -> Path:
    """Return the folder to load: the model's folder for a name in the cache, otherwise the path itself.

    Raises:
        ModelFolderError: if the model is in the cache but has not been built yet; see also `pulled_model`.
    """
    pulled = pulled_model(reference)
    if pulled is None:
        return named_or(expanded(reference))
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
