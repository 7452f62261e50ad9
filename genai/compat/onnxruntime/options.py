"""Options of sessions and runs, under onnxruntime's names.

Options that concern only onnxruntime's implementation (memory arena and patterns, inter-op threads, log identifiers)
are accepted and ignored; docs/reference/session-options.md lists them. All other options take effect or raise an error
(`check_entries`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genai.common.warning import warn_caller

from ...errors import InputError, OptionError, did_you_mean, whole_number
from ...optimize.base import Level
from ...session.config import SessionConfig
from ...session.execution_providers import ChosenProvider
from ..refused import REASONS, refusing_method
from .adapter_format import LoraAdapter
from .errors import typed_errors
from .module import global_threads

if TYPE_CHECKING:
    from .values import OrtValue


class GraphOptimizationLevel(IntEnum):
    """Levels of graph optimisation; each level includes the lower ones."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99

    @property
    def level(self) -> Level:
        """The level for `genai.optimize`."""
        return Level(min(int(self), int(Level.ALL)))


class ExecutionMode(IntEnum):
    """Ignored: nodes always run one after another, and each kernel uses several threads."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(IntEnum):
    """Ignored: nodes run in the order of the graph."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class _Entries:
    """Key-value entries of onnxruntime's configuration."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def _add(self, key: str, value: str) -> None:
        """Add an entry to the configuration. In addition to onnxruntime's entries, there is "session.max_value_bytes":
        the maximum size of a single value of the graph in bytes. Creating a session raises an error for entries that it
        does not support (docs/reference/session-options.md). Entries of runs are ignored."""
        if not isinstance(key, str) or not isinstance(value, str):
            raise OptionError(
                f"config entry {key!r}: {value!r}",
                "keys and values of config entries must be strings",
                "pass str(value)",
            )
        self._entries[key] = value

    def _get(self, key: str) -> str:
        """Return the value of an entry that was added. Raises OptionError if there is no entry with that key."""
        if key not in self._entries:
            raise OptionError(
                f"there is no config entry {key!r}",
                f"existing entries: {', '.join(sorted(self._entries)) or 'none'}",
                "add the entry before you read it",
            )
        return self._entries[key]


@typed_errors
class SessionOptions(_Entries):
    """Options of an InferenceSession.

    Attributes:
        intra_op_num_threads: number of threads that share a kernel's work; 0 = the physical cores.
        graph_optimization_level: level of graph optimisation.
        optimized_model_filepath: path to write the rewritten model to; "" = do not write it.
        enable_profiling: True to record every node; `InferenceSession.end_profiling` writes the trace.
        profile_file_prefix: beginning of the trace's file name.

    For scripts written for onnxruntime, these options are accepted but ignored: enable_cpu_mem_arena,
    enable_mem_pattern, enable_mem_reuse, execution_mode, execution_order, inter_op_num_threads, log_severity_level,
    log_verbosity_level, logid and use_deterministic_compute (runs are always deterministic). If use_per_session_threads
    is False, `set_global_thread_pool_sizes` sets the number of threads.
    """

    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    enable_profiling: bool = False
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    execution_order: ExecutionOrder = ExecutionOrder.DEFAULT
    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    inter_op_num_threads: int = 0
    intra_op_num_threads: int = 0
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    optimized_model_filepath: str = ""
    profile_file_prefix: str = "onnxruntime_profile_"
    use_deterministic_compute: bool = False
    use_per_session_threads: bool = True

    def __init__(self) -> None:
        super().__init__()
        self._dims_by_name: dict[str, int] = {}
        self._dims_by_denotation: dict[str, int] = {}
        self._initializers: dict[str, Any] = {}
        self._external_files: dict[str, bytes] = {}
        self._providers: list[tuple[str, dict[str, Any]]] = []
        self._load_cancelled = False

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in _SESSION_OPTIONS:
            raise OptionError(
                f"SessionOptions has no option {name!r}",
                f"the options are {', '.join(sorted(_SESSION_OPTIONS))}",
                "use one of these names",
            )
        kind = _SESSION_OPTIONS.get(name)
        object.__setattr__(self, name, value if kind is None else _checked("SessionOptions", name, kind, value))

    add_session_config_entry, get_session_config_entry = _Entries._add, _Entries._get

    def add_free_dimension_override_by_name(self, name: str, value: int) -> None:
        """Set a fixed extent for every dimension with this symbolic name."""
        self._dims_by_name[name] = _extent(name, value)

    def add_free_dimension_override_by_denotation(self, denotation: str, value: int) -> None:
        """Set a fixed extent for every dimension with this denotation (such as DATA_BATCH)."""
        self._dims_by_denotation[denotation] = _extent(denotation, value)

    def add_initializer(self, name: str, value: OrtValue) -> None:
        """Use a value in place of the initializer with this name."""
        self._initializers[name] = value

    def add_external_initializers(self, names: list[str], values: list[OrtValue]) -> None:
        """Use values in place of several initializers."""
        if len(names) != len(values):
            raise OptionError(
                f"{len(names)} names and {len(values)} values were given",
                "each name needs a value",
                "pass lists of equal length",
            )
        self._initializers.update(zip(names, values, strict=True))

    def add_external_initializers_from_files_in_memory(
        self, file_names: list[str], buffers: list[bytes], lengths: list[int]
    ) -> None:
        """Provide the contents of external data files, which then need not exist."""
        if not len(file_names) == len(buffers) == len(lengths):
            raise OptionError(
                f"{len(file_names)} names, {len(buffers)} buffers and {len(lengths)} lengths were given",
                "each file needs a name, a buffer and a length",
                "pass lists of equal length",
            )
        for name, buffer, length in zip(file_names, buffers, lengths, strict=True):
            self._external_files[name] = bytes(memoryview(buffer)[:length])

    def add_provider(self, provider_name: str, options: dict[str, Any] | None = None) -> None:
        """Request an execution provider; see `InferenceSession`."""
        self._providers.append((provider_name, dict(options or {})))

    def set_load_cancellation_flag(self, value: bool) -> None:
        """If True, cancel loading, which then raises ModelLoadCanceled. Another thread may call this during loading."""
        self._load_cancelled = bool(value)

    add_provider_for_devices = refusing_method("add_provider_for_devices", REASONS["OrtEpDevice"])
    clear_ep_context_data_read_func = refusing_method("clear_ep_context_data_read_func", REASONS["ModelCompiler"])
    set_ep_context_data_read_func = refusing_method("set_ep_context_data_read_func", REASONS["ModelCompiler"])
    set_provider_selection_policy = refusing_method("set_provider_selection_policy", REASONS["OrtEpDevice"])
    set_provider_selection_policy_delegate = refusing_method(
        "set_provider_selection_policy_delegate", REASONS["OrtEpDevice"]
    )

    def has_providers(self) -> bool:
        """Return True if `add_provider` was called."""
        return bool(self._providers)

    def register_custom_ops_library(self, path: str) -> None:
        """Native operator libraries are not supported, because they need onnxruntime's C interface.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"the custom operator library {path!r} cannot be loaded",
            "native libraries for onnxruntime are not supported",
            "register the operators in Python with @genai.register_op",
        )


