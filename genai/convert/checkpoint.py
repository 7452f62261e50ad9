"""A Hugging Face checkpoint folder: config.json, and safetensors files that are memory-mapped."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelFolderError, UnsupportedModelError
from ..lora.bind import check_mergeable, delta
from ..lora.gguf import in_our_order
from ..lora.parameters import AdapterParameters, checkpoint_name
from ..lora.peft import CONFIG as ADAPTER_CONFIG
from ..lora.selection import check_last_layers
from ..models.exported_config import variants_in
from ..models.folders import folder_json, not_a_checkpoint, readable
from ..text.backend import load_tokenizer
from ..text.sources.choosing import has_tokenizer
from ..weight_files.gguf import is_gguf
from ..weight_files.safetensors import SafetensorsFile
from ..weight_files.tensor_files import TensorFile, TensorFiles
from .architectures import find
from .architectures.common import Architecture
from .hf_config import HFConfig
from .nested import TextTensors, nested_type, text_part
from .options import Precision

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Pickles, which can run code when they are opened, and the formats of other tools.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def is_checkpoint(folder: Path) -> bool:
    """Return True if a path is a GGUF file or a Hugging Face checkpoint folder that is not also a model folder.

    A folder with config.json and graphs, but without safetensors, was written by an exporter, and is a model folder.
    """
    with readable(folder):
        if is_gguf(folder):
            return True
        if not (folder / CONFIG).is_file() or (folder / "genai_config.json").exists():
            return False
        return any(folder.glob("*.safetensors")) or not variants_in(folder)


class Checkpoint(TensorFiles[TensorFile]):
    """The tensors of a checkpoint, by their names in the files. Looking up a tensor memory-maps it without a copy.

    Attributes:
        source: the path as the caller passed it.
        folder: the folder with the tokenizer's files.
        config: config.json, or the text decoder's part of it, with the special tokens of generation_config.json and of
            the tokenizer.
        remarks: remarks to show to the user.
        precision: the default storage format for the weights.

    Raises:
        ModelFolderError: a file is missing.
        InputError: a file is malformed.
    """

    precision: Precision = "int4"

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.source = self.folder = Path(folder)
        self.remarks: list[str] = []
        config = _whole_config(self.folder)
        self.config, nested = text_part(config), nested_type(config)
        self._files: list[TensorFile] = [SafetensorsFile(path) for path in tensor_files(self.folder)]
        for file in self._files:
            self._add(file if nested is None else TextTensors(file), "download the checkpoint again")
        if nested is not None:
            self.remarks.append(f"only the text decoder of this {nested} model is used: pictures are not read")
            # Both parts of config.json have this flag, and transformers writes contradicting defaults.
            tied = not any(name.startswith("lm_head.") for name in self._file_of)
            self.config = self.config.with_values({**self.config.values, "tie_word_embeddings": tied})

    @property
    def architecture(self) -> Architecture:
        """The architecture and its tensor names; raises UnsupportedModelError if the architecture is unknown."""
        return find(self.config.model_type)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header alone."""
        shape: tuple[int, ...] = self._file_of[name].tensors[name][1]
        return shape

    def kind(self, name: str) -> np.dtype[Any]:
        """Return the dtype of the array that a look-up returns."""
        dtype: np.dtype[Any] = self._file_of[name].tensors[name][0]
        return dtype

    def nbytes(self, name: str) -> int:
        """Return the size in bytes of the array that a look-up returns."""
        return math.prod(self.shape(name)) * self.kind(name).itemsize

    def order(self, name: str) -> NDArray[np.int64] | None:
        """Return the column order of a stored matrix: its column i is the matrix's column order[i]. None: no change."""
        return None


