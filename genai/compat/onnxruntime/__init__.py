"""The API of onnxruntime, and `install`, which makes `import onnxruntime` return this package.

Programs that were written for onnxruntime run unchanged after `install()`, or with
`python -m genai.compat.onnxruntime -- script.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .shim import API_VERSION, install, uninstall

__version__ = version = API_VERSION
__all__ = ["install", "uninstall"]

NAMES = frozenset(
    """
    AdapterFormat ExecutionMode ExecutionOrder GraphOptimizationLevel IOBinding InferenceSession LoraAdapter
    ModelCompiler ModelMetadata ModelPackage ModelPackageComponentContext ModelPackageContext ModelPackageOptions
    ModelPackageWriteMode NodeArg OrtAllocatorType OrtArenaCfg OrtCompileApiFlags OrtDevice OrtDeviceMemoryType
    OrtDeviceVendorId OrtEpAssignedNode OrtEpAssignedSubgraph OrtEpContextData OrtEpContextDataBuffer OrtEpDevice
    OrtExecutionProviderDevicePolicy OrtExternalInitializerInfo OrtHardwareDevice OrtHardwareDeviceType OrtMemType
    OrtMemoryInfo OrtMemoryInfoDeviceType OrtSparseFormat OrtSyncStream OrtValue RunOptions SessionIOBinding
    SessionOptions SparseTensor copy_tensors create_and_register_allocator create_and_register_allocator_v2 cuda_version
    disable_telemetry_events enable_telemetry_events get_all_providers get_available_providers get_build_info get_device
    get_ep_devices get_version_string has_collective_ops package_name preload_dlls print_debug_info
    register_execution_provider_library set_default_logger_callback set_default_logger_severity
    set_default_logger_verbosity set_global_thread_pool_sizes set_seed unregister_execution_provider_library
    """.split()
)
"""The public names of onnxruntime, which are names of `genai`."""


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return getattr(import_module("genai"), name)
    if name == "capi":  # `import onnxruntime` also imports this package
        return import_module(f"{__name__}.capi")
    raise AttributeError(f"module 'onnxruntime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES, "capi"})
