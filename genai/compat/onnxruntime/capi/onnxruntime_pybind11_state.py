"""The names of onnxruntime's native module: its public names, its exceptions, and names that are refused when used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...refused import stand_in
from .. import NAMES
from ..errors import (
    DeviceReset as DeviceReset,
    EngineError as EngineError,
    EPFail as EPFail,
    Fail as Fail,
    InvalidArgument as InvalidArgument,
    InvalidGraph as InvalidGraph,
    InvalidProtobuf as InvalidProtobuf,
    ModelLoadCanceled as ModelLoadCanceled,
    ModelLoaded as ModelLoaded,
    ModelRequiresCompilation as ModelRequiresCompilation,
    NoModel as NoModel,
    NoSuchFile as NoSuchFile,
    NotFound as NotFound,
    NotImplemented as NotImplemented,
    RuntimeException as RuntimeException,
)
from ..options import SessionOptions

REFUSED = {
    name: reason
    for reason, names in {
        "sessions have no native allocators": "ArenaExtendStrategy",
        "kernels and operator schemas of onnxruntime do not exist here": (
            "get_all_operator_schema get_all_opkernel_def get_registered_ep_kernel_defs opkernel schemadef"
        ),
        "native execution providers cannot be loaded": (
            "OrtCompiledModelCompatibility OrtDeviceEpIncompatibilityReason get_compatibility_info_from_model "
            "get_compatibility_info_from_model_bytes get_hardware_device_ep_incompatibility_details "
            "get_hardware_devices get_model_compatibility_for_ep_devices"
        ),
        "sparse constants of a model become dense, and inputs and outputs are dense": (
            "SparseBlockSparseView SparseCooView SparseCsrView"
        ),
        "weights are quantised by onnxruntime.quantization and by genai quantize": (
            "pack_fp4_weights_for_cuda_moe_gemm quantize_matmul_2bits quantize_matmul_4bits quantize_matmul_8bits "
            "quantize_matmul_bnb4 quantize_qdq_matmul_2bits quantize_qdq_matmul_4bits"
        ),
        "sessions are created by InferenceSession": "SessionObjectInitializer get_session_initializer",
    }.items()
    for name in names.split()
}
"""Names that raise an error when they are used, each with the reason."""
kNextPowerOfTwo, kSameAsRequested = 0, 1
OrtValueVector = list


def get_default_session_options() -> SessionOptions:
    """Return new options with default values."""
    return SessionOptions()


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return getattr(import_module("genai"), name)
    if name in REFUSED:
        return stand_in(name, REFUSED[name], "for the supported names, see docs/reference/onnxruntime-names.md")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES, *REFUSED})
