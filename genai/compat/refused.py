"""Names in onnxruntime's and onnxruntime-genai's APIs that raise an error with a reason when they are used.

Code may import and mention these names, because examples use them in type annotations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from ..devices import why_no_gpu
from ..errors import NotSupportedYetError

_SESSION_PAGE = "for the supported names, see docs/reference/session-options.md"
GENERATING_PAGE = "for the supported names, see docs/how-to/onnxruntime-genai.md"
"""The fix for names of onnxruntime-genai; the names of onnxruntime are documented on another page."""
_REFUSED = {
    _SESSION_PAGE: {
        "models are read from ONNX files, not from packages of several models": (
            "ModelPackage ModelPackageComponentContext ModelPackageContext ModelPackageOptions ModelPackageWriteMode"
        ),
        "providers here do not store compiled models": (
            "ModelCompiler OrtCompileApiFlags OrtEpContextData OrtEpContextDataBuffer OrtExternalInitializerInfo"
        ),
        "providers are chosen by name; devices of native providers are not listed": (
            "OrtEpDevice OrtExecutionProviderDevicePolicy OrtHardwareDevice OrtHardwareDeviceType get_ep_devices"
        ),
        "sparse constants of a model become dense, and inputs and outputs are dense": "OrtSparseFormat SparseTensor",
        "native providers cannot be loaded; see docs/reference/session-options.md, 'Providers'": (
            "register_execution_provider_library unregister_execution_provider_library"
        ),
        "NumPy allocates memory, so there is no allocator to set up": (
            "OrtArenaCfg create_and_register_allocator create_and_register_allocator_v2"
        ),
        "results are ready when a run returns": "OrtSyncStream",
        "sessions write no log that a callback could receive": "set_default_logger_callback",
    },
    GENERATING_PAGE: {
        "this version runs only text models": "Audios Images MultiModalProcessor",
        "an LLM proposes tokens with the MTP head of a folder; use LLM(folder, speculation='auto')": "MtpGenerator",
        "this version runs text models, not speech models": "StreamingProcessor",
        "a device is chosen by name: Model(folder, device=…)": "get_current_gpu_device_id set_current_gpu_device_id",
    },
}
REASONS = {name: why for reasons in _REFUSED.values() for why, names in reasons.items() for name in names.split()}
"""Unsupported names, each with the reason why it is not supported."""
_FIXES = {name: page for page, reasons in _REFUSED.items() for names in reasons.values() for name in names.split()}


def is_cuda_available() -> bool:
    """Return True if an NVIDIA GPU can be used."""
    return not why_no_gpu(0)


def is_dml_available() -> bool:
    """Return False: DirectML is not supported, nor is any device other than the CPU and NVIDIA GPUs."""
    return False


is_openvino_available = is_qnn_available = is_webgpu_available = is_dml_available
AVAILABLE = tuple(name for name in globals() if name.startswith("is_"))
"""The functions that report whether a device is available."""


def refuse(name: str, reason: str, fix: str = _SESSION_PAGE) -> NoReturn:
    """Raise NotSupportedYetError."""
    raise NotSupportedYetError(f"{name} is not supported", reason, fix)


class _RefusedType(type):
    """The metaclass of unsupported classes. Calling an attribute, such as an enum member, also raises the error."""

    refusal: tuple[str, str]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return stand_in(f"{cls.__name__}.{name}", *cls.refusal)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        refuse(cls.__name__, *cls.refusal)


@cache
def stand_in(name: str, reason: str, fix: str) -> Any:
    """Return an object that raises an error when called: a class if the name is capitalised, else a function."""
    if name[0].isupper():
        return _RefusedType(name, (), {"refusal": (reason, fix)})

    def function(*arguments: Any, **options: Any) -> NoReturn:
        refuse(name, reason, fix)

    function.__name__ = function.__qualname__ = name
    return function


def refusing_method(name: str, reason: str, fix: str = _SESSION_PAGE) -> Callable[..., NoReturn]:
    """Return a method with this name that raises NotSupportedYetError."""

    def method(self: Any, *arguments: Any, **options: Any) -> NoReturn:
        refuse(f"{type(self).__name__}.{name}", reason, fix)

    method.__name__ = name
    method.__doc__ = f"Not supported: {reason}."
    return method


def __getattr__(name: str) -> Any:
    if name not in REASONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return stand_in(name, REASONS[name], _FIXES[name])
