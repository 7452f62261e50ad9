"""Model folders: the bundled one, what somebody meant who gave something else, and files that are damaged."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import genai.configs

from ..common.foreign_models import foreign_model_error
from ..common.reading import file_text, json_object
from ..errors import CacheCapacityError, GenaiError, ModelFolderError, UnsupportedModelError
from ..hub.store import models

BUNDLED_MODEL = "pebble"


def configs_folder() -> Path:
    """The installed configs/ folder."""
    return Path(next(iter(genai.configs.__path__))).resolve()


def bundled_model() -> Path:
    """The folder of the model that ships with the package."""
    return configs_folder() / "models" / BUNDLED_MODEL


def bundled_adapter(name: str) -> Path:
    """The folder of an adapter of the bundled model: "words" or "pirate"."""
    return configs_folder() / "adapters" / name


def bundled_tasks() -> Path:
    """The held-out questions of the bundled model, JSON lines."""
    return configs_folder() / "tasks" / f"{BUNDLED_MODEL}.jsonl"


@contextmanager
def folder_errors(folder: str | Path) -> Iterator[None]:
    """Turns errors that nobody foresaw, as damaged files bring them about, into errors of this toolkit.

    Raises:
        UnsupportedModelError: in place of any Exception that is not a GenaiError.
        CacheCapacityError: in place of a MemoryError.
    """
    try:
        yield
    except GenaiError:
        raise
    except MemoryError as error:
        raise CacheCapacityError(
            f"{folder}: the model needs more memory than there is",
            str(error) or "the system refused to give it",
            "free memory, ask for a smaller context, or check the sizes in its files",
        ) from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{folder}: the model cannot be loaded",
            f"its files do not fit together: {type(error).__name__}: {error}",
            "copy or export it again; if it runs elsewhere, report it with this message",
        ) from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what the system says of a path into a ModelFolderError: a name too long for it, a folder closed to us."""
    try:
        yield
    except OSError as error:
        why = f"the system says: {error.strerror}"
        fix = 'check the path and its permissions; a question goes behind -p: `genai chat -p "…"`'
        raise ModelFolderError(f"{str(path)!r:.80}: not a model folder", why, fix) from error


def folder_json(
    folder: Path,
    name: str,
    malformed: type[GenaiError],
    absent: Callable[[Path], ModelFolderError],
    no_folder: Callable[[Path], ModelFolderError] | None = None,
) -> dict[str, Any]:
    """The JSON object in a folder's file.

    Args:
        absent, no_folder: make the errors where the folder has no such file, or is no folder.
    """
    with readable(folder):
        if not folder.is_dir():
            raise (no_folder or not_a_folder)(folder)
    text = file_text(folder / name, ModelFolderError, malformed)
    if text is None:
        raise absent(folder)
    return json_object(text, folder / name, malformed)


_CONFIG = "genai_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Folders looked into for the model that may lie deeper.
_MOST_LOOKED_AT = 200


def not_a_folder(path: Path) -> ModelFolderError:
    """The error for a path that is no folder."""
    text = str(path)
    if error := foreign_model_error(path, "a model folder"):
        return error
    if path.suffix.lower() == ".onnx":
        return _onnx_file(path)
    if path.is_file():
        return _other_file(path)
    if re.search(r"\s", text.strip()) and (len(text.split()) > 2 or text.rstrip().endswith(("?", "!", "."))):
        return ModelFolderError(
            f"{text!r:.80}: not a model folder",
            "this looks like a question; MODEL comes first, and without it the bundled model answers",
            f'ask with -p: `genai chat -p "{text:.60}"`',
        )
    if text == BUNDLED_MODEL:
        fix = "leave MODEL out: the bundled model is what answers then"
    elif near := _similar(path) or _similar_name(text):
        fix = f"did you mean {near}?"
    else:
        fix = (
            f"give the folder that holds {_CONFIG}, a Hugging Face checkpoint's, or a name as on its page, org/name; "
            'without MODEL the bundled model answers; a question goes behind -p: `genai chat -p "…"`'
        )
    why = "there is no such folder" + ("" if "/" in text else ", and `genai list` has no model of this name")
    return ModelFolderError(f"{text}: not a model folder", why, fix)


