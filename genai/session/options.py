"""Options of sessions and runs, under onnxruntime's names.

What steers only onnxruntime's own machinery (memory arena and patterns, inter-op threads, log identifiers) is accepted
and has no effect here, which docs/session.md says; everything else is obeyed or raises.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import OptionError
from ..graph.rewrites.base import Level

if TYPE_CHECKING:
    from .values import OrtValue


class GraphOptimizationLevel(IntEnum):
    """How far the graph may be rewritten; each level includes those before it."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99

    @property
    def level(self) -> Level:
        """The rewrites' own name for it."""
        return Level(min(int(self), int(Level.ALL)))


class ExecutionMode(IntEnum):
    """Kept for scripts: steps always run one after another, and kernels share their work among threads."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(IntEnum):
    """Kept for scripts: nodes run in the order of the graph."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class _Entries:
    """Key-value entries of onnxruntime's configuration."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def _add(self, key: str, value: str) -> None:
        if not isinstance(key, str) or not isinstance(value, str):
            raise OptionError(
                f"config entry {key!r}: {value!r}", "keys and values of config entries are strings", "pass str(value)"
            )
        self._entries[key] = value

    def _get(self, key: str) -> str:
        if key not in self._entries:
            raise OptionError(
                f"there is no config entry {key!r}",
                f"set are: {', '.join(sorted(self._entries)) or 'none'}",
                "add it first",
            )
        return self._entries[key]


class SessionOptions(_Entries):
    """Options of an InferenceSession.

    Attributes:
        intra_op_num_threads: threads that share a kernel's work; 0 = the physical cores.
        graph_optimization_level: how far the graph may be rewritten.
        optimized_model_filepath: where to write the rewritten model; "" = nowhere.
        enable_profiling: record every step; `InferenceSession.end_profiling` writes the trace.
        profile_file_prefix: how the trace's file name begins.
        log_severity_level: 0 and 1 say on stderr which operators are not ours; -1 and above 1 do not.

    Without effect, for scripts written for onnxruntime: enable_cpu_mem_arena, enable_mem_pattern, enable_mem_reuse,
    execution_mode, execution_order, inter_op_num_threads, log_verbosity_level, logid, use_deterministic_compute (runs
    are always deterministic) and use_per_session_threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enable_cpu_mem_arena = True
        self.enable_mem_pattern = True
        self.enable_mem_reuse = True
        self.enable_profiling = False
        self.execution_mode = ExecutionMode.ORT_SEQUENTIAL
        self.execution_order = ExecutionOrder.DEFAULT
        self.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self.inter_op_num_threads = 0
        self.intra_op_num_threads = 0
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.logid = ""
        self.optimized_model_filepath = ""
        self.profile_file_prefix = "onnxruntime_profile_"
        self.use_deterministic_compute = False
        self.use_per_session_threads = True
        self._dims_by_name: dict[str, int] = {}
        self._dims_by_denotation: dict[str, int] = {}
        self._initializers: dict[str, Any] = {}
        self._external_files: dict[str, bytes] = {}
        self._providers: list[tuple[str, dict[str, Any]]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in _SESSION_OPTIONS:
            raise OptionError(
                f"SessionOptions has no option {name!r}", f"it has {', '.join(sorted(_SESSION_OPTIONS))}", "rename it"
            )
        object.__setattr__(self, name, _checked(name, value) if name in _SESSION_OPTIONS else value)

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Add an entry of onnxruntime's configuration. One key, ours, has an effect: "session.max_value_bytes" limits
        what a single value of the graph may take (docs/session.md)."""
        self._add(key, value)

    def get_session_config_entry(self, key: str) -> str:
        """An entry that was added.

        Raises:
            OptionError: there is none of that key.
        """
        return self._get(key)

    def add_free_dimension_override_by_name(self, name: str, value: int) -> None:
        """Give every dimension of this symbolic name a fixed extent."""
        self._dims_by_name[name] = _extent(name, value)

    def add_free_dimension_override_by_denotation(self, denotation: str, value: int) -> None:
        """Give every dimension of this denotation (such as DATA_BATCH) a fixed extent."""
        self._dims_by_denotation[denotation] = _extent(denotation, value)

    def add_initializer(self, name: str, value: OrtValue) -> None:
        """Put a value in place of the initializer of that name."""
        self._initializers[name] = value

    def add_external_initializers(self, names: list[str], values: list[OrtValue]) -> None:
        """Put values in place of several initializers."""
        if len(names) != len(values):
            raise OptionError(f"{len(names)} names and {len(values)} values", "each needs the other", "check the lists")
        self._initializers.update(zip(names, values, strict=True))

    def add_external_initializers_from_files_in_memory(
        self, file_names: list[str], buffers: list[bytes], lengths: list[int]
    ) -> None:
        """Give the contents of external data files, which then need not exist."""
        if not len(file_names) == len(buffers) == len(lengths):
            raise OptionError(
                f"{len(file_names)} names, {len(buffers)} buffers and {len(lengths)} lengths",
                "each file needs all three",
                "check the lists",
            )
        for name, buffer, length in zip(file_names, buffers, lengths, strict=True):
            self._external_files[name] = bytes(memoryview(buffer)[:length])

    def add_provider(self, provider_name: str, options: dict[str, Any] | None = None) -> None:
        """Ask for an execution provider; see `InferenceSession`."""
        self._providers.append((provider_name, dict(options or {})))

    def has_providers(self) -> bool:
        """Whether `add_provider` was called."""
        return bool(self._providers)

    def register_custom_ops_library(self, path: str) -> None:
        """Native operator libraries are refused: they are code for onnxruntime's own interface.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"custom operator library {path!r}",
            "native libraries for onnxruntime cannot be loaded here",
            "register the operators in Python with @genai.register_op",
        )