@typed_errors
class RunOptions(_Entries):
    """Options of one run.

    Attributes:
        terminate: set it to True from another thread to stop the run between two nodes.
        logid, log_severity_level, log_verbosity_level, only_execute_path_to_fetches: ignored.
    """

    terminate: bool = False
    logid: str = ""
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    only_execute_path_to_fetches: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in _RUN_OPTIONS:
            raise OptionError(
                f"RunOptions has no option {name!r}",
                f"the options are {', '.join(_RUN_OPTIONS)}",
                "use one of these names",
            )
        kind = _RUN_OPTIONS.get(name)
        object.__setattr__(self, name, value if kind is None else _checked("RunOptions", name, kind, value))

    def __init__(self) -> None:
        super().__init__()
        self._adapters: list[LoraAdapter] = []

    def add_active_adapter(self, adapter: LoraAdapter) -> None:
        """Use the arrays of an adapter for inputs that are not in the feed.

        If two adapters contain an array with the same name, the array of the later adapter is used.

        Raises:
            InputError: `adapter` is not a LoraAdapter, or no file was loaded into it.
        """
        if not isinstance(adapter, LoraAdapter) or adapter.arrays is None:
            raise InputError(
                f"the adapter is {'empty' if isinstance(adapter, LoraAdapter) else 'a ' + type(adapter).__name__}",
                "the arrays of an adapter replace inputs of the model",
                "pass a LoraAdapter on which Load(path) was called",
            )  # fmt: skip
        self._adapters.append(adapter)

    @property
    def adapter_values(self) -> dict[str, NDArray[Any]]:
        """The arrays of the active adapters, by name."""
        return {name: array for adapter in self._adapters for name, array in (adapter.arrays or {}).items()}

    add_run_config_entry, get_run_config_entry = _Entries._add, _Entries._get


