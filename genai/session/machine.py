"""Small functions of onnxruntime's module that say what is here, and settings that hold for the process."""

from __future__ import annotations

import numpy as np

from ..errors import OptionError
from .providers import get_all_providers, get_available_providers, get_device


def get_version_string() -> str:
    """This package's version."""
    from genai import __version__

    return __version__


def get_build_info() -> str:
    """How this package was built: it is plain Python."""
    return f"genai {get_version_string()}, NumPy {np.__version__}, providers {', '.join(get_available_providers())}"


def set_default_logger_severity(severity: int) -> None:
    """Accepted: sessions log nothing.

    Raises:
        OptionError: outside 0 to 4.
    """
    if not 0 <= int(severity) <= 4:
        raise OptionError(f"log severity {severity}", "severities go from 0 (verbose) to 4 (fatal)", "give one of them")


def set_default_logger_verbosity(verbosity: int) -> None:
    """Accepted: sessions log nothing."""


def disable_telemetry_events() -> None:
    """There is no telemetry."""


def enable_telemetry_events() -> None:
    """There is no telemetry to enable.

    Raises:
        OptionError: always.
    """
    raise OptionError("enable_telemetry_events()", "this package has no telemetry", "remove the call")


__all__ = [
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_version_string",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
]
