"""Names of onnxruntime's and onnxruntime-genai's APIs that are refused with a reason when they are used.

Mentioning them is fine: examples do so in type annotations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from ..devices import why_no_gpu
from ..errors import NotSupportedYetError

_SESSION_PAGE = "docs/session.md lists what is"
GENERATING_PAGE = "docs/python-api.md lists what is"
"""Where the names of onnxruntime-genai are; those of onnxruntime are on another page."""
_REFUSED = {
    _SESSION_PAGE: {
        "models are read from ONNX files, not from packages of several": (
            "ModelPackage ModelPackageComponentContext ModelPackageContext ModelPackageOptions ModelPackageWriteMode"
        ),
        "providers here keep no compiled models": (
            "ModelCompiler OrtCompileApiFlags OrtEpContextData OrtEpContextDataBuffer OrtExternalInitializerInfo"
        ),
        "providers are chosen by name; devices of native providers are not listed": (
            "OrtEpDevice OrtExecutionProviderDevicePolicy OrtHardwareDevice OrtHardwareDeviceType get_ep_devices"
        ),
        "sparse constants of a model become dense, and inputs and results are dense": "OrtSparseFormat SparseTensor",
        "native providers cannot be loaded; see docs/session.md, 'Providers'": (
            "register_execution_provider_library unregister_execution_provider_library"
        ),
        "memory comes from NumPy, so that there is no allocator to set up": (
            "OrtArenaCfg create_and_register_allocator create_and_register_allocator_v2"
        ),
        "results are ready when a run returns": "OrtSyncStream",
        "sessions log nothing that a callback could receive": "set_default_logger_callback",
    },
    GENERATING_PAGE: {
        "this version runs text models": "Audios Images MultiModalProcessor",
        "heads that predict several tokens are not run; LLM(speculation=…) guesses otherwise": "MtpGenerator",
        "this version runs text models, not speech": "StreamingProcessor",
        "a device is chosen by name: Model(folder, device=…)": "get_current_gpu_device_id set_current_gpu_device_id",
    },
}
REASONS = {name: why for reasons in _REFUSED.values() for why, names in reasons.items() for name in names.split()}
"""Names that are refused, each with the reason."""
_FIXES = {name: page for page, reasons in _REFUSED.items() for names in reasons.values() for name in names.split()}


def is_cuda_available() -> bool:
    """Whether a GPU of NVIDIA can be used."""
    return not why_no_gpu(0)


def is_dml_available() -> bool:
    """False, as of every device but the CPU and GPUs of NVIDIA."""
    return False


is_openvino_available = is_qnn_available = is_webgpu_available = is_dml_available
AVAILABLE = tuple(name for name in globals() if name.startswith("is_"))
"""What scripts ask of devices."""


def refuse(name: str, reason: str, fix: str = _SESSION_PAGE) -> NoReturn:
    """Say no. Raises NotSupportedYetError: always."""
    raise NotSupportedYetError(f"{name} is not supported", reason, fix)


class _RefusedType(type):
    """Attributes of such classes, as members of an enumeration, are stand-ins too, that refuse when they are called."""

    refusal: tuple[str, str]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return stand_in(f"{cls.__name__}.{name}", *cls.refusal)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        refuse(cls.__name__, *cls.refusal)


@cache
def stand_in(name: str, reason: str, fix: str) -> Any:
    """What refuses when it is called; a function if the name begins with a small letter, else a class."""
    if name[0].isupper():
        return _RefusedType(name, (), {"refusal": (reason, fix)})

    def function(*arguments: Any, **options: Any) -> NoReturn:
        refuse(name, reason, fix)

    function.__name__ = function.__qualname__ = name
    return function


def refusing_method(name: str, reason: str, fix: str = _SESSION_PAGE) -> Callable[..., NoReturn]:
    """A method of that name that refuses."""

    def method(self: Any, *arguments: Any, **options: Any) -> NoReturn:
        refuse(f"{type(self).__name__}.{name}", reason, fix)

    method.__name__ = name
    method.__doc__ = f"Not supported: {reason}."
    return method


def __getattr__(name: str) -> Any:
    if name not in REASONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return stand_in(name, REASONS[name], _FIXES[name])
