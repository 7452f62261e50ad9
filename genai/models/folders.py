"""Model folders: the bundled model, hints for wrong paths, and errors for damaged files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ..common.foreign_models import foreign_model_error
from ..common.reading import file_text, json_object
from ..errors import CacheCapacityError, GenaiError, ModelFolderError, UnsupportedModelError, about
from ..hub.known import (
    BUNDLED_MODEL,
    bundled_model as bundled_model,
    configs_folder,
    known_model,
    known_models,
    names_of_family,
)
from ..hub.references import offline
from ..hub.store import models


def bundled_adapter(name: str) -> Path:
    """Return the folder of an adapter for the bundled model: "words" or "pirate"."""
    return configs_folder() / "adapters" / name


def bundled_tasks() -> Path:
    """Return the file with the held-out questions for the bundled model, in JSON Lines."""
    return configs_folder() / "tasks" / f"{BUNDLED_MODEL}.jsonl"


@contextmanager
def folder_errors(folder: str | Path) -> Iterator[None]:
    """Convert unforeseen errors, such as errors caused by damaged files, into errors of this toolkit.

    Raises:
        UnsupportedModelError: in place of any Exception except a GenaiError.
        CacheCapacityError: in place of a MemoryError.
    """
    try:
        yield
    except GenaiError:
        raise
    except MemoryError as error:
        raise CacheCapacityError(
            f"{folder}: the model needs more memory than is available",
            str(error) or "the system refused the allocation",
            "free memory, choose a smaller context size, or check the sizes in the model's files",
        ) from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{folder}: the model cannot be loaded",
            f"its files are inconsistent: {type(error).__name__}: {error}",
            "copy or export the model again; if the model works elsewhere, report the problem with this message",
        ) from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert an OSError about a path into a ModelFolderError, such as a name that is too long, or no permission."""
    try:
        yield
    except OSError as error:
        why = f"the operating system reports: {error.strerror}"
        raise ModelFolderError(
            f"{str(path)!r:.80}: not a model folder", why, "check the path and its permissions"
        ) from error


def folder_json(
    folder: Path,
    name: str,
    malformed: type[GenaiError],
    absent: Callable[[Path], ModelFolderError],
    no_folder: Callable[[Path], ModelFolderError] | None = None,
) -> dict[str, Any]:
    """Return the JSON object in a folder's file.

    Args:
        folder: the folder.
        name: name of the file.
        malformed: class of the error for a malformed file.
        absent: function that returns the error for a folder without the file.
        no_folder: function that returns the error for a path that is not a folder.
    """
    with readable(folder):
        if not folder.is_dir():
            raise (no_folder or not_a_folder)(folder)
    text = file_text(folder / name, ModelFolderError, malformed)
    if text is None:
        raise absent(folder)
    return json_object(text, folder / name, malformed)


