"""The content of an adapter's files in any format: pairs of factors, by the name of the module that they change."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelFolderError
from ..weight_files.gguf import is_gguf
from .names import module_of
from .onnx_adapter import AdapterFile, read_adapter_file, write_adapter_file

SUFFIX = ".onnx_adapter"
# Larger ranks are not used in practice, and a step's memory grows with the ranks of its adapters.
MOST_RANK = 1024
_GIVE_ONE = f"pass a folder of PEFT or mlx-lm, an {SUFFIX} file, or the GGUF file of an adapter"


@dataclass(frozen=True)
class Pair:
    """The factors of x @ a.T @ b.T * scale, a product that is added to a projection.

    Attributes:
        a: factor A [rank, inputs], any float type.
        b: factor B [outputs, rank], any float type.
        scale: alpha / rank, or the scale used in training.
    """

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float = 1.0


@dataclass(frozen=True)
class AdapterParameters:
    """The content of an adapter's files.

    Attributes:
        source: the folder or file.
        pairs: factors by module name, as written in the files.
        values: other arrays, by the name of the graph input with the default that they replace.
        base: name of the model that the adapter was trained on; "" = unknown.
        base_hash: identity of that model, if recorded; see `base_identity`.
        kind: "peft", "mlx", "onnx_adapter" or "gguf".
        fan_in_fan_out: True if the base stores weights as [inputs, outputs], as GPT-2 does; used for merging.
        permuted: True if rows of queries and keys are in ggml's order; see `gguf`.
        last_layers: the number of layers at the end of the base that the adapter may change; 0 = all layers.
    """

    source: Path
    pairs: Mapping[str, Pair]
    kind: str
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    base: str = ""
    base_hash: str = ""
    fan_in_fan_out: bool = False
    permuted: bool = False
    last_layers: int = 0

    @cached_property
    def content_hash(self) -> bytes:
        """SHA-256 of all numbers and their names, which determine the adapter's effect."""
        digest = hashlib.sha256()
        for name in sorted(self.pairs):
            pair = self.pairs[name]
            digest.update(f"{name}\n{pair.scale!r}\n".encode())
            for array in (pair.a, pair.b):
                digest.update(f"{array.dtype} {array.shape}\n".encode())
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        for name in sorted(self.values):
            array = self.values[name]
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.digest()

    @property
    def ranks(self) -> list[int]:
        """The distinct ranks, in ascending order."""
        return sorted({len(pair.a) for pair in self.pairs.values()})

    @property
    def nbytes(self) -> int:
        """The number of bytes in the arrays of the files."""
        pairs = sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())
        return pairs + sum(array.nbytes for array in self.values.values())


def adapter_path(source: str | Path) -> Path:
    """Return the path of an adapter. Raises ModelFolderError or InputError if there is no adapter."""
    try:
        path = Path(source)
        if path.is_dir():
            return path
        exists = path.exists()
    except (TypeError, ValueError, OSError) as error:
        raise InputError(f"the adapter's path is {source!r:.80}", str(error)[:200], _GIVE_ONE) from error
    if not exists or not (path.suffix == SUFFIX or is_gguf(path)):
        why = f"the file is neither an {SUFFIX} file nor a GGUF file" if exists else "there is no such folder or file"
        raise ModelFolderError(f"{path}: not an adapter", why, _GIVE_ONE)
    return path


def paired(source: Path, module: str, a: NDArray[Any], b: NDArray[Any], scale: float = 1.0) -> Pair:
    """Create a module's pair from the factors in a file. Raises InputError if their shapes or types are invalid."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise InputError(
            f"{source}: {module!r} has factors A {list(a.shape)} and B {list(b.shape)}",
            "A must be [rank, inputs] and B [outputs, rank], with the same rank",
            "save the adapter again",
        )
    for array in (a, b):
        if not is_float(array):
            raise InputError(
                f"{source}: a factor of {module!r} is {array.dtype}",
                "factors must be floats; quantised factors are not supported",
                "save the adapter again in float16, bfloat16 or float32",
            )
    return Pair(a, b, scale)


def scaled(pair: Pair, weight: float = 1.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return A and B as float32, with all scales in B. Values outside float32's range become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return pair.a.astype(np.float32), pair.b.astype(np.float32) * np.float32(pair.scale * weight)


def is_float(array: NDArray[Any]) -> bool:
    """Return True if an array holds floats, whether of a NumPy or an ml_dtypes type."""
    return array.dtype.kind == "f" or "float" in array.dtype.name


def narrowed(array: NDArray[np.float32], dtype: Any, source: Path, module: str) -> NDArray[Any]:
    """Convert a factor to the type to write. Raises InputError if a number is outside the type's range."""
    with np.errstate(over="ignore"):
        result: NDArray[Any] = np.ascontiguousarray(array.astype(dtype))
    if not np.isfinite(result).all():
        raise InputError(
            f"{source}: a factor of {module!r} has numbers up to {np.abs(array).max():.3g}",
            f"the largest {np.dtype(dtype)} is {np.finfo(dtype).max:.3g}",
            "write float32; if the factor contains NaN or infinite numbers, train the adapter again",
        )
    return result