_RUN_OPTIONS = {name: type(getattr(RunOptions, name)) for name in sorted(RunOptions.__annotations__)}
_SESSION_OPTIONS = {name: type(getattr(SessionOptions, name)) for name in SessionOptions.__annotations__}
# onnxruntime's log levels; -1 leaves the choice to the environment or the session.
_SEVERITIES = range(-1, 5)


def _checked(owner: str, name: str, kind: type, value: Any) -> Any:
    """Convert an option's value as onnxruntime does; raise OptionError for a value that onnxruntime refuses."""
    wanted, why = f"pass a {kind.__name__}", f"a {kind.__name__} is expected"
    if kind is str and isinstance(value, str | Path | bytes):
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    if issubclass(kind, IntEnum):
        # Like onnxruntime, do not convert numbers to enums: 99 may be a typo, but a member's name cannot be.
        if isinstance(value, kind):
            return value
        members = ", ".join(f"{kind.__name__}.{member}" for member in kind.__members__)
        why, wanted = f"a member of {kind.__name__} is expected", f"use one of {members}"
    elif kind is bool and (value is None or isinstance(value, int | float | np.generic)):
        return bool(value)
    elif kind is int and isinstance(value, int | np.integer) and not isinstance(value, bool):
        number = int(value)
        if name.endswith("num_threads") and number < 0:
            why, wanted = "the number of threads cannot be negative", "pass a number of threads, or 0 for one per core"
        elif name == "log_severity_level" and number not in _SEVERITIES:
            why, wanted = (
                "levels are 0 (everything) to 4 (fatal errors only), or -1 (unchanged)",
                "use one of these levels",
            )
        elif abs(number) >= 1 << 31:
            why, wanted = "the value must fit in 32 bits", "use a smaller number"
        else:
            return number
    raise OptionError(f"{owner}.{name} = {value!r:.80} of type {type(value).__name__}", why, wanted)