_CONFIG = "genai_config.json"
# The fix of an error for a text that resembles no model.
ASK_FOR_MODEL = (
    f"pass a folder with {_CONFIG}, a Hugging Face checkpoint, or the name of a model: org/name, or {BUNDLED_MODEL} "
    "for the bundled model"
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Maximum number of folders that are searched for similar names or nested models.
_MOST_LOOKED_AT = 200


def looks_like_question(text: str) -> bool:
    """Return True if a text has several words, and is more likely a question than a path."""
    return len(words := text.split()) > 2 or (len(words) > 1 and text.rstrip().endswith(("?", "!", ".")))


def gguf_encoder(name: str | Path) -> UnsupportedModelError:
    """Return the error for a GGUF file in place of an encoder."""
    return UnsupportedModelError(
        f"{name}: GGUF files are not supported for embeddings and reranking",
        "vectors and scores are computed from checkpoints and ONNX graphs",
        "use the original checkpoint of the model",
    )


def not_a_folder(path: Path) -> ModelFolderError:
    """Return the error for a path that is not a folder."""
    text = str(path)
    if error := foreign_model_error(path, "a model folder"):
        return error
    if path.suffix.lower() == ".onnx":
        return _onnx_file(path)
    if path.is_file():
        return _other_file(path)
    if known := known_model(re.split("[:@]", text, maxsplit=1)[0]):
        return ModelFolderError(
            f"{text}: not a model folder",
            f"the name stands for {known.repository}, which has not been pulled yet",
            f"to download the model, run `genai pull {text}` or `genai chat {text}`, or use genai.LLM(…, pull=True)",
        )
    if looks_like_question(text):
        return ModelFolderError(
            f"{text!r:.80}: not a model folder",
            "this looks like a question, but the path or name of a model is expected",
            ASK_FOR_MODEL,
        )
    if "+" in text and not text.rpartition("+")[0].endswith(("+", "/")):
        base, _, adapter = text.rpartition("+")
        fix = (
            f"MODEL+ADAPTER works in `genai chat`, generate, batch and info; elsewhere, pass {base} as the model, and "
            f"the adapter {adapter} with --lora NAME=PATH or LLM.load_adapter"
        )
    elif near := _similar(path) or _similar_name(text):
        fix = f"did you mean {near}?"
    else:
        fix = ASK_FOR_MODEL
    why = "there is no such folder" + ("" if "/" in text else ", and `genai list` shows no model with this name")
    return ModelFolderError(f"{text}: not a model folder", why, fix)


def not_a_checkpoint(path: Path) -> ModelFolderError:
    """Return the error for a path that is not a folder, where a checkpoint's folder is expected."""
    if error := foreign_model_error(path, "a checkpoint"):
        return error
    is_file = path.is_file()
    if is_file and (path.suffix.lower() == ".onnx" or path.suffix in _PICKLES):
        return not_a_folder(path)
    near = None if is_file else _similar(path) or _similar_name(str(path))
    return ModelFolderError(
        f"{path}: not a checkpoint",
        "the file is not a GGUF file" if is_file else "there is no such folder",
        f"did you mean {near}?" if near else
        "pass a folder downloaded from Hugging Face (config.json and *.safetensors), a GGUF file, or the name of a "
        "model, org/name",
    )  # fmt: skip


def no_config(folder: Path) -> ModelFolderError:
    """Return the error for a folder without genai_config.json."""
    problem = f"{folder}: {_CONFIG} is missing"
    why = "a model folder needs that file, or config.json and the graph of a decoder"
    inside = _models_below(folder)
    if inside:
        models = ", ".join(map(str, inside[:3])) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
        return ModelFolderError(problem, why, f"{'pass one of the models inside:' if inside[1:] else 'pass'} {models}")
    for pattern, instead in (("*.gguf", not_a_folder), ("*.onnx", _onnx_file)):
        if matches := sorted(folder.glob(pattern)):
            hint = instead(matches[0])
            found = ModelFolderError(problem, f"{why}; about {matches[0].name}: {hint.why}", hint.fix)
            return about(hint.about, found)
    return ModelFolderError(
        problem,
        why,
        "pass a folder from a model builder, or build one from a Hugging Face checkpoint with `genai build`",
    )


def _onnx_file(path: Path) -> ModelFolderError:
    problem = f"{path}: an .onnx file is not a model folder"
    if not path.exists():
        return ModelFolderError(problem, "there is no such file", "check the path of the model folder")
    if (path.parent / _CONFIG).is_file():
        return ModelFolderError(
            problem, f"the model is the folder of the file, with {_CONFIG} and the tokenizer", f"pass {path.parent}"
        )
    return about(
        "graph",
        ModelFolderError(
            problem,
            f"a chat needs config.json or {_CONFIG}, and a tokenizer, next to the graph",
            f"to describe the graph, use `genai info {path}`; to run it, use `genai run {path} --random`",
        ),
    )


def _other_file(path: Path) -> ModelFolderError:
    problem = f"{path}: a file is not a model folder"
    if path.suffix in _PICKLES:
        return ModelFolderError(
            problem,
            "the file is a pickle, which can run arbitrary code when it is loaded",
            "download the checkpoint as safetensors",
        )
    beside = (path.parent / _CONFIG).is_file() or (path.parent / "config.json").is_file()
    fix = (
        f"pass {path.parent}, the folder that contains the file"
        if beside
        else f"pass the folder that contains {_CONFIG}"
    )
    return ModelFolderError(problem, "a model is a folder that contains a graph, a tokenizer and a configuration", fix)


def _similar(path: Path) -> Path | None:
    """Return the model folder, checkpoint or GGUF file next to `path` with the most similar name."""
    try:
        names = [one.name for one in islice(path.parent.iterdir(), _MOST_LOOKED_AT)]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, 5, 0.7)
    return next((near for near in map(path.parent.joinpath, close) if _is_model(near)), None)


def _is_model(path: Path) -> bool:
    """Return True if a path looks like a model: a folder with a configuration, or a GGUF file."""
    return any(_is_there(path / name) for name in (_CONFIG, "config.json")) or (
        path.suffix.lower() == ".gguf" and _is_there(path)
    )


def _similar_name(text: str) -> str | None:
    """Return the most similar model names: a cached model, with or without its org, or short names of the table."""
    known = {key: model.name for model in models() for key in (model.name.rsplit("/", 1)[-1], model.name)}
    known |= {name: name for name in (BUNDLED_MODEL, *(() if offline() else known_models()))}
    if close := difflib.get_close_matches(text, list(known), 1, 0.7):
        return known[close[0]]
    return None if offline() else " or ".join(names_of_family(text)) or None


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # no permission for its folder
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
