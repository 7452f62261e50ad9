"""MLX folders: codes of 2 to 8 bits packed along the inputs, with a scale and a minimum ("bias") per group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UnsupportedModelError
from ..hf_config import HFConfig
from .matrices import Array, Codes, Files, Matrices, bases, bits_of, contradiction, floats, part, words
from .mxfp4 import power_scales

_MODES = ("affine", "mxfp4")
# The experts of a layer share one tensor; these are the names of the matrices of single experts.
_TOGETHER = ".switch_mlp."
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def read(files: Files, settings: HFConfig) -> Matrices:
    """Read weight uint32 [outputs, inputs * bits / 32], scales and biases [outputs, groups]; experts are axis 0."""
    group, mode = settings.integer("group_size"), settings.text("mode", default="affine")
    bits = settings.integer("bits")
    _check_mode("quantization.mode", mode)
    for base in bases(files, ".scales"):
        own = settings.get(base)
        if own is not None and not isinstance(own, dict):
            raise settings.wrong(base, own, "an object with bits and group_size")
        layer = HFConfig(own or {}, part=base)
        own_mode = layer.text("mode", default=mode)
        _check_mode(f"quantization.{base}.mode", own_mode)
        sizes = layer.integer("group_size", default=group), layer.integer("bits", default=bits)
        yield from _matrices(files, base, *sizes, own_mode)


def _check_mode(key: str, mode: str) -> None:
    if mode not in _MODES:
        raise UnsupportedModelError(
            f"{key} is {mode!r}", f"the supported MLX modes are {' and '.join(_MODES)}",
            "use a checkpoint of the same model in one of these modes, or the float checkpoint",
        )  # fmt: skip


def _matrices(files: Files, base: str, group: int, wanted: int, mode: str) -> Matrices:
    ends = ("weight", "scales") if mode == "mxfp4" else ("weight", "scales", "biases")
    names = tuple(f"{base}.{end}" for end in ends)
    scales = files[names[1]]
    if scales.ndim not in (2, 3):
        raise InputError(
            f"{names[1]} has shape {list(scales.shape)}",
            "scales must have two dimensions, or three for experts",
            "download the checkpoint again",
        )
    weight = words(files, names[0], (*scales.shape[:-1], None))
    columns = scales.shape[-1] * group
    bits = bits_of(names[0], weight.shape[-1] * 32, columns)
    if bits != wanted:
        raise InputError(
            f"{names[0]} contains {bits}-bit numbers in groups of {group}, but the settings are {wanted} bits",
            "the shapes of the weights and the scales must agree with group_size and bits",
            "check that config.json and the weights belong to the same checkpoint",
        )
    if mode == "mxfp4" and (bits, group) != (4, 32):
        raise contradiction(
            names[0], f"{bits}-bit numbers in groups of {group}", "mode = 'mxfp4', which has 4 bits and groups of 32"
        )
    if mode == "mxfp4":
        beside = [part(files, names[1], ("uint8",))]
    else:
        beside = [floats(files, name, scales.shape) for name in names[1:]]
    if scales.ndim == 2:
        yield f"{base}.weight", _codes(names, weight, beside, columns, bits).matrix()
        return
    for expert in range(len(weight)):
        one = [tensor[expert] for tensor in beside]
        yield _expert_name(base, expert), _codes(names, weight[expert], one, columns, bits).matrix()


def _codes(names: tuple[str, ...], weight: NDArray[np.uint32], beside: list[Array], columns: int, bits: int) -> Codes:
    shape, groups = (len(weight), columns), beside[0].shape[-1]

    def packed() -> NDArray[np.uint8]:
        return np.ascontiguousarray(weight).view(np.uint8)

    if len(beside) == 1:
        return Codes(shape, bits, groups, names, packed, power_scales(names[1], beside[0]), grid="mxfp4")
    return Codes(shape, bits, groups, names, packed, lambda: beside[0], least=lambda: beside[1])


def _expert_name(base: str, expert: int) -> str:
    before, together, matrix = base.partition(_TOGETHER)
    if not together:
        return f"{base}.{expert}"
    matrix = _MIXTRAL[matrix] if before.endswith("block_sparse_moe") else matrix
    return f"{before}.experts.{expert}.{matrix}.weight"