def read_onnx_adapter(path: Path) -> AdapterParameters:
    """Read an adapter file of onnxruntime.

    The factors are those of the graph, with scales included: [inputs, rank] and [rank, outputs].
    """
    arrays, halves = read_adapter_file(path).arrays, {}
    values: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        if ".quant." in name:
            raise InputError(
                f"{path}: {name!r} is quantised",
                "factors must be floats",
                "convert the adapter again without quantisation",
            )
        module, factor = split_factor(name)
        if factor and array.ndim == 2:
            if (module, factor) in halves:
                raise InputError(
                    f"{path}: {module!r} has two factors {factor}",
                    "a projection has only one pair of factors",
                    "export the adapter again",
                )
            halves[module, factor] = array
        else:
            values[name] = array
    pairs = {
        module: paired(path, module, halves[module, "A"].T, halves[module, "B"].T)
        for module, factor in halves
        if factor == "A" and (module, "B") in halves
    }
    lonely = [module for module, factor in halves if module not in pairs]
    if lonely:
        raise InputError(
            f"{path}: {lonely[0]!r} has only one factor", "A and B come in pairs", "export the adapter again"
        )
    return AdapterParameters(path, pairs, "onnx_adapter", values)


def write_onnx_adapter(adapter: AdapterParameters, path: Path, dtype: Any, *, names: Mapping[str, str]) -> None:
    """Write an adapter file.

    Args:
        adapter: the adapter.
        path: the file, which must not exist.
        dtype: type of the factors in the file.
        names: for each module, the part of the graph's input names that precedes ".lora_A".

    Raises:
        InputError: a number is outside the type's range, the file exists, or writing fails.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for module, pair in adapter.pairs.items():
        base = names.get(module, module)
        a, b = scaled(pair)
        arrays[f"{base}.lora_A.MatMul.weight"] = narrowed(a.T, dtype, adapter.source, module)
        arrays[f"{base}.lora_B.MatMul.weight"] = narrowed(b.T, dtype, adapter.source, module)
    if path.exists():
        raise already_exists(path)
    write_adapter_file(path, AdapterFile({**arrays, **adapter.values}, adapter_version=1, model_version=1))


def already_exists(path: Path) -> InputError:
    """Return the error for an adapter's target path when a file or folder already exists there."""
    return InputError(
        f"{path} already exists",
        "adapters are never overwritten",
        "delete the existing adapter, or choose another path",
    )


def input_names(adapter: AdapterParameters, known_names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return, for each module, the part of its input names in onnxruntime-genai's graphs that precedes ".lora_A".

    Args:
        adapter: the adapter.
        known_names: names of the factors A (and B) in a graph; without them, the naming scheme of onnxruntime-genai's
            builder is used.
    """
    known = {module_of(split_factor(name)[0]): split_factor(name)[0] for name in known_names or ()}
    return {module: known.get(module_of(module), module.replace(".self_attn.", ".attn.")) for module in adapter.pairs}


def checkpoint_name(module: str) -> str:
    """Return a module's name in checkpoints, given either that name or the builder's "model.layers.0.attn.q_proj"."""
    return re.sub(r"^(model\.layers\.\d+\.)attn\.", r"\1self_attn.", module)


def split_factor(name: str) -> tuple[str, str]:
    """Return a parameter's module and its factor, "A" or "B"; the factor is "" if the name has neither suffix."""
    for factor in "AB":
        before, separator, _ = name.partition(f".lora_{factor}.")
        if separator:
            return before, factor
        if name.endswith(f".lora_{factor}"):
            return name[: -len(f".lora_{factor}")], factor
    return name, ""
