"""A model folder, loaded: configuration, tokenizer files and a decoder ready to compute."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from genai.common.forks import renew_locks

from ..common.paths import expanded
from ..common.single import Single
from ..devices import instructions
from ..engine.decoder import Decoder
from ..engine.sampling.batch import BatchSampler
from ..engine.state_file import Identity
from ..errors import OptionError, StateError
from ..lora.inputs import check_values
from ..lora.parameters import AdapterParameters
from ..lora.targets import LoraTargets
from .config import Config
from .decoder_graph import DecoderInfo
from .folders import folder_errors
from .identity import model_identity
from .kv_quality import MEASURED, check_kv_quality
from .loading import add_lora_targets, keep_prefixes, load_as_exported, load_decoder
from .model_options import check_model_options

DEFAULT_PREFIX_BYTES = 4 * 2**30


class Model(Single, AbstractContextManager["Model"]):
    """A generative model.

    One Model may serve many Generators from several threads; they share its weights and its block pool.

    Args:
        source: the model folder, or a Config.
        threads: CPU threads for its kernels; None = the physical cores this process may use.
        kv_dtype: type of cached keys and values: "fp16", "fp32", or "auto": fp16 where products take int8 activations,
            else fp32. "int8" takes half the memory of fp16. "int4" takes a little more than a quarter; it is refused
            unless `genai eval kld` has measured that it costs this model little (see docs/kv_cache.md). On GPUs also
            "bf16", and "fp8" (E4M3: numbers beyond 448 become 448), which takes half the memory of fp16.
        accuracy: "auto" obeys each node's accuracy_level: 4 rounds activations of products with quantised weights to
            int8, everything else, also where it is unset, keeps them in fp32. "int8" rounds in all of them, which is
            faster; "fp32" in none, and keys and values are fp32.
        cache_bytes: most bytes for the KV cache; None = half of the memory that weights and activations leave free now.
        context_size: most tokens per sequence; None = what fits in that cache, at most the model's context_length.
        kv_dtype_force: take "int4" whatever it costs.
        device: None = what the model's genai_config.json asks for in `provider_options`, where it works, else the CPU;
            "cpu"; "cuda" or "cuda:1": an NVIDIA GPU (see docs/cuda.md); "auto": a GPU where one can be used, else
            the CPU; or "reference": the forward pass in plain NumPy, slow and in full precision,
            to compare with; as with accuracy "fp32" nothing is rounded, and how many threads its products use is
            NumPy's affair.
        lora: give its program places for adapters at once; otherwise the first adapter that is loaded does, between
            two steps, which takes a moment.
        quiet: log only warnings while loading: neither that kernels are compiled, nor that the graph cannot be batched
            (`info.reason` says that too), nor why the CPU computes where a GPU might (`device_type` says that it does).
            Progress is not reported.

    Raises:
        ModelFolderError, ConfigError, GraphError, UnsupportedModelError: the model cannot be loaded; see the message.
        OptionError: an argument out of range; a kv_dtype that the device has no kernels for.
        DeviceError: the device asked for cannot be used here.
        CacheCapacityError: weights and context need more memory than there is.
    """

    _config_class = Config

    def __init__(
        self,
        source: str | Path | Config,
        *,
        threads: int | None = None,
        kv_dtype: str = "auto",
        accuracy: str = "auto",
        cache_bytes: int | None = None,
        context_size: int | None = None,
        quiet: bool = False,
        device: str | None = None,
        lora: bool = False,
        kv_dtype_force: bool = False,
    ) -> None:
        if device is None and isinstance(source, Config):
            device = source.device or None
        options: dict[str, Any] = {"kv_dtype": kv_dtype, "accuracy": accuracy, "device": device, "lora": lora}
        options |= {"threads": threads, "cache_bytes": cache_bytes, "context_size": context_size}
        check_model_options(**options, kv_dtype_force=kv_dtype_force)
        options = {
            name: int(value) if isinstance(value, Integral) and name != "lora" else value
            for name, value in options.items()
        }
        self.config = source if isinstance(source, Config) else self._config_class(source)
        self.folder, self.accuracy = self.config.folder, accuracy
        self._sampler: BatchSampler | None = None
        self._decoder: Decoder | None
        with folder_errors(self.folder):
            if kv_dtype == MEASURED and not kv_dtype_force:
                check_kv_quality(self.config)
            options["device"] = self.config.choose_device(device)
            self._decoder, self.info, self._lora_targets = load_decoder(self.config, quiet=quiet, **options)
        self._as_exported = cast("Decoder | None", None)
        self._identity: Identity | None = None
        self._lora_targets_lock = threading.Lock()
        renew_locks(self, "_lora_targets_lock")

    info: DecoderInfo
    """What was found in the graph: layers, parameters, bytes, how it runs."""

    @property
    def type(self) -> str:
        """The model type of genai_config.json, such as "llama"."""
        return self.config.model.type

    @property
    def device_type(self) -> str:
        """Where it runs: "CPU" or "CUDA"."""
        return "CUDA" if self._decoder is not None and self.decoder.executor.name == "cuda" else "CPU"

    @property
    def context_size(self) -> int:
        """Most tokens that one sequence may have, prompt and output together."""
        return self.info.context_size

    @property
    def decoder(self) -> Decoder:
        """The engine's decoder. Raises StateError: the model was closed."""
        if self._decoder is None:
            raise StateError("the model is closed", "close() gave its memory back", "load the model again")
        return self._decoder

    @property
    def sampler(self) -> BatchSampler:
        """Chooses tokens over this model's vocabulary; made at the first use."""
        if self._sampler is None:
            self._sampler = BatchSampler(self.decoder.vocab_size, self.decoder.executor)
        return self._sampler

    def lora_targets(self) -> LoraTargets:
        """Where adapters can change its program, which gets these places at the first call, between two steps.

        Raises:
            UnsupportedModelError: it has none.
        """
        with self._lora_targets_lock:
            if self._lora_targets is None:
                self._lora_targets = add_lora_targets(self.decoder, self.info)
            return self._lora_targets

    def check_adapter_values(self, adapter: AdapterParameters) -> None:
        """Raise InputError unless the arrays of an adapter fit inputs of the graph that have a default."""
        check_values(adapter, self.info.defaults)

    def decoder_as_exported(self) -> Decoder:
        """A decoder of the same weights in which inputs that have a default can be given; made at the first use."""
        with self._lora_targets_lock:
            if self._as_exported is None:
                self._as_exported = load_as_exported(self.config, self.decoder.executor, self.accuracy)
            return self._as_exported

    def identity(self) -> Identity:
        """What saved states of this model are known by; it reads the model's files at the first call."""
        with self._lora_targets_lock:
            if self._identity is None:
                info, computed = self.info, instructions(self.decoder.executor)
                self._identity = Identity(
                    model_identity(self.folder, self.config.model_data),
                    f"{computed}, activations {self.accuracy}, keys and values {info.kv_dtype}",
                    self.decoder.vocab_size,
                    self.context_size,
                )
            return self._identity

    def keep_prefixes_in(self, folder: str | Path, max_bytes: int = DEFAULT_PREFIX_BYTES) -> None:
        """Keep the blocks of the prefix cache in a folder, too, where later processes find them; see docs/states.md.

        Args:
            folder: made if there is none; several models and processes may share it.
            max_bytes: most bytes of it; what was not used for longest is removed.

        Raises:
            OptionError: the folder cannot be used, or max_bytes is no whole number of at least 1.
            UnsupportedModelError: the model runs sequence by sequence, without blocks.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise OptionError(
                f"prefix cache of {max_bytes!r:.40} bytes", "a whole number of at least 1 is expected", "leave it out"
            )
        if not isinstance(folder, str | Path) or not str(folder).strip():
            raise OptionError(
                f"a prefix cache in {folder!r:.40}", "the path of a folder is expected", "name one, or leave it out"
            )
        identity = self.identity()
        keep_prefixes(self.decoder, self.info, expanded(folder), max_bytes, identity)

    @property
    def threads(self) -> int:
        """CPU threads that its kernels use."""
        return self.decoder.executor.threads

    def close(self) -> None:
        """Give weights and cache back. Generators of this model cannot be used afterwards."""
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = self._as_exported = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Model({str(self.folder)!r}, type={self.type!r})"