def _extent(name: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
        raise OptionError(
            f"dimension {name!r} = {value!r}", "a dimension must be an integer of at least 0", "pass an int"
        )
    return int(value)


MAX_VALUE_BYTES = "session.max_value_bytes"
WEIGHTS_FILE = "session.optimized_model_external_initializers_file_name"
WEIGHTS_LEAST_BYTES = "session.optimized_model_external_initializers_min_size_in_bytes"
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
KEEPS_QDQ = "session.disable_quant_qdq"
RECORDS_ASSIGNMENT = "session.record_ep_graph_assignment_info"
OBEYED = frozenset({MAX_VALUE_BYTES, WEIGHTS_FILE, WEIGHTS_LEAST_BYTES, WEIGHTS_FOLDER, KEEPS_QDQ, RECORDS_ASSIGNMENT})

# Entries for onnxruntime's memory, threads and rewrites. They change neither results nor files.
_WITHOUT_EFFECT = frozenset(
    """
    optimization.constant_folding_max_output_size_in_bytes optimization.enable_cast_chain_elimination
    optimization.minimal_build_optimizations session.allow_released_opsets_only session.debug_layout_transformation
    session.disable_aot_function_inlining session.disable_double_qdq_remover session.disable_model_compile
    session.disable_prepacking session.disable_qdq_constant_folding session.dynamic_block_base
    session.enable_dq_matmulnbits_fusion session.enable_quant_qdq_cleanup session.enable_saved_runtime_optimizations
    session.fail_on_suboptimal_compiled_model session.force_spinning_stop session.function_expansion_byte_limit
    session.function_expansion_node_limit session.graph_optimizations_loop_level session.kernel_dispatch_policy
    session.prepack.enable_parallel session.qdq_matmulnbits_accuracy_level session.qdq_matmulnbits_block_size
    session.qdqisint8allowed session.use_device_allocator_for_initializers session.use_env_allocators
    session.use_external_initializer_file_buffers_directly session.use_ort_model_bytes_directly
    session.use_ort_model_bytes_for_initializers session.x64quantprecision
    """.split()
)
_PREFIXES_WITHOUT_EFFECT = (
    "arena.", "ep.cpu.", "ep.cuda.", "memory.", "mlas.", "session.external_data_loader.", "session.inter_op.",
    "session.intra_op.", "session.moe.offload.",
)  # fmt: skip

_ORT_FORMAT = "models are read and written in ONNX format only"
_ONE_PROVIDER = "each node is assigned to a provider that supports it"
_NO_CONTEXT = "no provider here stores compiled models"
# Key -> the values that request the default, and the reason for refusing other values.
_REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "ep.context_embed_mode": (("0",), _NO_CONTEXT),
    "ep.context_enable": (("0",), _NO_CONTEXT),
    "ep.context_file_path": ((), _NO_CONTEXT),
    "ep.context_model_external_initializers_file_name": ((), _NO_CONTEXT),
    "optimization.disable_specified_optimizers": ((), "only graph_optimization_level selects the optimisations"),
    "optimization.enable_gelu_approximation": (("0",), "GELU is computed as the model defines it"),
    "session.collect_node_memory_stats_to_file": ((), "memory statistics are not written to a file"),
    "session.compile_only": (("0",), _NO_CONTEXT),
    "session.disable_cpu_ep_fallback": (("0",), "nodes that no provider supports always run on the CPU"),
    "session.intra_op_thread_affinities": ((), "threads are not bound to processors"),
    "session.layer_assignment_settings": ((), _ONE_PROVIDER),
    "session.load_model_format": (("ONNX",), _ORT_FORMAT),
    "session.name_based_layer_assignment": ((), _ONE_PROVIDER),
    "session.node_partition_config_file": ((), _ONE_PROVIDER),
    "session.resource_cuda_partitioning_settings": ((), _ONE_PROVIDER),
    "session.save_external_prepacked_constant_initializers": (("0",), "packed weights are not written to files"),
    "session.save_model_format": (("ONNX",), _ORT_FORMAT),
    "session.set_denormal_as_zero": (("0",), "denormal numbers are not replaced with zero"),
    "session.strict_shape_type_inference": (("0",), "contradictory shapes raise an error only where they matter"),
}


def check_entries(entries: Mapping[str, str]) -> None:
    """Check the configuration entries of a session. Unknown entries cause a warning.

    Raises:
        OptionError: an entry requests an unsupported feature, or has an invalid value.
    """
    for key, value in entries.items():
        harmless, why = _REFUSED.get(key, ((), ""))
        if why and value not in ("", *harmless):
            raise OptionError(f"config entry {key} = {value!r}", why, "remove the entry")
        if not why and key not in OBEYED | _WITHOUT_EFFECT and not key.startswith(_PREFIXES_WITHOUT_EFFECT):
            hint = did_you_mean(key, [*OBEYED, *_WITHOUT_EFFECT, *_REFUSED], "check the name of the entry")
            warn_caller(f"the config entry {key!r} is unknown and has no effect; {hint}")
    for key in (MAX_VALUE_BYTES, WEIGHTS_LEAST_BYTES):
        if key in entries and whole_number(entries[key]) is None:
            raise OptionError(
                f"config entry {key} = {entries[key]!r:.80}", "a number of bytes is expected", "use plain digits"
            )
    for key in (KEEPS_QDQ, RECORDS_ASSIGNMENT):
        if entries.get(key, "0") not in ("0", "1"):
            raise OptionError(f"config entry {key} = {entries[key]!r}", "'0' or '1' is expected", "use '0' or '1'")
    folder = entries.get(WEIGHTS_FOLDER)
    if folder is not None and not Path(folder).is_dir():
        raise OptionError(f"config entry {WEIGHTS_FOLDER} = {folder!r}", "the folder does not exist", "check the path")


