"""compressed-tensors (llm-compressor): packed 4- or 8-bit integers, 8-bit integers and floats, NVFP4 and MXFP4.

The tensors of a matrix determine its format; `config_groups` adds only details.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import unpack_bits

from ...errors import InputError, UnsupportedModelError
from ..hf_config import HFConfig
from . import fp8
from .matrices import (
    Array,
    Codes,
    Files,
    LazyMatrix,
    Matrices,
    bases,
    bits_of,
    contradiction,
    floats,
    group_order,
    groups_of,
    part,
    rows_of_bits,
    words,
)
from .mxfp4 import power_scales

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
# Scales of activations and of cached keys and values, which are not quantised here.
_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale")


def read(files: Files, settings: HFConfig) -> Matrices:
    """Read weight_packed or weight, with weight_scale, _zero_point, _shape, _g_idx and _global_scale."""
    format = settings.text("format", default="mixed-precision")
    if format not in _FORMATS or _object(settings, "sparsity_config").get("format", "dense") != "dense":
        raise UnsupportedModelError(
            f"quantization_config.format is {format!r}, or the weights are sparse",
            f"the supported compressed-tensors formats are {', '.join(_FORMATS)}, without sparsity",
            "use a checkpoint of the same model in one of these formats, or the float checkpoint",
        )
    _refuse_rotations(settings)
    scheme = _scheme(settings)
    for base in bases(files, ".weight_scale"):
        parts = tuple(name for name in files if name.startswith(f"{base}.") and _is_beside(name[len(base) + 1 :]))
        yield f"{base}.weight", _matrix(files, base, parts, scheme)


def _is_beside(end: str) -> bool:
    return end.startswith("weight") or end in _UNUSED


def _object(settings: HFConfig, name: str) -> dict[str, Any]:
    value = settings.get(name)
    if value is not None and not isinstance(value, dict):
        raise settings.wrong(name, value, "an object")
    return value or {}


def _refuse_rotations(settings: HFConfig) -> None:
    """Raise if the model needs rotations at run time; rotated weights need no rotation at run time."""
    rotations = HFConfig(_object(settings, "transform_config"), part="transform_config")
    for name, one in _object(rotations, "config_groups").items():
        applied = one.get("apply") if isinstance(one, dict) else None
        locations = [entry.get("location") for entry in applied or [] if isinstance(entry, dict)]
        if not isinstance(applied, list) or not all(str(where).startswith("weight_") for where in locations):
            raise UnsupportedModelError(
                f"quantization_config.transform_config applies {name} to {', '.join(map(repr, locations))}",
                "transforms at run time are not supported, and the weights are wrong without them",
                "use a checkpoint without transforms, or the float checkpoint",
            )


@dataclass(frozen=True)
class _Scheme:
    """The settings of config_groups.

    Attributes:
        widths: bits of weights.
        blocks: sizes [rows, columns] of the blocks; the weights of a block share a scale.
        group_sizes: columns per group; empty if a group of the settings has no size.
        symmetric: True if no weights have zero points.
        types: types of weights, "int" or "float"; empty if a group of the settings has no type.
        strategies: the parts of a matrix that share a scale, such as "group" or "channel"; empty if a group of the
            settings has no strategy.
    """

    widths: set[int]
    blocks: list[list[int]]
    group_sizes: set[int]
    symmetric: bool
    types: set[str]
    strategies: set[str]

    def check_type(self, name: str, kind: str, dtype: str) -> None:
        """Raise InputError if all weights of the settings have another type, "int" or "float"."""
        if self.types and kind not in self.types:
            raise contradiction(name, f"{kind} weights ({dtype})", f"type = {', '.join(map(repr, sorted(self.types)))}")

    def check(self, name: str, columns: int, groups: int, zeros: Array | None, neutral: int) -> None:
        """Raise InputError if the groups or the zero points of a matrix contradict the settings."""
        size = groups_of(name, columns, groups)
        if groups > 1 and self.strategies and self.strategies <= {"tensor", "channel"}:
            shown = ", ".join(map(repr, sorted(self.strategies)))
            raise contradiction(name, f"{groups} scales per row", f"strategy = {shown}, which means one")
        if self.group_sizes and size not in self.group_sizes and not (groups == 1 and max(self.group_sizes) > columns):
            raise InputError(
                f"{name} has groups of {size} columns, but quantization_config sets group size "
                f"{', '.join(map(str, sorted(self.group_sizes)))}",
                "the two group sizes must be equal",
                "check that config.json and the weights belong to the same checkpoint",
            )
        if self.symmetric and zeros is not None and (zeros != neutral).any():
            raise InputError(
                f"{name} has zero points, but quantization_config sets symmetric weights",
                "symmetric weights have no zero points",
                "check that config.json and the weights belong to the same checkpoint",
            )


def _scheme(settings: HFConfig) -> _Scheme:
    groups = HFConfig(_object(settings, "config_groups"), part="config_groups")
    widths: set[int] = set()
    blocks: list[list[int]] = []
    sizes: list[int] = []  # 0 = not set
    symmetric: list[bool] = []
    words_of: dict[str, list[str | None]] = {"type": [], "strategy": []}
    for name in groups.values:
        weights = HFConfig(_object(HFConfig(_object(groups, name), part=name), "weights"), part=f"{name}.weights")
        if weights.get("num_bits") is not None:
            widths.add(weights.integer("num_bits"))
        if weights.get("block_structure") is not None:
            block = weights.numbers("block_structure")
            if len(block) != 2 or min(block) < 1:
                raise weights.wrong("block_structure", block, "two positive sizes")
            blocks.append(block)
        sizes.append(weights.integer("group_size", default=0, least=-1))
        symmetric.append(weights.get("symmetric") is True)
        for key, found in words_of.items():
            found.append(None if weights.get(key) is None else weights.text(key))
    group_sizes = set(sizes) if min(sizes, default=0) > 0 else set()
    types, strategies = ({word for word in some if word} if None not in some else set() for some in words_of.values())
    return _Scheme(widths, blocks, group_sizes, bool(symmetric) and all(symmetric), types, strategies)


def _matrix(files: Files, base: str, parts: tuple[str, ...], scheme: _Scheme) -> LazyMatrix:
    scale_name = f"{base}.weight_scale"
    if f"{base}.weight_packed" in files:
        packed = files[f"{base}.weight_packed"]
        scheme.check_type(f"{base}.weight_packed", "float" if packed.dtype == np.uint8 else "int", packed.dtype.name)
        if packed.dtype == np.uint8:
            return _floats_of_4_bits(files, base, parts).matrix()
        return _packed(files, base, parts, scheme).matrix()
    weight = part(files, f"{base}.weight", ("int8", *fp8.KINDS), (None, None))
    rows, columns = weight.shape
    scheme.check_type(f"{base}.weight", "int" if weight.dtype == np.int8 else "float", weight.dtype.name)
    if weight.dtype != np.int8:
        scale = floats(files, scale_name)
        if scale.ndim == 2 and scale.shape[0] == rows and scale.shape[1] > 1 and columns % scale.shape[1] == 0:
            return fp8.matrix(weight, scale, parts, [1, columns // scale.shape[1]])
        counts = {(-(-rows // block[0]), -(-columns // block[1])): block for block in scheme.blocks}
        block = counts.get(scale.shape, next(iter(scheme.blocks), None))
        fp8.check_scale(scale_name, scale, weight.shape, block)
        return fp8.matrix(weight, scale, parts, block)
    scale = _per_row(floats(files, scale_name), scale_name, rows)
    zeros = None
    if (name := f"{base}.weight_zero_point") in files:
        points = _per_row(part(files, name, ("int8",)), name, rows)
        if points.shape[1] not in (1, scale.shape[1]):
            raise InputError(
                f"{name} has {points.shape[1]} numbers per row, but {scale_name} has {scale.shape[1]}",
                "a row needs one zero point, or one for each of its scales", "download the checkpoint again",
            )  # fmt: skip
        zeros = np.broadcast_to(points, scale.shape).astype(np.int16) + np.int16(128)
    scheme.check(f"{base}.weight", columns, scale.shape[1], zeros, 128)

    largest = 1 << (max(scheme.widths, default=8) - 1)

    def codes() -> NDArray[np.uint8]:
        if largest < 128:
            low, high = int(weight.min(initial=0)), int(weight.max(initial=0))
            if low < -largest or high >= largest:
                found = f"numbers from {low} to {high}"
                raise contradiction(f"{base}.weight", found, f"num_bits = {max(scheme.widths)}")
        return weight.view(np.uint8) ^ np.uint8(128)

    return Codes((rows, columns), 8, scale.shape[1], parts, codes, lambda: scale, zeros).matrix()


def _per_row(tensor: Array, name: str, rows: int) -> Array:
    """Return numbers that are stored per matrix, per row, or per row and group as an array [rows, groups]."""
    if tensor.size == 1:
        return np.broadcast_to(tensor.reshape(1, 1), (rows, 1))
    if len(tensor) != rows or tensor.ndim > 2:
        raise InputError(
            f"{name} has shape {list(tensor.shape)}, expected [{rows}, groups]",
            "scales are stored per matrix, per row, or per row and group",
            "check that quantization_config and the weights belong to the same checkpoint",
        )
    return tensor.reshape(rows, -1)


def _packed(files: Files, base: str, parts: tuple[str, ...], scheme: _Scheme) -> Codes:
    """Read words that store integers plus 2 ** (bits - 1), lowest bits first; zero points are packed along the rows."""
    names = {end: f"{base}.weight_{end}" for end in ("packed", "shape", "scale", "zero_point", "g_idx")}
    sizes = part(files, names["shape"], ("int32", "int64"), (2,)).tolist()
    rows, columns = int(sizes[0]), int(sizes[1])
    weight = words(files, names["packed"], (rows, None))
    bits = bits_of(names["packed"], weight.shape[1] * 32, columns)
    if scheme.widths and bits not in scheme.widths:
        raise InputError(
            f"{names['packed']} contains {bits}-bit numbers, but quantization_config sets the widths "
            f"{sorted(scheme.widths)}",
            "config_groups must list the bit widths of all matrices",
            "check that config.json and the weights belong to the same checkpoint",
        )
    scale = _per_row(floats(files, names["scale"]), names["scale"], rows)
    groups, order, zeros = scale.shape[1], None, None
    if names["g_idx"] in files and (part(files, names["g_idx"], ("int32", "int64"), (columns,)) >= 0).all():
        order, _ = group_order(names["g_idx"], files[names["g_idx"]], groups)
    if names["zero_point"] in files:
        stored = words(files, names["zero_point"], (-(-rows * bits // 32), groups))
        zeros = unpack_bits(np.ascontiguousarray(stored.T).view(np.uint8), bits, rows).T
    scheme.check(names["packed"], columns, groups, zeros, 1 << (bits - 1))

    def codes() -> NDArray[np.uint8]:
        found = np.ascontiguousarray(weight).view(np.uint8)
        return found if order is None else rows_of_bits(unpack_bits(found, bits, columns)[:, order], bits)

    return Codes((rows, columns), bits, groups, parts, codes, lambda: scale, zeros, order=order)


def _floats_of_4_bits(files: Files, base: str, parts: tuple[str, ...]) -> Codes:
    """Read NVFP4 (an 8-bit scale per 16 numbers, divided by one float) or MXFP4 (a power of two per 32 numbers)."""
    weight = part(files, f"{base}.weight_packed", ("uint8",), (None, None))
    rows, columns = len(weight), 2 * weight.shape[1]
    name = f"{base}.weight_scale"
    read: Callable[[], Array]
    if files[name].dtype == np.uint8:
        stored = part(files, name, ("uint8",), (rows, columns // 32))
        read = power_scales(name, stored)
    else:
        stored = part(files, name, ("float8_e4m3fn",), (rows, columns // 16))
        whole = floats(files, whole_name := f"{base}.weight_global_scale").reshape(-1).astype(np.float32)
        if whole.size != 1:
            raise InputError(
                f"{whole_name} has {whole.size} numbers",
                "a matrix has exactly one global scale",
                "download the checkpoint again",
            )

        def read() -> Array:
            found: Array = stored.astype(np.float32) / whole[0]
            return found

    return Codes((rows, columns), 4, stored.shape[1], parts, lambda: weight, read, grid="mxfp4")
