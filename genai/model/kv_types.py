"""Types of cached keys and values by the names that options have, and which devices have kernels for them."""

from __future__ import annotations

from ..errors import OptionError

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


def check_kv_type(kv_dtype: str, device: str, asked: str = "") -> None:
    """Raise OptionError where a device has no kernels for such keys and values.

    Args:
        device: its name. asked: the device that was asked for, where that is another one.
    """
    if device != "cpu" or kv_dtype not in _NOT_ON_CPUS:
        return
    chosen = f"device = {asked!r}, which found no GPU" if asked and asked != device else f"device = {device!r}"
    raise OptionError(
        f"kv_dtype = {kv_dtype!r} with {chosen}",
        f"the CPU has kernels for keys and values of {', '.join(kv_types_on(device))}",
        'take "fp16", or "int8", which needs little more memory than fp8; or device="cuda" (--device cuda)',
    )