class MergedCheckpoint(Checkpoint):
    """A checkpoint with an adapter merged into its weights; each weight is computed when it is looked up.

    Raises:
        InputError: the adapter changes a module that the checkpoint lacks or that has another size. Other errors: see
            Checkpoint.
    """

    def __init__(self, folder: str | Path, adapter: AdapterParameters, weight: float = 1.0) -> None:
        if is_gguf(Path(folder)):
            raise UnsupportedModelError(
                f"{folder}: an adapter cannot be merged into a GGUF file",
                "the merged weights would have to be quantised a second time",
                f"load the adapter with the model (--lora NAME={adapter.source}), or merge the adapter into the float "
                "checkpoint",
            )  # fmt: skip
        super().__init__(folder)
        spec = self.architecture.describe(self.config)
        adapter = in_our_order(adapter, spec.num_attention_heads, spec.num_key_value_heads)
        check_last_layers(adapter.source / ADAPTER_CONFIG, adapter.last_layers, adapter.pairs, spec.num_layers)
        self._adapter, self._weight = adapter, weight
        # An adapter for an ONNX graph uses the graph's module names.
        names = {module: module if f"{module}.weight" in self else checkpoint_name(module) for module in adapter.pairs}
        self._changed = {f"{name}.weight": module for module, name in names.items()}
        for name, module in self._changed.items():
            shape = self.shape(name) if name in self else None
            check_mergeable(adapter, module, shape, self)

    def __getitem__(self, name: str) -> NDArray[Any]:
        stored = super().__getitem__(name)
        module = self._changed.get(name)
        return stored if module is None else stored.astype("float32") + delta(self._adapter, module, self._weight)


def read_config(folder: Path) -> HFConfig:
    """Read config.json and generation_config.json. The tokenizer is read only when its special tokens are needed.

    If the checkpoint holds a text decoder and a reader of pictures, the result is the text decoder's part.

    Raises:
        ModelFolderError: config.json is missing.
        InputError: a file is malformed.
        ConfigError: the text decoder's part is not a JSON object.
    """
    return text_part(_whole_config(folder))


def _whole_config(folder: Path) -> HFConfig:
    more = read_json(folder, GENERATION_CONFIG) if (folder / GENERATION_CONFIG).is_file() else {}
    return HFConfig(read_json(folder, CONFIG), more, tokenizer_ends=cache(partial(_tokenizer_ends, folder)))


def _tokenizer_ends(folder: Path) -> tuple[int, ...]:
    """Return the id of the tokenizer's eos_token; empty if there is no tokenizer, or if it names no eos_token."""
    end = load_tokenizer(folder).id_of("eos_token") if has_tokenizer(folder) else None
    return () if end is None else (end,)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file. Raise ModelFolderError if the file is missing, InputError if it is malformed."""
    fix = f"use a folder downloaded from Hugging Face that contains {name} and *.safetensors"

    def absent(path: Path) -> ModelFolderError:
        if name == CONFIG and (path / "genai_config.json").is_file():
            return ModelFolderError(
                f"{path} is already built",
                "the folder contains genai_config.json, so it is a model folder, and not a checkpoint",
                f"use the folder as it is, such as `genai chat {quote(str(path))}`; to build the model again, pass its "
                "checkpoint",
            )
        return ModelFolderError(f"{path}: {name} is missing", "a checkpoint folder must contain this file", fix)

    return folder_json(folder, name, InputError, absent, not_a_checkpoint)


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raises ModelFolderError if there are none."""
    if (folder / SINGLE).is_file():  # if a folder has both, transformers also prefers the single file
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelFolderError(
            f"{folder}: the weights are in {pickles[0]}, which is a pickle file",
            "a pickle can run any code when it is opened, so pickles are not supported",
            "download the checkpoint in safetensors format, or convert it with a tool that you trust",
        )
    raise ModelFolderError(
        f"{folder}: there is neither {SINGLE} nor {INDEX}",
        "weights are read from safetensors files only",
        "download the complete checkpoint",
    )


def _shards(folder: Path) -> list[Path]:
    weight_map = read_json(folder, INDEX).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise InputError(
            f"{INDEX} has no weight_map", "weight_map lists the file of each tensor", "download the file again"
        )
    shards = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise InputError(
                f"{INDEX} contains the file name {name!r}",
                "shards must be in the same folder as the index",
                "download the index again",
            )
        shards.append(folder / name)
    if missing := [path.name for path in shards if not path.is_file()]:
        raise ModelFolderError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}",
            f"all shards in {INDEX} are required",
            "download the missing shards",
        )
    return shards