# Our rewrites that do what an optimizer of onnxruntime does.
_REWRITES = {
    "AttentionFusion": "fuse_attention",
    "CommonSubexpressionElimination": "share_subexpressions",
    "ConstantFolding": "fold_constants fold_known_shapes",
    "ConvActivationFusion": "fuse_conv_activation",
    "ConvAddActivationFusion": "fuse_conv_addition fuse_conv_activation",
    "ConvAddFusion": "fuse_conv_addition",
    "ConvBNFusion": "fold_conv_batch_norm",
    "EliminateIdentity": "remove_identities",
    "GeluFusion": "fuse_gelu",
    "GeluFusionL1": "fuse_gelu",
    "GeluFusionL2": "fuse_gelu",
    "GemmActivationFusion": "fuse_linear_activation",
    "LayerNormFusion": "fuse_layer_norm",
    "LayerNormFusionL1": "fuse_layer_norm",
    "LayerNormFusionL2": "fuse_layer_norm",
    "MatMulAddFusion": "fuse_linear",
    "MatMul_BatchNormalization_Fusion": "fold_product_batch_norm",
    "MatMulIntegerToFloatFusion": "fuse_matmul_integer_to_float",
    "Pad_Fusion": "fold_pad_into_conv",
    "QDQSelectorActionTransformer": "fuse_quantized_nodes fuse_quantized_arithmetic move_quantized tabulate_bytes",
    "ReshapeFusion": "fold_known_reshapes",
    "TransposeOptimizer": "merge_transposes",
}


def disabled_rules(names: Collection[str] | None) -> frozenset[str]:
    """Return the names of the rewrites that the names of optimizers disable.

    Raises:
        OptionError: `names` is not a collection of strings.
    """
    given = [] if names is None else names
    if isinstance(given, str) or not isinstance(given, Collection) or any(not isinstance(name, str) for name in given):
        raise OptionError(
            f"disabled_optimizers is {names!r:.80}",
            "a list of names is expected",
            "pass a list, such as ['GeluFusion']",
        )
    return frozenset(rule for name in given for rule in _REWRITES.get(name, name).split())


def session_config(options: SessionOptions, providers: Sequence[ChosenProvider]) -> SessionConfig:
    """Convert options to the settings of the underlying session.

    Raises:
        OptionError: see `check_entries`.
    """
    entries = options._entries
    check_entries(entries)
    folder = entries.get(WEIGHTS_FOLDER)
    return SessionConfig(
        level=options.graph_optimization_level.level,
        keep_qdq=entries.get(KEEPS_QDQ) == "1",
        threads=options.intra_op_num_threads or (0 if options.use_per_session_threads else global_threads()),
        max_value_bytes=int(entries[MAX_VALUE_BYTES]) if MAX_VALUE_BYTES in entries else None,
        dims=dict(options._dims_by_name),
        dims_by_denotation=dict(options._dims_by_denotation),
        initializers={name: getattr(value, "value", value) for name, value in options._initializers.items()},
        external_data=dict(options._external_files),
        external_folder=None if folder is None else Path(folder),
        optimized_path=Path(options.optimized_model_filepath) if options.optimized_model_filepath else None,
        optimized_weights=entries.get(WEIGHTS_FILE) or None,
        optimized_weights_min_bytes=int(entries.get(WEIGHTS_LEAST_BYTES, "1024")),
        providers=tuple(providers),
        record_assignment=entries.get(RECORDS_ASSIGNMENT) == "1",
        profile_prefix=options.profile_file_prefix if options.enable_profiling else None,
        is_cancelled=lambda: options._load_cancelled,
    )
