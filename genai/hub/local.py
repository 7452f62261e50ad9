"""What a text means that should be a model, where only the disk is looked at: a path, or a name in the cache."""

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
    """The model in the cache that a text names; None for a path that exists, and for what is not in the cache.

    Raises:
        ModelFolderError: its record is damaged, several have this name, or it is no reference and looks like one.
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
    """The folder that is to be loaded: of a name in the cache that of its model, otherwise the path as it is.

    Raises:
        ModelFolderError: it is in the cache, but not built yet; or see `pulled_model`.
    """
    pulled = pulled_model(reference)
    if pulled is None:
        return expanded(reference)
    if pulled.kind == ONNX:
        return pulled.path
    for folder in pulled.built():
        return folder
    raise ModelFolderError(
        f"{pulled.name} is in the cache, but no model was built of it yet",
        f"a {'GGUF file' if pulled.path.is_file() else 'checkpoint'} runs when it has been written as an ONNX model",
        f"`genai chat {quote(pulled.name)}` does that the first time, and so does genai.LLM({pulled.name!r})",
    )


def exists(path: Path) -> bool:
    """Whether there is such a path; what the system refuses to look for does not exist."""
    with suppress(OSError, ValueError, RuntimeError):
        return path.expanduser().exists()
    return False
