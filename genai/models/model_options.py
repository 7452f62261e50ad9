"""The options of `Model`, and checks that run before anything is loaded. This module does not import Numba."""

from __future__ import annotations

from numbers import Integral
from typing import Any, TypedDict

from ..errors import OptionError, did_you_mean, whole_number
from .kv_quality import MEASURED
from .kv_types import KV_TYPES, check_kv_type

KV_DTYPES = ("auto", *KV_TYPES)
ACCURACIES = ("auto", "fp32", "int8")
DEVICES = ("cpu", "cuda", "auto", "reference")


class ModelOptions(TypedDict, total=False):
    """The options of Model as keyword arguments."""

    threads: int | None
    kv_dtype: str
    accuracy: str
    cache_bytes: int | None
    context_size: int | None
    quiet: bool
    device: str | None
    lora: bool
    kv_dtype_force: bool


def check_model_options(
    *,
    kv_dtype: str = "auto",
    accuracy: str = "auto",
    device: str | None = None,
    lora: bool = False,
    kv_dtype_force: bool = False,
    **numbers: Any,
) -> None:
    """Check options of Model without loading a model. `numbers` are options that are whole numbers or None."""
    device = "auto" if device is None else device  # the folder may name a device
    _check_choice("kv_dtype", kv_dtype, KV_DTYPES)
    _check_choice("accuracy", accuracy, ACCURACIES)
    _check_choice("device", gpu_name(device) or device, DEVICES)
    if device == "cpu":
        check_kv_type(kv_dtype, device)
    if not isinstance(lora, bool):
        raise OptionError(f"lora = {lora!r}", "True or False is expected", "pass True or False")
    if not isinstance(kv_dtype_force, bool) or (kv_dtype_force and kv_dtype != MEASURED):
        raise OptionError(
            f"kv_dtype_force = {kv_dtype_force!r} cannot be used with kv_dtype = {kv_dtype!r}",
            f"kv_dtype_force is True or False, and True is allowed only with kv_dtype = {MEASURED!r}",
            f"leave kv_dtype_force out, or set kv_dtype to {MEASURED!r}",
        )
    refused = {"accuracy": accuracy == "int8" and accuracy, "threads": numbers.get("threads")}
    for name, value in refused.items():
        if device == "reference" and value:
            why = "the reference device computes in full precision, and NumPy chooses the number of threads"
            raise OptionError(f"device = 'reference' cannot be used with {name} = {value!r}", why, f"leave {name} out")
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
            raise OptionError(
                f"{name} = {value!r}", "a whole number of at least 1 is expected", f"leave {name} out for the default"
            )


def gpu_name(device: str) -> str:
    """Return "cuda" for a GPU with a number, such as "cuda:1"; "" for any other name."""
    kind, _, number = str(device).partition(":")
    return kind if kind == "cuda" and whole_number(number) is not None else ""


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        gpu = name == "device" and str(value).lower().startswith(("gpu", "rocm", "mps", "metal"))
        more = " (and cuda:1, cuda:2 and so on for other GPUs)" if name == "device" else ""
        why = f"allowed: {', '.join(allowed)}{more}{'; only NVIDIA GPUs are supported' if gpu else ''}"
        likely = "cuda" if str(value).lower().startswith("gpu") else str(value).lower()
        fix = did_you_mean(likely, allowed, f"pass one of these values, or leave {name} out")
        raise OptionError(f"{name} = {value!r}", why, fix)
