"""The module in which onnxruntime defines the classes of its Python API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...refused import ModelCompiler as ModelCompiler, SparseTensor as SparseTensor
from ..adapter_format import AdapterFormat as AdapterFormat
from ..binding import IOBinding as IOBinding
from ..inference_session import InferenceSession as InferenceSession
from ..providers import chosen_providers
from ..values import (
    OrtDevice as OrtDevice,
    OrtDeviceVendorId as OrtDeviceVendorId,
    OrtValue as OrtValue,
    copy_tensors as copy_tensors,
)

Session = InferenceSession


def check_and_normalize_provider_args(
    providers: Sequence[Any] | None,
    provider_options: Sequence[dict[str, Any]] | None,
    available_provider_names: Sequence[str],
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names and the options of the requested providers that are available.

    Raises:
        InvalidArgument: an argument is malformed.
    """
    chosen = [
        (name, options)
        for name, options in chosen_providers(providers or (), provider_options)
        if name in available_provider_names
    ]
    return [name for name, _ in chosen], [{key: str(value) for key, value in given.items()} for _, given in chosen]