class RunOptions(_Entries):
    """Options of one run.

    Attributes:
        terminate: set it from another thread to stop the run between two steps.
        logid, log_severity_level, log_verbosity_level, only_execute_path_to_fetches: without effect.
    """

    def __init__(self) -> None:
        super().__init__()
        self.terminate = False
        self.logid = ""
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.only_execute_path_to_fetches = False

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Add an entry of onnxruntime's configuration. None has an effect here."""
        self._add(key, value)

    def get_run_config_entry(self, key: str) -> str:
        """An entry that was added.

        Raises:
            OptionError: there is none of that key.
        """
        return self._get(key)


_SESSION_OPTIONS: dict[str, type] = {
    "enable_cpu_mem_arena": bool,
    "enable_mem_pattern": bool,
    "enable_mem_reuse": bool,
    "enable_profiling": bool,
    "execution_mode": ExecutionMode,
    "execution_order": ExecutionOrder,
    "graph_optimization_level": GraphOptimizationLevel,
    "inter_op_num_threads": int,
    "intra_op_num_threads": int,
    "log_severity_level": int,
    "log_verbosity_level": int,
    "logid": str,
    "optimized_model_filepath": str,
    "profile_file_prefix": str,
    "use_deterministic_compute": bool,
    "use_per_session_threads": bool,
}


def _checked(name: str, value: Any) -> Any:
    kind = _SESSION_OPTIONS[name]
    try:
        if kind is str and isinstance(value, str | Path):
            return str(value)
        if issubclass(kind, IntEnum):
            return kind(value)
        if kind is bool and isinstance(value, bool | np.bool_):
            return bool(value)
        if kind is int and isinstance(value, int | np.integer) and not isinstance(value, bool):
            if name.endswith("num_threads") and value < 0:
                raise ValueError("it must not be negative")
            return int(value)
    except ValueError as error:
        raise OptionError(f"SessionOptions.{name} = {value!r}", str(error), f"give a {kind.__name__}") from error
    raise OptionError(
        f"SessionOptions.{name} = {value!r} of type {type(value).__name__}",
        f"it is a {kind.__name__}",
        f"give a {kind.__name__}",
    )


def _extent(name: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
        raise OptionError(f"dimension {name!r} = {value!r}", "an extent is a whole number from 0", "give one")
    return int(value)
