"""A Hugging Face checkpoint folder: config.json, and safetensors files read through memory maps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelFolderError, UnsupportedModelError
from ..lora.bind import check_mergeable, delta
from ..lora.gguf import in_our_order
from ..lora.parameters import AdapterParameters, checkpoint_name
from ..models.folders import folder_json, not_a_checkpoint, readable
from ..weight_files.gguf import is_gguf
from ..weight_files.safetensors import SafetensorsFile
from ..weight_files.tensor_files import TensorFiles
from .architectures import find
from .architectures.common import Architecture
from .hf_config import HFConfig
from .options import Precision

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Formats that may run code when they are opened, or that other tools read.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def is_checkpoint(folder: Path) -> bool:
    """Whether a path is a GGUF file, or a folder that looks like a Hugging Face checkpoint and not like ours."""
    with readable(folder):
        if is_gguf(folder):
            return True
        return (folder / CONFIG).is_file() and not (folder / "genai_config.json").exists()


class Checkpoint(TensorFiles[SafetensorsFile]):
    """Tensors by their names in the files; each look-up maps memory and copies nothing.

    Attributes:
        source: what was given. folder: where the tokenizer's files lie.
        config: config.json, with generation_config.json's special tokens.
        remarks: what a user should be told. precision: in which weights are stored unless another is asked for.

    Raises:
        ModelFolderError: a file is missing. InputError: a file is malformed.
    """

    precision: Precision = "int4"

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.source = self.folder = Path(folder)
        self.remarks: list[str] = []
        has_more = (self.folder / GENERATION_CONFIG).is_file()
        generation = read_json(self.folder, GENERATION_CONFIG) if has_more else {}
        self.config = HFConfig(read_json(self.folder, CONFIG), generation)
        self._files = [SafetensorsFile(path) for path in _tensor_files(self.folder)]
        for file in self._files:
            self._add(file, "download the checkpoint again")

    @property
    def architecture(self) -> Architecture:
        """What it is, and where its tensors lie; UnsupportedModelError if it is not known."""
        return find(self.config.model_type)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header alone."""
        return self._file_of[name].tensors[name][1]

    def kind(self, name: str) -> np.dtype[Any]:
        """The type in which a look-up gives a tensor."""
        return self._file_of[name].tensors[name][0]

    def nbytes(self, name: str) -> int:
        """The bytes of what a look-up gives."""
        return math.prod(self.shape(name)) * self.kind(name).itemsize

    def order(self, name: str) -> NDArray[np.int64] | None:
        """Where columns of a matrix lie in another order: column i of what a look-up gives is its column order[i]."""
        return None


class MergedCheckpoint(Checkpoint):
    """A checkpoint to whose weights an adapter has been added; each is computed when it is looked up.

    Raises:
        InputError: also where the adapter changes a module that the checkpoint has not, or has in another size.
    """

    def __init__(self, folder: str | Path, adapter: AdapterParameters, weight: float = 1.0) -> None:
        if is_gguf(Path(folder)):
            raise UnsupportedModelError(
                f"{folder}: adapters are not merged into GGUF files", "its weights are quantised already",
                f"use it beside the model, with --lora NAME={adapter.source}; or merge it into the float checkpoint",
            )  # fmt: skip
        super().__init__(folder)
        spec = self.architecture.describe(self.config)
        adapter = in_our_order(adapter, spec.num_attention_heads, spec.num_key_value_heads)
        self._adapter, self._weight = adapter, weight
        # An adapter from a graph calls modules as the graph does.
        names = {module: module if f"{module}.weight" in self else checkpoint_name(module) for module in adapter.pairs}
        self._changed = {f"{name}.weight": module for module, name in names.items()}
        for name, module in self._changed.items():
            shape = self.shape(name) if name in self else None
            check_mergeable(adapter, module, shape, self)

    def __getitem__(self, name: str) -> NDArray[Any]:
        stored = super().__getitem__(name)
        module = self._changed.get(name)
        return stored if module is None else stored.astype("float32") + delta(self._adapter, module, self._weight)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object from a file; ModelFolderError if there is no such file, InputError if it is no JSON object."""
    fix = f"give a folder downloaded from Hugging Face, with {name} and *.safetensors"
    return folder_json(
        folder, name, InputError, lambda path: ModelFolderError(f"{path}: no {name}", "there is no such file", fix),
        not_a_checkpoint,
    )  # fmt: skip


def _tensor_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():  # first, as transformers does where a folder has both
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelFolderError(
            f"{folder}: the weights are in {pickles[0]}, which is a pickle",
            "opening a pickle runs whatever code it holds, so it is never opened here",
            "get the checkpoint as safetensors (most have both), or convert it with the tool you trust",
        )
    raise ModelFolderError(
        f"{folder}: no {SINGLE} and no {INDEX}",
        "the weights are read from safetensors files",
        "download the checkpoint whole",
    )


def _shards(folder: Path) -> list[Path]:
    weight_map = read_json(folder, INDEX).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise InputError(f"{INDEX} has no weight_map", "it says which file holds which tensor", "download it again")
    shards = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise InputError(
                f"{INDEX} names the file {name!r}", "shards lie beside the index, nowhere else", "download it again"
            )
        shards.append(folder / name)
    if missing := [path.name for path in shards if not path.is_file()]:
        raise ModelFolderError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}",
            f"{INDEX} names them",
            "finish the download",
        )
    return shards
