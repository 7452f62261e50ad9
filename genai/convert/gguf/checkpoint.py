"""A GGUF file as a checkpoint: a configuration, tensors by name, and a folder with the tokenizer's files."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ...weight_files.gguf import GgufModel
from ..architectures.common import Architecture
from ..checkpoint import Checkpoint
from .architectures import ROPE_TENSORS, TABLE, architecture_of, config_of, gguf_architecture_of, tensors_of
from .tokenizer import write_tokenizer

_ADAPTER = "adapter"


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file by their names in the file: floats, or blocks in the layout of `quant.ggml`.

    Attributes:
        source: the path of the file as the caller passed it.
        folder: a temporary folder with the tokenizer's files, deleted with this object.

    Raises:
        ModelFolderError: a file is missing.
        InputError: the file is malformed.
        UnsupportedModelError: the model is not supported.
    """

    precision = "kept"

    def __init__(self, path: str | Path) -> None:
        self.source = Path(path)
        self.model = model = GgufModel(self.source)
        if model.files[0].single("general.type", "model") == _ADAPTER:
            raise UnsupportedModelError(
                f"{path} is an adapter, not a model", "an adapter only contains changes to the weights of a model",
                f"load the adapter with the model that it was trained for: --lora NAME={path}",
            )  # fmt: skip
        gguf_architecture_of(model)
        self.folder = Path(tempfile.mkdtemp(prefix="genai-gguf-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        rows = model.info(TABLE).shape[0] if TABLE in model else 0
        tokens = write_tokenizer(model, rows, self.folder) if rows else {}
        self.config, unread = config_of(model, tokens)
        self._more = tensors_of(model)
        self.remarks = [f"{self.source.name} contains keys that are ignored: {', '.join(unread)}"] if unread else []

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.model)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._more[name] if name in self._more else self.model[name]

    def __contains__(self, name: object) -> bool:
        return name in self._more or (name in self.model and name not in ROPE_TENSORS)

    def __iter__(self) -> Iterator[str]:
        yield from self._more
        yield from (name for name in self.model if name not in ROPE_TENSORS)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._more[name].shape if name in self._more else self.model.info(name).shape

    def kind(self, name: str) -> np.dtype[Any]:
        return self[name].dtype

    def nbytes(self, name: str) -> int:
        return self[name].nbytes
