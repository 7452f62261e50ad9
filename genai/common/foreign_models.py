"""Errors for paths that name a model in another place or of another kind, each with a fix."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ModelFolderError
from .paths import expanded

_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?|hf:/{0,2}")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_BUILD = "to convert a checkpoint to a model folder, run `genai build {0} -o FOLDER`, or `genai chat {0}`"


def foreign_model_error(path: Path, expected: str) -> ModelFolderError | None:
    """Return the error for a GGUF file or Hugging Face name in place of `expected`; None for any other path."""
    text = str(path)
    hub = _HUB.match(text) or _HUB.match(text.replace(":/", "://", 1))  # a Path collapses the two slashes into one
    name = _HUB.sub("", text.replace(":/", "://", 1) if hub else text, count=1).strip("/")
    if hub is None and re.match(r"https?:/", text):
        return ModelFolderError(
            f"{text:.200} is not {expected}",
            "the file at this URL has not been pulled yet",
            f"to download the file, run `genai pull {text.replace(':/', '://', 1) if '://' not in text else text}`",
        )
    if path.suffix.lower() == ".gguf":
        exists = path.exists()
        return ModelFolderError(
            f"{text}: a GGUF file is not {expected}" if exists else f"{text}: the GGUF file does not exist",
            "a GGUF file must be converted first" if exists else "there is no such file",
            _BUILD.format(text).replace(" a checkpoint", " a GGUF file") if exists else "check the path",
        )
    if path.exists() or path.suffix.lower() == ".onnx":
        return None
    if hub or (_HUB_NAME.fullmatch(name) and not Path(text.split("/")[0]).exists() and not text.startswith(".")):
        return _hub_name("/".join(name.split("/")[:2]), f"{text} is not {expected}")
    return None


def _hub_name(name: str, problem: str) -> ModelFolderError:
    if download := downloaded(name):
        return ModelFolderError(
            problem,
            "the model has not been pulled, but Hugging Face's cache contains a copy",
            f"to import the copy, run `genai pull {name}`; to use the copy in place, run `genai chat {download}` or "
            f"`genai build {download} -o FOLDER`",
        )
    return ModelFolderError(
        problem,
        "there is no such folder, and no Hugging Face model of this name has been pulled yet",
        f"to download the model, run `genai pull {name}` or `genai chat {name}`, or use genai.LLM(…, pull=True); to "
        f"convert the model to an ONNX model, run `genai build {name} -o FOLDER`",
    )


def downloaded(name: str) -> Path | None:
    """Return the newest snapshot of a model in Hugging Face's cache, or None."""
    snapshots = [
        folder
        for folder in huggingface_cache().glob(f"models--{name.replace('/', '--')}/snapshots/*")
        if folder.is_dir()
    ]
    return max(snapshots, key=lambda folder: folder.stat().st_mtime, default=None)


def huggingface_cache() -> Path:
    """Return the folder in which the huggingface_hub library caches downloads."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return expanded(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