def not_a_checkpoint(path: Path) -> ModelFolderError:
    """The error for a path that is no folder, where the folder of a checkpoint is wanted."""
    if error := foreign_model_error(path, "a checkpoint"):
        return error
    is_file = path.is_file()
    if is_file and (path.suffix.lower() == ".onnx" or path.suffix in _PICKLES):
        return not_a_folder(path)
    near = None if is_file else _similar(path) or _similar_name(str(path))
    return ModelFolderError(
        f"{path}: not a checkpoint",
        "it is a file, and no GGUF file" if is_file else "there is no such folder",
        f"did you mean {near}?" if near else
        "give a folder downloaded from Hugging Face (config.json and *.safetensors), a GGUF file, or a name as on its "
        "page, org/name",
    )  # fmt: skip


def no_config(folder: Path) -> ModelFolderError:
    """The error for a folder without genai_config.json."""
    problem, why = f"{folder}: {_CONFIG} is missing", "a model folder is described by that file"
    inside = _models_below(folder)
    if inside:
        models = ", ".join(map(str, inside[:3])) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
        return ModelFolderError(problem, why, f"{'the models below it are' if inside[1:] else 'give'} {models}")
    for pattern, instead in (("*.gguf", not_a_folder), ("*.onnx", _onnx_file)):
        if matches := sorted(folder.glob(pattern)):
            hint = instead(matches[0])
            return ModelFolderError(problem, f"{why}; of {matches[0].name}: {hint.why}", hint.fix)
    return ModelFolderError(
        problem, why, "give a folder made by a model builder; of a Hugging Face checkpoint `genai build` makes one"
    )


def _onnx_file(path: Path) -> ModelFolderError:
    problem = f"{path}: an .onnx file is not a model folder"
    if not path.exists():
        return ModelFolderError(problem, "and there is no such file", "check the path")
    if (path.parent / _CONFIG).is_file():
        return ModelFolderError(
            problem, f"it belongs to the one it lies in, with {_CONFIG} and the tokenizer", f"give {path.parent}"
        )
    return ModelFolderError(
        problem,
        f"to chat, a model needs {_CONFIG} and a tokenizer beside its graph",
        f"`genai info {path}` describes the graph, `genai run {path} --random` runs it",
    )


def _other_file(path: Path) -> ModelFolderError:
    problem = f"{path}: a file, not a model folder"
    if path.suffix in _PICKLES:
        return ModelFolderError(
            problem, "and a pickle, which would run whatever code it holds", "get the checkpoint as safetensors"
        )
    beside = (path.parent / _CONFIG).is_file() or (path.parent / "config.json").is_file()
    fix = f"give {path.parent}, the folder it lies in" if beside else f"give the folder that holds {_CONFIG}"
    return ModelFolderError(problem, "a model is a folder: graph, tokenizer and configuration", fix)


def _similar(path: Path) -> Path | None:
    """The folder beside it whose name is most alike."""
    try:
        names = [one.name for one in islice(path.parent.iterdir(), _MOST_LOOKED_AT) if one.is_dir()]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, 1, 0.7)
    return path.parent / close[0] if close else None


def _similar_name(text: str) -> str | None:
    """The name in the cache that is most alike, whole or without its organisation."""
    known = {key: model.name for model in models() for key in (model.name.rsplit("/", 1)[-1], model.name)}
    close = difflib.get_close_matches(text, list(known), 1, 0.7)
    return known[close[0]] if close else None


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # it lies where this user may not look
        return False


def _models_below(folder: Path) -> list[Path]:
    models: list[Path] = []
    level = [folder]
    for _ in range(3):
        inside: list[Path] = []
        for directory in level[:_MOST_LOOKED_AT]:
            with suppress(OSError):
                inside += sorted(entry for entry in directory.iterdir() if entry.is_dir() and not entry.is_symlink())
        models += [entry for entry in inside if _is_there(entry / _CONFIG)]
        level = inside
    return models
