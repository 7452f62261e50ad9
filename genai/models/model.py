"""A model folder, loaded: configuration, tokenizer files and a decoder ready to compute."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from genai.common.forks import renew_locks

from ..common.paths import expanded
from ..common.single import Single
from ..errors import OptionError, StateError, did_you_mean, whole_number
from .config import Config
from .folders import folder_errors
from .kv_quality import MEASURED, check_kv_quality
from .kv_types import KV_TYPES, check_kv_type

if TYPE_CHECKING:
    from ..engine.decoder import Decoder
    from ..engine.sampling.batch import BatchSampler
    from ..engine.state_file import Identity
    from ..lora.parameters import AdapterParameters
    from ..lora.targets import LoraTargets
    from .decoder_graph import DecoderInfo

KV_DTYPES = ("auto", *KV_TYPES)
ACCURACIES = ("auto", "fp32", "int8")
DEVICES = ("cpu", "cuda", "auto", "reference")
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
        from .loading import load_decoder

        options = {
            name: int(value) if isinstance(value, Integral) and name != "lora" else value
            for name, value in options.items()
        }
        self.config = source if isinstance(source, Config) else Config(source)
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
            from ..engine.sampling.batch import BatchSampler

            self._sampler = BatchSampler(self.decoder.vocab_size, self.decoder.executor)
        return self._sampler

    def lora_targets(self) -> LoraTargets:
        """Where adapters can change its program, which gets these places at the first call, between two steps.

        Raises:
            UnsupportedModelError: it has none.
        """
        from .loading import add_lora_targets

        with self._lora_targets_lock:
            if self._lora_targets is None:
                self._lora_targets = add_lora_targets(self.decoder, self.info)
            return self._lora_targets

    def check_adapter_values(self, adapter: AdapterParameters) -> None:
        """Raise InputError unless the arrays of an adapter fit inputs of the graph that have a default."""
        from ..lora.inputs import check_values

        check_values(adapter, self.info.defaults)

    def decoder_as_exported(self) -> Decoder:
        """A decoder of the same weights in which inputs that have a default can be given; made at the first use."""
        from .loading import load_as_exported

        with self._lora_targets_lock:
            if self._as_exported is None:
                self._as_exported = load_as_exported(self.config, self.decoder.executor, self.accuracy)
            return self._as_exported

    def identity(self) -> Identity:
        """What saved states of this model are known by; it reads the model's files at the first call."""
        from ..devices import instructions
        from ..engine.state_file import Identity
        from .identity import model_identity

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
        from .loading import keep_prefixes

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


class ModelOptions(TypedDict, total=False):
    """The options of Model as keywords of calls."""

    threads: int | None
    kv_dtype: str
    accuracy: str
    cache_bytes: int | None
    context_size: int | None
    quiet: bool
    device: str | None
    lora: bool
    kv_dtype_force: bool


def check_model_options(
    *,
    kv_dtype: str = "auto",
    accuracy: str = "auto",
    device: str | None = None,
    lora: bool = False,
    kv_dtype_force: bool = False,
    **numbers: Any,
) -> None:
    """Check options of Model without loading one; `numbers` are those that are whole numbers or None."""
    device = "auto" if device is None else device  # the folder has a say
    _check_choice("kv_dtype", kv_dtype, KV_DTYPES)
    _check_choice("accuracy", accuracy, ACCURACIES)
    _check_choice("device", gpu_name(device) or device, DEVICES)
    if device == "cpu":
        check_kv_type(kv_dtype, device)
    if not isinstance(lora, bool):
        raise OptionError(f"lora = {lora!r}", "True or False is expected", "leave it out for False")
    if not isinstance(kv_dtype_force, bool) or (kv_dtype_force and kv_dtype != MEASURED):
        raise OptionError(
            f"kv_dtype_force = {kv_dtype_force!r} with kv_dtype = {kv_dtype!r}",
            f"True or False is expected, and only {MEASURED!r} is ever refused for what it costs",
            f"leave it out, or set kv_dtype to {MEASURED!r}",
        )
    refused = {"accuracy": accuracy == "int8" and accuracy, "threads": numbers.get("threads")}
    for name, value in refused.items():
        if device == "reference" and value:
            why = "the reference computes in full precision, with as many threads as NumPy takes"
            raise OptionError(f"device = 'reference' with {name} = {value!r}", why, f"leave {name} out")
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
            raise OptionError(
                f"{name} = {value!r}", "a whole number of at least 1 is expected", f"leave {name} out for the default"
            )


def gpu_name(device: str) -> str:
    """ "cuda" for a GPU by its number, such as "cuda:1"; "" for what is none."""
    kind, _, number = str(device).partition(":")
    return kind if kind == "cuda" and whole_number(number) is not None else ""


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        gpu = name == "device" and str(value).lower().startswith(("gpu", "rocm", "mps", "metal"))
        more = " (and cuda:1, cuda:2 and so on for other GPUs)" if name == "device" else ""
        why = f"allowed: {', '.join(allowed)}{more}{'; there are kernels for GPUs of NVIDIA only' if gpu else ''}"
        likely = "cuda" if str(value).lower().startswith("gpu") else str(value).lower()
        fix = did_you_mean(likely, allowed, f"pass one of them, or leave {name} out")
        raise OptionError(f"{name} = {value!r}", why, fix)
