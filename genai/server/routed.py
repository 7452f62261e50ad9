"""The models of a router: their files, their options, and the memory that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..embed.embedder import Embedder
from ..embed.folder import find_graph, has_graph, read_encoder_folder
from ..embed.reranker import Reranker
from ..errors import ModelFolderError, OptionError
from ..llm.llm import LLM
from ..lora.parameters import adapter_path
from ..models.config import Config
from ..models.decoder_graph import read_decoder
from ..models.encoder import STEP_TOKENS
from ..models.loading import open_chosen, refused_by
from ..models.memory_plan import MemoryPlan, check_limit, loaded_weight_bytes, plan_memory
from ..onnx.reader import read_model

Kind: TypeAlias = Literal["completion", "embedding", "rerank"]
"""The kind of a model: it generates text, computes embeddings, or scores documents."""

DEFAULT_CONTEXT = 8192
"""The maximum default of the context size, in tokens. A single model would use half of the free memory."""

# An estimate of an encoder's activations: rows of the hidden size per token, with four for the feed-forward layer.
_ROWS, _HIDDEN = 12, 1024


@dataclass(frozen=True)
class RoutedModel:
    """A model that a router loads when a request needs it.

    Attributes:
        name: the name in requests.
        folder: the model's folder.
        kind: the kind of the model.
        adapters: the adapters by name: path and scale. Requests select one by `NAME`, or by `MODEL+NAME`.
        is_pinned: True to load the model at the start, and never unload it.
        keep: seconds after the last request until the model is unloaded; None = until another needs the memory.
        context_size: maximum number of tokens per sequence; None = the model's limit, and at most DEFAULT_CONTEXT.
        cache_bytes: size of the KV cache; None = the size for one sequence of `context_size` tokens.
        max_sequences: maximum number of sequences that are generated concurrently.
        options: further arguments of genai.LLM, or of genai.Embedder and genai.Reranker: threads, accuracy, device.

    Raises:
        ModelFolderError, ConfigError: the model's configuration cannot be read, or an adapter does not exist.
        OptionError: an option is out of range, or does not apply to encoders.
    """

    name: str
    folder: Path
    kind: Kind = "completion"
    adapters: Mapping[str, tuple[Path, float]] = field(default_factory=dict)
    is_pinned: bool = False
    keep: float | None = None
    context_size: int | None = None
    cache_bytes: int | None = None
    max_sequences: int = 32
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or "+" in self.name:
            raise OptionError(
                f"name = {self.name!r:.80}", "a plus sign separates a model and an adapter in requests",
                "choose a name without a plus sign",
            )  # fmt: skip
        if self.keep is not None and not 0 < self.keep < 1e9:
            raise OptionError(f"keep = {self.keep!r:.40}", "a time above 0 is expected", "leave keep out")
        if self.kind != "completion" and (self.adapters or self.context_size or self.cache_bytes):
            raise OptionError(
                f"the model {self.name} has an adapter, a context size or a cache", "it is an encoder, which has none",
                "remove the option",
            )  # fmt: skip
        for name in ("context_size", "cache_bytes", "max_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} = {value}", "at least 1 is expected", f"leave {name} out")
        if self.kind == "completion" and self.context_size is not None and self.folder.is_dir():
            limit = Config(self.folder).model.context_length
            if self.context_size > limit:
                raise OptionError(
                    f"context_size = {self.context_size}", f"the context length of the model is {limit} tokens",
                    f"use at most {limit}, or leave context_size out",
                )  # fmt: skip
        for path, _ in self.adapters.values():
            adapter_path(path)
        _ = self.limit

    @cached_property
    def limit(self) -> int:
        """The maximum number of tokens in a sequence, or in a text of an encoder."""
        if self.kind != "completion":
            return read_encoder_folder(self.folder).max_length
        return self.context_size or min(Config(self.folder).model.context_length, DEFAULT_CONTEXT)

    def measure(self) -> int:
        """Return the bytes that the model needs when it is loaded.

        Raises:
            GenaiError: the files cannot be read.
        """
        if not self.folder.is_dir():
            raise ModelFolderError(f"{self.folder}: there is no such folder", "it was removed", "restore the folder")
        if self.kind != "completion":
            return self._encoder_bytes()
        plan = self._plan()
        return plan.fixed + (self.cache_bytes or plan.cache(self.limit))

    def _plan(self) -> MemoryPlan:
        config = Config(self.folder)
        accuracy, kv_dtype = self.options.get("accuracy", "auto"), self.options.get("kv_dtype", "auto")
        executor = open_chosen(config.choose_device(self.options.get("device")), self.options.get("threads"))
        with refused_by(executor):
            device = "" if executor.free_bytes() is None else executor.device
        source = read_decoder(config, kv_dtype=kv_dtype, accuracy=accuracy)
        plan = plan_memory(source, config, device=device, tokens=executor.step_sizes.fast)
        check_limit(plan, self.limit)
        return plan

    def _encoder_bytes(self) -> int:
        config = read_encoder_folder(self.folder).config
        hidden = config.get("hidden_size")
        activations = STEP_TOKENS * _ROWS * 4 * (hidden if isinstance(hidden, int) else _HIDDEN)
        if has_graph(self.folder):
            return loaded_weight_bytes(read_model(find_graph(self.folder)).graph) + activations
        return 2 * sum(path.stat().st_size for path in self.folder.glob("*.safetensors")) + activations  # built as fp32

    def load(self) -> LLM | Embedder | Reranker:
        """Load the model. The caller closes it.

        Raises:
            GenaiError: the model or an adapter cannot be loaded.
        """
        if self.kind != "completion":
            return (Embedder if self.kind == "embedding" else Reranker)(self.folder, **self.options)
        llm = LLM(
            self.folder,
            max_sequences=self.max_sequences,
            context_size=self.limit,
            cache_bytes=self.cache_bytes or self._plan().cache(self.limit),
            lora=bool(self.adapters),
            quiet=True,
            **self.options,
        )
        try:
            for name, (path, scale) in self.adapters.items():
                llm.load_adapter(path, name, scale)
        except BaseException:
            llm.close()
            raise
        return llm
