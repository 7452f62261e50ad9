"""bitsandbytes: 4-bit codes (NF4, FP4) with scales that may also be quantised, and LLM.int8's integers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.quant.formats import GRIDS

from ...errors import InputError
from ..hf_config import HFConfig
from .matrices import FLOAT32, Array, Codes, Files, LazyMatrix, Matrices, bases, contradiction, floats, part

_STATE = ".quant_state.bitsandbytes__"
_MOST_JSON = 1 << 16
# LLM.int8's integers are in [-127, 127], and its scale is the largest absolute value.
_INT8_RANGE = np.float32(127)
_GRID_TOLERANCE = 1e-6


def read(files: Files, settings: HFConfig) -> Matrices:
    """Read weight [pairs, 1] with weight.absmax and weight.quant_state, or int8 weight [outputs, inputs] with SCB."""
    widths = {bits for bits in (4, 8) if settings.flag(f"load_in_{bits}bit")}
    quant_type = None if settings.get("bnb_4bit_quant_type") is None else settings.text("bnb_4bit_quant_type")
    nested = settings.get("bnb_4bit_use_double_quant")
    for name in list(files):
        if _STATE in name:
            base = name.partition(_STATE)[0]
            _check_width(base, 4, widths)
            _check_state(_state(files, name), name, quant_type, nested)
            yield base, _four_bits(files, base, name)
    for base in bases(files, ".SCB"):
        _check_width(f"{base}.weight", 8, widths)
        yield f"{base}.weight", _int8(files, base)
    for base in bases(files, ".weight"):  # integers without scales: the error names the missing tensor
        kind = files[f"{base}.weight"].dtype
        if kind == np.int8:
            floats(files, f"{base}.SCB")
        elif kind == np.uint8 and not any(name.startswith(f"{base}.weight{_STATE}") for name in files):
            part(files, f"{base}.weight{_STATE}nf4", ("uint8",))


def _check_width(name: str, bits: int, widths: set[int]) -> None:
    if widths and bits not in widths:
        set_ = " and ".join(f"load_in_{width}bit = True" for width in sorted(widths))
        raise contradiction(name, f"{bits}-bit numbers", set_)


def _check_state(state: HFConfig, name: str, kind: str | None, nested: Any) -> None:
    """Raise InputError if the state of a 4-bit matrix differs from the settings, or from the name of its tensor."""
    stored, suffix = state.text("quant_type"), name.partition(_STATE)[2]
    if stored != suffix:
        raise InputError(
            f"{name} contains quant_type {stored!r}",
            "the name of the tensor ends with the type",
            "download the checkpoint again",
        )
    if kind is not None and stored != kind:
        raise contradiction(name, f"quant_type {stored!r}", f"bnb_4bit_quant_type = {kind!r}")
    is_nested = state.get("nested_blocksize") is not None
    if isinstance(nested, bool) and nested != is_nested:
        found = "scales that are quantised" if is_nested else "scales that are not quantised"
        raise contradiction(name, found, f"bnb_4bit_use_double_quant = {nested}")


def _int8(files: Files, base: str) -> LazyMatrix:
    names = (f"{base}.weight", f"{base}.SCB")
    weight = part(files, names[0], ("int8",), (None, None))
    largest = floats(files, names[1], (len(weight),))
    extra = tuple(name for name in (f"{base}.weight_format",) if name in files)
    shape = len(weight), weight.shape[1]

    def packed() -> NDArray[np.uint8]:
        return weight.view(np.uint8) ^ np.uint8(128)

    def scales() -> Array:
        return (largest.astype(np.float32) / _INT8_RANGE)[:, None]

    return Codes(shape, 8, 1, (*names, *extra), packed, scales).matrix()


def _four_bits(files: Files, base: str, state_name: str) -> LazyMatrix:
    state = _state(files, state_name)
    rows, columns = state.numbers("shape") if len(state.numbers("shape")) == 2 else (0, 0)
    block, kind = state.integer("blocksize"), state.text("quant_type")
    if kind not in ("nf4", "fp4") or min(rows, columns) < 1:
        raise state.wrong("(quant_type, shape)", (kind, state.get("shape")), "nf4 or fp4, and the shape of a matrix")
    count = -(-rows * columns // block)
    weight = part(files, base, ("uint8",))
    if weight.size != -(-rows * columns // 2):
        raise InputError(
            f"{base} has {weight.size} bytes, but its shape in quant_state is {rows} x {columns}",
            "one byte contains two 4-bit numbers",
            "download the checkpoint again",
        )
    table = floats(files, f"{base}.quant_map", (16,)).astype(np.float32)
    absmax, parts = _absmax(files, base, state, count)
    parts = (base, state_name, f"{base}.quant_map", *parts)
    codes = weight.reshape(-1)

    def packed() -> NDArray[np.uint8]:  # the first number of each pair is in the high bits
        return (codes >> np.uint8(4) | codes << np.uint8(4)).reshape(rows, -1)

    if columns % block or not np.allclose(table, GRIDS[kind], rtol=0, atol=_GRID_TOLERANCE):
        why = f"blocks of {block} in rows of {columns}" if columns % block else "a custom code table"

        def values() -> Array:
            both = np.stack([codes >> np.uint8(4), codes & np.uint8(15)], -1).reshape(-1)[: rows * columns]
            return (table[both] * np.repeat(absmax(), block)[: rows * columns]).reshape(rows, columns)

        return LazyMatrix((rows, columns), parts, FLOAT32, values, why=why)
    groups = columns // block
    return Codes((rows, columns), 4, groups, parts, packed, lambda: absmax().reshape(rows, groups), grid=kind).matrix()


def _absmax(
    files: Files, base: str, state: HFConfig, count: int
) -> tuple[Callable[[], NDArray[np.float32]], tuple[str, ...]]:
    """Return a function that reads the scales of all blocks, and the names of the tensors that the function reads."""
    name = f"{base}.absmax"
    if state.get("nested_blocksize") is None:
        plain = floats(files, name, (count,))
        return lambda: plain.astype(np.float32), (name,)
    names = (name, f"{base}.nested_absmax", f"{base}.nested_quant_map")
    block, offset = state.integer("nested_blocksize"), np.float32(state.number("nested_offset"))
    codes = part(files, names[0], ("uint8",), (count,))
    outer = floats(files, names[1], (-(-count // block),))
    table = floats(files, names[2], (256,)).astype(np.float32)

    def read() -> NDArray[np.float32]:
        found: NDArray[np.float32] = table[codes] * np.repeat(outer.astype(np.float32), block)[:count] + offset
        return found

    return read, names


def _state(files: Files, name: str) -> HFConfig:
    """Read the JSON object in a tensor of bytes."""
    raw = part(files, name, ("uint8",), (None,))
    try:
        values: Any = json.loads(raw.tobytes().decode("utf-8")) if raw.size <= _MOST_JSON else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InputError(
            f"{name} is not a JSON object",
            "this tensor must contain the quantisation settings as JSON",
            "download the checkpoint again",
        )
    return HFConfig(values, part=name)
