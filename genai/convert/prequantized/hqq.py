"""HQQ: codes of 1 to 8 bits with a float zero point per group, as written by HQQLinear.state_dict and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UnsupportedModelError
from ..hf_config import HFConfig
from .matrices import (
    FLOAT32,
    Array,
    Codes,
    Files,
    LazyMatrix,
    Matrices,
    bases,
    contradiction,
    floats,
    part,
    rows_of_bits,
)

# The word type and the shifts of each packing. The rows are split into equal parts; a word holds one number from each.
_PACKINGS: dict[str, tuple[str, tuple[int, ...]]] = {
    "8bit_u8": ("uint8", (0,)),
    "4bit_u8": ("uint8", (4, 0)),
    "3bit_32": ("int32", tuple(range(27, -1, -3))),
    "2bit_u8": ("uint8", (6, 4, 2, 0)),
    "1bit_u8": ("uint8", tuple(range(7, -1, -1))),
}
_BY_BITS = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
_BESIDE = (
    "nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero",
)  # fmt: skip


def read(files: Files, settings: HFConfig) -> Matrices:
    """Read W_q (one group per row or column), scale and zero, and settings that are stored as tensors of one number."""
    whole = settings.get("quant_config")
    if whole is not None and not isinstance(whole, dict):
        raise settings.wrong("quant_config", whole, "an object")
    for base in bases(files, ".W_q"):
        _check_settings(files, base, _weight_settings(whole or {}, base))
        yield f"{base}.weight", _matrix(files, base)


def _weight_settings(whole: dict[str, Any], base: str) -> HFConfig:
    """Return the settings of a matrix. `quant_config` has them for all matrices, or by the end of a matrix's name."""
    own = next((one for tag, one in whole.items() if base.endswith(f".{tag}") and isinstance(one, dict)), whole)
    values = own.get("weight_quant_params", own if own is not whole else None)
    return HFConfig(values if isinstance(values, dict) else {}, part=f"quant_config of {base}")


def _check_settings(files: Files, base: str, settings: HFConfig) -> None:
    """Raise InputError if the numbers that are stored with a matrix differ from the settings."""
    for key in ("nbits", "axis", "group_size"):
        if settings.get(key) is None or f"{base}.{key}" not in files:
            continue
        found, wanted = _number(files, base, key), settings.integer(key, least=0)
        if found != wanted:
            raise contradiction(f"{base}.{key}", f"the value {found}", f"{key} = {wanted}")
    bits, name = _number(files, base, "nbits"), f"{base}.packing"
    if name in files and bits in _BY_BITS:
        packing = part(files, name, ("uint8",), (None,)).tobytes().decode("utf-8", "replace")
        if packing != _BY_BITS[bits]:
            raise InputError(
                f"{name} is {packing!r:.40}, but {base}.nbits is {bits}",
                f"the packing of {bits} bits is {_BY_BITS[bits]}",
                "use a checkpoint with this packing, or the float checkpoint",
            )


def _number(files: Files, base: str, name: str, default: int | None = None) -> int:
    full = f"{base}.{name}"
    if default is not None and full not in files:
        return default
    tensor = part(files, full, ("int32", "int64", "uint8", "float32", "bool"))
    if tensor.size != 1 or not float(tensor.reshape(-1)[0]).is_integer():
        raise InputError(
            f"{full} is {tensor.tolist()!r:.60}", "the tensor must contain one integer", "use another checkpoint"
        )
    return int(tensor.reshape(-1)[0])


def _matrix(files: Files, base: str) -> LazyMatrix:
    weight_name = f"{base}.W_q"
    sizes = part(files, f"{base}.shape", ("int32", "int64"), (2,)).tolist()
    rows, columns = int(sizes[0]), int(sizes[1])
    bits, axis = _number(files, base, "nbits"), _number(files, base, "axis")
    group = _number(files, base, "group_size", columns if axis else rows)
    for flag in ("quant_scale", "quant_zero", "view_as_float"):
        if _number(files, base, flag, 0):
            raise UnsupportedModelError(
                f"{base}.{flag} is set", "quantised scales and complex views are not supported",
                "build the model from the float checkpoint",
            )  # fmt: skip
    if bits not in _BY_BITS or axis not in (0, 1) or min(rows, columns, group) < 1 or rows * columns % group:
        raise InputError(
            f"{base} has {bits} bits, axis {axis}, group size {group} and shape {sizes}",
            f"bits must be one of {', '.join(map(str, _BY_BITS))}, axis must be 0 or 1, and the group size must divide "
            "the number of elements",
            "download the checkpoint again",
        )
    kind, shifts = _PACKINGS[_BY_BITS[bits]]
    wide, high = (rows * columns // group, group) if axis else (group, rows * columns // group)
    packed = part(files, weight_name, (kind,), (-(-wide // len(shifts)), high))
    scale_shape = (wide, 1) if axis else (1, high)
    scale, zero = (floats(files, f"{base}.{name}", scale_shape) for name in ("scale", "zero"))
    parts = (weight_name, *(name for end in _BESIDE if (name := f"{base}.{end}") in files))

    def codes() -> NDArray[np.uint8]:
        found = np.concatenate([packed >> shift & ((1 << bits) - 1) for shift in shifts])[:wide]
        return found.astype(np.uint8)

    if axis == 0 or bits == 1 or columns % group:
        why = "groups that are not part of one row" if axis == 0 or columns % group else f"{bits}-bit weights"

        def values() -> Array:
            found = (codes().astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
            return found.reshape(rows, columns)

        return LazyMatrix((rows, columns), parts, FLOAT32, values, why=why)
    groups = columns // group

    def of_groups(tensor: Array) -> NDArray[np.float32]:
        return tensor.astype(np.float32).reshape(rows, groups)

    return Codes(
        (rows, columns), bits, groups, parts, lambda: rows_of_bits(codes().reshape(rows, columns), bits),
        lambda: of_groups(scale), least=lambda: -of_groups(scale) * of_groups(zero),
    ).matrix()  # fmt: skip
