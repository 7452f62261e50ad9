"""Paths that stand for models which lie elsewhere, or are of another kind: what to do instead."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ModelFolderError
from .paths import expanded

_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?|hf:/{0,2}")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_BUILD = "`genai build {0} -o FOLDER` makes a model folder of a checkpoint, as `genai chat {0}` does the first time"


def foreign_model_error(path: Path, expected: str) -> ModelFolderError | None:
    """The error for a GGUF file or a name on Hugging Face where `expected` should be; None for anything else."""
    text = str(path)
    hub = _HUB.match(text) or _HUB.match(text.replace(":/", "://", 1))  # a Path has swallowed one of the slashes
    name = _HUB.sub("", text.replace(":/", "://", 1) if hub else text, count=1).strip("/")
    if hub is None and re.match(r"https?:/", text):
        return ModelFolderError(
            f"{text:.200}: not {expected}",
            "it is an address, and was not pulled yet",
            f"`genai pull {text.replace(':/', '://', 1) if '://' not in text else text}` fetches the file",
        )
    if path.suffix.lower() == ".gguf":
        exists = path.exists()
        return ModelFolderError(
            f"{text}: a GGUF file is not {expected}" if exists else f"{text}: there is no such GGUF file",
            "GGUF becomes a model folder first" if exists else f"nothing lies there, and a GGUF file is not {expected}",
            ("" if exists else "check the path; ") + _BUILD.format(text).replace("of a checkpoint", "of it"),
        )
    if path.exists() or path.suffix.lower() == ".onnx":
        return None
    if hub or (_HUB_NAME.fullmatch(name) and not Path(text.split("/")[0]).exists() and not text.startswith(".")):
        return _hub_name("/".join(name.split("/")[:2]), f"{text}: not {expected}")
    return None


def _hub_name(name: str, problem: str) -> ModelFolderError:
    if download := downloaded(name):
        return ModelFolderError(
            problem,
            "it was not pulled, but Hugging Face's cache has it",
            f"`genai pull {name}` takes it over from there; or give its folder: `genai chat {download}`, or `genai "
            f"build {download} -o FOLDER`",
        )
    return ModelFolderError(
        problem,
        "there is no such folder; it looks like a name on Hugging Face, and was not pulled yet",
        f"`genai pull {name}` fetches it, as does `genai chat {name}` after asking, and genai.LLM(…, pull=True); "
        f"`genai build {name} -o FOLDER` makes an ONNX model of it",
    )


def downloaded(name: str) -> Path | None:
    """The newest snapshot of a model in Hugging Face's cache."""
    snapshots = [
        folder
        for folder in huggingface_cache().glob(f"models--{name.replace('/', '--')}/snapshots/*")
        if folder.is_dir()
    ]
    return max(snapshots, key=lambda folder: folder.stat().st_mtime, default=None)


def huggingface_cache() -> Path:
    """Where Hugging Face's own library keeps what it downloads."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return expanded(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
