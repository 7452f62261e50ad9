"""The checks that onnxruntime performs when it is imported."""

from __future__ import annotations

from ..shim import API_VERSION


def check_distro_info() -> None:
    """Do nothing: the package does not depend on the distribution."""


def get_package_name_and_version_info() -> tuple[str, str, str]:
    """Return the name of the package, the version of its API, and the version of CUDA, which is ""."""
    return "onnxruntime", API_VERSION, ""
