"""A loaded model folder: its configuration, and a decoder that is ready to compute."""

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
from ..engine.mtp import HeadDecoder
from ..engine.sampling.batch import BatchSampler
from ..engine.state_file import Identity
from ..errors import OptionError, StateError
from ..lora.inputs import check_values
from ..lora.parameters import AdapterParameters
from ..lora.targets import LoraTargets
from .config import Config
from .decoder_graph import DecoderInfo
from .folders import folder_errors
from .identity import LoadedFiles
from .kv_quality import MEASURED, check_kv_quality
from .loading import add_lora_targets, check_draft_inputs, keep_prefixes, load_as_exported, load_decoder, load_head
from .model_options import check_model_options
from .side_files import LoadedFolder

DEFAULT_PREFIX_BYTES = 4 * 2**30


class Model(Single, AbstractContextManager["Model"]):
    """A generative model.

    One Model can serve many Generators on several threads, which share the model's weights and block pool.

    Args:
        source: the model folder, or a Config.
        threads: CPU threads [default: the physical cores that this process may use].
        kv_dtype: type of the KV cache. "fp16"; "fp32"; "auto": fp16 if matmuls use int8 activations, else fp32; "int8":
            half the memory of fp16; "int4": a little more than a quarter of the memory of fp16, refused unless `genai
            eval kld` has measured that it hardly affects this model (see docs/how-to/kv-cache-type.md). GPUs also
            support "bf16", and "fp8" (E4M3, in which numbers beyond 448 become 448): half the memory of fp16.
        accuracy: "auto": follow each node's accuracy_level; level 4 rounds the activations of matmuls with quantised
            weights to int8, and any other level, or none, keeps the activations in fp32. "int8": round in all of these
            matmuls, which is faster. "fp32": round in none of them, and store keys and values in fp32.
        cache_bytes: maximum bytes of the KV cache; None = half of the free memory after weights and activations.
        context_size: maximum number of tokens per sequence; None = the number that fits into the cache, up to the
            model's context_length.
        kv_dtype_force: True to allow "int4" without a measurement, or despite one.
        device: None = the device in `provider_options` of the model's genai_config.json if that device works, else the
            CPU. "cpu". "cuda" or "cuda:1": an NVIDIA GPU (see docs/how-to/gpu.md). "auto": a GPU if one can be used,
            else the CPU. "reference": the forward pass in plain NumPy, slow and in full precision, for comparisons; as
            with accuracy "fp32", nothing is rounded, and NumPy chooses the number of threads.
        lora: True to add target modules for adapters when the model is loaded; otherwise, loading the first adapter
            adds them between two steps, which takes a moment.
        draft: True to also load the draft model that the folder describes in genai_config.json (`model.draft`), if any,
            with the same options (except kv_dtype) and on the same device. Generators then decode speculatively
            [default: True].
        mtp: True to also load the MTP head that the folder describes in genai_config.json (`model.mtp`), if any, on the
            same device. An LLM then uses the head for speculative decoding.
        quiet: True to log only warnings while loading, and to report no progress. The log then omits the messages that
            kernels are compiled and that the graph cannot be batched (see `info.reason`), and the reason why the CPU
            is used in place of a GPU (see `device_type`).

    Raises:
        ModelFolderError, ConfigError, GraphError, UnsupportedModelError: the model cannot be loaded; see the message.
        OptionError: an argument is out of range, or the device has no kernels for the kv_dtype.
        DeviceError: the requested device cannot be used.
        CacheCapacityError: weights and context need more memory than is available.
    """

    _config_class = Config
    _loads_draft = False  # only Generators use the draft model without being asked

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
        draft: bool | None = None,
        mtp: bool = False,
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
        draft_config = self.config.for_draft() if (self._loads_draft if draft is None else draft) else None
        head_config = self.config.for_mtp() if mtp else None
        self._sampler: BatchSampler | None = None
        self._decoder: Decoder | None
        with folder_errors(self.folder):
            if kv_dtype == MEASURED and not kv_dtype_force:
                check_kv_quality(self.config)
            options["device"] = self.config.choose_device(device)
            self.loaded_folder = LoadedFolder.read(self.config)
            self._files = LoadedFiles(self.folder, self.config.model_data)
            self._decoder, self.info, self._lora_targets = load_decoder(
                self.config, quiet=quiet, files=self._files, **options,
                token_rows=head_config.model.decoder.main_output if head_config is not None else "",
            )  # fmt: skip
        is_fixed = context_size is not None or cache_bytes is not None
        self.fixed_context_size = self.info.context_size if is_fixed else None
        self._as_exported = cast("Decoder | None", None)
        self._identity: Identity | None = None
        self._lora_targets_lock = threading.Lock()
        renew_locks(self, "_lora_targets_lock")
        self.draft: Model | None = None
        self.head: HeadDecoder | None = None
        if head_config is not None:
            try:
                with folder_errors(self.folder):
                    self.head = load_head(head_config, self._decoder, self.info, accuracy=accuracy, quiet=quiet)
            except BaseException:
                self.close()
                raise
        if draft_config is not None:
            try:
                # The type of the draft's cache affects no token, and another type may not fit the draft's heads.
                options |= {"device": self._decoder.executor.device, "lora": False, "kv_dtype": "auto"}
                self.draft = Model(draft_config, quiet=quiet, **options)
                check_draft_inputs(self.draft.decoder, draft_config.model.decoder.filename)
            except BaseException:
                self.close()
                raise

    draft: Model | None
    """The draft model for speculative decoding, which has the same tokenizer; None if there is none or if it was not
    loaded. It is closed with this model."""

    head: HeadDecoder | None
    """The MTP head for speculative decoding; None if there is none or if it was not loaded."""

    info: DecoderInfo
    """Facts about the graph: its layers, parameters and bytes, and the way in which it runs."""

    loaded_folder: LoadedFolder
    """The configuration and the tokenizer's files, as they were when the model was loaded."""

    fixed_context_size: int | None
    """The context size if an option determined it; None if it is the largest that fits into the free memory."""

    @property
    def type(self) -> str:
        """The model type of genai_config.json, such as "llama"."""
        return self.config.model.type

    @property
    def device_type(self) -> str:
        """The type of the device: "CPU" or "CUDA"."""
        return "CUDA" if self._decoder is not None and self.decoder.executor.name == "cuda" else "CPU"

    @property
    def context_size(self) -> int:
        """The maximum number of tokens per sequence, prompt and output together."""
        return self.info.context_size

    @property
    def decoder(self) -> Decoder:
        """The engine's decoder. Raises StateError if the model was closed."""
        if self._decoder is None:
            raise StateError("the model is closed", "close() freed its memory", "load the model again")
        return self._decoder

    @property
    def sampler(self) -> BatchSampler:
        """The sampler for this model's vocabulary, created at first use."""
        if self._sampler is None:
            self._sampler = BatchSampler(self.decoder.vocab_size, self.decoder.executor)
        return self._sampler

    def lora_targets(self) -> LoraTargets:
        """Return the target modules for adapters. The first call adds them to the program, between two steps.

        Raises:
            UnsupportedModelError: the model has no possible target modules.
        """
        with self._lora_targets_lock:
            if self._lora_targets is None:
                self._lora_targets = add_lora_targets(self.decoder, self.info)
            return self._lora_targets

    def check_adapter_values(self, adapter: AdapterParameters) -> None:
        """Raise InputError unless an adapter's arrays fit inputs of the graph that have a default."""
        check_values(adapter, self.info.defaults)

    def decoder_as_exported(self) -> Decoder:
        """Return a decoder that has the same weights and accepts inputs with a default. It is created at first use."""
        with self._lora_targets_lock:
            if self._as_exported is None:
                self._as_exported = load_as_exported(self.config, self.decoder.executor, self.accuracy, self._files)
            return self._as_exported

    def identity(self) -> Identity:
        """Return the identification of this model in saved states, which depends on the files as they were loaded."""
        with self._lora_targets_lock:
            if self._identity is None:
                info, computed = self.info, instructions(self.decoder.executor)
                self._identity = Identity(
                    self._files.identity(),
                    f"{computed}, activations {self.accuracy}, keys and values {info.kv_dtype}",
                    self.decoder.vocab_size,
                    self.context_size,
                    self.folder.name,
                )
            return self._identity

    def folder_as_loaded(self) -> Path:
        """Return the model folder.

        Raises:
            ModelFolderError: a file that the model was loaded from was replaced after loading.
        """
        self._files.check()
        return self.folder

    def keep_prefixes_in(self, folder: str | Path, max_bytes: int = DEFAULT_PREFIX_BYTES) -> None:
        """Also store the blocks of the prefix cache in a folder, for later processes; see docs/how-to/saved-states.md.

        Args:
            folder: the folder, which is created if it does not exist; several models and processes may share it.
            max_bytes: maximum size of the folder; the least recently used blocks are removed.

        Raises:
            OptionError: the folder cannot be used, or max_bytes is not a whole number of at least 1.
            UnsupportedModelError: the model runs sequence by sequence, without blocks.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise OptionError(
                f"the prefix cache size is {max_bytes!r:.40} bytes",
                "a whole number of at least 1 is expected",
                "leave the size out",
            )
        if not isinstance(folder, str | Path) or not str(folder).strip():
            raise OptionError(
                f"the prefix cache folder is {folder!r:.40}",
                "the path of a folder is expected",
                "pass a path, or leave the folder out",
            )
        identity = self.identity()
        keep_prefixes(self.decoder, self.info, expanded(folder), max_bytes, identity)

    @property
    def threads(self) -> int:
        """The number of CPU threads for kernels."""
        return self.decoder.executor.threads

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._decoder is None

    def close(self) -> None:
        """Free the weights and the cache. Generators of this model cannot be used afterwards."""
        if self.head is not None:
            self.head.close()
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = self._as_exported = None
        if self.draft is not None:
            self.draft.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Model({str(self.folder)!r}, type={self.type!r})"
