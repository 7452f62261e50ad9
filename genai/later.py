"""Names of onnxruntime-genai's API that scripts may mention and that this version does not serve yet.

Mentioning them is fine (its examples do so in type annotations); using them says what is missing.
"""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import NotSupportedYetError


def _refuse(name: str, reason: str) -> NoReturn:
    raise NotSupportedYetError(f"{name} is not supported yet", reason, "see docs/python-api.md for what is")


class _Later:
    """Base of classes that exist by name only."""

    _reason = ""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _refuse(type(self).__name__, self._reason)

    @classmethod
    def open(cls, *arguments: Any) -> NoReturn:
        """Refuses, as the constructor does."""
        _refuse(f"{cls.__name__}.open", cls._reason)


class Images(_Later):
    """Images for multimodal models."""

    _reason = "this version runs text models"


class Audios(_Later):
    """Sounds for multimodal models."""

    _reason = "this version runs text models"


class Adapters(_Later):
    """LoRA adapters."""

    _reason = "adapters come later"


class Engine(_Later):
    """Continuous batching by requests."""

    _reason = "several Generators may share one Model from several threads already"


class MtpGenerator(_Later):
    """Multi-token prediction."""

    _reason = "speculative decoding comes later"


def set_log_options(**options: Any) -> NoReturn:
    """Logging inside the engine: not supported yet."""
    _refuse("set_log_options", "the engine writes no log")


def register_execution_provider_library(name: str, path: str) -> NoReturn:
    """Providers of onnxruntime: not supported."""
    _refuse(f"execution provider {name!r}", "no onnxruntime runs here")


def is_cuda_available() -> bool:
    """Whether models can run on CUDA: not in this version."""
    return False
