"""What an adapter's files hold, whatever their format: pairs of factors by the name of the module that they change."""

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
# Nobody trains larger ones; a step's memory grows with the ranks of its adapters.
MOST_RANK = 1024
_GIVE_ONE = f"give a folder as PEFT writes it, an {SUFFIX} file, or a GGUF file of an adapter"


@dataclass(frozen=True)
class Pair:
    """x @ a.T @ b.T * scale, which is added to a projection.

    Attributes:
        a: [rank, inputs]. b: [outputs, rank]. Of any float type. scale: alpha / rank, or what training scaled by.
    """

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float = 1.0


@dataclass(frozen=True)
class AdapterParameters:
    """An adapter as its files say it.

    Attributes:
        source: the folder or file.
        pairs: by the name of a module, as the files write it.
        values: other arrays, by the name of the graph's input whose default they replace.
        base: what the files say of the model that it was trained on; "" = nothing.
        base_hash: the identity of that model, if the files say it; see `base_identity`.
        kind: "peft", "onnx_adapter" or "gguf".
        fan_in_fan_out: whether the base stores its weights as [inputs, outputs], as GPT-2 does: for merging.
        permuted: rows of queries and keys are in the order of ggml; see `gguf`.
    """

    source: Path
    pairs: Mapping[str, Pair]
    kind: str
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    base: str = ""
    base_hash: str = ""
    fan_in_fan_out: bool = False
    permuted: bool = False

    @cached_property
    def content_hash(self) -> bytes:
        """SHA-256 of all numbers and the names that they belong to: what is added depends on nothing else."""
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
        """The ranks that occur, in order."""
        return sorted({len(pair.a) for pair in self.pairs.values()})

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers as the files hold them."""
        pairs = sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())
        return pairs + sum(array.nbytes for array in self.values.values())


def adapter_path(source: str | Path) -> Path:
    """Where an adapter is. Raises ModelFolderError, InputError: there is none."""
    try:
        path = Path(source)
        if path.is_dir():
            return path
        exists = path.exists()
    except (TypeError, ValueError, OSError) as error:
        raise InputError(f"an adapter's path is {source!r:.80}", str(error)[:200], _GIVE_ONE) from error
    if not exists or not (path.suffix == SUFFIX or is_gguf(path)):
        why = f"it is a file whose name does not end in {SUFFIX}" if exists else "there is no such folder or file"
        raise ModelFolderError(f"{path}: not an adapter", why, _GIVE_ONE)
    return path


def paired(source: Path, module: str, a: NDArray[Any], b: NDArray[Any], scale: float = 1.0) -> Pair:
    """Factors of a module as its files hold them, checked against each other. Raises InputError: they do not agree."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise InputError(
            f"{source}: {module!r} has A {list(a.shape)} and B {list(b.shape)}",
            "A is [rank, inputs] and B [outputs, rank], of one rank",
            "save the adapter again",
        )
    for array in (a, b):
        if not is_float(array):
            raise InputError(
                f"{source}: a factor of {module!r} is {array.dtype}",
                "the factors of adapters are multiplied as floats here; whole numbers are quantised ones",
                "save the adapter again in float16, bfloat16 or float32",
            )
    return Pair(a, b, scale)


def scaled(pair: Pair, weight: float = 1.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A and B as float32, all scales in B; what float32 cannot hold is infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return pair.a.astype(np.float32), pair.b.astype(np.float32) * np.float32(pair.scale * weight)


def is_float(array: NDArray[Any]) -> bool:
    """Whether an array holds floats, of NumPy's types or of ml_dtypes'."""
    return array.dtype.kind == "f" or "float" in array.dtype.name


def narrowed(array: NDArray[np.float32], dtype: Any, source: Path, module: str) -> NDArray[Any]:
    """A factor in the type that it is to be written in. Raises InputError: a number has no place in it."""
    with np.errstate(over="ignore"):
        result: NDArray[Any] = np.ascontiguousarray(array.astype(dtype))
    if not np.isfinite(result).all():
        raise InputError(
            f"{source}: a factor of {module!r} has numbers up to {np.abs(array).max():.3g}",
            f"the largest {np.dtype(dtype)} is {np.finfo(dtype).max:.3g}",
            "write float32; or train the adapter again if it holds NaN or infinite numbers",
        )
    return result


def read_onnx_adapter(path: Path) -> AdapterParameters:
    """An adapter file of onnxruntime: factors as graphs have them, [inputs, rank] and [rank, outputs], scaled."""
    arrays, halves = read_adapter_file(path).arrays, {}
    values: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        if ".quant." in name:
            raise InputError(
                f"{path}: {name!r} is quantised",
                "the factors of adapters are multiplied as floats here",
                "convert the adapter again without quantising it",
            )
        module, factor = split_factor(name)
        if factor and array.ndim == 2:
            if (module, factor) in halves:
                raise InputError(
                    f"{path}: {module!r} has two factors {factor}", "a projection has one pair", "export it again"
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
        raise InputError(f"{path}: {lonely[0]!r} has one factor", "A and B come in pairs", "export the adapter again")
    return AdapterParameters(path, pairs, "onnx_adapter", values)


def write_onnx_adapter(adapter: AdapterParameters, path: Path, dtype: Any, *, names: Mapping[str, str]) -> None:
    """Write an adapter file.

    Args:
        dtype: of the factors that it will hold. names: per module what the graph's inputs are called before ".lora_A".

    Raises:
        InputError: numbers that the type cannot hold; something is there already; the system refuses to write.
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
    """The error that something is where an adapter is to be written."""
    return InputError(f"{path} exists already", "an adapter is never overwritten", "remove it, or choose another place")


def input_names(adapter: AdapterParameters, known_names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Per module of an adapter what graphs of onnxruntime-genai's builder call its inputs, before ".lora_A".

    Args:
        known_names: the names of the factors A (and B) that a graph has; without them, the builder's own way.
    """
    known = {module_of(split_factor(name)[0]): split_factor(name)[0] for name in known_names or ()}
    return {module: known.get(module_of(module), module.replace(".self_attn.", ".attn.")) for module in adapter.pairs}


def checkpoint_name(module: str) -> str:
    """What checkpoints call a module that graphs of onnxruntime-genai's builder call "model.layers.0.attn.q_proj"."""
    return re.sub(r"^(model\.layers\.\d+\.)attn\.", r"\1self_attn.", module)


def split_factor(name: str) -> tuple[str, str]:
    """A parameter's module and which factor it is, "A" or "B"; "" where it is neither."""
    for factor in "AB":
        before, separator, _ = name.partition(f".lora_{factor}.")
        if separator:
            return before, factor
        if name.endswith(f".lora_{factor}"):
            return name[: -len(f".lora_{factor}")], factor
    return name, ""
