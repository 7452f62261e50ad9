"""Data types of the KV cache by option name, and the devices that have kernels for them."""

from __future__ import annotations

from genai.kernels.cuda.driver import NoDevice

from ..devices import check_device, first_gpu
from ..errors import OptionError
from .chosen_device import ChosenDevice

# The values are the names that `LayerShape` uses.
KV_TYPES = {
    "fp16": "float16",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp8": "float8",
    "int8": "int8",
    "int4": "int4",
}
# Types without CPU kernels.
_NOT_ON_CPUS = ("bf16", "fp8")


def kv_types_on(device: str) -> tuple[str, ...]:
    """Return the types for which a device has kernels, by the device's name (`Executor.name`)."""
    return tuple(name for name in KV_TYPES if device != "cpu" or name not in _NOT_ON_CPUS)


def check_kv_type(kv_dtype: str, device: str, chosen: ChosenDevice | None = None) -> None:
    """Raise OptionError if a device has no kernels for a KV cache type.

    Args:
        kv_dtype: the type.
        device: name of the device.
        chosen: the choice that led to the device; None = the device itself.
    """
    if device == "cpu" and kv_dtype in _NOT_ON_CPUS:
        raise _no_kernels(kv_dtype, _used(chosen or ChosenDevice(device)))


def check_here(device: str | None, kv_dtype: str) -> None:
    """Check a device and a KV cache type before a model is downloaded. The model's folder may itself name a GPU.

    Raises:
        DeviceError: the requested GPU cannot be used.
        OptionError: no device is requested, and no available device has kernels for the type.
    """
    check_device(device)
    if device is not None or kv_dtype not in _NOT_ON_CPUS:
        return
    try:
        first_gpu()
    except NoDevice as error:
        raise _no_kernels(kv_dtype, "on the CPU, because there is no GPU", "") from error


def _no_kernels(kv_dtype: str, how: str, more: str = '; or device="cuda" (--device cuda)') -> OptionError:
    return OptionError(
        f"kv_dtype = {kv_dtype!r} cannot be used {how}",
        f"the CPU supports {', '.join(kv_types_on('cpu'))}",
        f'use "fp16", or "int8", which needs little more memory than fp8{more}',
    )


def _used(chosen: ChosenDevice) -> str:
    """Return the part of a message that describes how a choice led to the CPU."""
    if chosen.is_default:
        return "on the CPU, because no GPU was requested"
    if chosen.asked_by:
        return f"on the CPU, because {chosen.asked_by} requests {chosen.name}, and there is no GPU"
    return f"with device = {chosen.name!r}" + ("" if chosen.name == "cpu" else ", for which no GPU was found")
