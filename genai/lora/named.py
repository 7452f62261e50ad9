"""Names of the form base+adapter: a model, and an adapter beside the model or at a path.

An adapter is registered if it is in the folder `adapters` of the model's folder. The bundled model's adapters are
registered, too.
"""

from __future__ import annotations

from pathlib import Path

from ..common.paths import expanded
from ..errors import ModelFolderError, did_you_mean
from ..hub.known import BUNDLED_MODEL, configs_folder
from ..hub.local import exists, may_be_model, pulled_model
from ..models.folders import looks_like_question, not_a_folder
from .describe import find_adapters

_FOLDER = "adapters"


def split_adapter(name: str | Path) -> tuple[str, tuple[str, Path] | None]:
    """Split base+adapter at its last plus sign.

    Args:
        name: the name of a model, or base+adapter. An existing path, or the name of a cached model, is never split.

    Returns:
        The name of the base model, and the name and the path of the adapter; None if the name has no adapter.

    Raises:
        ModelFolderError: there is no such model or adapter, or several adapters match.

    >>> from genai.lora.named import split_adapter
    >>> base, (adapter, path) = split_adapter("pebble+pirate")
    >>> base, adapter
    ('pebble', 'pirate')
    """
    text = str(name)
    base, plus, adapter = text.rpartition("+")
    if not plus or "://" in text or ":/" in text or exists(Path(text)) or pulled_model(text) is not None:
        return text, None
    if not base or not adapter:
        raise ModelFolderError(
            f"{text:.200} is not a model name",
            "a plus sign separates a model and an adapter, and one of the two is missing",
            f"write MODEL+ADAPTER, such as {BUNDLED_MODEL}+pirate",
        )
    if not may_be_model(base):
        raise not_a_folder(Path(text if looks_like_question(text) else base))
    return base, _find(base, adapter)


def registered_adapters(base: str | Path) -> dict[str, Path]:
    """Return the adapters beside a model on the local disk, by name. A model that is not cached has none."""
    if str(base) == BUNDLED_MODEL and not exists(Path(base)):
        folder = configs_folder() / _FOLDER
    else:
        pulled = pulled_model(base)
        path = expanded(base) if pulled is None else pulled.path
        folder = (path if path.is_dir() else path.parent) / _FOLDER
    if not folder.is_dir():
        return {}
    return {path.name if path.is_dir() else path.stem: path for path in find_adapters(folder)}


def _find(base: str, adapter: str) -> tuple[str, Path]:
    registered, path = registered_adapters(base), expanded(adapter)
    beside = registered.get(adapter)
    if beside is not None and exists(path) and not path.samefile(beside):
        raise ModelFolderError(
            f"{adapter} is both a path and an adapter of {base}",
            f"the path is {path.absolute()}, and the adapter is {beside}",
            f"for the path, write {base}+./{adapter}; for the adapter, write {base}+{beside}",
        )
    if beside is not None:
        return adapter, beside
    if exists(path):
        return (path.name if path.is_dir() else path.stem), path
    known = f"the adapters of {base} are {', '.join(registered)}" if registered else f"{base} has no registered adapter"
    raise ModelFolderError(
        f"{base}+{adapter}: there is no adapter {adapter!r:.120}",
        f"{known}, and there is no such path",
        did_you_mean(adapter, registered, f"write {base}+PATH with the path of the adapter, or omit +{adapter}"),
    )
