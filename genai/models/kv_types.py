"""Types of cached keys and values by the names that options have, and which devices have kernels for them."""

from __future__ import annotations

from genai.kernels.cuda.driver import NoDevice

from ..devices import check_device, first_gpu
from ..errors import OptionError
from .chosen_device import ChosenDevice

# What `LayerShape` calls them.
KV_TYPES = {
    "fp16": "float16",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp8": "float8",
    "int8": "int8",
    "int4": "int4",
}
# Those that CPUs do not compute.
_NOT_ON_CPUS = ("bf16", "fp8")


def kv_types_on(device: str) -> tuple[str, ...]:
    """Those that the device of this name (`Executor.name`) has kernels for."""
    return tuple(name for name in KV_TYPES if device != "cpu" or name not in _NOT_ON_CPUS)


def check_kv_type(kv_dtype: str, device: str, chosen: ChosenDevice | None = None) -> None:
    """Raise OptionError where a device has no kernels for such keys and values.

    Args:
        device: its name. chosen: what it stands for; None = itself.
    """
    if device == "cpu" and kv_dtype in _NOT_ON_CPUS:
        raise _no_kernels(kv_dtype, _used(chosen or ChosenDevice(device)))


def check_here(device: str | None, kv_dtype: str) -> None:
    """What can be said of a device and a cache before a model is fetched, which may ask for a GPU itself.

    Raises:
        DeviceError: the GPU that is asked for cannot be used.
        OptionError: nobody has said a device, and none that is here has kernels for such keys and values.
    """
    check_device(device)
    if device is not None or kv_dtype not in _NOT_ON_CPUS:
        return
    try:
        first_gpu()
    except NoDevice as error:
        raise _no_kernels(kv_dtype, "on the CPU, as there is no GPU here", "") from error


def _no_kernels(kv_dtype: str, how: str, more: str = '; or device="cuda" (--device cuda)') -> OptionError:
    return OptionError(
        f"kv_dtype = {kv_dtype!r} {how}",
        f"the CPU has kernels for keys and values of {', '.join(kv_types_on('cpu'))}",
        f'take "fp16", or "int8", which needs little more memory than fp8{more}',
    )


def _used(chosen: ChosenDevice) -> str:
    """How a choice led to the CPU."""
    if chosen.is_default:
        return "on the CPU, as no GPU was asked for"
    if chosen.asked_by:
        return f"on the CPU, as there is no GPU where {chosen.asked_by} asks for {chosen.name}"
    return f"with device = {chosen.name!r}" + ("" if chosen.name == "cpu" else ", which found no GPU")
